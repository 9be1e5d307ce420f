"""``GradientBuffer``: gradients of one flat parameter, from autograd's hands to the reduced shard.

Each gradient is copied, in the reduce dtype, into its slot as it comes: no concatenation, no
second full-size gradient. The buffer exists from the first gradient to the end of its reduction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatshard.collectives import Communicator, Pending
from flatshard.flat_param import view_of
from flatshard.layout import FlatLayout


class GradientBuffer:
    """Collects, reduces and hands over the gradients of one flat parameter.

    Attributes:
        filled: original parameters whose gradient lies in the buffer, by index.
        seen: those whose gradient came since the unit was last gathered for backward.
        used: those that got a gradient since the last ``take``.
    """

    def __init__(
        self,
        layout: FlatLayout,
        label: str,
        *,
        comm: Communicator,
        replicas: Communicator,
        dtype: torch.dtype,
        like: Tensor,
    ) -> None:
        """Plan; allocates nothing.

        Args:
            layout: where each original parameter lies.
            label: the unit's name.
            comm: the ranks that split the flat parameter.
            replicas: the ranks that hold the same shard.
            dtype: in which gradients are collected and reduced.
            like: the shard, whose dtype and device the reduced gradient gets.
        """
        self.label = label
        self.filled: set[int] = set()
        self.seen: set[int] = set()
        self.used: set[int] = set()
        self._layout = layout
        self._comm, self._replicas = comm, replicas
        self._dtype, self._out_dtype, self._device = dtype, like.dtype, like.device
        self._buffer: Tensor | None = None
        self._slots: list[Tensor] = []
        self._reduction: tuple[Pending, Tensor] | None = None
        self._reduced: Tensor | None = None

    def receive(self, index: int, grad: Tensor) -> None:
        """Copy a gradient into its slot, or add it where there is one already."""
        with torch.no_grad():
            if self._buffer is None:
                self._allocate()
            if index in self.filled:
                self._slots[index].add_(grad)
            else:
                self._slots[index].copy_(grad)
        for marks in (self.filled, self.seen, self.used):
            marks.add(index)

    def _allocate(self) -> Tensor:
        buffer = torch.empty(self._layout.padded_numel, dtype=self._dtype, device=self._device)
        # Padding is summed and stepped like the rest, so it must stay zero.
        for start, end in self._layout.gaps:
            buffer[start:end].zero_()
        self._slots = [view_of(buffer, span) for span in self._layout.spans]
        self._buffer = buffer
        return buffer

    def slot(self, index: int) -> Tensor:
        """The gradient in the buffer, not reduced; ``index`` is filled."""
        return self._slots[index]

    def shard_part(self, rank: int) -> Tensor:
        """A copy of what the buffer holds of a rank's shard, not reduced."""
        assert self._buffer is not None, "nothing was received"
        self._zero_unfilled()
        start, end = self._layout.shard_range(rank)
        return self._buffer[start:end].clone()

    def _zero_unfilled(self) -> None:
        for index, slot in enumerate(self._slots):
            if index not in self.filled:
                slot.zero_()

    def forget(self, index: int) -> None:
        """Drop one gradient that was not reduced yet."""
        for marks in (self.filled, self.seen, self.used):
            marks.discard(index)

    def start_reduce(self) -> int:
        """Begin averaging over the ranks; what was not filled counts as zero.

        Collective: all ranks of both groups, in the same order of calls.

        Returns:
            Bytes that are held until ``finish_reduce``.
        """
        self.finish_reduce()
        with torch.no_grad():
            buffer = self._allocate() if self._buffer is None else self._buffer
            self._zero_unfilled()
            self._buffer, self._slots = None, []
            self.filled.clear()
            if self._comm.size > 1:
                out = buffer.new_empty(self._layout.shard_numel)
                pending = self._comm.reduce_scatter(buffer, out, label=self.label)
            elif self._replicas.size > 1:
                out = buffer
                pending = self._replicas.all_reduce(buffer, label=self.label)
            else:
                out, pending = buffer, Pending([], self.label)
            self._reduction = pending, out
        return 2 * buffer.numel() * buffer.element_size()

    def reduce_done(self) -> bool:
        """Whether ``finish_reduce`` would return at once."""
        return self._reduction is None or self._reduction[0].done()

    def finish_reduce(self) -> None:
        """Wait for the reduction under way and add its result to this backward's gradient."""
        if self._reduction is None:
            return
        (pending, out), self._reduction = self._reduction, None
        pending.wait()
        with torch.no_grad():
            if self._reduced is None:
                self._reduced = out.to(self._out_dtype)
            else:
                self._reduced.add_(out)

    def take(self) -> Tensor | None:
        """Hand over the reduced gradient of this rank's shard; None when nothing was reduced."""
        self.used.clear()
        reduced, self._reduced = self._reduced, None
        return reduced

    def drop(self) -> None:
        """Forget everything, after a backward that failed."""
        if self._reduction is not None:
            # Its memory is written to until it is over.
            (pending, _), self._reduction = self._reduction, None
            pending.wait()
        self._buffer, self._slots, self._reduced = None, [], None
        for marks in (self.filled, self.seen, self.used):
            marks.clear()
