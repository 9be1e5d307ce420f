"""Optimizers see plain tensors: local twins stand in for sharded parameters during ``step()``.

Dispatching every operation of an optimizer on ``FlatShardTensor`` is right but slow. For optimizers
that treat every element alike, hooks around ``step()`` therefore put plain 1-D parameters that
share the shard's memory into the parameter groups, and move the state along. The hooks are
global, so they also serve optimizers that were built before the model was wrapped.

Users' own step hooks see the sharded parameters: the exchange happens after the last of them before
``step()``, and is undone before the first of them after it.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import hooks as torch_hooks

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

# State of one number per parameter, not per element: also where the parameter is 0-d itself.
_ONE_PER_PARAMETER = frozenset({"step", "eta", "mu", "mu_product"})

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
        _installed = True


def restore_all() -> None:
    """Undo the exchange where ``step()`` raised and its post hook never ran."""
    for optimizer in list(_swapped):
        _swap_out(optimizer)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Global hook: let the exchange be the optimizer's innermost hooks."""
    restore_all()
    _check_reduced(optimizer)
    if inspect.unwrap(type(optimizer).step) not in _ELEMENTWISE:
        return
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    for table, hook in ((before, _exchange), (after, _undo)):
        if hook not in table.values():
            table[torch_hooks.RemovableHandle(table).id] = hook
    before.move_to_end(next(key for key, hook in before.items() if hook is _exchange))
    after.move_to_end(next(key for key, hook in after.items() if hook is _undo), last=False)


def _check_reduced(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step on gradients that only this rank has."""
    with torch._C.DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            for param in group["params"]:
                # An earlier, reduced gradient is marked too while more waits for its reduction.
                unit = getattr(param.grad, "_unreduced_of", None)
                if unit is not None:
                    raise RuntimeError(
                        f"unit {unit!r}: step() on gradients that were accumulated under no_sync "
                        "and not reduced. Run the last backward before a step outside of no_sync."
                    )


def _exchange(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not _swap_in(optimizer):
        return None
    # args[0] is the optimizer itself.
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None

    def with_sharded_parameters() -> Any:
        _swap_out(optimizer)
        result = closure()  # where it raises, the step is over
        _swap_in(optimizer)
        return result

    if len(args) > 1:
        return (args[0], with_sharded_parameters, *args[2:]), kwargs
    return args, {**kwargs, "closure": with_sharded_parameters}


def _undo(optimizer: torch.optim.Optimizer, *_: Any) -> None:
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
                if twin.grad is not None:
                    # An optimizer that writes to `p.data` would leave no trace of it, and what
                    # was gathered before would be taken for current.
                    torch.autograd.graph.increment_version(twin)
                if param in optimizer.state:
                    state = optimizer.state.pop(param)
                    optimizer.state[twin] = _local_state(param, state)
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


def _local_state(param: FlatShardTensor | FlatParameter, state: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of state from before wrapping, or loaded from an unwrapped model.

    Raises:
        RuntimeError: a state tensor has neither the parameter's shape nor this rank's.
    """
    held = param._local if isinstance(param, FlatShardTensor) else param
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.shape == held.shape:
            continue
        if key in _ONE_PER_PARAMETER:
            continue
        if isinstance(param, FlatShardTensor) and value.shape == param.shape:
            state[key] = param._spec.slice(value).clone()
        elif value.numel() > 1:
            name = param._spec.name if isinstance(param, FlatShardTensor) else repr(param)
            raise RuntimeError(
                f"optimizer state {key!r} of parameter {name!r}: expected shape "
                f"{tuple(held.shape)} (this rank's part) or {tuple(param.shape)} (the whole), got "
                f"{tuple(value.shape)}. A plain optimizer.state_dict() belongs to one rank: save "
                "and load it per rank, at the same world size."
            )
    return state


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
