"""``UnreducedGrads``: what waits in a ``GradientBuffer`` under ``no_sync`` shows in ``.grad``.

So ``zero_grad()`` drops it, as under DistributedDataParallel, and a step or a norm is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatshard.engine.grad_buffer import GradientBuffer
from flatshard.engine.param_views import ParamViews
from flatshard.plan.layout import view_of
from flatshard.plan.module_tree import unit_text
from flatshard.precision.casts import set_grad
from flatshard.tensor.sharded_tensor import GRADIENT, FlatShardTensor, local_range
from flatshard.tensor.tensor_notes import UNREDUCED


class UnreducedGrads:
    """Shows the unreduced gradients of one flat parameter, between two backwards."""

    def __init__(self, params: ParamViews, grad_buffer: GradientBuffer) -> None:
        self._params, self._buffer = params, grad_buffer
        # Whether the user edited what is shown here, each rank its own. All ranks raise together,
        # when it would be reduced.
        self.was_edited = False
        # By index: what `.grad` holds, its version then, and whether it is nothing but that.
        self._shown: dict[int, tuple[Any, int, bool]] = {}

    def show(self) -> None:
        """After a backward: let ``.grad`` show that there is something to reduce."""
        params, buffer, waiting = self._params, self._buffer, self._buffer.accumulated
        if not waiting:
            return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            # Slots hold full gradients; of what was reduced within a group this rank has a part.
            in_parts = buffer.intra_reduced is not None
            part = buffer.shard_part().to(params.sharded[0].device) if in_parts else None
            for index in waiting:
                param = params.sharded[index]
                is_view = param.grad is None
                if is_view:
                    set_grad(param, self._view(index, part))
                # An earlier, reduced gradient is marked too: a step would lack what waits here.
                grad: Any = param.grad
                UNREDUCED[grad] = params.link.unit_name
                self._shown[index] = grad, local_range(grad)._version, is_view

    def _view(self, index: int, part: Tensor | None) -> Tensor:
        params, param = self._params, self._params.sharded[index]
        if part is not None:
            return shown_in(params, index, part)
        slot, spec = self._buffer.slots[index], params.specs[index]
        if params.is_whole:
            return slot.to(param.device, param.dtype).view(slot.shape)
        # Cut first: a view of a full cast would keep all of that alive.
        part = spec.slice(slot).to(param.device, param.dtype)
        return FlatShardTensor(part, spec).with_role(GRADIENT)

    def is_shown(self) -> bool:
        """Whether any ``.grad`` lacks, or is nothing but, local gradients that are not reduced."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(
                self._params.sharded[index].grad is shown
                for index, (shown, *_) in self._shown.items()
            )

    def take_back(self, index: int, grad: Tensor) -> Tensor:
        """What autograd left in ``.grad``, as a gradient that nothing else shows."""
        if index not in self._shown or self._shown[index][0] is not grad:
            return grad
        # Autograd has added to it before this backward could take anything back. Where it was a
        # view, that changed the buffer, too: all of it is in the new gradient.
        _, _, is_view = self._shown.pop(index)
        if is_view:
            self._buffer.forget(index)
        return grad.clone()

    def take_all_back(self) -> None:
        """Before the next backward: forget what the user dropped, and note what was edited."""
        params = self._params
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for index, (shown, version, is_view) in self._shown.items():
                UNREDUCED.pop(shown, None)  # as an ordinary gradient, a step must accept it
                param, local = params.sharded[index], local_range(shown)
                is_dropped = param.grad is None
                is_replaced = not is_dropped and param.grad is not shown
                if is_replaced or (not is_dropped and local._version != version):
                    # Written zeros are zero_grad(set_to_none=False). Anything else reached only
                    # this rank's part, and was not meant for all.
                    is_dropped = not is_replaced and not local.any()
                    self.was_edited |= not is_dropped
                if is_view and not is_replaced:
                    param.grad = None
                if is_dropped:
                    self._buffer.forget(index)
        self._shown.clear()
        self.was_edited &= bool(self._buffer.accumulated)


def shown_in(params: ParamViews, index: int, flat: Tensor) -> Tensor:
    """What sharded parameter ``index`` shows of ``flat``, ``(shard_numel,)``: a view."""
    if params.is_whole:
        return view_of(flat, params.layout.spans[index])
    return FlatShardTensor.in_flat(flat, params.specs[index]).with_role(GRADIENT)


def edited(unit_name: str) -> RuntimeError:
    """The error for accumulated gradients that were edited."""
    return RuntimeError(
        f"{unit_text(unit_name)}: gradients accumulated under no_sync were edited before they were "
        "reduced. Edit them after a backward outside of no_sync."
    )
