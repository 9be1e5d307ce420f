"""The exact sequence of collectives in a step, and what they do to memory."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import checkpoint

from flatshard import ShardedWrapper, collectives, sharded_modules
from flatshard.comm.process_groups import control_of, new_group
from flatshard.comm.ranks import communicator
from flatshard.comm.transports import Gather
from flatshard.module.wrappers import handles_in
from flatshard.tensor.sharded_tensor import local_range
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import assert_raises, on_ranks
from tests.models import Composed
from tests.oracle import assert_same_gradients

pytestmark = pytest.mark.uncoalesced  # counts and names collectives and units one by one

LAYERS = ("0", "1", "2")
SCALARS = ("scalars", "used parameters of all units, backward")


def _stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in LAYERS))


def _wrapped(strategy: str, **keywords: object) -> ShardedWrapper:
    policy = ModuleWrapPolicy({nn.Linear})
    return ShardedWrapper(_stack(), sharding_strategy=strategy, auto_wrap_policy=policy, **keywords)


def _step(model: ShardedWrapper) -> list[tuple[str, str]]:
    with collectives.record() as events:
        model(torch.ones(2, 8)).sum().backward()
    return [(event.kind, event.unit_fqn) for event in events]


EXPECTED = {
    # Prefetch moves each gather before the compute of the unit ahead of it.
    "FULL_SHARD": [("gather", n) for n in "012"]
    + [("gather", "2"), ("gather", "1"), ("reduce", "2"), ("gather", "0")]
    + [("reduce", "1"), ("reduce", "0")],
    "SHARD_GRAD_OP": [("gather", n) for n in "012"] + [("reduce", n) for n in "210"],
    "NO_SHARD": [("all_reduce", n) for n in "210"],
}


@on_ranks(2)
def test_prefetch_at_the_end_of_forward(rank: int, world_size: int) -> None:
    """Backward begins with what forward ended with, and its gathers begin in forward."""
    model = _wrapped("FULL_SHARD", backward_prefetch="END_OF_FORWARD")
    unit_bytes = (8 * 8 + 8) * 4
    reductions = [("gather", "1"), ("reduce", "2"), ("gather", "0"), ("reduce", "1")]
    _step(model)
    for _ in range(2):
        gathers = [("gather", n) for n in LAYERS]
        assert _step(model) == [*gathers, *reductions, ("reduce", "0"), SCALARS]
    with collectives.record() as events:
        model(torch.ones(2, 8))
    assert [(e.kind, e.unit_fqn) for e in events] == [*gathers, ("gather", "1")]
    assert _live_bytes(model) == 2 * unit_bytes
    with torch.no_grad():  # what was gathered for a backward that did not come is used, and freed
        model(torch.ones(2, 8))
    assert _live_bytes(model) == 0


def _lookups() -> nn.Module:
    """Two embeddings, used as ``how`` says."""

    def forward(net: Any, tokens: Tensor, how: str) -> Tensor:
        weights = torch.ones(tokens.shape, requires_grad=True) if how == "saved" else None
        x = net.words(tokens).sum(dim=1) + net.bag(tokens, per_sample_weights=weights)
        if how == "recomputed":
            words = checkpoint.checkpoint(net.words, tokens, use_reentrant=False)
            x = x + words.sum(dim=1) ** 2
        return net.head(x)

    torch.manual_seed(0)
    words, bag = nn.Embedding(11, 8), nn.EmbeddingBag(11, 8, mode="sum")
    return Composed(forward, words=words, bag=bag, head=nn.Linear(8, 3))


@on_ranks(2)
def test_backward_of_a_lookup_gathers_nothing(rank: int, world_size: int) -> None:
    """Unless something of its forward is saved, or computed again."""
    for how, regathered in (("plain", []), ("saved", ["bag"]), ("recomputed", ["words"])):
        for mode in ("sockets", "native"):
            policy = ModuleWrapPolicy({nn.Embedding, nn.EmbeddingBag, nn.Linear})
            model = ShardedWrapper(_lookups(), auto_wrap_policy=policy, collectives=mode)
            plain = _lookups()
            tokens = torch.arange(6).view(2, 3)
            for _ in range(3):
                with collectives.record() as events:
                    model(tokens, how).square().sum().backward()
                assert _live_bytes(model) == 0
            seen = Counter(event.unit_fqn for event in events if event.kind == "gather")
            assert seen["head"] == (1 if mode == "sockets" else 2)  # kept, where links are slow
            for name in ("words", "bag"):
                calls = 2 if name == "words" and how == "recomputed" else 1
                assert seen[name] == calls + (name in regathered), (how, mode, name)
            for _ in range(3):
                plain(tokens, how).square().sum().backward()
            assert_same_gradients(model, plain, 1.3e-6, 1e-5)


@on_ranks(2)
def test_prefetch_goes_as_far_as_the_largest_unit(rank: int, world_size: int) -> None:
    for mode, ahead in (("sockets", 3), ("native", 1)):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 24), nn.Linear(24, 8), *(nn.Linear(8, 8) for _ in range(4))]
        policy = ModuleWrapPolicy({nn.Linear})
        model = ShardedWrapper(nn.Sequential(*layers), auto_wrap_policy=policy, collectives=mode)
        on_the_way: list[int] = []

        def count(*_: Any, seen: list[int] = on_the_way, of: nn.Module = model) -> None:
            units = (wrapper._sharded_unit for wrapper in sharded_modules(of))
            seen.append(sum(unit.is_prefetched for unit in units))

        for layer in model.module:
            layer.register_forward_hook(count)
        _step(model)
        on_the_way.clear()
        with torch.no_grad():
            model(torch.ones(2, 8))
        assert max(on_the_way) == ahead  # 8 x 24 elements are three times 8 x 8


@on_ranks(2)
def test_prefetch_can_be_turned_off(rank: int, world_size: int) -> None:
    for prefetch, expected in (
        (None, [("gather", "2"), ("reduce", "2"), ("gather", "1"), ("reduce", "1")]),
        ("BACKWARD_POST", [("gather", "2"), ("reduce", "2"), ("gather", "1"), ("reduce", "1")]),
        ("BACKWARD_PRE", [("gather", "2"), ("gather", "1"), ("reduce", "2"), ("gather", "0")]),
    ):
        model = _wrapped("FULL_SHARD", backward_prefetch=prefetch, forward_prefetch=False)
        _step(model)
        assert _step(model)[3:7] == expected, prefetch


def _live_bytes(model: nn.Module) -> int:
    """Bytes of unsharded buffers that exist now."""
    handles = (handle for handle in handles_in(model) if handle.buffer_bytes)
    return sum(handle.buffer.untyped_storage().nbytes() for handle in handles)


@on_ranks(2)
def test_transports_that_cannot_be_had(rank: int, world_size: int) -> None:
    for dtype in ("bfloat16", torch.float16, torch.int8):
        kind = TypeError if dtype == "bfloat16" else ValueError
        with pytest.raises(kind, match=r"wire_dtype: expected torch\.bfloat16 or None"):
            _wrapped("FULL_SHARD", wire_dtype=dtype)
    with pytest.raises(ValueError, match="own collectives"):
        _wrapped("FULL_SHARD", wire_dtype=torch.bfloat16, collectives="native")
    with pytest.raises(ValueError, match="averaged over 2 replicas"):
        _wrapped("NO_SHARD", wire_dtype=torch.bfloat16)
    model = _wrapped("FULL_SHARD", collectives="sockets", wire_dtype=torch.bfloat16)
    rows = [row for row in model.unit_report().splitlines() if "  sockets, bfloat16  " in row]
    assert len(rows) == 4
    assert _wrapped("NO_SHARD").unit_report().count("  gloo  ") == 4


@on_ranks(1, init_group=False)
def test_groups_of_other_backends(rank: int, world_size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    for keywords in ({"collectives": "sockets"}, {"wire_dtype": torch.bfloat16}):
        with pytest.raises(ValueError, match=r"gloo, but the backend of this group is .*fake"):
            _wrapped("FULL_SHARD", **keywords)
    _groups_without_host_memory(dist.group.WORLD)
    dist.destroy_process_group()


def _groups_without_host_memory(world: dist.ProcessGroup) -> None:
    """Like NCCL's, as far as collectives that move nothing show it."""
    cuda = torch.device("cuda", 0)
    # What ranks say to one another has a group beside one of NCCL: here one that answers.
    beside, device = control_of(dist.new_group(backend="cuda:fake"))
    numbers = torch.ones(3)
    dist.all_reduce(numbers, group=beside)
    assert (numbers.tolist(), device.type) == ([1, 1, 1], "cpu")
    comm = communicator(world)
    assert comm.transport_for(cuda).stream_waits(cuda)
    assert not comm.transport_for().stream_waits(torch.device("cpu"))
    # In torch 2.11 simulated collectives do not say that they are over.
    shard, whole = torch.ones(1), torch.zeros(4)
    assert comm.all_gather(Gather(shard, whole, "", 1, "")).done()
    assert comm.all_reduce(whole, unit_fqn="").done()

    # Bound to a device, NCCL's groups would be split off, which takes ranks that are not asked.
    seen = []

    def note(*_: Any, **__: Any) -> None:
        seen.append(world.bound_device_id)

    with mock.patch.object(dist, "new_group", side_effect=note):
        world.bound_device_id = cuda
        for ranks in ([0, 2], [0, 1, 2, 3]):
            assert_raises(AssertionError, "is a member", new_group, world, ranks)
    assert (seen, world.bound_device_id) == ([None, cuda], cuda)
    world.bound_device_id = None


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_native_collectives(rank: int, world_size: int) -> None:
    """The path of back ends other than gloo: the same sequence, and the same gradients.

    And one collective of the backend per unit and purpose, once the order is known.
    """
    with pytest.raises(ValueError, match=r'"auto", "sockets", "native"'):
        _wrapped("FULL_SHARD", collectives="mpi")
    for strategy, expected in EXPECTED.items():
        models = [_wrapped(strategy, collectives=mode) for mode in ("auto", "native")]
        for model in models:
            _step(model)
            assert _step(model) == [*expected, SCALARS]
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            grads = [local_range(p.grad) for p in (one, other)]
            torch.testing.assert_close(*grads)
        # Without acc_events torch 2.11 warns that it keeps one cycle's events.
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, acc_events=True) as profile:
            _step(models[1])
        asked = [e.name for e in profile.events() if e.name.startswith("c10d::")]
        counts = Counter(kind for kind, _ in expected)
        assert sum("gather" in name for name in asked) == counts["gather"]
        assert sum("reduce_scatter" in name for name in asked) == counts["reduce"]
        # One more tells who used what.
        assert sum("allreduce" in name for name in asked) == counts["all_reduce"] + 1
        assert len(asked) == len(expected) + 1, asked
