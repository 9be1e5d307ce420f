"""Another way to move bytes is one class and one line in the table of transports."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm import communicator
from flatshard.comm.transports import Gather, Members, ReduceScatter, Transport, average
from flatshard.comm.work import AsyncWork
from flatshard.units.layout import as_bytes
from tests.harness import on_ranks
from tests.models import CASES
from tests.oracle import OPTIMIZERS, snapshot, train_steps, trainable


class ListTransport(Transport):
    """Gathers everything everywhere, by the one collective that fills a list of tensors."""

    name = "lists of tensors"
    is_ordered = True

    def __init__(self, members: Members) -> None:
        self._members = members
        self.num_begun = {"gather": 0, "reduce_scatter": 0}
        MADE.append(self)

    @classmethod
    def connect(cls, members: Members) -> ListTransport:
        return cls(members)

    def gather(self, request: Gather, op_name: str) -> AsyncWork:
        self.num_begun["gather"] += 1
        return self._gather(self._members.gather_group, request.shard, request.out, op_name)

    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
        self.num_begun["reduce_scatter"] += 1
        buffer = request.full
        size, rank = self._members.size, self._members.rank
        everyone = buffer.new_empty(size * buffer.numel())
        mine = [theirs.chunk(size)[rank] for theirs in everyone.chunk(size)]
        then = partial(average, mine, request.out)
        return self._gather(self._members.reduce_group, buffer, everyone, op_name, then=then)

    def _gather(
        self, group: dist.ProcessGroup, source: Tensor, out: Tensor, op_name: str, **keywords: Any
    ) -> AsyncWork:
        need = self._members.history.begin(group)
        slots = list(as_bytes(out).chunk(self._members.size))
        work = dist.all_gather(slots, as_bytes(source), group=group, async_op=True)
        return AsyncWork([work], op_name, [source, out], condition=need, **keywords)


MADE: list[ListTransport] = []


def _trained(rank: int, world_size: int, **keywords: Any) -> tuple[Any, str]:
    case = CASES["mlp"]
    model = case.wrap(case.model(), process_group=dist.new_group(), **keywords)
    optimizer = OPTIMIZERS["sgd"](trainable(model))
    losses = train_steps(model, optimizer, case, rank, world_size, steps=3)
    return (losses, snapshot(model)), model.unit_report()


@on_ranks(2, fresh=True)
def test_a_fourth_transport_is_a_class_and_a_line_in_the_table(rank: int, world_size: int) -> None:
    """It trains like the others, to the bit; nothing else of the package names it."""
    expected, report = _trained(rank, world_size, collectives="sockets")
    assert ListTransport.name not in report
    kinds = [ListTransport, *communicator.transport_kinds()]
    with mock.patch.object(communicator, "transport_kinds", return_value=kinds):
        actual, report = _trained(rank, world_size)
    assert ListTransport.name in report
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    (transport,) = MADE
    assert all(transport.num_begun.values()), transport.num_begun
