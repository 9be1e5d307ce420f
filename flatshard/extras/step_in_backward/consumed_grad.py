"""``ConsumedGrad``: stands in ``.grad`` where a step in backward has used the gradient up.

``None`` would say that there was no gradient, and what comes after backward (clipping by a norm, a
gradient scaler, a log) would silently do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatshard.tensor.sharded_tensor import tensors_in

_ZEROING = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class ConsumedGrad(torch.Tensor):
    """A gradient that is gone, of the parameter's shape, dtype and device.

    It has no memory, can be dropped and set to zero like a gradient, and raises for anything else.
    """

    _of: str

    @staticmethod
    def __new__(cls, param: Tensor, name: str) -> ConsumedGrad:
        self = torch.Tensor._make_wrapper_subclass(
            cls, tuple(param.shape), dtype=param.dtype, device=param.device
        )
        self._of = name
        return self  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ConsumedGrad({self._of!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    # Dispatch, below, sees every operation; reading an attribute is to cost nothing.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ZEROING:
            # Such a list mixes consumed gradients with others, which are to become zero.
            for tensor in args[0] if isinstance(args[0], list) else []:
                if not isinstance(tensor, cls):
                    tensor.zero_()
            return args[0] if isinstance(args[0], Tensor) else None
        tensors = tensors_in((*args, *(kwargs or {}).values()))
        consumed = next(t for t in tensors if isinstance(t, cls))
        raise RuntimeError(
            f"parameter {consumed._of!r}: {func._schema.name} on a gradient that "
            "ShardedWrapper.step_in_backward() has used and dropped: the parameter is stepped "
            "already. Clipping by a norm, GradScaler, and whatever else needs the gradients after "
            "backward needs an ordinary optimizer.step(): call remove() on what "
            "step_in_backward() returned. To read or change one parameter's gradient before its "
            "step, use p.register_post_accumulate_grad_hook."
        )
