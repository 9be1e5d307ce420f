"""``GradientBuffer``: gradients of one flat parameter, from autograd's hands to the reduced shard.

Each gradient is copied, in the reduce dtype, into its slot of one buffer as it comes: no
concatenation, no second full-size gradient. On a CPU, large ones are read or sent from the tensors
that autograd made (``grad_parts``). Buffer or tensors exist from the first gradient to the end of
the reduction.

[Note: accumulation]
Sums are not kept in a reduce dtype narrower than the shard's. Where more gradients are to come
(``no_sync``), the first one stays as autograd made it, or becomes as wide as the shard's, in a
tensor of its own; when another is added, the slot becomes so wide. All are cast when the reduction
begins.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.comm.flat_chunks import ChunkPlan, FlatChunks
from flatshard.comm.topology import Topology
from flatshard.comm.work import AsyncWork, CollectiveError, PendingSends
from flatshard.engine.grad_reduce import GradReduce
from flatshard.engine.offload import DeviceToHost, OffloadTarget
from flatshard.memory.buffer_cache import BufferCache
from flatshard.options.precision import GradDtypes
from flatshard.plan.layout import FlatLayout
from flatshard.tensor.flat_parameter import part_of, view_of

_IN_PLACE_BYTES = 1 << 20
"""Of a flat parameter: below, one reading of a buffer is cheaper than many of gradients, and one
copy of all gradients cheaper than many of each."""

_MEAN_IN_PLACE_BYTES = 1 << 16
"""Of its originals: below, a copy as they come is cheaper than a reading of each."""

_COPIED_TOGETHER_BYTES = 1 << 20
"""Of one gradient on an accelerator: below, beginning a copy takes longer than the copy, so the
flat parameter's are copied by one kernel when all have come."""


class Sync(enum.Enum):
    """What becomes of a unit's gradients at the end of a backward."""

    LOCAL = "LOCAL"
    """They stay whole and unreduced, and later ones are added to them."""
    INTRA = "INTRA"
    """They are reduced within the intra group; what crosses it waits."""
    ALL = "ALL"
    """They are reduced over all ranks and published."""


@dataclass(frozen=True)
class CommHook:
    """What a user put in the place of the usual reduction of a flat parameter.

    Attributes:
        reduce_dtype: in which gradients are reduced; None: as without a hook.
        reduce: called with whole gradients, ``(padded_numel,)`` in the reduce dtype, and the
            unit's name; returns their average over all ranks, this rank's ``(shard_numel,)``, in
            any dtype. Collective, over when it returns. None: the usual reduction.
    """

    reduce_dtype: torch.dtype | None = None
    reduce: Callable[[Tensor, str], Tensor] | None = None


class GradientBuffer:
    """Collects, reduces and hands over the gradients of one flat parameter.

    Attributes:
        unit_fqn: the unit's name.
        filled: original parameters whose gradient lies in the buffer, by index.
        seen: those whose gradient came since the unit was last gathered for backward.
        used: those that got a gradient since the last ``take``.
        tags: the flat parameter's numbers in the intra, the inter and the replicate group.
        dtypes: of what is collected, accumulated and handed over.
        fixed_order: whether to add in rank order also where the backend would add.
        pending_sends: what other ranks may still be taking from this one.
        spare: memory of reduced gradients that users have dropped.
        held: the sum of what ``Sync.INTRA`` reduced, ``(padded_numel / intra_group.size,)``, or
            None.
    """

    def __init__(
        self,
        layout: FlatLayout,
        unit_fqn: str,
        *,
        topology: Topology,
        dtypes: GradDtypes,
        device: torch.device,
        home: OffloadTarget | None,
        tags: tuple[int, int, int],
        pending_sends: PendingSends,
        comm_hook: CommHook | None = None,
        fixed_order: bool = False,
    ) -> None:
        """Plan; allocates nothing.

        Args:
            layout: where each original parameter lies.
            unit_fqn: the unit's name.
            topology: the ranks that gradients are averaged over.
            dtypes: of what is collected, accumulated and handed over.
            device: where gradients come and are reduced.
            home: where the reduced gradient lives; None: there.
            tags: the flat parameter's, in the intra, the inter and the replicate group.
            pending_sends: takes what other ranks may still be taking.
            comm_hook: what reduces, if it is not this; only where there is one stage.
            fixed_order: whether to add in rank order also where the backend would add.
        """
        self.unit_fqn = unit_fqn
        self.filled: set[int] = set()
        self.seen: set[int] = set()
        self.used: set[int] = set()
        self.spare = BufferCache()
        self.held: Tensor | None = None
        self.pending_sends = pending_sends
        self._layout, self.tags = layout, tags
        self._topology = topology
        self.dtypes, self._device = dtypes, device
        self.fixed_order = fixed_order
        self._to_host = DeviceToHost(home)
        self._reduce_by_hook = None if comm_hook is None else comm_hook.reduce
        self._buffer: Tensor | None = None
        self._sizes: list[int] = []  # of gaps and originals in turn, once they were asked for
        self._slots: dict[int, Tensor] = {}
        self._apart: set[int] = set()  # those that are tensors of their own
        nbytes = layout.padded_numel * dtypes.reduce_dtype.itemsize
        is_small = nbytes < _IN_PLACE_BYTES
        # How the other ranks get gradients from where autograd made them, without a buffer.
        self._runs = None if comm_hook is not None else self._plan_runs(nbytes)
        # Whether all slots are tensors of their own until the reduction begins.
        self._stay = self._runs is not None or is_small
        self._copies_together = device.type != "cpu"
        self._reduction: GradReduce | None = None
        self._reduced: Tensor | None = None
        self._given: list[AsyncWork] = []

    def _plan_runs(self, nbytes: int) -> ChunkPlan | None:
        dtype, spans = self.dtypes.reduce_dtype, self._layout.spans
        if self._device.type != "cpu" or nbytes < _IN_PLACE_BYTES:
            return None
        min_bytes = self._topology.intra_group.part_bytes(self.tags[0], dtype)
        if min_bytes is None or nbytes < _MEAN_IN_PLACE_BYTES * len(spans):
            return None
        return ChunkPlan(self._layout, min_bytes, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of gradients here, also of those that other ranks are still taking from."""
        held: list[object] = [self._buffer, self.held, *self._slots.values()]
        if not self._to_host.is_apart:
            held.append(self._reduced)
        if self._reduction is not None:
            held.append(self._reduction.out)
        for pending in self._given:
            held.extend(pending.kept)
        storages = [one.untyped_storage() for one in held if isinstance(one, Tensor)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def is_given(self) -> bool:
        """Whether a reduction is under way, or other ranks are still taking from this one's."""
        return any(pending.kept for pending in self._given)

    def receive(self, index: int, grad: Tensor, *, more_to_come: bool = False) -> None:
        """Put a gradient, which nobody else holds, into its slot, or add it to what is there.

        Args:
            index: the original parameter's.
            grad: in its true shape, in any dtype; needs no gradient itself.
            more_to_come: whether nothing is reduced at the end of this backward.
        """
        if index in self.filled:
            self._add(index, grad)
        else:
            self._fill(index, grad, more_to_come)
            self.filled.add(index)
        self.seen.add(index)
        self.used.add(index)

    def _add(self, index: int, grad: Tensor) -> None:
        slot = self._slots[index]
        if slot.dtype is not self.dtypes.accum_dtype:
            slot = self._slots[index] = slot.to(self.dtypes.accum_dtype)
            self._apart.add(index)
        slot.add_(grad)

    def _fill(self, index: int, grad: Tensor, more_to_come: bool) -> None:
        """See the note on accumulation."""
        span, dtype = self._layout.spans[index], self.dtypes.reduce_dtype
        may_widen = more_to_come and self.dtypes.accum_dtype is not dtype
        if may_widen and grad.dtype is not dtype and grad.itemsize >= dtype.itemsize:
            dtype = self.dtypes.accum_dtype  # the other would round it
        waits = self._copies_together and grad.nbytes < _COPIED_TOGETHER_BYTES
        if waits and not may_widen:
            dtype = grad.dtype  # cast by the one copy
        if not (self._stay or may_widen or waits):
            buffer = self._allocate() if self._buffer is None else self._buffer
            self._slots[index] = view_of(buffer, span).copy_(grad)
            self._apart.discard(index)
            return
        fits = grad.dtype is dtype and grad.stride() == span.strides
        # Of a lazy conjugate or negative the memory has other values.
        fits = fits and not (grad.is_conj() or grad.is_neg())
        if not fits or grad.device != self._device:
            slot = torch.empty_strided(span.shape, span.strides, dtype=dtype, device=self._device)
            grad = slot.copy_(grad)
        self._slots[index] = grad
        self._apart.add(index)

    def _allocate(self) -> Tensor:
        buffer = torch.empty(
            self._layout.padded_numel, dtype=self.dtypes.reduce_dtype, device=self._device
        )
        # Padding is summed and stepped like the rest, so it must stay zero.
        _zero([buffer[start:end] for start, end in self._layout.gaps])
        self._buffer = buffer
        return buffer

    # ------------------------------------------------------------ not reduced yet

    @property
    def accumulated(self) -> set[int]:
        """Original parameters whose gradient waits for a reduction over all ranks."""
        return self.filled if self.held is None else self.filled | self.used

    def waits_for(self, sync: Sync) -> bool:
        """Whether there is something that ``start_reduce(sync)`` would reduce further."""
        return bool(self.filled) or (sync is Sync.ALL and self.held is not None)

    @property
    def is_reducing(self) -> bool:
        """Whether a reduction has begun and ``finish_reduce`` was not called."""
        return self._reduction is not None

    @property
    def is_finished(self) -> bool:
        """Whether nothing waits or is under way: there is a reduced gradient, or none at all."""
        return self._reduction is None and not self.filled and self.held is None

    def shard_part(self) -> Tensor:
        """A copy of what waits of this rank's shard, in the shard's dtype."""
        part = torch.zeros(
            self._layout.shard_numel, dtype=self.dtypes.grad_dtype, device=self._device
        )
        for index in self.filled:
            span = self._layout.spans[index]
            local = self._layout.local_span(index, self._topology.index)
            part[local.start : local.end].copy_(part_of(self._slots[index], span, local))
        if self.held is not None:
            part.add_(self.held.narrow(0, *self._range(self._topology.inter_group.rank)))
        return part

    def slot(self, index: int) -> Tensor:
        """The gradient in the buffer; ``index`` is filled."""
        return self._slots[index]

    def _range(self, position: int) -> tuple[int, int]:
        return position * self._layout.shard_numel, self._layout.shard_numel

    def _whole(self) -> FlatChunks:
        """Everything that was received; the rest is zero."""
        if self._runs is not None:
            return self._runs.whole({i: _in_memory_order(self._slots[i]) for i in self.filled})
        spans = self._layout.spans
        buffer = self._allocate() if self._buffer is None else self._buffer
        if len(self.filled) < len(spans):
            absent = (span for index, span in enumerate(spans) if index not in self.filled)
            _zero([buffer[span.start : span.end] for span in absent])
        apart = self._apart & self.filled
        if apart:
            pieces = self._split(buffer)
            torch._foreach_copy_(
                [pieces[index] for index in apart],
                [_in_memory_order(self._slots[index]) for index in apart],
            )
        return FlatChunks.of(buffer)

    def _split(self, buffer: Tensor) -> list[Tensor]:
        """The original parameters' ranges of a buffer; in one call."""
        if not self._sizes:
            bounds = [bound for span in self._layout.spans for bound in (span.start, span.end)]
            ends = [*bounds, buffer.numel()]
            self._sizes = [end - start for start, end in zip([0, *bounds], ends, strict=True)]
        return list(buffer.split_with_sizes(self._sizes)[1::2])

    def forget(self, index: int) -> None:
        """Drop one gradient that was not reduced yet."""
        for marks in (self.filled, self.seen, self.used):
            marks.discard(index)
        if self.held is not None:
            intra_group = self._topology.intra_group
            first, length = intra_group.rank * self.held.numel(), self.held.numel()
            span = self._layout.spans[index]
            start, end = (min(max(x - first, 0), length) for x in (span.start, span.end))
            self.held[start:end].zero_()
            if not self.used:
                self.held = None

    def mark_used(self, used: list[bool]) -> None:
        """Note which gradients ``held`` sums up, on whatever rank they came."""
        self.used.update(index for index, was_used in enumerate(used) if was_used)

    def take_over(self, other: GradientBuffer) -> None:
        """Go on with what another buffer of the same layout has accumulated; casts and moves."""
        for mine, theirs in (
            (self.filled, other.filled),
            (self.seen, other.seen),
            (self.used, other.used),
        ):
            mine |= theirs
        with torch.no_grad():
            for index in other.filled:
                self._fill(index, other.slot(index), more_to_come=True)
            if other.held is not None:
                self.held = other.held.to(self._device, self.dtypes.accum_dtype)

    # ------------------------------------------------------------ reductions

    def start_reduce(self, sync: Sync) -> int:
        """Begin averaging over the ranks; what was not filled counts as zero.

        Collective: all ranks of the unit, in the same order of calls.

        Args:
            sync: ``ALL``, or ``INTRA`` to hold what the first stage gives.

        Returns:
            Bytes that are held until ``finish_reduce``.
        """
        assert self._reduction is None, "the reduction before was not finished"
        with torch.no_grad():
            whole = self._whole()
            self._buffer, self._slots, self._apart = None, {}, set()
            self.filled.clear()
            if self._reduce_by_hook is not None:
                assert sync is Sync.ALL, "units with a hook have one stage"
                assert whole.parts[0] is not None, "hooks get one buffer"
                reduced = self._reduce_by_hook(whole.parts[0], self.unit_fqn)
                self._add_reduced(self._without_padding(reduced))
                return 0
            self._reduction = GradReduce(
                self, whole, self._topology, hold=sync is Sync.INTRA, held=self.held
            )
            self._given = self._reduction.stages
            if sync is Sync.ALL:
                self.held = None
        # To send and to receive, unless the backend adds up as it receives. An accelerator's then
        # has two units under way, without which its host would be too little ahead of it.
        adds = self._topology.intra_group.is_stream_ordered(self._device) and not self.fixed_order
        return (1 if adds else 2) * whole.numel * self.dtypes.reduce_dtype.itemsize

    def _without_padding(self, reduced: Tensor) -> Tensor:
        """Zero the padding in this rank's part: a hook may have put noise there."""
        self._zero_padding(reduced, self._topology.index)
        return reduced

    def _zero_padding(self, part: Tensor, position: int) -> None:
        """Zero the padding in part number ``position`` of the flat parameter."""
        first, numel = position * part.numel(), part.numel()
        inside = ([min(max(x - first, 0), numel) for x in gap] for gap in self._layout.gaps)
        _zero([part[start:end] for start, end in inside if start < end])

    def new_part(self, comm: Communicator) -> Tensor:
        """Where this rank's part of a reduction over ``comm`` goes; only its padding has values."""
        numel = self._layout.padded_numel // comm.size
        dtype = self.sum_dtype(comm)
        # Only what is published itself needs memory that users may hold on to: not what a later
        # stage goes on with, nor what is copied home.
        passes_on = self._topology.inter_group.size > 1 or self.adds_replicas
        if passes_on or self._to_host.is_apart:
            part = torch.empty(numel, dtype=dtype, device=self._device)
        else:
            part = self.spare.take(numel, dtype, self._device)
        if self._runs is not None:
            self._zero_padding(part, comm.rank)
        return part

    def sum_dtype(self, comm: Communicator) -> torch.dtype:
        """In which a reduction over ``comm`` adds up and gives its part."""
        return comm.sum_dtype(self.dtypes.reduce_dtype, self._device, fixed_order=self.fixed_order)

    @property
    def adds_replicas(self) -> bool:
        """Whether replicas' averages are added up in parts, which are then gathered."""
        replicate = self._topology.replicate
        return replicate.adds_all_reduces(
            self.dtypes.reduce_dtype, self._device, fixed_order=self.fixed_order
        )

    @property
    def is_unordered(self) -> bool:
        """Whether reductions may begin in another order than other models' on other ranks."""
        topology = self._topology
        return (
            self._reduce_by_hook is None
            and topology.intra_group.is_unordered(self._device)
            and topology.inter_group.is_unordered(self._device)
            and topology.replicate.is_unordered(self._device)
            and (topology.replicate.size == 1 or self.adds_replicas)
        )

    def _add_reduced(self, reduced: Tensor) -> None:
        out = self._to_host.land(reduced.to(self.dtypes.grad_dtype))
        self._reduced = out if self._reduced is None else self._to_host.add(self._reduced, out)

    def advance(self) -> bool:
        """Begin the second stage if the first is over; False while that must wait."""
        return self._reduction is None or self._reduction.advance()

    def cross(self) -> None:
        """Wait for the first stage and begin the second, if there is one.

        Collective: in the same order on all ranks.
        """
        if self._reduction is not None:
            self._reduction.cross()

    def reduce_done(self) -> bool:
        """Whether ``finish_reduce`` would return at once."""
        return self._reduction is None or self._reduction.done()

    def tells_when_done(self) -> bool:
        """Whether ``reduce_done`` can become true by itself."""
        return self._reduction is None or self._reduction.tells_when_done()

    def is_computed(self) -> bool:
        """Whether what is being reduced was computed, where a device runs behind the host."""
        return self._reduction is None or self._reduction.is_computed()

    def finish_reduce(self) -> None:
        """Wait for the reduction under way and add its result to this backward's gradient.

        Collective where a second stage was not begun: in the same order on all ranks.
        """
        if self._reduction is None:
            return
        reduction, self._reduction = self._reduction, None
        with torch.no_grad():
            out = reduction.finish()
            if not reduction.hold:
                self._add_reduced(out)
                return
            out = out.to(self.dtypes.accum_dtype)
            self.held = out if self.held is None else self.held.add_(out)

    def take(self) -> Tensor | None:
        """Hand over the reduced gradient of this rank's shard; None when nothing was reduced."""
        self._to_host.settle()
        self.used.clear()
        self._given = []
        reduced, self._reduced = self._reduced, None
        return reduced

    def drop(self) -> None:
        """Forget everything, after a backward that failed."""
        if self._reduction is not None:
            # Its memory is written to until it is over. What makes it fail was told already.
            reduction, self._reduction = self._reduction, None
            with contextlib.suppress(CollectiveError):
                reduction.finish()
        self._buffer, self._slots, self._apart = None, {}, set()
        self._reduced, self.held, self._given = None, None, []
        for marks in (self.filled, self.seen, self.used):
            marks.clear()


def _zero(pieces: list[Tensor]) -> None:
    """Zero all of them; on an accelerator in one kernel."""
    if pieces:
        torch._foreach_zero_(pieces)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as they lie, ``(numel,)``; a view, or the tensor itself."""
    if tensor.dim() == 1:  # most are
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,))
