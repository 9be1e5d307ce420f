"""``Gradients``: the gradients of one flat parameter, from autograd to ``.grad``.

[Note: a gradient's way]
1.  ``pending`` has the gradients that autograd has just computed. When every parameter of the flat
    parameter has a gradient, ``receive_pending`` adds the gradients to the accumulated gradients
    (``slots``): the sums of this rank's gradients since the last reduction.
2.  ``start_reduction`` joins the accumulated gradients in one tensor, and starts the reduction.
3.  ``finish_reduction`` keeps the reduced gradients. At the end of backward, ``publish`` puts the
    reduced gradients into ``.grad``. If the reduction covered only the intra group, such as the
    ranks of one node (``GradSync.SHARD_ONLY``), the result waits for a reduction over all ranks.

[Note: unreduced gradients]
After a backward under ``no_sync``, ``show`` puts the unreduced, accumulated gradients into
``.grad``, so that ``zero_grad()`` drops them, as under DistributedDataParallel. An optimizer step,
or a norm of the gradients, raises an error.
"""

import contextlib
import enum
import sys
import weakref
from collections.abc import Sequence
from operator import attrgetter
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from flatshard.comm.work import CollectiveError
from flatshard.engine.grad_reduce import GradReduce, ReducePlan, zero
from flatshard.memory import BufferCache, on_side_stream, side_stream, storage_bytes
from flatshard.precision import get_grad, put_grad, set_grad
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.tensor.sharded_tensor import (
    ASSIGNED,
    UNREDUCED_UNITS,
    FlatShardTensor,
    local_range,
    version_of,
)
from flatshard.units.layout import view_of
from flatshard.units.module_tree import unit_text

# Gradients smaller than this are copied together, by one kernel after the flat parameter's last
# gradient is computed: starting one kernel per small gradient takes longer than the copy.
_SMALL_BYTES = 1 << 20

_LAYOUT = attrgetter("layout")


class GradSync(enum.Enum):
    """How a backward reduces the gradients of a unit."""

    # Gradients are kept, unsharded and unreduced. Later backwards add their gradients.
    ACCUMULATE = "ACCUMULATE"
    # Gradients are reduced only within the intra group (the ranks of one node, for example). A
    # later backward reduces them across groups.
    SHARD_ONLY = "SHARD_ONLY"
    # Gradients are reduced over all ranks, and put into ``.grad``.
    FULL = "FULL"


class Gradients:
    """The gradients of one flat parameter; see [Note: a gradient's way]."""

    def __init__(self, plan: ReducePlan, params: Sequence[OriginalParam]) -> None:
        """Start without gradients. ``params``: the flat parameter's original parameters."""
        self._params, self._layout = params, plan.flat.layout
        # Whether the flat parameter is a single parameter without padding, such as an embedding.
        self._is_single = self._layout.padded_numel == self._layout.spans[0].numel
        self._is_contiguous = all(span.is_contiguous for span in self._layout.spans)
        # Accumulated gradients, keyed by the index of the original parameter. A gradient whose
        # index is in `_separate` has separate memory. All other gradients are views of `_buffer`.
        self.slots: dict[int, Tensor] = {}
        self._separate: set[int] = set()
        self._buffer: Tensor | None = None
        # Gradients that wait for `receive_pending`, keyed by the index of the original parameter.
        self.pending: dict[int, Tensor] = {}
        # Indices of the parameters whose gradients were received in this backward.
        self.arrived: set[int] = set()
        # Indices of the parameters whose gradients this rank has computed since the last `publish`.
        # After a `GradSync.SHARD_ONLY` reduction, also the parameters for which other ranks of the
        # intra group had gradients, because `intra_reduced` contains these gradients.
        self.used_by_rank: set[int] = set()
        # Sum of the `GradSync.SHARD_ONLY` reductions, `(padded_numel / intra_group.size,)`.
        self.intra_reduced: Tensor | None = None
        # The latest reduction. None: no reduction was started yet.
        self.reduction: GradReduce | None = None
        # Whether the user edited an accumulated gradient in `.grad` on this rank. Then all ranks
        # raise at the end of the next backward that reduces.
        self.was_edited = False
        # The keys: parameters with unreduced gradients, for which `show` has set or marked `.grad`.
        # The values: the tensor in `.grad`, its version, and whether `show` made the tensor.
        # If `show` did not make the tensor, it is a reduced gradient of an earlier step, and the
        # unreduced gradients are only in `slots`.
        self.shown: dict[OriginalParam, tuple[Any, int, bool]] = {}
        # `_target`: whether `.grad` is in device memory, host memory or on disk. For host and disk,
        # `_cache` has memory to reuse, and `_copies` has an event for each unfinished copy.
        target = self._target = plan.flat.targets.gradient
        self._cache = BufferCache(new=target.new)
        self._copies: list[torch.cuda.Event] = []
        # Reduced gradients that `publish` will put into `.grad`.
        self._reduced: Tensor | None = None
        # The `.grad` of each parameter from before the running backward; see `set_aside_earlier`.
        self._earlier_grads: dict[OriginalParam, Tensor] = {}
        # Factor for published gradients. If some ranks have no more input (`join`), the factor is
        # not 1, because the reduction divides by the number of all ranks.
        self.scale = 1.0
        self.use(plan)

    def use(self, plan: ReducePlan) -> None:
        """Reduce by ``plan`` from now on. Accumulated gradients are kept, and moved or cast."""
        slots, intra_reduced, self.intra_reduced = self.slots, self.intra_reduced, None
        self._empty()
        self.plan, self.dtypes = plan, plan.dtypes
        # Indices of parameters with large gradients. To save memory, a large gradient is copied
        # into `_buffer` as soon as autograd has computed it, and then freed.
        min_numel = _SMALL_BYTES / self.dtypes.reduce_dtype.itemsize
        spans = enumerate(self._layout.spans)
        self.large = {index for index, span in spans if span.numel >= min_numel}
        for param in self._params:
            param.kept_grad = None  # the object has the dtype and device of the previous plan
        with torch.no_grad():
            for index, slot in slots.items():
                self.receive(index, slot.to(plan.device))
            self.arrived.clear()  # undo the marks of `receive`, because no backward is running
            if intra_reduced is not None:
                self.add_intra_reduced(intra_reduced.to(plan.device))
        self.show()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory for gradients that are not in ``.grad``."""
        # Reduced gradients that are offloaded (to host or disk) do not count.
        reduced = self._reduced if self._target.is_device else None
        gradients = *self.slots.values(), *self.pending.values()
        under_way = 0 if self.reduction is None else self.reduction.nbytes
        return under_way + storage_bytes([self._buffer, self.intra_reduced, reduced, *gradients])

    @property
    def accumulated(self) -> set[int]:
        """Indices of parameters whose gradients are not reduced over all ranks yet."""
        reduced = set() if self.intra_reduced is None else self.used_by_rank
        return reduced | self.slots.keys()

    def waits_for(self, sync: GradSync) -> bool:
        """Whether a reduction with ``sync`` would have any gradients to reduce."""
        has_intra = sync is GradSync.FULL and self.intra_reduced is not None
        return sync is not GradSync.ACCUMULATE and (bool(self.slots) or has_intra)

    # ------------------------------------------------------------ before a backward

    def set_aside_earlier(self) -> None:
        """Remove users' hooks and the present ``.grad`` until the end of backward.

        Called when a backward begins, if the shard serves as the unsharded buffer (NO_SHARD). Then
        modules compute with the user's own parameters. So autograd would call the hooks with
        unreduced gradients, and add unreduced gradients to the reduced gradients in ``.grad``.
        """
        for param in self._params:
            param.hold_hooks()  # the hooks return in `FlatParamHandle.give_hooks_back`
            if param.sharded.grad is not None:
                self._earlier_grads[param], param.sharded.grad = param.sharded.grad, None

    def take_all_back(self) -> None:
        """Remove the accumulated gradients that ``show`` put into ``.grad``, before a backward.

        If the user has removed or zeroed a ``.grad``, drop the parameter's accumulated gradient. If
        the user has changed the ``.grad`` in another way, set ``was_edited``.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            while self.shown:
                original, (shown, version, is_view) = self.shown.popitem()
                vars(shown).pop("unreduced_unit", None)
                param, present = original.sharded, get_grad(original.sharded)
                is_dropped, is_zeroed = present is None, False
                is_replaced = present is not shown and not is_dropped
                if is_replaced or (not is_dropped and version_of(shown) != version):
                    # The user has edited the unreduced gradient. If all values are zero now, this
                    # was zero_grad(set_to_none=False). Any other edit is an error: the average is
                    # computed later, so the edit changed only this rank's contribution.
                    is_zeroed = not is_replaced and not local_range(shown).any()
                    self.was_edited |= not is_zeroed
                # Reuse the tensor object for the average, even if the program refers to it.
                is_reused = is_view and not (is_replaced or is_dropped or is_zeroed)
                if is_reused and not original.is_sharded:
                    original.taken_grad = weakref.ref(shown)
                elif is_reused and shown is original.kept_grad:
                    put_grad(param, None)
                    shown.__dict__ = {}
                elif is_view and original.is_sharded:
                    vars(shown)["unreduced_unit"] = original.spec.unit  # the program may keep it
                del shown, present  # lets `FlatShardTensor.grad` reuse the tensor object
                if is_view and not is_replaced:
                    param.grad = None
                if is_dropped or is_zeroed:
                    self.forget(original.index)
                if is_zeroed and is_view:  # keep zeros, unless a backward computes the gradient
                    zeros = torch.zeros_like(param)
                    set_grad(param, zeros)
                    original.published = NoneType if original.is_sharded else weakref.ref(zeros)
            for original in [one for one in self._params if ASSIGNED and one.spec in ASSIGNED]:
                del ASSIGNED[original.spec]
                if not isinstance(original.sharded.grad, FlatShardTensor):
                    self._take_assigned(original)
        self.was_edited &= bool(self.accumulated)

    def take_assigned_of_whole(self) -> None:
        """Take gradients that the program assigned to ``.grad``, to average them in this backward.

        Called when a backward begins, if every rank holds the whole parameters. Then users see
        plain parameters, which do not record assignments. So every ``.grad`` counts as assigned,
        except a ``.grad`` from ``publish``.
        """
        for param in self._params:
            if param.sharded.grad is not param.published():
                self._take_assigned(param)

    def _take_assigned(self, param: OriginalParam) -> None:
        grad = param.sharded.grad
        if grad is not None:
            _check_assigned(param, grad)
            # As in DistributedDataParallel, the assigned gradient is averaged together with the
            # gradients of this backward.
            self.receive(param.index, grad.detach().to(self.plan.device, copy=True))
            self.arrived.clear()  # this gradient was assigned, and did not arrive in a backward
            param.sharded.grad = None
            param.taken_grad, param.kept_grad = weakref.ref(grad), None

    # ------------------------------------------------------------ accumulate

    def receive_pending(self, *, more_to_come: bool) -> None:
        """Move the gradients in ``pending`` to ``slots``.

        ``more_to_come``: whether this backward reduces nothing, so that later backwards will add to
        the gradients.
        """
        pending, self.pending = self.pending, {}
        indices = pending.keys()
        is_dense = {*map(_LAYOUT, pending.values())} == {torch.strided}
        is_usual = is_dense and not (self._is_single or torch.is_grad_enabled())
        # The usual case: autograd has given each gradient the strides of its parameter.
        if is_usual and self.slots.keys().isdisjoint(indices):
            self.slots.update(pending)
            for marks in (self._separate, self.arrived, self.used_by_rank):
                marks.update(indices)
            # If later backwards add to a gradient, do not round it to a narrower reduce dtype yet.
            if not more_to_come or self.dtypes.accum_dtype is self.dtypes.reduce_dtype:
                for index in self.large.intersection(indices):
                    buffer = self._allocate() if self._buffer is None else self._buffer
                    place = view_of(buffer, self._layout.spans[index])
                    self.slots[index] = place.copy_(pending[index])
                    self._separate.discard(index)
            return
        # The usual case of a later micro-batch: add all gradients by one call.
        held = [self.slots[i] for i in indices if i in self.slots] if is_usual else []
        if len(held) == len(indices) and {s.dtype for s in held} == {self.dtypes.accum_dtype}:
            torch._foreach_add_(held, [*pending.values()])
            torch.autograd.graph.increment_version(held)  # under a dispatch mode, foreach does not
            self.arrived.update(indices)
            self.used_by_rank.update(indices)
            return
        for index, grad in pending.items():
            self.receive(index, grad)

    def receive(self, index: int, grad: Tensor) -> None:
        """Store the gradient of parameter ``index``, or add it to the stored gradient.

        Args:
            index: index of the original parameter.
            grad: the gradient, in the parameter's shape and any dtype, on the parameter's device.
                The caller must not use the tensor afterwards: this object may keep and change it.
        """
        if grad.requires_grad:
            raise RuntimeError(
                f"parameter {self._params[index].name!r}: backward(create_graph=True) computes "
                "differentiable gradients, but a gradient of a sharded parameter cannot be "
                "differentiable. Use torch.autograd.grad for the inner gradient and backward() for "
                "the outer gradient."
            )
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        self.arrived.add(index)
        self.used_by_rank.add(index)
        slot = self.slots.get(index)
        if slot is not None:
            if slot.dtype is not self.dtypes.accum_dtype:
                # Add in the accumulation dtype: in the reduce dtype, which may be narrower, the sum
                # would lose small gradients.
                slot = self.slots[index] = slot.to(self.dtypes.accum_dtype)
                self._separate.add(index)
            slot.add_(grad)
            return
        span = self._layout.spans[index]
        # `take` reads the gradient's memory in order. So copy a gradient with other strides (an
        # expanded tensor, for example), and a gradient whose memory has other values than the
        # tensor (a lazily conjugated or negated tensor).
        fits = grad.stride() == span.strides and not (grad.is_conj() or grad.is_neg())
        if not fits:
            grad = grad.new_empty_strided(span.shape, span.strides).copy_(grad)
        # Keep the tensor without a copy. This is safe, because `Backward.receive` has emptied
        # `.grad`, so autograd does not add to the tensor. `take` casts later.
        self.slots[index] = grad
        self._separate.add(index)

    def _allocate(self) -> Tensor:
        buffer = self._buffer = torch.empty(
            self._layout.padded_numel, dtype=self.dtypes.reduce_dtype, device=self.plan.device
        )
        # Padding is reduced and passed to optimizers like gradients, so it must be zero.
        zero([buffer[start:end] for _, start, end in self._layout.gaps])
        return buffer

    def add_intra_reduced(self, part: Tensor) -> None:
        """Add ``part``, the result of a reduction within the intra group.

        ``part`` has the shape ``(padded_numel / intra_group.size,)``.
        """
        part = part.to(self.dtypes.accum_dtype)
        total = self.intra_reduced
        self.intra_reduced = part if total is None else total.add_(part)

    def forget(self, index: int) -> None:
        """Drop the accumulated gradient of a parameter."""
        self.slots.pop(index, None)
        for marks in (self._separate, self.arrived, self.used_by_rank):
            marks.discard(index)
        if self.intra_reduced is not None:
            span, first = self._layout.spans[index], self.plan.intra_start
            # `intra_reduced` is a sum over ranks, from which this rank's gradient cannot be
            # removed. So zero the parameter's range.
            self.intra_reduced[max(span.start - first, 0) : max(span.end - first, 0)].zero_()
            if not self.used_by_rank:
                self.intra_reduced = None

    def accumulated_shard(self) -> Tensor:
        """Return a copy of this rank's shard of the accumulated gradients, in ``.grad``'s dtype."""
        part = torch.zeros(
            self._layout.shard_numel, dtype=self.dtypes.grad_dtype, device=self.plan.device
        )
        for index, slot in self.slots.items():
            spec = self._params[index].spec
            part[spec.range].copy_(spec.slice(slot))
        if self.intra_reduced is not None:
            first, _ = self._layout.shard_range(self.plan.flat.topology.index)
            first -= self.plan.intra_start
            part.add_(self.intra_reduced.narrow(0, first, self._layout.shard_numel))
        return part

    # ------------------------------------------------------------ reduce

    def start_reduction(self, sync: GradSync) -> GradReduce | None:
        """Start to average the gradients over the ranks.

        Returns the reduction, for ``finish_reduction``. None: the user's communication hook has
        already averaged the gradients. A gradient that this rank has not computed counts as zero.
        Collective: all ranks that train the unit.
        """
        assert self.reduction is None or self.reduction.is_finished, "an earlier reduction runs"
        full, earlier = self.take(), None
        if self.plan.hook is not None:
            assert sync is GradSync.FULL, "a communication hook reduces over all ranks"
            with torch.no_grad():
                self.add_reduced(self.plan.hook(full, self.plan.flat))
            return None
        is_intra_only = sync is not GradSync.FULL
        if not is_intra_only:
            earlier, self.intra_reduced = self.intra_reduced, None
        self.reduction = GradReduce(self.plan, full, earlier, is_intra_only=is_intra_only)
        return self.reduction

    def finish_reduction(self, reduction: GradReduce) -> None:
        """Wait for a reduction, and keep the result until ``publish`` or a later reduction."""
        out = reduction.finish()
        if reduction.is_intra_only:
            self.add_intra_reduced(out)
        else:
            self.add_reduced(out)

    def take(self) -> Tensor:
        """Return all accumulated gradients as one tensor, and keep none.

        The tensor is ``(padded_numel,)``, in the reduce dtype; zero where there is no gradient.
        """
        spans, dtype = self._layout.spans, self.dtypes.reduce_dtype
        if self._is_single and self.slots:
            # The only gradient is the flat gradient. Do not copy the gradient, which may be large.
            whole = self.slots[0].as_strided((self._layout.padded_numel,), (1,))
            self._empty()
            return whole.to(dtype)
        # Join all gradients by one kernel, because one kernel per parameter would take longer. The
        # gradients are dense, so each has a 1-D view in memory order.
        flat = [self.slots[index] for index in sorted(self._separate)]
        if not self._is_contiguous:
            flat = [s.as_strided((s.numel(),), (1,)) for s in flat]
        if len(flat) == len(spans) and {one.dtype for one in flat} == {dtype}:  # the usual case
            # Insert the padding, from the end, because an insertion moves later pieces. The
            # zeros are not cached, because their size grows with the world size. The list must have
            # no empty tensors: otherwise torch copies each piece separately.
            for index, start, end in reversed(self._layout.gaps):
                flat.insert(index, flat[0].new_zeros(end - start))
            self._empty()
            return torch._C._nn.flatten_dense_tensors(flat)  # type: ignore[no-any-return]
        buffer = self._allocate() if self._buffer is None else self._buffer
        if len(self.slots) < len(spans):
            absent = (span for index, span in enumerate(spans) if index not in self.slots)
            zero([buffer[span.start : span.end] for span in absent])
        if flat:
            places = [buffer[spans[i].start : spans[i].end] for i in sorted(self._separate)]
            torch._foreach_copy_(places, [one.view(-1) for one in flat])
        self._empty()
        return buffer

    def _empty(self) -> None:
        self._buffer, self.slots, self._separate = None, {}, set()

    # ------------------------------------------------------------ accumulated gradients in `.grad`

    def show(self) -> None:
        """Put accumulated gradients into ``.grad``, after a backward that published no averages.

        See [Note: unreduced gradients]. Also undoes ``set_aside_earlier``.
        """
        self._restore_earlier()
        waiting = self.accumulated
        if not waiting:
            return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            # `.grad` gets this rank's range of the full gradient in `slots`. But if gradients were
            # reduced within the intra group (`intra_reduced`, 1-D), first add up this rank's shard
            # of all accumulated gradients. Then cut the range out of this shard.
            in_parts = self.intra_reduced is not None
            device = self._params[0].sharded.device
            chunk = self.accumulated_shard().to(device) if in_parts else None
            for original in (self._params[index] for index in waiting):
                grad: Any = get_grad(original.sharded)
                is_view = grad is None
                if is_view:
                    grad = (
                        original.of_unreduced(self.slots[original.index], self.dtypes.grad_dtype)
                        if chunk is None
                        else original.of_chunk(chunk)
                    )
                    set_grad(original.sharded, grad)
                # Mark the tensor in `.grad`, so that an optimizer step raises. Also mark a reduced
                # gradient of an earlier backward: a step with this gradient would leave out the
                # accumulated gradients.
                grad.unreduced_unit = original.spec.unit
                UNREDUCED_UNITS.add(original.spec.unit)
                self.shown[original] = grad, version_of(grad), is_view

    def is_shown(self) -> bool:
        """Whether any ``.grad`` still contains unreduced gradients, put there by ``show``.

        False if the user has removed or replaced every such ``.grad``.
        """
        return any(param.sharded.grad is shown for param, (shown, *_) in self.shown.items())

    def take_back(self, param: OriginalParam, grad: Tensor) -> Tensor:
        """Return the tensor for ``receive``, after autograd has put ``grad`` into ``.grad``.

        Usually, this tensor is ``grad``. But if ``.grad`` still had a tensor from ``show``,
        autograd has added the new gradient to that tensor in place. Then return a copy of the sum.
        """
        if param not in self.shown or self.shown[param][0] is not grad:
            return grad
        _, _, is_view = self.shown.pop(param)
        if is_view:  # `grad` contains the accumulated gradient
            self.forget(param.index)
        return grad.clone()

    # ------------------------------------------------------------ reduced gradients

    def add_reduced(self, reduced: Tensor) -> None:
        """Add ``reduced``, ``(shard_numel,)``, to the gradients that this backward will publish."""
        part, total = reduced.to(self.dtypes.grad_dtype), self._reduced
        if not self._target.is_device:
            part = self._copied_to_target(part)
        if total is None:
            self._reduced = part
        else:  # a second reduction in one backward: some gradients arrived late
            self._finish_copies()
            total.add_(part)
            self._target.page_out(total, part)

    def _copied_to_target(self, reduced: Tensor) -> Tensor:
        """Start a copy of ``reduced`` to the offload target, complete after ``_finish_copies``."""
        place = self._cache.take(reduced.numel(), reduced.dtype, torch.device("cpu"))
        self._target.page_in(place)
        if reduced.device.type == "cpu":
            place.copy_(reduced)
        else:
            with on_side_stream(reduced.device, "offload"):
                place.copy_(reduced, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self._copies.append(event)
            # The caller drops `reduced` while the copy still reads its memory. `record_stream`
            # delays the reuse of this memory until the copy is complete. (If this object kept
            # `reduced` until `_finish_copies`, all gradients of the model would stay on the device
            # until the end of backward.)
            reduced.record_stream(side_stream(reduced.device, "offload"))
        self._target.page_out(place)
        return place

    def _finish_copies(self) -> None:
        """Block the host until all copies to the offload target are complete."""
        for event in self._copies:
            event.synchronize()
        self._copies.clear()

    def publish(self, used: Sequence[bool]) -> None:
        """Add the reduced gradients to ``.grad``.

        Args:
            used: for each original parameter, whether any rank used the parameter. Unused
                parameters keep their ``.grad``.
        """
        if not self._target.is_device:
            self._finish_copies()
        self.used_by_rank.clear()
        reduced, self._reduced = self._reduced, None
        if self._earlier_grads:
            self._restore_earlier()
        if reduced is None:
            return
        if self.scale != 1.0:
            reduced.mul_(self.scale)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            put = put_grad if reduced.dtype is self._params[0].sharded.dtype else set_grad
            for param in self._params:
                if not used[param.index]:
                    continue
                sharded, kept, spec = param.sharded, param.kept_grad, param.spec
                if get_grad(sharded) is not None:
                    self._add_grad(param, param.of_chunk(reduced))
                    continue
                if kept is not None and not kept.__dict__:
                    # Reuse the Python object of the last step's gradient: creating an object of a
                    # Tensor subclass takes several times as long.
                    grad: Tensor = kept
                    kept.__dict__ = {"shard_flat": reduced, "shard_spec": spec, "is_kept": True}
                else:
                    grad = param.of_chunk(reduced)
                    if isinstance(grad, FlatShardTensor):
                        param.kept_grad, grad.is_kept = grad, True
                    else:
                        param.published = weakref.ref(grad)
                put(sharded, grad)

    def _restore_earlier(self) -> None:
        """Put the gradients that ``set_aside_earlier`` removed back into ``.grad``."""
        earlier, self._earlier_grads = self._earlier_grads, {}
        with torch.no_grad():
            for param, grad in earlier.items():
                self._add_grad(param, grad)

    def _add_grad(self, param: OriginalParam, grad: Tensor) -> None:
        """Add ``grad`` to the ``.grad`` of a parameter, or set ``.grad`` if there is none."""
        before = get_grad(param.sharded)
        if isinstance(before, FlatShardTensor) and not before.is_alike:
            raise RuntimeError(
                f"{before.spec.where()}: before backward, .grad was set to a sharded tensor "
                f"({before.text}) that may differ between ranks. Expected None, an average, or a "
                "full tensor of this rank, which backward averages. Call zero_grad(), or set "
                ".grad to full_tensor() of the sharded tensor."
            )
        if before is not None and before.dtype is grad.dtype:
            # Like autograd, add in place: the program may have another reference to the tensor.
            self._target.page_in(local_range(before))
            before.add_(grad)
            self._target.page_out(local_range(before), local_range(grad))
            return
        if before is not None:
            grad.add_(before)
            self._target.page_out(local_range(grad), local_range(before))
        param.kept_grad = None
        set_grad(param.sharded, grad)

    # ------------------------------------------------------------ after a backward that failed

    def drop(self) -> None:
        """After a backward that failed, drop all gradients that are not published in ``.grad``."""
        reduction, self.reduction = self.reduction, None
        if reduction is not None and not reduction.is_finished:
            # Wait, because a running collective may still write into the memory that is freed next.
            # Suppress an error of the wait, which would hide the error that ended the backward.
            with contextlib.suppress(CollectiveError):
                reduction.finish()
        self._empty()
        self.intra_reduced = self._reduced = None
        for marks in (self.pending, self.arrived, self.used_by_rank):
            marks.clear()
        self.was_edited = False

    def leave_failed_backward(self) -> None:
        """Restore the ``.grad`` from before the failed backward."""
        for param in self._params:
            param.full.grad = None  # perhaps the failed backward has left an unreduced gradient
        self._restore_earlier()


def _num_base_references(view: Tensor) -> int:
    """Return the number of Python's references to the tensor that ``view`` is a view of."""
    base: Tensor | None = view._base
    return 0 if base is None else sys.getrefcount(base)


# Number of references if only the view refers to the tensor. It depends on Python's version.
_NO_REFERENCE = _num_base_references(torch.empty(1)[:])


def _check_assigned(param: OriginalParam, grad: Tensor) -> None:
    """Raise RuntimeError if ``grad``, assigned to ``.grad``, is a view of a tensor in use.

    The program would expect the new gradient in this tensor, where autograd would have added it.
    """
    if _num_base_references(grad) > _NO_REFERENCE:
        raise RuntimeError(
            f"{param.where}: .grad was set to a view of a tensor that the program still has. "
            "Autograd would add the new gradient to this tensor, but flatshard puts the average "
            "into a new tensor, so this tensor would keep its old values. Call zero_grad() before "
            "backward and read p.grad after it, or set .grad to a clone() of the view."
        )


def edited(unit_name: str) -> RuntimeError:
    """Make the error to raise if the user edited accumulated gradients of a unit."""
    return RuntimeError(
        f"{unit_text(unit_name)}: gradients accumulated under no_sync were edited before they were "
        "reduced. Edit .grad once it is reduced. (If no .grad was edited, another rank's forward "
        "edited parameters in place: see that rank's error.)"
    )
