"""``GradPublish``: puts the reduced gradients of one flat parameter into ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.engine.grad_buffer import GradientBuffer, Sync
from flatshard.memory.buffers import BufferCache, storage_bytes
from flatshard.memory.offload_target import beside, copy_stream
from flatshard.precision import get_grad, set_grad
from flatshard.tensor.flat_parameter import FlatParamPlan, OriginalParam
from flatshard.tensor.sharded_tensor import (
    ASSIGNED,
    GRADIENT,
    UNREDUCED,
    FlatShardTensor,
    local_range,
)
from flatshard.units.module_tree import unit_text


class UnreducedGrads:
    """Shows accumulated gradients (``no_sync``) in ``.grad`` between two backwards.

    The accumulated gradients are in a ``GradientBuffer``, and are not reduced. While ``.grad``
    shows accumulated gradients, ``zero_grad()`` drops the gradients from the buffer, too, as under
    DistributedDataParallel. An optimizer step, or a norm of the gradients, raises an error.
    """

    def __init__(self, params: Sequence[OriginalParam], grad_buffer: GradientBuffer) -> None:
        self._params, self._buffer = params, grad_buffer
        # Whether the user edited an accumulated gradient on this rank. All ranks raise together at
        # the end of the next backward that reduces gradients.
        self.was_edited = False
        # For each original parameter whose `.grad` shows accumulated gradients: the tensor in
        # `.grad`, the tensor's version, and whether `show` made the tensor. False: the tensor is a
        # reduced gradient of an earlier step, which `show` has left in `.grad`.
        self.shown: dict[OriginalParam, tuple[Any, int, bool]] = {}

    def show(self) -> None:
        """Put accumulated gradients into ``.grad`` after a backward."""
        buffer, waiting = self._buffer, self._buffer.accumulated
        if not waiting:
            return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            # Usually `.grad` shows this rank's gradients of the full parameters, which are in
            # `slots`. But gradients that were already averaged within the node are in
            # `intra_reduced`, which covers only a part of the flat parameter. Then `.grad` shows
            # only this rank's shard of the gradients.
            in_parts = buffer.intra_reduced is not None
            device = self._params[0].sharded.device
            chunk = buffer.accumulated_shard().to(device) if in_parts else None
            for original in (self._params[index] for index in waiting):
                param = original.sharded
                is_view = param.grad is None
                if is_view:
                    set_grad(param, self._view(original, chunk))
                # Mark the gradient as unreduced, so that an optimizer step raises an error. Also
                # mark a reduced gradient of an earlier step: if an optimizer step used only this
                # gradient, the accumulated gradients would be missing in the step.
                grad: Any = param.grad
                UNREDUCED[grad] = original.spec.unit
                self.shown[original] = grad, local_range(grad)._version, is_view

    def _view(self, param: OriginalParam, chunk: Tensor | None) -> Tensor:
        if chunk is not None:
            return param.of_chunk(chunk)
        slot, sharded = self._buffer.slots[param.index], param.sharded
        if not param.is_sharded:
            return slot.to(sharded.device, sharded.dtype).view(slot.shape)
        # Slice before the cast. A slice after the cast would keep a full gradient in memory.
        part = param.spec.slice(slot).to(sharded.device, sharded.dtype)
        return FlatShardTensor(part, param.spec, role=GRADIENT)

    def is_shown(self) -> bool:
        """Whether any ``.grad`` now shows accumulated gradients.

        False if every ``.grad`` has been replaced or removed since ``show``.
        """
        return any(param.sharded.grad is shown for param, (shown, *_) in self.shown.items())

    def take_back(self, param: OriginalParam, grad: Tensor) -> Tensor:
        """Take ``grad``, which autograd left in ``.grad``; return a tensor for the buffer.

        Between backwards, ``.grad`` may show the gradient that the buffer has accumulated. If
        autograd added the new gradient to the shown gradient in place, the returned tensor already
        contains the accumulated gradient. Then this method drops the buffer's accumulated gradient,
        and returns a copy, which the buffer can keep because no other code can reach the copy.
        """
        if param not in self.shown or self.shown[param][0] is not grad:
            return grad
        # Autograd has added the new gradient to the shown gradient in place, before this backward
        # could remove the shown gradient. So the buffer must not add the accumulated gradient
        # again.
        _, _, is_view = self.shown.pop(param)
        if is_view:
            self._buffer.forget(param.index)
        return grad.clone()

    def take_all_back(self) -> None:
        """Remove the accumulated gradients that ``show`` put into ``.grad``, before a backward.

        If the user has removed or zeroed a gradient in ``.grad``, drop the gradient from the
        buffer, too. If the user has changed ``.grad`` in another way, set ``was_edited``.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for original, (shown, version, is_view) in self.shown.items():
                # The user may have kept a reference to the tensor. Outside of `.grad`, the tensor
                # is an ordinary tensor, so operations on the tensor no longer raise an error.
                UNREDUCED.pop(shown, None)
                param, local = original.sharded, local_range(shown)
                is_dropped = param.grad is None
                is_replaced = not is_dropped and param.grad is not shown
                if is_replaced or (not is_dropped and local._version != version):
                    # If all values are zero, the edit was zero_grad(set_to_none=False), so drop the
                    # gradient. Any other edit is an error, because the edit changed only this
                    # rank's contribution to the average, and the user expects to edit the average.
                    is_dropped = not is_replaced and not local.any()
                    self.was_edited |= not is_dropped
                if is_view and not is_replaced:
                    param.grad = None
                if is_dropped:
                    self._buffer.forget(original.index)
            for original in [one for one in self._params if one.sharded in ASSIGNED]:
                del ASSIGNED[original.sharded]
                grad = original.sharded.grad
                if grad is not None and not isinstance(grad, FlatShardTensor):
                    # As DistributedDataParallel does, average the assigned tensor together with the
                    # gradients of the backward.
                    self._buffer.receive(original.index, grad.detach().clone())
                    self._buffer.arrived.clear()  # a gradient of this backward may follow
                    original.sharded.grad = None
        self.shown.clear()
        self.was_edited &= bool(self._buffer.accumulated)


def edited(unit_name: str) -> RuntimeError:
    """Make the error to raise if the user edited accumulated gradients of a unit."""
    return RuntimeError(
        f"{unit_text(unit_name)}: gradients accumulated under no_sync were edited before they were "
        "reduced. Edit .grad only after a backward outside of no_sync."
    )


class GradPublish:
    """Collects the reduced gradients of one flat parameter, and sets ``.grad`` at the end."""

    def __init__(
        self, params: Sequence[OriginalParam], buffer: GradientBuffer, plan: FlatParamPlan
    ) -> None:
        self.unreduced = UnreducedGrads(params, buffer)
        self._params, self._buffer, self._plan = params, buffer, plan
        # `_target`: where `.grad` lives. For targets other than the device, `_cache` reuses memory
        # in the target, and `_copies` has the events of the copies under way.
        target = self._target = plan.targets.gradient
        self._cache = BufferCache(new=target.new)
        self._copies: list[torch.cuda.Event] = []
        self._reduced: Tensor | None = None
        # For each aliased parameter (the shard is the unsharded buffer), the `.grad` from before
        # the running backward; see `hold_earlier`.
        self._earlier_grads: dict[OriginalParam, Tensor] = {}
        # Factor by which published gradients are multiplied. Differs from 1 only if some ranks
        # compute no gradients (`join`), because the reduction divides by the number of all ranks.
        self.scale = 1.0

    @property
    def nbytes(self) -> int:
        # Count only device memory: gradients in another target (host, disk) count as zero.
        return storage_bytes([self._reduced]) if self._target.is_device else 0

    # ------------------------------------------------------------ before a backward

    def hold_earlier(self) -> None:
        """Set aside users' hooks, and reduced gradients of earlier backwards, until backward ends.

        Called when a backward begins, only if the shard is the unsharded buffer (``is_aliased``).
        Then modules compute with the sharded parameters, and autograd would add unreduced gradients
        to the ``.grad`` of these parameters. Autograd never writes to the ``.grad`` of other
        sharded parameters.
        """
        for param in self._params:
            param.hold_hooks()  # until `FlatParamHandle.give_hooks_back`
            if param.sharded.grad is not None:
                self._earlier_grads[param], param.sharded.grad = param.sharded.grad, None

    @property
    def holds_gradients(self) -> bool:
        """Whether a backward that fails would lose accumulated gradients."""
        return self._buffer.waits_for(Sync.ALL)

    # ------------------------------------------------------------ reduced gradients

    def add(self, reduced: Tensor) -> None:
        """Add ``reduced``, ``(shard_numel,)``, to the gradients that this backward will publish."""
        with torch.no_grad():
            part, total = reduced.to(self._buffer.dtypes.grad_dtype), self._reduced
            if not self._target.is_device:
                part = self._copied_to_target(part)
            if total is None:
                self._reduced = part
            else:  # a second reduction in one backward: some gradients arrived late
                self._finish_copies()
                total.add_(part)
                self._target.page_out(total, part)

    def _copied_to_target(self, reduced: Tensor) -> Tensor:
        """Start a copy of ``reduced`` to the offload target (host memory or disk).

        Returns the copy, which is complete only after ``_finish_copies``.
        """
        place = self._cache.take(reduced.numel(), reduced.dtype, torch.device("cpu"))
        self._target.page_in(place)
        if reduced.device.type == "cpu":
            place.copy_(reduced)
        else:
            with beside(reduced.device):
                place.copy_(reduced, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self._copies.append(event)
            # The caller drops `reduced` while the copy still reads the memory, so `record_stream`
            # delays the reuse of the memory until the copy is over. Keeping a reference until
            # `_finish_copies` would be safe, too, but would keep all gradients of the model on the
            # device until the end of backward.
            reduced.record_stream(copy_stream(reduced.device))
        self._target.page_out(place)
        return place

    def _finish_copies(self) -> None:
        """Wait, on the host, until all copies are complete: optimizers read ``.grad`` next."""
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
        self._buffer.used_by_rank.clear()
        reduced, self._reduced = self._reduced, None
        if self._earlier_grads:
            self._show_earlier()
        if reduced is None:
            return
        if self.scale != 1.0:
            reduced.mul_(self.scale)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for param in self._params:
                if used[param.index]:
                    self._add_grad(param.sharded, param.of_chunk(reduced))

    def show_unreduced(self) -> None:
        """Show unreduced gradients in ``.grad``, after a backward that did not publish averages."""
        self._show_earlier()
        self.unreduced.show()

    def _show_earlier(self) -> None:
        """Put the gradients that ``hold_earlier`` removed back into ``.grad``."""
        earlier, self._earlier_grads = self._earlier_grads, {}
        with torch.no_grad():
            for param, grad in earlier.items():
                self._add_grad(param.sharded, grad)

    def _add_grad(self, param: nn.Parameter, grad: Tensor) -> None:
        """Set ``.grad`` to ``grad`` plus the present ``.grad``.

        The present ``.grad`` comes from an earlier backward or from the user.
        """
        before = get_grad(param)
        if before is not None:
            if isinstance(before, FlatShardTensor) and not before.is_alike:
                raise RuntimeError(
                    f"{before.spec.where()}: .grad was set to a sharded tensor ({before.text}) "
                    "before backward, and may hold another gradient on each rank. Expected None, "
                    "an averaged gradient, or a full tensor of this rank, which backward averages."
                )
            grad.add_(before)
            self._target.page_out(local_range(grad), local_range(before))
        set_grad(param, grad)

    def drop(self) -> None:
        """After a backward that failed, drop all gradients that are not published in ``.grad``."""
        self._buffer.drop()
        self._reduced = None
        self.unreduced.was_edited = False

    def leave_failed_backward(self) -> None:
        """Restore the ``.grad`` from before the failed backward."""
        for param in self._params:
            param.full.grad = None  # the failed backward may have left this rank's own gradient
        self._show_earlier()

    # ------------------------------------------------------------ conversion

    def take_off(self) -> list[Tensor | None]:
        """Remove and return every ``.grad``, before the parameters are converted.

        Raises:
            RuntimeError: gradients accumulated under ``no_sync`` were edited.
        """
        self.unreduced.take_all_back()
        if self.unreduced.was_edited:
            raise edited(self._plan.unit_name)
        grads = [param.sharded.grad for param in self._params]
        for param in self._params:
            param.sharded.grad = None
        return grads

    def put_back(self, grads: list[Tensor | None], fn: Callable[[Tensor], Tensor]) -> None:
        """Put ``grads``, the result of ``take_off``, back into ``.grad``, converted with ``fn``."""
        for param in self._params:
            grad = grads[param.index]
            if isinstance(grad, FlatShardTensor):
                local, origin = fn(grad.local), grad.origin
                twin = FlatShardTensor(local, param.spec, role=grad.role, origin=origin)
                set_grad(param.sharded, twin)
            elif grad is not None:
                set_grad(param.sharded, fn(grad))

    def replace_buffer(self, grad_buffer: GradientBuffer) -> None:
        """Use ``grad_buffer`` from now on, and move accumulated gradients there."""
        grad_buffer.take_over(self._buffer)
        self._buffer, self.unreduced = grad_buffer, UnreducedGrads(self._params, grad_buffer)
        self.unreduced.show()
