"""What the ranks tell one another at the end of a backward, in one exchange.

By then ranks may differ: one used a parameter that another did not.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import chain, compress, islice

import torch

from flatshard.engine.events import Kind
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.reduce_buckets import ReduceBucket
from flatshard.engine.step_state import StepState
from flatshard.engine.unit import Unit


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

    def is_used(self, bucket: ReduceBucket) -> bool:
        return any(any(self.used[handle]) for handle in bucket.handles)


def agree(state: StepState, buckets: Sequence[ReduceBucket], rest: Set[int]) -> Agreement:
    """Ask the other ranks. Collective: all ranks, at the end of each backward that reduces.

    Args:
        state: of the model's step.
        buckets: of all units.
        rest: indices of those that have not had their turn here.

    Raises:
        RuntimeError: the ranks do not run the same program; on all of them.
    """
    voters = state.observers.voters
    own: list[list[int]] = [_program(state), *_votes(state, buckets, rest)]
    ballots = [*own, *(one.votes() for one in voters)]
    # Small, and once per backward: one message costs what its latency costs.
    combined = torch.tensor(
        list(chain.from_iterable(ballots)), dtype=torch.uint8, device=state.world.control_device
    )
    with state.observers.waiting(Kind.RANKS_WAIT):
        op_name = "used parameters of all units, backward"
        state.world.reduce_scalars(combined, "MAX", op_name=op_name)
    # Waits for the device, if the numbers are there: what follows differs by their values.
    numbers = iter(combined.tolist())
    maxima = [list(islice(numbers, len(ballot))) for ballot in ballots]
    program, started, waiting, edited, left_over, used = maxima[: len(own)]
    _check_program(state.root.name, program)
    # All ranks have the same observers, in the same order.
    for voter, their_maxima in zip(voters, maxima[len(own) :], strict=True):
        voter.tally(their_maxima)
    flags = map(bool, used)
    owned = [(unit, handle) for unit in state.units for handle in unit.handles]
    return Agreement(
        used={handle: list(islice(flags, len(handle.full))) for _, handle in owned},
        left_over=list(compress(owned, left_over)),
        uneven=[i for i, both in enumerate(zip(started, waiting, strict=True)) if all(both)],
        edited=list(compress(state.units, edited)),
    )


def _votes(state: StepState, buckets: Sequence[ReduceBucket], rest: Set[int]) -> list[list[int]]:
    """In the order of ``Agreement``; what is uneven is two votes, one for each kind of rank."""
    owned = [(unit, handle) for unit in state.units for handle in unit.handles]
    # The turn of a bucket in `rest` reduces its gradients, on all ranks.
    to_come = {handle for index in rest for handle in buckets[index].trainable_handles}
    return [
        [bucket.index not in rest for bucket in buckets],
        [bucket.index in rest for bucket in buckets],
        # No rank raises alone: the others would wait for its reductions.
        [any(h.grad_publish.unreduced.was_edited for h in unit.handles) for unit in state.units],
        [
            unit.sync is not Sync.NONE
            and handle not in to_come
            and handle.grad_buffer.waits_for(unit.sync)
            for unit, handle in owned
        ],
        [i in h.grad_buffer.used_by_rank for _, h in owned for i in range(len(h.full))],
    ]


def _program(state: StepState) -> list[int]:
    """What is the same on all ranks that run the same program; each with its complement."""
    in_order = 0 if state.device is None else state.world.num_in_order(state.device)
    num_loads = sum(unit.num_loads for unit in state.units)
    numbers = (state.number, in_order % 256, num_loads % 256)
    return [value for number in numbers for value in (number, 255 - number)]


def _check_program(name: str, maxima: Sequence[int]) -> None:
    # The largest number and the largest complement add up to 255 where all are equal.
    model, order, loads = (
        largest + complement != 255
        for largest, complement in zip(maxima[::2], maxima[1::2], strict=True)
    )
    if model:
        raise RuntimeError(
            f"backward of {name or 'the model'!r}: another rank is at the end of the "
            "backward of another model. Where one backward() has gradients of several "
            "ShardedWrappers, it must reach them in the same order on all ranks: call "
            "backward() once for each."
        )
    if order:
        raise RuntimeError(
            f"backward of {name or 'the model'!r}: some ranks have all-gathered, or "
            "asked for a norm or a sum, more often than others, and what they got may be of "
            "other parameters. With this backend all ranks must run the same units, forwards "
            "and backwards, and call state_dict(), summon_full_params() and the like "
            "together, not under `if rank == 0:`. Start again from a checkpoint."
        )
    if loads:
        raise RuntimeError(
            f"backward of {name or 'the model'!r}: load_state_dict() was called on some ranks "
            "and not on others, or more often, so that the model is a mixture of parts. Call "
            "it on every rank with the same state: torch.load(path, mmap=True) reads what is "
            "needed alone."
        )
