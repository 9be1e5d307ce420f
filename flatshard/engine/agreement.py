"""What the ranks tell one another at the end of a backward, in one exchange.

By then ranks may differ: one used a parameter that another did not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice

import torch

from flatshard.engine.events import Kind
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.reduce_buckets import ReduceBucket
from flatshard.engine.step_state import StepState
from flatshard.engine.unit import Unit


class Agreement:
    """What all ranks together used in a backward, and what is left to be done for it.

    Attributes:
        used: per unit, flat parameter and original parameter: whether any rank used it.
        left_over: flat parameters with gradients that no bucket's turn reduces: they came after
            it, or were accumulated before the parameters were frozen.
        uneven: indices of buckets whose turn came on some ranks, and on others not yet.
        edited: units of which some rank found accumulated gradients edited.
    """

    def __init__(
        self, state: StepState, buckets: Sequence[Sequence[ReduceBucket]], rest: Collection[int]
    ) -> None:
        """Ask the other ranks. Collective: all ranks, at the end of each backward that reduces.

        Args:
            state: of the model's step.
            buckets: per unit.
            rest: indices of those that have not had their turn here.

        Raises:
            RuntimeError: the ranks do not run the same program; on all of them.
        """
        self.used: list[list[list[bool]]] = []
        self.left_over: list[tuple[Unit, FlatParamHandle]] = []
        self.uneven: list[int] = []
        self.edited: list[str] = []
        self._state, self._buckets, self._rest = state, buckets, set(rest)
        ballots = [self._program(), self._used_here(), *(vote() for vote in state.observers.votes)]
        # Small, and once per backward: one message costs what its latency costs.
        combined = torch.tensor(
            list(chain.from_iterable(ballots)),
            dtype=torch.uint8,
            device=state.world.control_device,
        )
        with state.observers.waiting(Kind.RANKS_WAIT):
            op_name = "used parameters of all units, backward"
            state.world.reduce_scalars(combined, "MAX", op_name=op_name)
        # Waits for the device, if the numbers are there: what follows differs by their values.
        maxima = iter(combined.tolist())
        self._check_program(maxima)
        self._tally_used(maxima)
        for ballot, tally in zip(ballots[2:], state.observers.tally, strict=True):
            # After the model's own, in the order of votes: all ranks have the same observers.
            tally(list(islice(maxima, len(ballot))))

    def _program(self) -> list[int]:
        """What is the same on all ranks that run the same program; each with its complement."""
        state = self._state
        in_order = 0 if state.device is None else state.world.num_in_order(state.device)
        num_loads = sum(unit.num_loads for unit in state.units)
        numbers = (state.number, in_order % 256, num_loads % 256)
        return [value for number in numbers for value in (number, 255 - number)]

    def _check_program(self, maxima: Iterator[int]) -> None:
        # The largest number and the largest complement add up to 255 where all are equal.
        differs = [next(maxima) + next(maxima) != 255 for _ in range(3)]
        name = self._state.root.name
        if differs[0]:
            raise RuntimeError(
                f"backward of {name or 'the model'!r}: another rank is at the end of the "
                "backward of another model. Where one backward() has gradients of several "
                "ShardedWrappers, it must reach them in the same order on all ranks: call "
                "backward() once for each."
            )
        if differs[1]:
            raise RuntimeError(
                f"backward of {name or 'the model'!r}: some ranks have all-gathered, or "
                "asked for a norm or a sum, more often than others, and what they got may be of "
                "other parameters. With this backend all ranks must run the same units, forwards "
                "and backwards, and call state_dict(), summon_full_params() and the like "
                "together, not under `if rank == 0:`. Start again from a checkpoint."
            )
        if differs[2]:
            raise RuntimeError(
                f"backward of {name or 'the model'!r}: load_state_dict() was called on some ranks "
                "and not on others, or more often, so that the model is a mixture of parts. Call "
                "it on every rank with the same state: torch.load(path, mmap=True) reads what is "
                "needed alone."
            )

    def _used_here(self) -> list[int]:
        votes: list[int] = []
        for unit, buckets in zip(self._state.units, self._buckets, strict=True):
            to_come: set[FlatParamHandle] = set()
            for bucket in buckets:
                # Both in one maximum: some rank has it left, and some rank has not.
                votes += [bucket.index in self._rest, bucket.index not in self._rest]
                if bucket.index in self._rest:
                    to_come.update(bucket.trainable_handles)
            # No rank raises alone: the others would wait for its reductions.
            votes.append(any(handle.grad_publish.was_edited for handle in unit.handles))
            for handle in unit.handles:
                # The turn of a bucket in `rest` reduces its gradients, on all ranks.
                is_due = unit.sync is not Sync.NONE and handle not in to_come
                votes.append(is_due and handle.grad_buffer.waits_for(unit.sync))
                used = handle.grad_buffer.used_by_rank
                votes += [i in used for i in range(len(handle.full))]
        return votes

    def _tally_used(self, maxima: Iterator[int]) -> None:
        for unit, buckets in zip(self._state.units, self._buckets, strict=True):
            for bucket in buckets:
                if all([next(maxima), next(maxima)]):
                    self.uneven.append(bucket.index)
            if next(maxima):
                self.edited.append(unit.name)
            used = []
            for handle in unit.handles:
                if next(maxima):
                    self.left_over.append((unit, handle))
                used.append([bool(next(maxima)) for _ in handle.full])
            self.used.append(used)

    def is_used(self, bucket: ReduceBucket) -> bool:
        """Whether any rank used any parameter of a bucket."""
        unit = bucket.unit
        flags = dict(zip(unit.handles, self.used[unit.index], strict=True))
        return any(any(flags[handle]) for handle in bucket.handles)
