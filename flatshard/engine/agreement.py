"""What the ranks tell one another at the end of a backward, in one exchange.

By then ranks may differ: one used a parameter that another did not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import chain, compress, islice
from zlib import crc32

import torch

from flatshard.comm.communicator import Communicator
from flatshard.comm.deadlock.history import Begun, first_difference
from flatshard.engine.events import Kind
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.step_state import StepState
from flatshard.engine.unit import Unit

_SYNCS = list(Sync)
_UNKNOWN = "Where they parted is longer ago than what was noted"


@dataclass
class Agreement:
    """What all ranks together used in a backward, and what is left to be done for it."""

    # Per original parameter: whether any rank used it.
    used: dict[FlatParamHandle, list[bool]]
    # Flat parameters with gradients that no bucket's turn reduces: they came after it, or were
    # accumulated before the parameters were frozen.
    left_over: list[tuple[Unit, FlatParamHandle]]
    # Indices of buckets whose turn came on some ranks, and on others not yet.
    uneven: list[int]
    # Units of which some rank found accumulated gradients edited.
    edited: list[Unit]


def agree(
    state: StepState,
    num_buckets: int,
    rest: Set[int],  # indices of the buckets that have not had their turn here
    to_come: Set[FlatParamHandle],  # whose gradients these turns reduce
) -> Agreement:
    """Ask the other ranks. Collective: all ranks, at the end of each backward that reduces.

    Raises:
        RuntimeError: the ranks do not run the same program; on all of them.
    """
    voters = state.observers.voters
    handles, groups = state.handles, _ordered_groups(state)
    own: list[list[int]] = [
        _program(state),
        _orders(state.world, groups),
        # Two votes on what is uneven, one for each kind of rank.
        [index not in rest for index in range(num_buckets)],
        [index in rest for index in range(num_buckets)],
        # No rank raises alone: the others would wait for its reductions.
        [any(h.grad_publish.unreduced.was_edited for h in unit.handles) for unit in state.units],
        [h not in to_come and h.grad_buffer.waits_for(unit.sync) for unit, h in handles],
        [i in h.grad_buffer.used_by_rank for _, h in handles for i in range(len(h.params.full))],
    ]
    maxima = _maxima(state, [*own, *(one.votes() for one in voters)])
    program, orders, started, waiting, edited, left_over, used = maxima[: len(own)]
    where = f"backward of {state.root.name or 'the model'!r}"
    _check_program(where, program)
    _check_orders(state, where, groups, orders)
    # All ranks have the same observers, in the same order.
    for voter, their_maxima in zip(voters, maxima[len(own) :], strict=True):
        voter.tally(their_maxima)
    flags = map(bool, used)
    return Agreement(
        used={handle: list(islice(flags, len(handle.params.full))) for _, handle in handles},
        left_over=list(compress(handles, left_over)),
        uneven=[i for i, both in enumerate(zip(started, waiting, strict=True)) if all(both)],
        edited=list(compress(state.units, edited)),
    )


def _maxima(state: StepState, ballots: list[list[int]]) -> list[list[int]]:
    """Of each number, the largest of all ranks. Collective."""
    # Small, and once per backward: one message costs what its latency costs.
    combined = torch.tensor(
        list(chain.from_iterable(ballots)), dtype=torch.uint8, device=state.world.control_device
    )
    with state.observers.waiting(Kind.RANKS_WAIT):
        op_name = "used parameters of all units, backward"
        state.world.reduce_scalars(combined, "MAX", op_name=op_name)
    # Waits for the device, if the numbers are there: what follows differs by their values.
    numbers = iter(combined.tolist())
    return [list(islice(numbers, len(ballot))) for ballot in ballots]


def _program(state: StepState) -> list[int]:
    """What is the same on all ranks that run the same program; each with its complement."""
    num_loads = sum(unit.num_loads for unit in state.units)
    reduced = bytes(
        _SYNCS.index(unit.sync) * bool(unit.num_trainable[handle]) for unit, handle in state.handles
    )
    return _with_complements([state.number, num_loads % 256, *crc32(reduced).to_bytes(4, "big")])


def _with_complements(numbers: Iterable[int]) -> list[int]:
    return [value for number in numbers for value in (number, 255 - number)]


def _differ(maxima: Sequence[int]) -> list[bool]:
    # The largest number and the largest complement add up to 255 where all are equal. There are
    # none, and so 0 and 0, where no rank has a number.
    return [
        one + other not in (0, 255) for one, other in zip(maxima[::2], maxima[1::2], strict=True)
    ]


def _check_program(where: str, maxima: Sequence[int]) -> None:
    model, loads, *reduced = _differ(maxima)
    if model:
        raise RuntimeError(
            f"{where}: another rank is at the end of the backward of another model. Where one "
            "backward() has gradients of several ShardedWrappers, it must reach them in the same "
            "order on all ranks: call backward() once for each."
        )
    if loads:
        raise RuntimeError(
            f"{where}: load_state_dict() was called on some ranks and not on others, or more "
            "often, so that the model is a mixture of parts. Call it on every rank with the same "
            "state: torch.load(path, mmap=True) reads what is needed alone."
        )
    if any(reduced):
        raise RuntimeError(
            f"{where}: ranks reduce the gradients of different parameters. requires_grad and "
            "no_sync() must be the same on every rank."
        )


def _ordered_groups(state: StepState) -> list[Communicator]:
    """Groups over which all-gathers match by order alone, so that ranks may mix up parameters."""
    world, device = state.world, state.device
    if world.size == 1 or device is None or not world.transport_for(device).is_ordered:
        return []
    topologies = [unit.handles[0].topology for unit in state.units if unit.handles]
    found = [(one.intra_group, one.inter_group, one.regather or world) for one in topologies]
    return [group for group in dict.fromkeys([world, *chain(*found)]) if group.size > 1]


def _orders(world: Communicator, groups: Sequence[Communicator]) -> list[int]:
    """Digests of what was all-gathered; of the groups that divide the ranks, each has its place."""
    votes: list[int] = []
    for group in groups:
        digest = _with_complements(group.history.to_compare())
        places = [[0] * len(digest)] * (world.size if group is not world else 1)
        places[world.ranks.index(group.ranks[0])] = digest
        votes += chain(*places)
    return votes


def _check_orders(
    state: StepState, where: str, groups: Sequence[Communicator], maxima: Sequence[int]
) -> None:
    if not any(_differ(maxima)):
        return
    # All ranks have seen it, so all come here.
    own = [(tuple(group.ranks), group.history.recent()) for group in groups]
    everyone = state.world.gather_objects(own, op_name="all-gathers of all ranks")
    recent: dict[tuple[int, ...], dict[int, list[Begun]]] = {}
    for rank, groups_of_rank in zip(state.world.ranks, everyone, strict=True):
        for ranks, begun in groups_of_rank:
            recent.setdefault(ranks, {})[rank] = begun
    known = filter(None, map(first_difference, recent.values()))
    raise RuntimeError(
        f"{where}: ranks have all-gathered different units, or asked for different norms and sums, "
        f"and what they got may be of other parameters. {next(known, _UNKNOWN)}. With this backend "
        "all ranks must run the same units in the same order, forwards and backwards, and call "
        "state_dict(), summon_full_params() and the like together, not under `if rank == 0:`. "
        "Start again from a checkpoint."
    )
