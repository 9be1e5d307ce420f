"""Optimizers see plain tensors: local twins stand in for sharded parameters during ``step()``.

Dispatching every operation of an optimizer on ``FlatShardTensor`` is right but slow. For optimizers
that treat every element alike, hooks around ``step()`` therefore put plain 1-D parameters that
share the shard's memory into the parameter groups, and move the state along. The hooks are
global, so they also serve optimizers that were built before the model was wrapped.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from flatshard.flat_param import FlatParameter
from flatshard.shard_tensor import FlatShardTensor

_ELEMENTWISE: set[Any] = {
    inspect.unwrap(kind.step)
    for kind in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    )
}

_swapped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_installed = False


def declare_elementwise(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Say that an optimizer updates every element from that element's own gradient and state.

    Its ``step`` then works on plain 1-D tensors, as torch's own do. Without this it sees
    true-shape sharded parameters, where an operation is right or raises.
    """
    _ELEMENTWISE.add(inspect.unwrap(optimizer_class.step))


def install() -> None:
    """Register the hooks with torch, once in a process."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _installed = True


def restore_all() -> None:
    """Undo the exchange where ``step()`` raised and its post hook never ran."""
    for optimizer in list(_swapped):
        _swap_out(optimizer)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    restore_all()
    if inspect.unwrap(type(optimizer).step) not in _ELEMENTWISE:
        return None
    if not _swap_in(optimizer):
        return None
    # args[0] is the optimizer itself.
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None

    def with_sharded_parameters() -> Any:
        _swap_out(optimizer)
        try:
            return closure()
        finally:
            _swap_in(optimizer)

    if len(args) > 1:
        return (args[0], with_sharded_parameters, *args[2:]), kwargs
    return args, {**kwargs, "closure": with_sharded_parameters}


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _swap_out(optimizer)


def _swap_in(optimizer: torch.optim.Optimizer) -> bool:
    """Put twins into the groups; says whether there was anything to exchange."""
    with torch._C.DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            params = group["params"]
            for position, param in enumerate(params):
                if isinstance(param, FlatShardTensor):
                    twin = _twin(param)
                    twin.grad = _local_grad(param)
                elif isinstance(param, FlatParameter):
                    # Plain already, only its gradient is not.
                    twin = _flat_twin(param)
                    twin.grad = getattr(param.grad, "_local", param.grad)
                else:
                    continue
                params[position] = twin
                _swapped.add(optimizer)
                if param in optimizer.state:
                    optimizer.state[twin] = optimizer.state.pop(param)
    return optimizer in _swapped


def _swap_out(optimizer: torch.optim.Optimizer) -> None:
    if optimizer not in _swapped:
        return
    _swapped.discard(optimizer)
    with torch._C.DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            params = group["params"]
            for position, twin in enumerate(params):
                param = getattr(twin, "_twin_of", None)
                if param is None:
                    continue
                params[position] = param
                del twin._twin_of  # a cycle otherwise
                if twin.grad is None:
                    # The optimizer, or a step that failed, dropped it.
                    param.grad = None
                twin.grad = None
                if twin in optimizer.state:
                    optimizer.state[param] = optimizer.state.pop(twin)


def _twin(param: FlatShardTensor) -> nn.Parameter:
    twin: nn.Parameter | None = param.__dict__.get("_twin")
    if twin is None or twin.requires_grad != param.requires_grad:
        twin = nn.Parameter(param._local.detach(), requires_grad=param.requires_grad)
        param._twin = twin  # type: ignore[attr-defined]
    twin._twin_of = param  # type: ignore[attr-defined]
    return twin


def _flat_twin(param: FlatParameter) -> nn.Parameter:
    twin = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
    twin._twin_of = param  # type: ignore[attr-defined]
    return twin


def _local_grad(param: FlatShardTensor) -> torch.Tensor | None:
    grad = param.grad
    if grad is None:
        return None
    if isinstance(grad, FlatShardTensor):
        return grad._local
    # Assigned by the user as a full tensor.
    return param._spec.slice(grad.detach())
