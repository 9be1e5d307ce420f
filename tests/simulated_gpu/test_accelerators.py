"""What differs on accelerators, as far as it shows without one."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flatshard import MixedPrecision
from flatshard.comm.communicator import ALONE, Topology
from flatshard.comm.ranks import communicator
from flatshard.comm.transports import native
from flatshard.comm.work import AsyncWork, CollectiveError, PendingSends, named
from flatshard.engine import gradients, reduce_queue
from flatshard.engine.gather import ParamGather
from flatshard.engine.grad_reduce import ReducePlan
from flatshard.engine.gradients import Gradients
from flatshard.memory import HostMemory
from flatshard.module import model_plan
from flatshard.module.settings import find_device
from flatshard.options import Collectives, TransportOptions
from flatshard.options.precision import ParamPrecision
from flatshard.units.layout import FlatLayout
from flatshard.units.module_tree import NOTHING
from tests.harness import Watching, assert_raises, on_ranks
from tests.models import CASES
from tests.oracle import local_loss, sgd

# By so many looks, the gradients are computed, and reduced; whether the work reports its end, and
# whether the wait ends with the reduction.
WAITS = {
    # A stream that waited for a peer which lacks a gradient would hold up the gathers that this
    # peer needs to come to the end of its backward.
    "a peer does not come": (0, 10**9, True, False),
    "nobody knows": (0, 10**9, False, False),
    # The device is behind the host for longer than a peer is waited for.
    "still to be computed": (700, 701, True, True),
}


@pytest.mark.parametrize("case", WAITS)
def test_the_host_waits_for_a_reduction_on_a_device(case: str) -> None:
    *looks, tells, is_reduced = WAITS[case]
    computed, done = (chain(repeat(False, n), repeat(True)) for n in looks)
    reduction: Any = SimpleNamespace(
        computed=SimpleNamespace(query=lambda: next(computed)),
        work=SimpleNamespace(reports_end=tells),
        advance=lambda: True,
        done=lambda: next(done),
    )
    with mock.patch.object(reduce_queue, "_STALL_SECONDS", 0.05):
        assert reduce_queue.wait_until_reduced(reduction) is is_reduced


@on_ranks(2)
def test_the_host_waits_for_gloo_on_a_device(rank: int, world_size: int) -> None:
    comm = communicator(dist.group.WORLD)
    cuda = torch.device("cuda", 0)
    assert not comm.transport_for(cuda).stream_waits(cuda)
    _reductions_are_connected_at_construction()
    _memory_that_lacks_leaves_no_stale_buffer()


def _reductions_are_connected_at_construction() -> None:
    """At the first of each kind, in a backward, a rank may be alone for a while."""
    case = CASES["mlp"]
    native_mode = TransportOptions(collectives=Collectives.NATIVE)
    group = communicator(dist.group.WORLD, mode=native_mode).reduce_group
    connected: list[tuple[str, int]] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            where, first, *_ = (keywords["group"], *args) if keywords else args
            if where is not group:
                return real(*args, **keywords)
            connected.append((name, first.numel()))
            return mock.Mock()

        return call

    with contextlib.ExitStack() as stack:
        waits = mock.patch.object(native.NativeTransport, "stream_waits", return_value=True)
        stack.enter_context(waits)
        for owner, name in (
            *((dist.ProcessGroup, "_reduce_scatter_base"), (dist.ProcessGroup, "_allgather_base")),
            *((dist, "all_reduce"), (dist, "all_to_all_single")),
        ):
            function = noted(name.strip("_"), getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, function))
        scatter, gather = ("all_to_all_single", 1 << 20), ("allgather_base", 1 << 20)
        for strategy, mode, expected in (
            ("FULL_SHARD", "auto", [("reduce_scatter_base", 1 << 19)]),
            ("NO_SHARD", "auto", [("all_reduce", 1 << 20)]),
            ("FULL_SHARD", "fixed_order", [scatter]),
            ("NO_SHARD", "fixed_order", [scatter, gather]),
        ):
            for _ in range(2):
                precision = MixedPrecision(reduce_mode=mode)
                keywords = {"sharding_strategy": strategy, "mixed_precision": precision}
                case.wrap(collectives="native", **keywords)
            large = [(name, numel) for name, numel in connected if numel > 2]
            assert (large, len(connected)) == (expected, 2 * len(expected)), (strategy, mode)
            connected.clear()


def _memory_that_lacks_leaves_no_stale_buffer() -> None:
    case = CASES["mlp"]
    model = case.wrap(sharding_strategy="SHARD_OP", collectives="sockets")
    batch = case.batch(0, 2)[0]
    model(batch).sum().backward()
    sgd(model).step()
    with mock.patch.object(ParamGather, "start", side_effect=_lacking):
        assert_raises(torch.OutOfMemoryError, "out of memory", model, batch)
    plain = case.model()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(batch), plain(batch))


def _lacking(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_lack_of_memory_is_no_failure_of_other_ranks() -> None:
    with pytest.raises(torch.OutOfMemoryError), named("a collective"):
        _lacking()
    with pytest.raises(torch.OutOfMemoryError):
        AsyncWork([], "a collective", then=_lacking).wait(PendingSends())


def test_ranks_on_one_gpu_are_told_what_to_do() -> None:
    last = "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
    with pytest.raises(CollectiveError, match=r"set_device\(local_rank\)"), named("meeting"):
        raise RuntimeError(f"NCCL error in: NCCLUtils.cpp:94, invalid usage\n{last}")


def test_the_device_that_a_group_is_bound_to_goes_before_the_current_one() -> None:
    group: Any = SimpleNamespace(bound_device_id=torch.device("cuda", 1), _device_types=["cuda"])
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        found = find_device(torch.nn.Linear(1, 1), NOTHING, None, group)
    assert found == torch.device("cuda", 1)


def _gradients(layout: FlatLayout, device: str) -> Gradients:
    flat: Any = SimpleNamespace(
        layout=layout,
        topology=Topology(ALONE, ALONE, ALONE, ALONE),
        precision=ParamPrecision(),
        targets=SimpleNamespace(gradient=HostMemory(pinned=False)),
    )
    plan = ReducePlan(flat, torch.float32, torch.device(device), tags=(0, 0, 0), hook=None)
    return Gradients(plan, [])


def test_what_is_copied_home_leaves_the_device_while_backward_goes_on() -> None:
    """Else an offloaded model's gradients would be there all together at the end of it."""
    layout = FlatLayout.build({"w": torch.empty(4)}, world_size=1, itemsize=4)
    published = _gradients(layout, "meta")
    with (
        mock.patch.object(Tensor, "copy_"),  # nothing comes from there
        mock.patch.object(Tensor, "record_stream") as record_stream,
        mock.patch.object(gradients, "on_side_stream", return_value=contextlib.nullcontext()),
        mock.patch.object(gradients, "side_stream", return_value="for copies"),
        mock.patch.object(torch.cuda, "Event"),
    ):
        reduced = torch.empty(4, device="meta")
        published.add_reduced(reduced)
        Tensor.copy_.reset_mock()  # type: ignore[attr-defined]
        record_stream.assert_called_once_with("for copies")
        on_device = weakref.ref(reduced)
        del reduced
        assert on_device() is None
        published._finish_copies()


def _listed(names: list[str]) -> Watching:
    """Lists what runs."""
    return Watching(lambda func, _: names.append(func._schema.name.removeprefix("aten::")))


@on_ranks(1, init_group=False)
def test_what_a_group_without_host_memory_does(rank: int, world_size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    case = CASES["transformer"]
    with mock.patch.object(model_plan, "LARGE_BYTES", 1):
        model = case.wrap(coalesce_bytes=0)
    _reductions_under_way_take_as_much_as_two_large_ones(model)
    local_loss(model, case, 0, 0, 4).backward()
    names: list[str] = []
    with _listed(names):
        model.clip_grad_norm_(1.0)
    assert names.count("_to_copy") < 5, "norms are cast together"
    _one_rank_casts_as_it_copies()
    with (
        mock.patch.object(model._sharded_unit.context, "device", torch.device("cuda", 1)),
        mock.patch.object(torch.cuda, "current_device", return_value=1),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"),
    ):
        local_loss(model, case, 1, 0, 4)
    dist.destroy_process_group()


def _one_rank_casts_as_it_copies() -> None:
    case = CASES["mlp"]
    precision = MixedPrecision(torch.bfloat16)
    model = case.wrap(sharding_strategy="NO_SHARD", mixed_precision=precision)
    (handle, *_) = _handles(model)
    names: list[str] = []
    with _listed(names):
        handle.unshard("forward")
    assert "_to_copy" not in names
    handle.reshard()


def _reductions_under_way_take_as_much_as_two_large_ones(model: Any) -> None:
    context, sizes = model._sharded_unit.context, []
    for handle in _handles(model):
        handle.device = torch.device("cuda", 0)
        sizes.append(handle.layout.padded_numel * handle.grads.plan.dtypes.reduce_dtype.itemsize)
    context.refresh()
    assert len(context.root.handles) > 1, "the root's large parameters are apart"
    assert context.backward.queue.max_bytes_in_flight == 2 * max(sizes)
    for handle in _handles(model):
        handle.device = torch.device("cpu")
    context.refresh()


def _handles(model: Any) -> Iterator[Any]:
    return (handle for unit in model._sharded_unit.context.units for handle in unit.handles)
