"""Full tensors of sharded ones that are no unit's, and views of copies that nobody may write."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import FlatShardTensor, is_collective, untraced


class GatheredView(Tensor):
    """A view of a full copy. Reading it is right; a write would reach no parameter, and raises."""

    parameter: str  # its name

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ == "__set__":  # of `requires_grad`, say
                return func(*args)
            # They share the version counter, and sharded tensors beside them are heard.
            views = [t for t in leaves if isinstance(t, GatheredView)]
            plain = {id(t): t.as_subclass(Tensor) for t in views}
        before = [tensor._version for tensor in plain.values()]
        if is_collective(func):  # it moves no version counter
            raise _lost(func, views[0])
        args, kwargs = pytree.tree_unflatten([plain.get(id(t), t) for t in leaves], tree)
        result = func(*args, **kwargs)
        if before != [tensor._version for tensor in plain.values()]:
            raise _lost(func, views[0])
        return as_views(result, plain.values(), views[0].parameter)


def _lost(func: Any, view: GatheredView) -> RuntimeError:
    """The error for a function that writes, or may write, to a view."""
    return RuntimeError(
        f"parameter {view.parameter!r}: {torch.overrides.resolve_name(func) or func.__name__} "
        "writes to a part of it that was read outside of forward, which is a copy: the edit would "
        "be lost. Edit under ShardedWrapper.summon_full_params(model), or pass a clone()."
    )


def as_views(result: Any, of: Collection[Tensor], name: str, *, copies: bool = False) -> Any:
    """An operation's result, with what shares memory with ``of`` as ``GatheredView``s.

    ``name``: of the parameter. ``copies``: of copies, as the memory is about to be freed.
    """
    storages = {tensor.untyped_storage()._cdata for tensor in of}

    def view(tensor: Tensor) -> Tensor:
        if tensor.is_sparse or tensor.untyped_storage()._cdata not in storages:
            return tensor
        if copies:
            # A tensor of inference mode has no version, by which a `GatheredView` sees a write.
            with torch.inference_mode(False):
                tensor = tensor.clone()
        # Autograd's own error guards what requires a gradient.
        if tensor.requires_grad:
            return tensor
        shown = tensor.as_subclass(GatheredView)
        shown.parameter = name
        return shown

    return pytree.tree_map_only(Tensor, view, result)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: FlatShardTensor) -> Tensor:  # type: ignore[override]
        ctx.spec = tensor.spec
        return tensor.full_tensor()

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: Tensor) -> FlatShardTensor:  # type: ignore[override]
        return _averaged(ctx.spec, gradient)


def _averaged(spec: ShardSpec, gradient: Tensor) -> FlatShardTensor:
    """This rank's range of the average of the ranks' full gradients of a parameter.

    Collective: all ranks that train the parameter.
    """
    if isinstance(gradient, FlatShardTensor):
        return gradient
    spec.owner.start_backward()
    part = gradient.contiguous().clone()
    for comm in (spec.comm, spec.replicas):
        comm.reduce_scalars(part, "SUM", op_name=f"backward of the full tensor of {spec.name!r}")
    return FlatShardTensor(spec.slice(part) / (spec.comm.size * spec.replicas.size), spec)


def average_full_gradients(param: FlatShardTensor) -> None:
    """Average over the ranks full gradients that autograd is about to add to ``param.grad``.

    A ``torch.autograd.Function`` that gets the sharded parameter returns the gradient of this
    rank's batch. Gradients of other operations are averaged ranges already.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if param.is_floating_point() or param.is_complex():
            is_trained = param.requires_grad
            param.requires_grad_(True)  # a frozen tensor refuses hooks, and may be unfrozen later
            Tensor.register_hook(param, partial(_averaged, param.spec))
            param.requires_grad_(is_trained)


def gathered(tensor: FlatShardTensor) -> Tensor:
    """``tensor.full_tensor()``, differentiable.

    Collective: all ranks of the shard group, and in backward all that train the parameter.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _Gathered.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]
    return tensor.full_tensor()
