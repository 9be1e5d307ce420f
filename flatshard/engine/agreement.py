"""The exchange between all ranks at the end of a backward.

By then ranks may differ: a parameter may be used on one rank and unused on another. The exchange
also compares whether ranks run the same program, and whether they have all-gathered the same units
in the same order. If a transport matches all-gathers only by their order, ranks with different
orders would receive each other's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import chain, compress, islice
from zlib import crc32

from flatshard.comm.communicator import Communicator
from flatshard.comm.host_exchange import differ, with_complements
from flatshard.comm.work import REMEDY, Begun, first_difference
from flatshard.engine.events import Kind, Voter
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Unit
from flatshard.plan.module_tree import unit_text

_SYNCS = list(Sync)


@dataclass
class Agreement:
    """What any rank used in a backward, and the reductions that all ranks still have to do."""

    # Per flat parameter, one flag per original parameter: whether any rank used the original.
    used: dict[FlatParamHandle, list[bool]]
    # Flat parameters with gradients that no bucket reduces in its turn in the reduce order: the
    # gradients arrived after the bucket was reduced, or were accumulated before the parameters were
    # frozen.
    left_over: list[tuple[Unit, FlatParamHandle]]
    # Indices of buckets reduced during backward on some ranks, and not yet reduced on others.
    uneven: list[int]
    # Units whose accumulated gradients were edited by the user, on any rank.
    edited: list[Unit]


def agree(
    state: RunState,
    num_buckets: int,
    rest: Set[int],  # indices of the buckets that this rank has not reduced yet
    to_come: Set[FlatParamHandle],  # the trainable flat parameters in those buckets
) -> Agreement:
    """Exchange votes with the other ranks. Collective: all ranks, after each backward that reduces.

    Raises:
        RuntimeError: the ranks do not run the same program. All ranks raise.
    """
    handles = state.handles
    # Parts of the engine that compare bytes between ranks, in the same order on all ranks.
    voters: list[Voter] = [*([state.buffers] if state.buffers else []), *state.extensions]
    # Ask the voters first. A voter may run a collective of its own in `votes()`, and all ranks must
    # run that collective before the exchange below.
    theirs = [one.votes() for one in voters]
    own: list[Sequence[int]] = [
        _program(state),
        _order(state),
        # Two votes per bucket: "reduced here" and "not reduced here". A bucket is uneven if both
        # votes have a yes on some rank.
        [index not in rest for index in range(num_buckets)],
        [index in rest for index in range(num_buckets)],
        # Vote on edited gradients instead of raising here: if only one rank raised, all others
        # would wait for its reductions.
        [any(h.grad_publish.unreduced.was_edited for h in unit.handles) for unit in state.units],
        [h not in to_come and h.grad_buffer.waits_for(unit.sync) for unit, h in handles],
        [i in h.grad_buffer.used_by_rank for _, h in handles for i in range(len(h.params))],
    ]
    ballots = [*own, *theirs]
    # Send all votes in one message. They are small, so the cost is latency, once per backward.
    with state.observers.span(Kind.RANKS_WAIT):
        op_name = "used parameters of all units, backward"
        numbers = iter(state.world.maxima(bytes(chain.from_iterable(ballots)), op_name=op_name))
    maxima = [bytes(islice(numbers, len(ballot))) for ballot in ballots]
    program, orders, started, waiting, edited, left_over, used = maxima[: len(own)]
    where = f"backward of {state.root.name or 'the model'!r}"
    _check_program(where, program)
    _check_order(state, where, orders)
    for voter, their_maxima in zip(voters, maxima[len(own) :], strict=True):
        voter.tally(their_maxima)
    flags = map(bool, used)
    used_by = {handle: list(islice(flags, len(handle.params))) for _, handle in handles}
    for unit, handle in handles:
        # The unit exists only on some ranks (an expert, for example). Other ranks have another
        # module under the same index, so their votes say nothing about this unit.
        if unit.topology.world.size < state.world.size:
            used_by[handle] = _used_within(unit, handle)
    return Agreement(
        used=used_by,
        left_over=list(compress(handles, left_over)),
        uneven=[i for i, both in enumerate(zip(started, waiting, strict=True)) if all(both)],
        edited=list(compress(state.units, edited)),
    )


def _used_within(unit: Unit, handle: FlatParamHandle) -> list[bool]:
    """Whether any rank that has the unit used each parameter. Collective: these ranks."""
    world, used = unit.topology.world, handle.grad_buffer.used_by_rank
    flags = bytes(index in used for index in range(len(handle.params)))
    op_name = f"used parameters of {unit_text(unit.name)}"
    return [bool(flag) for flag in world.maxima(flags, op_name=op_name)]


def _program(state: RunState) -> bytes:
    """Bytes with which ranks detect different programs, each with its complement."""
    num_loads = sum(unit.num_loads for unit in state.units)
    reduced = bytes(_SYNCS.index(u.sync) * bool(u.num_trainable[h]) for u, h in state.handles)
    return with_complements([state.number, num_loads % 256, *crc32(reduced).to_bytes(4, "big")])


def _check_program(where: str, maxima: bytes) -> None:
    model, loads, *reduced = differ(maxima)
    if model:
        raise RuntimeError(
            f"{where}: another rank is at the end of the backward of another model. Where one "
            "backward() has gradients of several ShardedWrappers, it must reach them in the same "
            "order on all ranks: call backward() once for each."
        )
    if loads:
        raise RuntimeError(
            f"{where}: load_state_dict() was called on some ranks and not on others, or more "
            "often, or tensors of a state_dict() were written there, so that the model is a "
            "mixture of parts. Call it on every rank with the same state: torch.load(path, "
            "mmap=True) reads what is needed alone."
        )
    if any(reduced):
        raise RuntimeError(
            f"{where}: ranks reduce the gradients of different parameters. requires_grad and "
            "no_sync() must be the same on every rank."
        )


def gathering_groups(state: RunState) -> list[Communicator]:
    """The groups of two or more ranks in which units all-gather, including the world."""
    found = [state.world]
    for topology in (unit.handles[0].topology for unit in state.units if unit.handles):
        found += topology.intra_group, topology.inter_group, topology.regather or state.world
    return [group for group in dict.fromkeys(found) if group.size > 1]


def _order(state: RunState) -> bytes:
    """Bytes that show whether all ranks all-gathered the same units in the same order.

    Collective: in each group over which units all-gather.
    """
    world, device = state.world, state.device
    if world.size == 1 or device is None or not world.transport_for(device).is_ordered:
        return b""
    # Each smaller group compares its own digest. If the world's exchange had a field for every
    # group, the message would grow with the number of ranks.
    digests = {group: group.history.to_compare() for group in gathering_groups(state)}
    own = digests.pop(world)
    comparing = "comparing the order of all-gathers"
    differs = [not one.host.all_equal(digest, comparing) for one, digest in digests.items()]
    return bytes([any(differs)]) + with_complements(own)


def _check_order(state: RunState, where: str, maxima: bytes) -> None:
    """Raise if ranks all-gathered different units. Collective if they did: ranks send histories."""
    if not (any(maxima[:1]) or any(differ(maxima[1:]))):
        return
    histories = [group.history for group in gathering_groups(state)]
    mine = {history.name: history.recent() for history in histories}
    of_group: dict[str, dict[int, list[Begun]]] = {}
    said = state.world.host.gather(mine, "what was all-gathered")
    for rank, groups in zip(state.world.ranks, said, strict=True):
        for name, recent in groups.items():
            of_group.setdefault(name, {})[rank] = recent
    known = map(first_difference, of_group.values())
    raise RuntimeError(
        f"{where}: ranks have all-gathered different units, or asked for different norms and "
        "sums, and what they got may be of other parameters; "
        f"{next(filter(None, known), 'that is longer ago than was noted')}. {REMEDY} Start "
        "again from a checkpoint. [FS-DEADLOCK]"
    )
