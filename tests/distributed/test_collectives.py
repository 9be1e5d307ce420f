"""The exact sequence of collectives in a step, and what they do to memory."""

import datetime

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard import ShardedWrapper, collectives, sharded_modules
from flatshard.collectives import CollectiveError, communicator
from flatshard.on_host import Whole
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import run_ranks

LAYERS = ("0", "1", "2")


def _stack(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in LAYERS))


def _wrapped(strategy: str, **keywords: object) -> ShardedWrapper:
    policy = ModuleWrapPolicy({nn.Linear})
    return ShardedWrapper(_stack(), sharding_strategy=strategy, auto_wrap_policy=policy, **keywords)


def _step(model: ShardedWrapper) -> list[tuple[str, str]]:
    with collectives.record() as events:
        model(torch.ones(2, 8)).sum().backward()
    return [(event.kind, event.label) for event in events]


def _gathers(events: list[tuple[str, str]]) -> list[str]:
    return [label for kind, label in events if kind == "gather"]


EXPECTED = {
    # Prefetch moves each gather before the compute of the unit ahead of it.
    "FULL_SHARD": [("gather", n) for n in "012"]
    + [("gather", "2"), ("gather", "1"), ("reduce", "2"), ("gather", "0")]
    + [("reduce", "1"), ("reduce", "0")],
    "SHARD_GRAD_OP": [("gather", n) for n in "012"] + [("reduce", n) for n in "210"],
    "NO_SHARD": [("all_reduce", n) for n in "210"],
}


@pytest.mark.parametrize("strategy", EXPECTED)
def test_sequence(strategy: str) -> None:
    run_ranks(_sequence, 2, strategy)


def _sequence(rank: int, world_size: int, strategy: str) -> None:
    model = _wrapped(strategy)
    _step(model)  # the first backward also agrees on an order
    for _ in range(2):
        assert _step(model) == [
            *EXPECTED[strategy],
            ("scalars", "used parameters of all units, backward"),
        ]


def test_prefetch_can_be_turned_off() -> None:
    run_ranks(_without_prefetch, 2)


def _without_prefetch(rank: int, world_size: int) -> None:
    for prefetch, expected in (
        (None, [("gather", "2"), ("reduce", "2"), ("gather", "1"), ("reduce", "1")]),
        ("BACKWARD_POST", [("gather", "2"), ("reduce", "2"), ("gather", "1"), ("reduce", "1")]),
        ("BACKWARD_PRE", [("gather", "2"), ("gather", "1"), ("reduce", "2"), ("gather", "0")]),
    ):
        model = _wrapped("FULL_SHARD", backward_prefetch=prefetch, forward_prefetch=False)
        _step(model)
        assert _step(model)[3:7] == expected, prefetch


def test_evaluation_only_gathers() -> None:
    run_ranks(_evaluation, 2)


def _evaluation(rank: int, world_size: int) -> None:
    model = _wrapped("SHARD_GRAD_OP")
    for context in (torch.no_grad, torch.inference_mode):
        with collectives.record() as events, context():
            model(torch.ones(2, 8))
        assert [(e.kind, e.label) for e in events] == [("gather", n) for n in LAYERS]
        assert _live_bytes(model) == 0


def test_another_order_than_recorded() -> None:
    run_ranks(_another_order, 2)


class _AnyOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = _stack()

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for index in order:
            x = self.layers[index](x)
        return x


def _another_order(rank: int, world_size: int) -> None:
    """Skipped, repeated and exchanged units: gathered on demand, nothing left behind."""
    model = ShardedWrapper(_AnyOrder(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    plain = _AnyOrder()
    plain.load_state_dict(model.state_dict())
    for order in ((0, 1, 2), (0, 2), (2, 1, 0), (1, 1, 0), (0, 1, 2)):
        model.zero_grad()
        plain.zero_grad()
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(len(order)))
        model(x, order).sum().backward()
        plain(x, order).sum().backward()
        assert _live_bytes(model) == 0
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def _live_bytes(model: nn.Module) -> int:
    """Bytes of unsharded buffers that exist now."""
    return sum(
        handle.buffer.untyped_storage().nbytes()
        for wrapper in sharded_modules(model)
        for handle in wrapper._unit.handles
        if handle.buffer_bytes
    )


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_memory_goes_back_between_units(strategy: str) -> None:
    run_ranks(_memory, 2, strategy)


def _memory(rank: int, world_size: int, strategy: str) -> None:
    model = _wrapped(strategy)
    unit_bytes = (8 * 8 + 8) * 4
    forward: list[int] = []
    backward: list[int] = []
    for layer in model.module:
        layer.module.register_forward_hook(lambda *_: forward.append(_live_bytes(model)))
        layer.module.bias.register_hook(lambda _: backward.append(_live_bytes(model)))
    for _ in range(2):
        forward.clear()
        backward.clear()
        output = model(torch.ones(2, 8)).sum()
        kept = _live_bytes(model)
        output.backward()
        assert _live_bytes(model) == 0
    if strategy == "FULL_SHARD":
        # The unit that computes, and the next one on its way.
        assert kept == 0
        assert max(forward + backward) == 2 * unit_bytes
    else:
        assert kept == 3 * unit_bytes
        assert backward == [3 * unit_bytes, 2 * unit_bytes, unit_bytes]


@pytest.mark.parametrize("world_size", [2, 3])
def test_reductions_do_not_depend_on_the_backend(world_size: int) -> None:
    """Additions in rank order: every rank computes the same average, in every run."""
    results = run_ranks(_reduce, world_size)
    total = _values(0, world_size)
    for rank in range(1, world_size):
        total += _values(rank, world_size)
    for rank, (first, second) in enumerate(results):
        assert torch.equal(first, second)
        assert torch.equal(first, (total / world_size).chunk(world_size)[rank])


def _values(rank: int, world_size: int) -> Tensor:
    return torch.randn(5 * world_size, generator=torch.Generator().manual_seed(rank))


def _reduce(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    comm = communicator(dist.group.WORLD)
    results = []
    for _ in range(2):
        out = torch.empty(5)
        comm.reduce_scatter(Whole.of(_values(rank, world_size)), out, label="test", tag=1).finish()
        results.append(out)
    return results[0], results[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.int8])
def test_gather_any_dtype(dtype: torch.dtype) -> None:
    run_ranks(_gather, 3, dtype)


def _gather(rank: int, world_size: int, dtype: torch.dtype) -> None:
    comm = communicator(dist.group.WORLD)
    out = torch.zeros(12, dtype=dtype)
    comm.all_gather(
        torch.full((4,), rank, dtype=dtype), out, label="test", tag=1, purpose="test"
    ).finish()
    assert out.tolist() == [r for r in range(3) for _ in range(4)]
    with pytest.raises(ValueError, match="does not fill"):
        comm.all_gather(torch.zeros(4), torch.zeros(13), label="test", tag=1, purpose="test")


def test_a_peer_that_does_not_come_is_named() -> None:
    run_ranks(_no_peer, 2, expendable=[1], group_timeout=2.0)


def _no_peer(rank: int, world_size: int) -> None:
    comm = communicator(dist.group.WORLD)
    if rank == 1:
        return
    started = datetime.datetime.now()
    with pytest.raises(CollectiveError, match=r"unit 'layers\.3', rank 0: gathering"):
        comm.all_gather(
            torch.zeros(4), torch.zeros(8), label="layers.3", tag=1, purpose="test"
        ).finish()
    assert datetime.datetime.now() - started < datetime.timedelta(seconds=10)


@pytest.mark.parametrize("world_size", [2, 3])
def test_native_collectives(world_size: int) -> None:
    run_ranks(_native, world_size)


def _native(rank: int, world_size: int) -> None:
    """The path of back ends other than gloo: the same sequence, and the same gradients."""
    with pytest.raises(ValueError, match=r'"auto", "sockets", "native"'):
        _wrapped("FULL_SHARD", collectives="mpi")
    for strategy, expected in EXPECTED.items():
        models = [_wrapped(strategy, collectives=mode) for mode in ("auto", "native")]
        for model in models:
            _step(model)
            assert _step(model) == [
                *expected,
                ("scalars", "used parameters of all units, backward"),
            ]
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            grads = [getattr(p.grad, "_local", p.grad) for p in (one, other)]
            torch.testing.assert_close(*grads)
