"""``UnreducedGrads``: what waits in a ``GradientBuffer`` under ``no_sync`` shows in ``.grad``.

So ``zero_grad()`` drops it, as under DistributedDataParallel, and a step or a norm is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatshard.engine.grad_buffer import GradientBuffer
from flatshard.plan.module_tree import unit_text
from flatshard.precision.casts import set_grad
from flatshard.tensor.original_param import OriginalParam
from flatshard.tensor.sharded_tensor import GRADIENT, FlatShardTensor, local_range
from flatshard.tensor.tensor_notes import UNREDUCED


class UnreducedGrads:
    """Shows the unreduced gradients of one flat parameter, between two backwards."""

    def __init__(self, params: Sequence[OriginalParam], grad_buffer: GradientBuffer) -> None:
        self._params, self._buffer = params, grad_buffer
        # Whether the user edited what is shown here, each rank its own. All ranks raise together,
        # when it would be reduced.
        self.was_edited = False
        # What `.grad` holds, its version then, and whether it is nothing but that.
        self._shown: dict[OriginalParam, tuple[Any, int, bool]] = {}

    def show(self) -> None:
        """After a backward: let ``.grad`` show that there is something to reduce."""
        buffer, waiting = self._buffer, self._buffer.accumulated
        if not waiting:
            return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            # Slots hold full gradients; of what was reduced within a group this rank has a part.
            in_parts = buffer.intra_reduced is not None
            device = self._params[0].sharded.device
            chunk = buffer.shard_part().to(device) if in_parts else None
            for original in (self._params[index] for index in waiting):
                param = original.sharded
                is_view = param.grad is None
                if is_view:
                    set_grad(param, self._view(original, chunk))
                # An earlier, reduced gradient is marked too: a step would lack what waits here.
                grad: Any = param.grad
                UNREDUCED[grad] = original.spec.unit
                self._shown[original] = grad, local_range(grad)._version, is_view

    def _view(self, param: OriginalParam, chunk: Tensor | None) -> Tensor:
        if chunk is not None:
            return param.of_chunk(chunk)
        slot, sharded = self._buffer.slots[param.index], param.sharded
        if not param.is_sharded:
            return slot.to(sharded.device, sharded.dtype).view(slot.shape)
        # Cut first: a view of a full cast would keep all of that alive.
        part = param.spec.slice(slot).to(sharded.device, sharded.dtype)
        return FlatShardTensor(part, param.spec).with_role(GRADIENT)

    def is_shown(self) -> bool:
        """Whether any ``.grad`` lacks, or is nothing but, local gradients that are not reduced."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(param.sharded.grad is shown for param, (shown, *_) in self._shown.items())

    def take_back(self, param: OriginalParam, grad: Tensor) -> Tensor:
        """What autograd left in ``.grad``, as a gradient that nothing else shows."""
        if param not in self._shown or self._shown[param][0] is not grad:
            return grad
        # Autograd has added to it before this backward could take anything back. Where it was a
        # view, that changed the buffer, too: all of it is in the new gradient.
        _, _, is_view = self._shown.pop(param)
        if is_view:
            self._buffer.forget(param.index)
        return grad.clone()

    def take_all_back(self) -> None:
        """Before the next backward: forget what the user dropped, and note what was edited."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for original, (shown, version, is_view) in self._shown.items():
                UNREDUCED.pop(shown, None)  # as an ordinary gradient, a step must accept it
                param, local = original.sharded, local_range(shown)
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
                    self._buffer.forget(original.index)
        self._shown.clear()
        self.was_edited &= bool(self._buffer.accumulated)


def edited(unit_name: str) -> RuntimeError:
    """The error for accumulated gradients that were edited."""
    return RuntimeError(
        f"{unit_text(unit_name)}: gradients accumulated under no_sync were edited before they were "
        "reduced. Edit them after a backward outside of no_sync."
    )
