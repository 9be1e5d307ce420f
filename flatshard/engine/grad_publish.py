"""``GradPublish``: reduced gradients of one flat parameter in, ``.grad`` out.

Also, what waits in the ``GradientBuffer`` under ``no_sync`` shows in ``.grad``, so that
``zero_grad()`` can drop it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.engine.grad_buffer import GradientBuffer
from flatshard.engine.offload import DeviceToHost, OffloadTarget
from flatshard.engine.param_views import ParamViews
from flatshard.memory.buffers import storage_bytes
from flatshard.precision.casts import set_grad
from flatshard.tensor.flat_parameter import FlatParameter, view_of
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_range


class GradPublish:
    """Shows the gradients of one flat parameter in the sharded parameters.

    Attributes:
        was_edited: whether the user edited gradients here that ``no_sync`` has accumulated, each
            rank its own. All ranks raise together, when these would be reduced.
    """

    def __init__(
        self, params: ParamViews, grad_buffer: GradientBuffer, target: OffloadTarget
    ) -> None:
        """Begin without gradients.

        Args:
            params: whose gradients.
            grad_buffer: accumulates them.
            target: where reduced gradients live.
        """
        self.was_edited = False
        self._params, self._buffer = params, grad_buffer
        self._to_host = DeviceToHost(target)
        self._reduced: Tensor | None = None
        # By index: what was in ``.grad`` before this backward.
        self._earlier: list[Tensor | None] = []
        # By index: what ``.grad`` shows of a gradient that is not reduced, its version then, and
        # whether ``.grad`` was empty before.
        self._unreduced: dict[int, tuple[Any, int, bool]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of reduced gradients, where they were reduced, that are not in ``.grad`` yet."""
        return storage_bytes([self._reduced]) if self._to_host.target.is_device else 0

    # ------------------------------------------------------------ before a backward

    def begin_backward(self) -> None:
        """Keep earlier gradients apart from those of the backward that begins.

        Only where the sharded parameters compute themselves: autograd would add to them.
        """
        params = self._params
        self._buffer.arrived.clear()
        self._collect_unreduced()
        if not params.are_full:
            return
        params.check_places()  # where others are installed for each forward, that checks
        self._hold_hooks()
        self._earlier = self._earlier or [None] * len(params.sharded)
        for index, param in enumerate(params.sharded):
            if param.grad is not None:
                self._earlier[index] = param.grad
                param.grad = None

    @property
    def holds_gradients(self) -> bool:
        """Whether there are earlier gradients that a failing backward would take along."""
        return bool(self._buffer.accumulated) or any(g is not None for g in self._earlier)

    def _hold_hooks(self) -> None:
        """Keep users' post-accumulate hooks back: they want the reduced gradient."""
        for param, spec in zip(self._params.sharded, self._params.specs, strict=True):
            hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
            for key in [k for k, hook in hooks.items() if not hasattr(hook, "of_flatshard")]:
                spec.post_accumulate_hooks[key] = hooks.pop(key)

    def take_back(self, index: int, grad: Tensor) -> Tensor:
        """What autograd left in ``.grad``, as a gradient that nothing else shows.

        Autograd may have added to what is shown of the buffer, before anything of this backward
        could take it back: then that is moved out.
        """
        if index not in self._unreduced or self._unreduced[index][0] is not grad:
            return grad
        del self._unreduced[index]
        self._buffer.forget(index)
        return grad.clone()

    # ------------------------------------------------------------ reduced gradients

    def add(self, reduced: Tensor) -> None:
        """Add to what this backward will publish: ``(shard_numel,)``, of any dtype."""
        with torch.no_grad():
            # A unit that is reduced twice in a backward, its late gradients apart, adds up here.
            out = self._to_host.copy(reduced.to(self._buffer.dtypes.grad_dtype))
            total = self._reduced
            self._reduced = out if total is None else self._to_host.add(total, out)

    def publish(self, used: list[bool]) -> None:
        """Put the reduced gradients into ``.grad``, adding to what is there.

        Args:
            used: per original parameter, whether any rank used it; ``.grad`` of the others stays.
        """
        params = self._params
        # On the host: users and the optimizer read `.grad` without a stream.
        self._to_host.wait()
        self._buffer.used_by_rank.clear()
        reduced, self._reduced = self._reduced, None
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if not params.use_orig_params:
                if reduced is not None and any(used):
                    self._add_grad(params.sharded[0], FlatShardTensor(reduced, params.flat_spec))
                return
            for index, param in enumerate(params.sharded):
                earlier = self._earlier[index] if self._earlier else None
                if reduced is not None and used[index]:
                    self._add_grad(param, self._view(reduced, index), earlier)
                elif earlier is not None:
                    set_grad(param, earlier)
        self._earlier = []

    def published(self, wanted: Collection[int]) -> list[Tensor]:
        """The gradients in ``.grad``, one per original parameter that has one.

        Args:
            wanted: ids of the parameters to look at.

        With ``use_orig_params=False`` they are views of the flat parameter's gradient.
        """
        params = self._params
        with torch._C.DisableTorchFunctionSubclass():
            grads = [param.grad for param in params.sharded if id(param) in wanted]
            if params.use_orig_params or not grads:
                return [grad for grad in grads if grad is not None]
            if grads[0] is None:
                return []
            local = local_range(grads[0])
            return [self._view(local, index) for index in range(len(params.specs))]

    def _view(self, reduced: Tensor, index: int) -> Tensor:
        """Original parameter ``index``'s range of something of the shard's shape."""
        params = self._params
        if params.is_whole:
            return view_of(reduced, params.layout.spans[index])
        return FlatShardTensor.in_flat(reduced, params.specs[index])

    def run_post_accumulate_hooks(self, used: list[bool]) -> None:
        """Call the users' hooks of every parameter that got a gradient."""
        params = self._params
        if not params.use_orig_params:
            flat = params.sharded[0]
            assert isinstance(flat, FlatParameter)
            hooked: list[tuple[nn.Parameter, Any]] = (
                [(flat, flat.post_accumulate_hooks)] if any(used) else []
            )
        else:
            hooked = [
                (param, spec.post_accumulate_hooks)
                for param, spec, was_used in zip(params.sharded, params.specs, used, strict=True)
                if was_used
            ]
        for param, hooks in hooked:
            for hook in list(hooks.values()):
                hook(param)

    def give_hooks_back(self) -> None:
        """Put the hooks that waited where users registered, and may remove, them."""
        if self._params.are_full:
            for param, spec in zip(self._params.sharded, self._params.specs, strict=True):
                if spec.post_accumulate_hooks:
                    hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
                    hooks.update(spec.post_accumulate_hooks)
                    spec.post_accumulate_hooks.clear()

    def drop(self) -> None:
        """Forget gradients that were not published, after a backward that failed."""
        self._buffer.drop()
        self._reduced = None
        for full in self._params.full:
            full.grad = None
        # Not put back: the user may have called zero_grad() since, and would get them again.
        self._earlier = []
        self.was_edited = False
        self.give_hooks_back()

    def _add_grad(self, param: nn.Parameter, grad: Tensor, earlier: Tensor | None = None) -> None:
        """Publish ``grad``; what was accumulated before, or by the user, stays in it."""
        for present in (param.grad, earlier):
            if present is not None:
                grad.add_(present)
                self._to_host.target.page_out(*(local_range(one) for one in (grad, present)))
        set_grad(param, grad)

    # ------------------------------------------------------------ gradients not yet reduced

    def show_unreduced(self) -> None:
        """After a backward under ``no_sync``: let ``.grad`` show that there is something.

        So ``zero_grad()`` can drop it, as under DistributedDataParallel, and a step that would
        use it is refused.
        """
        params, buffer = self._params, self._buffer
        waiting = buffer.accumulated
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for index, earlier in enumerate(self._earlier):
                if earlier is not None and index not in waiting:
                    params.sharded[index].grad, self._earlier[index] = earlier, None
            # Slots hold full gradients; of what was reduced within a group this rank has a part.
            in_parts = buffer.intra_reduced is not None or not params.use_orig_params
            part = buffer.shard_part() if in_parts and waiting else None
            for index in waiting if params.use_orig_params or not waiting else {0}:
                param = params.sharded[index]
                is_view = param.grad is None
                if is_view:
                    set_grad(param, self._unreduced_view(index, part))
                grad: Any = param.grad
                grad.unreduced_of = params.link.unit_name
                self._unreduced[index] = (grad, local_range(grad)._version, is_view)
        self.give_hooks_back()

    def shows_unreduced(self) -> bool:
        """Whether any ``.grad`` lacks, or is nothing but, local gradients that are not reduced."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(
                self._params.sharded[index].grad is shown
                for index, (shown, *_) in self._unreduced.items()
            )

    def _unreduced_view(self, index: int, part: Tensor | None) -> Tensor:
        params, device = self._params, self._params.sharded[0].device
        if part is not None:
            part = part.to(device)
            if not params.use_orig_params:
                return FlatShardTensor(part, params.flat_spec)
            return self._view(part, index)
        slot, dtype = self._buffer.slot(index), params.sharded[index].dtype
        if params.is_whole:
            return slot.to(device, dtype).view(slot.shape)
        # Cut first: a view of a full cast would keep all of that alive.
        part = params.specs[index].slice(slot).to(device, dtype)
        return FlatShardTensor(part, params.specs[index])

    def _collect_unreduced(self) -> None:
        """Take back what ``show_unreduced`` showed; what the user dropped is forgotten.

        Sets ``was_edited``: what reached only this rank's part was not meant for all.
        """
        params = self._params
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            everything = range(len(params.specs))
            for index in list(self._buffer.accumulated if params.use_orig_params else [0]):
                param = params.sharded[index]
                shown, version, is_view = self._unreduced.pop(index, (None, 0, False))
                if shown is None:
                    continue
                dropped = param.grad is None
                local = local_range(shown)
                replaced = not dropped and param.grad is not shown
                if replaced or (not dropped and local._version != version):
                    is_edited = replaced or bool(local.any())
                    self.was_edited |= is_edited
                    dropped = not is_edited
                # It may go on as an ordinary gradient, which a step must accept.
                del shown.unreduced_of
                if is_view and not replaced:
                    param.grad = None
                if dropped:
                    for one in [index] if params.use_orig_params else everything:
                        self._buffer.forget(one)
                        if self._earlier:
                            self._earlier[one] = None
            self.was_edited &= bool(self._buffer.accumulated)

    # ------------------------------------------------------------ conversion

    def take_off(self, fn: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        """Take every ``.grad`` off before the sharded parameters show other memory.

        Args:
            fn: what converts the shard, and gradients.

        Returns:
            For ``put_back``: what was in ``.grad``, not converted.

        Raises:
            RuntimeError: what was accumulated under ``no_sync`` was edited.
        """
        self._collect_unreduced()
        if self.was_edited:
            raise edited(self._params.link.unit_name)
        self._earlier = [None if g is None else fn(g) for g in self._earlier]
        grads = [param.grad for param in self._params.sharded]
        for param in self._params.sharded:
            param.grad = None
        return grads

    def put_back(self, grads: list[Tensor | None], fn: Callable[[Tensor], Tensor]) -> None:
        """Undo ``take_off``, converting the gradients with ``fn``."""
        params = self._params
        for index, (param, grad) in enumerate(zip(params.sharded, grads, strict=True)):
            if isinstance(grad, FlatShardTensor):
                spec = params.specs[index] if params.use_orig_params else params.flat_spec
                set_grad(param, FlatShardTensor(fn(grad.local), spec))
            elif grad is not None:
                set_grad(param, fn(grad))

    def replace_buffer(self, grad_buffer: GradientBuffer) -> None:
        """Show another buffer from now on, which takes over what the present one accumulated."""
        grad_buffer.take_over(self._buffer)
        self._buffer = grad_buffer
        self.show_unreduced()


def edited(unit_name: str) -> RuntimeError:
    """The error for accumulated gradients that were edited."""
    return RuntimeError(
        f"unit {unit_name!r}: gradients accumulated under no_sync were edited before they were "
        "reduced. Edit them after a backward outside of no_sync."
    )
