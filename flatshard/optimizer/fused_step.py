"""Which of torch's kernels an optimizer steps with where its user leaves that open.

On a CPU torch's Adam and AdamW then make one operation after another, each of which goes over
parameters, gradients or state. Their fused kernel goes over all of them once, in a fifth of the
time. It rounds otherwise: of 100,000 parameters one differs in its last bit after a step. Who wants
the operations says ``fused=False`` or ``foreach=False``.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

_STEPS = {inspect.unwrap(kind.step) for kind in (torch.optim.Adam, torch.optim.AdamW)}

_DTYPES = torch.float32, torch.float64
"""In narrower ones the kernel computes in fp32 what the operations round again and again."""


def suits(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether a group is left open and the fused kernel can step it.

    Args:
        optimizer: the group's.
        group: with the plain parameters that are stepped.
    """
    if inspect.unwrap(type(optimizer).step) not in _STEPS:
        return False
    if group["fused"] is not None or group["foreach"] is not None:
        return False
    if group["capturable"] or group["differentiable"]:
        return False
    numbers = group["lr"], *group["betas"], group["weight_decay"], group["eps"]
    if any(isinstance(number, Tensor) for number in numbers):
        return False
    return all(_takes(param) for param in group["params"] if param.grad is not None)


def _takes(param: Any) -> bool:
    grad = param.grad
    return bool(
        param.device.type == "cpu"
        and param.dtype in _DTYPES
        and grad.dtype == param.dtype
        and grad.layout is torch.strided
    )
