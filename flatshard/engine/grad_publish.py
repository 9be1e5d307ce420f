"""``GradPublish``: reduced gradients of one flat parameter in, ``.grad`` out."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from flatshard.engine.grad_buffer import GradientBuffer
from flatshard.engine.offload import DeviceToHost, OffloadTarget
from flatshard.engine.param_views import ParamViews
from flatshard.engine.unreduced_grads import UnreducedGrads, edited, shown_in
from flatshard.memory.buffers import storage_bytes
from flatshard.precision.casts import set_grad
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_range


class GradPublish:
    def __init__(
        self, params: ParamViews, grad_buffer: GradientBuffer, target: OffloadTarget
    ) -> None:
        self.unreduced = UnreducedGrads(params, grad_buffer)
        self._params, self._buffer = params, grad_buffer
        self._to_host = DeviceToHost(target)
        self._reduced: Tensor | None = None
        self.scale = 1.0  # of what is published, where it is no average over all ranks
        # By index: what was in `.grad` before this backward.
        self._earlier: list[Tensor | None] = []

    @property
    def nbytes(self) -> int:
        # Where they were reduced, until they are published.
        return storage_bytes([self._reduced]) if self._to_host.target.is_device else 0

    # ------------------------------------------------------------ before a backward

    def begin_backward(self) -> None:
        """Keep earlier gradients apart from those of the backward that begins."""
        params = self._params
        self._buffer.arrived.clear()
        self.unreduced.take_all_back()
        # Where other parameters are installed for each forward, that checks the places, and
        # autograd adds nothing to what the sharded ones hold.
        if not params.are_full:
            return
        params.check_places()
        self._hold_hooks()
        self._show_earlier()  # where a user's hook raised at the end of the last backward
        self._earlier = [param.grad for param in params.sharded]
        for param in params.sharded:
            param.grad = None

    @property
    def holds_gradients(self) -> bool:
        """Whether there are earlier gradients that a failing backward would take along."""
        return bool(self._buffer.accumulated) or any(g is not None for g in self._earlier)

    def _hold_hooks(self) -> None:
        # Users' post-accumulate hooks want the reduced gradient.
        for param, spec in zip(self._params.sharded, self._params.specs, strict=True):
            hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
            for key in [k for k, hook in hooks.items() if not hasattr(hook, "of_flatshard")]:
                spec.post_accumulate_hooks[key] = hooks.pop(key)

    # ------------------------------------------------------------ reduced gradients

    def add(self, reduced: Tensor) -> None:
        """Add to what this backward will publish: ``(shard_numel,)``, of any dtype."""
        with torch.no_grad():
            # A unit that is reduced twice in a backward, its late gradients apart, adds up here.
            out = self._to_host.copy(reduced.to(self._buffer.dtypes.grad_dtype))
            total = self._reduced
            self._reduced = out if total is None else self._to_host.add(total, out)

    def publish(self, used: list[bool]) -> None:
        """Put the reduced gradients of what any rank used into ``.grad``, adding to what is there.

        ``used`` is per original parameter; ``.grad`` of the others stays.
        """
        # On the host: users and the optimizer read `.grad` without a stream.
        self._to_host.wait()
        self._buffer.used_by_rank.clear()
        reduced, self._reduced = self._reduced, None
        self._show_earlier()
        if reduced is None:
            return
        if self.scale != 1.0:
            reduced.mul_(self.scale)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for index, (param, is_used) in enumerate(zip(self._params.sharded, used, strict=True)):
                if is_used:
                    self._add_grad(param, shown_in(self._params, index, reduced))

    def show_unreduced(self) -> None:
        self._show_earlier()
        self.unreduced.show()

    def _show_earlier(self) -> None:
        earlier, self._earlier = self._earlier, []
        if not earlier:
            return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for param, grad in zip(self._params.sharded, earlier, strict=True):
                if grad is not None:
                    self._add_grad(param, grad)

    def _add_grad(self, param: nn.Parameter, grad: Tensor) -> None:
        """Publish ``grad``; what was accumulated before, or by the user, stays in it."""
        if param.grad is not None:
            grad.add_(param.grad)
            self._to_host.target.page_out(local_range(grad), local_range(param.grad))
        set_grad(param, grad)

    def published(self, wanted: Collection[int]) -> list[Tensor]:
        """The gradients in ``.grad`` of parameters whose ids are ``wanted``."""
        with torch._C.DisableTorchFunctionSubclass():
            grads = [param.grad for param in self._params.sharded if id(param) in wanted]
        return [grad for grad in grads if grad is not None]

    def run_post_accumulate_hooks(self, used: list[bool]) -> None:
        params = self._params
        for param, spec, was_used in zip(params.sharded, params.specs, used, strict=True):
            if was_used:
                for hook in list(spec.post_accumulate_hooks.values()):
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
        self._buffer.drop()
        self._reduced = None
        for full in self._params.full:
            full.grad = None
        # Not put back: the user may have called zero_grad() since, and would get them again.
        self._earlier = []
        self.unreduced.was_edited = False
        self.give_hooks_back()

    # ------------------------------------------------------------ conversion

    def take_off(self) -> list[Tensor | None]:
        """Take every ``.grad`` off before the sharded parameters show other memory.

        Raises:
            RuntimeError: what was accumulated under ``no_sync`` was edited.
        """
        self.unreduced.take_all_back()
        if self.unreduced.was_edited:
            raise edited(self._params.link.unit_name)
        grads = [param.grad for param in self._params.sharded]
        for param in self._params.sharded:
            param.grad = None
        return grads

    def put_back(self, grads: list[Tensor | None], fn: Callable[[Tensor], Tensor]) -> None:
        """Undo ``take_off``, converting the gradients with ``fn``."""
        params = self._params
        for index, (param, grad) in enumerate(zip(params.sharded, grads, strict=True)):
            if isinstance(grad, FlatShardTensor):
                twin = FlatShardTensor(fn(grad.local), params.specs[index])
                set_grad(param, twin.with_role(grad.role))
            elif grad is not None:
                set_grad(param, fn(grad))

    def replace_buffer(self, grad_buffer: GradientBuffer) -> None:
        """Show another buffer from now on, which takes over what the present one accumulated."""
        grad_buffer.take_over(self._buffer)
        self._buffer, self.unreduced = grad_buffer, UnreducedGrads(self._params, grad_buffer)
        self.unreduced.show()
