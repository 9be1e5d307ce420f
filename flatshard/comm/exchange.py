"""Bytes that go from some ranks to others, rather than from each to all."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.comm.flat_chunks import as_bytes
from flatshard.comm.work import AsyncWork, named


def exchange(
    comm: Communicator, sent: Tensor, lengths: list[int], expected: list[int], *, op_name: str
) -> tuple[AsyncWork, Tensor]:
    """Begin to send each rank, in their order, so many ``lengths`` of the bytes ``sent``.

    Returns what fills the bytes that come from each rank, as many as ``expected``, and those.

    Collective: all ranks of the group, in the same order of calls.
    """
    comm.note("all_to_all", op_name, sent.nbytes)
    wire = sent.cpu() if comm.members.is_gloo else sent
    came = wire.new_empty(sum(expected))
    group, need = comm.group_for(wire), None
    name = f"{op_name}, rank {comm.global_rank}: exchanging values with the other ranks"
    if group is comm.host.group:
        comm.host.meet(op_name)
    else:
        need = comm.begin(op_name)
    with named(name, need):
        work = dist.all_to_all_single(came, wire, expected, lengths, group=group, async_op=True)
    return AsyncWork([work], name, [wire, came], need=need), came


def transfer(comm: Communicator, tensor: Tensor, *, source: int, to: int, op_name: str) -> None:
    """Overwrite a contiguous tensor of rank ``to`` with that of rank ``source``; both wait."""
    sends = comm.rank == source
    data, action, peer = as_bytes(tensor), "receiving from", source
    if sends:
        comm.note("send", op_name, tensor.nbytes)
        action, peer = "sending to", to
    wire = data
    if comm.members.is_gloo:
        wire = data.cpu()
    elif data.device.type == "cpu":
        # An offloaded shard's. The current device may be another rank's.
        wire = data.to(comm.control_device)
    group = comm.group_for(wire)
    # No WaitCondition: point-to-point messages are not counted, so no deadlock is proved.
    with named(f"{op_name!r}, rank {comm.global_rank}: {action} rank {comm.ranks[peer]}"):
        (group.send if sends else group.recv)([wire], peer, 0).wait()
    if not sends and wire.device != data.device:
        data.copy_(wire)
