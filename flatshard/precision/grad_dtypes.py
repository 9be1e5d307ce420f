"""Gradients in another dtype than their parameter's: how they are set, and who can step on them.

That is what ``MixedPrecision(keep_low_precision_grads=True)`` leaves in ``.grad``.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

_NOT_IN_LOW_PRECISION: dict[Any, str] = {
    inspect.unwrap(kind.step): why
    for why, names in {
        "needs gradients in the parameters' dtype": ("Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
        "would keep its state in the gradients' dtype": ("Adafactor", "LBFGS", "Muon", "Rprop"),
    }.items()
    for name in names
    if (kind := getattr(torch.optim, name, None)) is not None
}
_SGD = inspect.unwrap(torch.optim.SGD.step)


def set_grad(param: nn.Parameter, grad: Tensor | None) -> None:
    """Assign ``param.grad``, of whatever floating point dtype."""
    if grad is not None and grad.dtype != param.dtype:
        param.grad_dtype = None  # any; where torch lacks it, policies that need it are refused
    param.grad = grad


def check_dtype(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], param: nn.Parameter, name: str | None
) -> None:
    """See before a step that an optimizer can step on a gradient in another dtype.

    Its own error is the answer of an optimizer that is not torch's.

    Args:
        optimizer: that is about to step.
        group: of its ``param_groups``, the one with ``param``.
        param: whose gradient to look at.
        name: what errors call it; None: nothing.

    Raises:
        RuntimeError: it cannot, or its state would have that dtype too.
    """
    with torch._C.DisableTorchFunctionSubclass():
        grad = param.grad
        if grad is None or grad.dtype == param.dtype:
            return
    step = inspect.unwrap(type(optimizer).step)
    why = _NOT_IN_LOW_PRECISION.get(step)
    if group.get("fused"):
        why = "needs gradients in the parameters' dtype with fused=True"
    elif step is _SGD and group["momentum"]:
        why = "would keep its momentum in the gradients' dtype"
    if why is not None:
        named = f"parameter {name!r}: " if name is not None else ""
        raise RuntimeError(
            f"{named}its gradient is {grad.dtype} and it is {param.dtype}, as "
            "MixedPrecision(keep_low_precision_grads=True) asks for, but "
            f"{type(optimizer).__name__} {why}. Leave keep_low_precision_grads out, or use an "
            "optimizer that takes them: Adadelta, Adagrad, ASGD, RMSprop, SGD without momentum, or "
            "one of your own."
        )
