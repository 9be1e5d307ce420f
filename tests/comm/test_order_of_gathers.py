"""Where collectives match by order, the end of a backward compares what ranks have begun."""

import os
from unittest import mock

import torch

from flatshard.comm.host_exchange import HostExchange
from flatshard.comm.work import History
from tests.by_order import DIFFERENT, EQUAL, step, wrapped
from tests.harness import assert_raises, on_ranks


@on_ranks(2)
def test_only_what_is_unusual_is_announced(rank: int, world_size: int) -> None:
    """In a usual step, all-gathers are sent without messages before them."""
    model = wrapped(*DIFFERENT)
    for _ in range(2):
        step(model)
    with mock.patch.object(History, "learn", side_effect=AssertionError):
        step(model)
    with torch.no_grad():
        for _ in range(2):  # another order, on all ranks
            model(torch.ones(2, 8))
    for _ in range(2):
        step(model)


@on_ranks(2, fresh=True, group_timeout=120)
def test_before_the_optimizer_can_step(rank: int, world_size: int) -> None:
    """Ranks that gathered different units raise at the end of backward; no host need wait."""
    with mock.patch.object(HostExchange, "announce"):
        for order in ([0, 2, 1], [rank]):
            model = wrapped(*EQUAL)
            if rank == 1 or order == [rank]:
                model.module.order = order
            expected = r"The first difference: .*'layers\.\d'.*'layers\.\d'"
            assert_raises(RuntimeError, expected, step, model)
        model = wrapped(*EQUAL)
        model.module.layers[1].requires_grad_(rank == 0)
        assert_raises(RuntimeError, "reduce the gradients of different parameters", step, model)


@on_ranks(4, fresh=True, group_timeout=120)
def test_within_a_node(rank: int, world_size: int) -> None:
    """Each group of a hybrid strategy has an order of its own, and a rank is in one of them."""
    with mock.patch.object(HostExchange, "announce"):
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
            model = wrapped(*EQUAL, strategy="HYBRID_SHARD")
        model.module.order = [0, 2, 1] if rank == 3 else [0, 1, 2]
        expected = r"rank 2 began \[.*'layers.\d'.*; rank 3 began"
        assert_raises(RuntimeError, expected, step, model)
