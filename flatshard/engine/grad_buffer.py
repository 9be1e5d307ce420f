"""``GradientBuffer``: adds up the gradients of one flat parameter until the next reduction.

The buffer starts no collective. ``take_chunks`` returns the gradients for a reduction as
``FlatChunks``. If a reduction covers only the intra group (``Sync.INTRA``), the buffer keeps the
result until a later backward reduces over all ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import torch
from torch import Tensor

from flatshard.comm.transports import ChunkPlan, FlatChunks
from flatshard.engine.grad_reduce import ReducePlan, zero
from flatshard.memory.buffers import storage_bytes
from flatshard.units.layout import part_of, view_of

# Gradients smaller than this are copied together, by one kernel after the last gradient has
# arrived, because starting one copy per small gradient takes longer than the copies. If the whole
# flat parameter is smaller than this, the transport (the class that moves bytes between ranks) does
# not read the gradients in place: to send or read one block is faster than many small blocks.
_SMALL_BYTES = 1 << 20

# Minimum mean size of the gradients for which the transport (sockets, for example) reads each
# gradient in place. For smaller gradients, copying all gradients to one buffer first is faster.
_MEAN_IN_PLACE_BYTES = 1 << 16


class Sync(enum.Enum):
    """How a backward reduces the gradients of a unit."""

    # Gradients stay unsharded and unreduced. Gradients of later backwards are added.
    NONE = "NONE"
    # Gradients are reduced within the intra group (the ranks of one node, for example). The
    # reduction across groups waits for a later backward.
    INTRA = "INTRA"
    # Gradients are reduced over all ranks and published.
    ALL = "ALL"


class GradientBuffer:
    """Receives and adds up the gradients that autograd computes for one flat parameter."""

    def __init__(self, plan: ReducePlan) -> None:
        """Make an empty buffer for gradients that are reduced according to ``plan``."""
        self._plan, self._layout, self.dtypes = plan, plan.flat.layout, plan.dtypes
        # Accumulated gradients, by index of the original parameter. A gradient whose index is in
        # `_separate` has memory of its own. All other gradients are views of `_buffer`.
        self.slots: dict[int, Tensor] = {}
        self._separate: set[int] = set()
        self._buffer: Tensor | None = None
        # Indices of the parameters whose gradients have arrived in this backward.
        self.arrived: set[int] = set()
        # Indices of the parameters whose gradients this rank has computed since `.grad` was last
        # published. After a `Sync.INTRA` reduction, also the parameters that other ranks used,
        # whose gradients are in `intra_reduced`.
        self.used_by_rank: set[int] = set()
        # Sum of the `Sync.INTRA` reductions, `(padded_numel / intra_group.size,)`.
        self.intra_reduced: Tensor | None = None
        # Decides which gradients the transport reads in place. None: all gradients are copied to
        # `_buffer`, and the transport reads `_buffer`.
        self._chunk_plan: ChunkPlan | None = None
        least_bytes = max(_SMALL_BYTES, _MEAN_IN_PLACE_BYTES * len(self._layout.spans))
        if plan.device.type == "cpu" and plan.full_bytes >= least_bytes:
            self._chunk_plan = plan.chunk_plan()

    @property
    def nbytes(self) -> int:
        return storage_bytes([self._buffer, self.intra_reduced, *self.slots.values()])

    @property
    def accumulated(self) -> set[int]:
        """Indices of original parameters whose gradients wait for a reduction over all ranks."""
        reduced = set() if self.intra_reduced is None else self.used_by_rank
        return reduced | self.slots.keys()

    def waits_for(self, sync: Sync) -> bool:
        """Whether the buffer has gradients that a reduction with ``sync`` would reduce."""
        has_intra = sync is Sync.ALL and self.intra_reduced is not None
        return sync is not Sync.NONE and (bool(self.slots) or has_intra)

    # ------------------------------------------------------------ accumulate

    def receive(self, index: int, grad: Tensor, *, more_to_come: bool = False) -> None:
        """Store the gradient of parameter ``index``, or add it to the stored gradient.

        Args:
            index: index of the original parameter.
            grad: the gradient, in the parameter's shape and any dtype. No other code may use the
                tensor: the buffer may keep the tensor and add to it.
            more_to_come: whether this backward reduces nothing, so that more gradients follow.
        """
        if index in self.slots:
            self._add(index, grad)
        else:
            self._fill(index, grad, more_to_come)
        self.arrived.add(index)
        self.used_by_rank.add(index)

    def _add(self, index: int, grad: Tensor) -> None:
        slot = self.slots[index]
        if slot.dtype is not self.dtypes.accum_dtype:
            # Add in the accumulation dtype. In the reduce dtype, which may be narrower, the sum
            # would lose small gradients.
            slot = self.slots[index] = slot.to(self.dtypes.accum_dtype)
            self._separate.add(index)
        slot.add_(grad)

    def _fill(self, index: int, grad: Tensor, more_to_come: bool) -> None:
        span = self._layout.spans[index]
        # If more gradients follow, and the accumulation dtype is wider than the reduce dtype, do
        # not round this gradient to the reduce dtype yet.
        may_widen = more_to_come and self.dtypes.accum_dtype is not self.dtypes.reduce_dtype
        is_small = grad.nbytes < _SMALL_BYTES
        if self._chunk_plan is None and not (is_small or may_widen):
            buffer = self._allocate() if self._buffer is None else self._buffer
            self.slots[index] = view_of(buffer, span).copy_(grad)
            return
        # Chunks are read as raw memory, so do not keep a lazily conjugated or negated tensor: the
        # memory of such a tensor does not contain the tensor's values.
        fits = grad.stride() == span.strides and not (grad.is_conj() or grad.is_neg())
        if not fits or grad.device != self._plan.device:
            # Make a dense copy, because chunks must be dense and in the parameter's strides. An
            # expanded gradient, for example, has strides of 0.
            dense = grad.new_empty_strided(span.shape, span.strides, device=self._plan.device)
            grad = dense.copy_(grad)
        # Keep the tensor without a copy. This is safe because `Backward.receive` has removed the
        # tensor from `.grad`, so autograd does not add to the tensor. `take_chunks` casts later.
        self.slots[index] = grad
        self._separate.add(index)

    def _allocate(self) -> Tensor:
        buffer = torch.empty(
            self._layout.padded_numel, dtype=self.dtypes.reduce_dtype, device=self._plan.device
        )
        # Zero the padding. Reductions and optimizers treat padding like parameters, so other values
        # here would change the shards' padding, which must stay zero.
        zero([buffer[start:end] for start, end in self._layout.gaps])
        self._buffer = buffer
        return buffer

    def add_intra_reduced(self, part: Tensor) -> None:
        """Add ``part``, the result of a reduction within the intra group.

        ``part`` has the shape ``(padded_numel / intra_group.size,)``.
        """
        with torch.no_grad():
            part = part.to(self.dtypes.accum_dtype)
            total = self.intra_reduced
            self.intra_reduced = part if total is None else total.add_(part)

    def mark_used(self, used: list[bool]) -> None:
        """Record which parameters were used on any rank, after a ``Sync.INTRA`` reduction.

        The result of the reduction contains gradients of other ranks, so this rank has gradients
        also of parameters that only other ranks used.
        """
        self.used_by_rank.update(index for index, was_used in enumerate(used) if was_used)

    def forget(self, index: int) -> None:
        """Drop the accumulated gradient of a parameter."""
        self.slots.pop(index, None)
        for marks in (self._separate, self.arrived, self.used_by_rank):
            marks.discard(index)
        if self.intra_reduced is not None:
            span, numel = self._layout.spans[index], self.intra_reduced.numel()
            start, end = (
                min(max(bound - self._plan.intra_start, 0), numel)
                for bound in (span.start, span.end)
            )
            # Zero the parameter's range in `intra_reduced`, a sum over ranks: this rank's gradient
            # alone cannot be taken out of the sum.
            self.intra_reduced[start:end].zero_()
            if not self.used_by_rank:
                self.intra_reduced = None

    def accumulated_shard(self) -> Tensor:
        """Return a copy of this rank's shard of the accumulated gradients.

        The copy has the dtype of ``.grad``.
        """
        part = torch.zeros(
            self._layout.shard_numel, dtype=self.dtypes.grad_dtype, device=self._plan.device
        )
        rank = self._plan.flat.topology.index
        for index, slot in self.slots.items():
            span = self._layout.spans[index]
            local = self._layout.local_span(index, rank)
            part[local.start : local.end].copy_(part_of(slot, span, local))
        if self.intra_reduced is not None:
            first = self._layout.shard_range(rank)[0] - self._plan.intra_start
            part.add_(self.intra_reduced.narrow(0, first, self._layout.shard_numel))
        return part

    def take_over(self, other: GradientBuffer) -> None:
        """Move the gradients of ``other``, a buffer with the same layout, into this buffer."""
        self.arrived |= other.arrived
        self.used_by_rank |= other.used_by_rank
        with torch.no_grad():
            for index, slot in other.slots.items():
                self._fill(index, slot, more_to_come=True)
            if other.intra_reduced is not None:
                self.add_intra_reduced(other.intra_reduced.to(self._plan.device))

    # ------------------------------------------------------------ hand out

    def take_chunks(self) -> FlatChunks:
        """Return all accumulated gradients in the reduce dtype, and empty the buffer.

        The returned chunks are zero for parameters without a gradient.
        """
        with torch.no_grad():
            if self._chunk_plan is not None:
                in_order = self._in_memory_order(self.slots)
                grads = dict(zip(self.slots, in_order, strict=True))
                # Drop all other references to the gradients. Then `chunks` can free each gradient
                # as soon as the gradient is cast.
                in_order.clear()
                self._empty()
                return self._chunk_plan.chunks(grads)
            spans = self._layout.spans
            buffer = self._allocate() if self._buffer is None else self._buffer
            if len(self.slots) < len(spans):
                absent = (span for index, span in enumerate(spans) if index not in self.slots)
                zero([buffer[span.start : span.end] for span in absent])
            if self._separate:
                # Make all views with one call and all copies with one kernel: a call and a kernel
                # per parameter would take longer than the copies.
                pieces = buffer.split_with_sizes(self._layout.piece_numels)[1::2]
                separate = self._in_memory_order(self._separate)
                torch._foreach_copy_([pieces[index] for index in self._separate], separate)
        self._empty()
        return FlatChunks.of(buffer)

    def _in_memory_order(self, indices: Iterable[int]) -> list[Tensor]:
        """Return 1-D views of the gradients of ``indices``, with the elements in memory order.

        All stored gradients are dense, so a 1-D view exists.
        """
        slots = [self.slots[index] for index in indices]
        return [one if one.dim() == 1 else one.as_strided((one.numel(),), (1,)) for one in slots]

    def drop(self) -> None:
        """Drop all gradients."""
        self._empty()
        self.intra_reduced = None
        self.arrived.clear()
        self.used_by_rank.clear()

    def _empty(self) -> None:
        self._buffer, self.slots, self._separate = None, {}, set()
