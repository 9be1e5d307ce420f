"""What differs on accelerators, as far as it shows without one."""

import threading
from collections.abc import Iterator
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flatshard import collectives, context, watchdog
from flatshard.collectives import communicator
from flatshard.watchdog import watched
from tests.harness import run_ranks
from tests.models import CASES


class _Gradients:
    """On their way, on a device that comes to them after ``computed_after`` looks."""

    def __init__(self, computed_after: int, done_after: int, tells: bool = True) -> None:
        self._computed = chain(repeat(False, computed_after), repeat(True))
        self._done = chain(repeat(False, done_after), repeat(True))
        self._tells = tells

    def tells_when_done(self) -> bool:
        return self._tells

    def is_computed(self) -> bool:
        return next(self._computed)

    def advance(self) -> bool:
        return True

    def reduce_done(self) -> bool:
        return next(self._done)


@pytest.mark.parametrize(
    ("gradients", "is_reduced"),
    [
        # A stream that waited for a peer which lacks a gradient would hold up the gathers that
        # this peer needs to come to the end of its backward.
        (_Gradients(0, 10**9), False),
        (_Gradients(0, 10**9, tells=False), False),
        # The device is behind the host for longer than a peer is waited for.
        (_Gradients(700, 701), True),
    ],
    ids=["a peer does not come", "nobody knows", "still to be computed"],
)
def test_a_reduction_on_a_device_is_waited_for_by_the_host(
    gradients: _Gradients, is_reduced: bool
) -> None:
    handle = SimpleNamespace(device=torch.device("cuda", 0), gradients=gradients)
    with mock.patch.object(context, "_STALL_SECONDS", 0.05):
        assert context._wait_until_reduced(SimpleNamespace(handles=[handle])) is is_reduced


def test_a_thread_of_autograd_is_no_second_thread_that_waits() -> None:
    """An accelerator's backward has a thread of its own: nobody looked for standstills there."""

    def hook(_: torch.Tensor) -> None:
        with watched(lambda: "something"):
            pass

    def backward() -> None:
        leaf = torch.ones(1, requires_grad=True)
        out = leaf * 2
        out.register_hook(hook)
        out.sum().backward()

    before = set(watchdog._waiting_threads)
    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert watchdog._waiting_threads == before


def test_gloo_with_tensors_of_a_device_is_waited_for_by_the_host() -> None:
    run_ranks(_gloo, 2)


def _gloo(rank: int, world_size: int) -> None:
    comm = communicator(dist.group.WORLD)
    assert not comm.streams_wait(torch.device("cuda", 0))
    _reductions_are_connected_at_construction()
    _stale_buffers_are_used_again()


def _reductions_are_connected_at_construction() -> None:
    """At the first of them, in a backward, a rank may be alone for a while."""
    case = CASES["mlp"]
    with (
        mock.patch.object(collectives.Communicator, "streams_wait", return_value=True),
        mock.patch.object(collectives, "_reduce_scatter_single") as averaged,
    ):
        for _ in range(2):
            case.wrap(case.model(), collectives="native")
    assert [call.args[0].numel() for call in averaged.call_args_list] == [1, 1 << 19]


def _stale_buffers_are_used_again() -> None:
    """To resize a storage to the size that it has makes another one and copies."""
    case = CASES["mlp"]
    model = case.wrap(case.model(), sharding_strategy="SHARD_OP", collectives="sockets")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places = []
    for step in range(2):
        model(case.batch(step, 2)[0]).sum().backward()
        places.append([handle.buffer.data_ptr() for handle in _handles(model)])
        optimizer.step()
        optimizer.zero_grad()
    assert places[0] == places[1]


def _handles(model: Any) -> Iterator[Any]:
    return (handle for unit in model._context.units for handle in unit.handles)
