"""Unsharded tensors that users keep and use outside of the forward that made them.

[Note: freed parameters]
A user may keep an unsharded parameter from a forward, and read the parameter after its unit was
resharded. Reading freed memory would end the process. With the shared-memory transport the read
would return some shards from before the optimizer's step and others from after the step. So
resharding a unit changes the class of its full parameters to ``FreedParameter``, and unsharding
changes the class back. An operation on a ``FreedParameter`` raises an error with a remedy. The
class of views that were made in forward cannot be changed. For views, ``forbid`` makes torch raise
when an operation, also in C++, reads the memory. If the installed torch cannot do this, the read
ends the process, and ``python -X faulthandler`` prints the line.

[Note: gathered copies]
An operation on a sharded parameter outside of forward computes with a full copy of the parameter.
A write to the copy would not reach the parameter. So results that share memory with the copy become
``GatheredView``s, which raise on writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatshard.plan.module_tree import unit_text
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import FlatShardTensor, is_collective, untraced

_METHODS = """__hash__ data_ptr dim element_size is_complex is_contiguous is_floating_point numel
    register_hook register_post_accumulate_grad_hook requires_grad_ size storage_offset stride
    untyped_storage""".split()
_PROPERTIES = """_backward_hooks _version device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta
    is_sparse itemsize layout nbytes ndim requires_grad shape""".split()

# Functions that read no element of the tensor. They also work on a freed parameter.
_WITHOUT_VALUES = {getattr(Tensor, name) for name in _METHODS} | {
    method
    for name in _PROPERTIES
    for method in (getattr(Tensor, name).__get__, getattr(Tensor, name).__set__)
}


class FreedParameter(nn.Parameter):
    """Class of a full parameter whose unit is resharded; see [Note: freed parameters].

    Only ``set_accessible`` assigns this class.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` if it reads no values or if the unit can be unsharded; otherwise raise."""
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        freed = next(t for t in pytree.tree_leaves((args, kwargs)) if type(t) is FreedParameter)
        spec: ShardSpec | None = freed._full_of()  # type: ignore[attr-defined]
        where = "of a model that is gone" if spec is None else repr(spec.name)
        if func is Tensor.__repr__:
            return f"FreedParameter({where})"
        # During backward the owner unshards the unit, because autograd may need the values.
        if spec is not None and spec.owner.bring_back(spec):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        # The function may be the getter or setter of an attribute. Then ``func.__self__`` has the
        # attribute's name.
        is_property = name in ("__get__", "__set__")
        raise RuntimeError(
            f"parameter {where}: {f'.{func.__self__.__name__}' if is_property else f'{name}()'} on "
            "an unsharded parameter that was kept from a forward, after its unit was resharded. "
            "Compute with the parameter inside of forward, or keep a clone(). Outside of forward "
            "read the parameter from its module again: norms, sums and element-wise operations "
            "work on the sharded parameter, and full_tensor(), called on all ranks, returns the "
            "full tensor. [FS-FREED]"
        )


def set_accessible(params: Iterable[nn.Parameter], may_read: bool) -> None:
    """Allow or forbid operations on full parameters."""
    # Change the class instead of setting a flag: then operations on an unsharded parameter do not
    # go through ``__torch_function__`` in forward.
    kind = nn.Parameter if may_read else FreedParameter
    for param in params:
        param.__class__ = kind


_forbid: Any = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_allow: Any = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)  # not in 2.11


def forbid(buffer: Tensor, unit: str, rank: int) -> None:
    """Make torch raise when the freed buffer or a view of it is read, if torch supports this."""
    if _forbid is not None and _allow is not None:
        _forbid(buffer.untyped_storage()._cdata, _message(unit, rank))


@functools.cache  # called for every unit in every step
def _message(unit: str, rank: int) -> str:
    return (
        f"{unit_text(unit)}, rank {rank}: a view of an unsharded parameter (weight[0], "
        "weight.detach()) was read after the unit was resharded. A forward, a hook or a "
        "torch.autograd.Function kept the view. Keep a clone(), or use ctx.save_for_backward()."
    )


def allow(buffer: Tensor) -> None:
    """Undo ``forbid``, before the buffer gets memory again."""
    if _allow is not None:
        _allow(buffer.untyped_storage()._cdata)


class GatheredView(Tensor):
    """A tensor that shares memory with a full copy of a parameter; see [Note: gathered copies].

    Reads return the parameter's values. A write would not reach the parameter, so writes raise.
    """

    parameter: str  # name of the parameter

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ == "__set__":  # the setter of `requires_grad`, for example
                return func(*args)
            # Call the function with plain tensors that alias the views: the aliases have the same
            # version counters, and torch then calls `__torch_function__` of any sharded tensors
            # among the arguments.
            views = [t for t in leaves if isinstance(t, GatheredView)]
            plain = {id(t): t.as_subclass(Tensor) for t in views}
        before = [tensor._version for tensor in plain.values()]
        if is_collective(func):  # a collective may write without raising the version counter
            raise _lost(func, views[0])
        args, kwargs = pytree.tree_unflatten([plain.get(id(t), t) for t in leaves], tree)
        result = func(*args, **kwargs)
        if before != [tensor._version for tensor in plain.values()]:
            raise _lost(func, views[0])
        return as_views(result, plain.values(), views[0].parameter)


def _lost(func: Any, view: GatheredView) -> RuntimeError:
    """Return the error for a function that writes, or may write, to a view of a full copy."""
    return RuntimeError(
        f"parameter {view.parameter!r}: {torch.overrides.resolve_name(func) or func.__name__} "
        "writes to a view that was taken outside of forward. The view shows a copy of the "
        "parameter, so the edit would be lost. Edit the parameter under "
        "ShardedWrapper.summon_full_params(model), or pass a clone()."
    )


def as_views(result: Any, of: Collection[Tensor], name: str, *, copies: bool = False) -> Any:
    """Turn the tensors in ``result`` that share memory with ``of`` into ``GatheredView``s.

    Args:
        result: the result of an operation on ``of``; may be a container of tensors.
        of: full copies of parameters.
        name: name of the parameter.
        copies: clone the tensors, because the memory of ``of`` is about to be freed.
    """
    storages = {tensor.untyped_storage()._cdata for tensor in of}

    def view(tensor: Tensor) -> Tensor:
        if tensor.is_sparse or tensor.untyped_storage()._cdata not in storages:
            return tensor
        if copies:
            # Leave inference mode for the clone: a tensor that is made in inference mode has no
            # version counter, and `GatheredView` needs the counter to detect writes.
            with torch.inference_mode(False):
                tensor = tensor.clone()
        # A tensor that requires a gradient need not become a `GatheredView`, because autograd
        # itself raises on an in-place write to the tensor.
        if tensor.requires_grad:
            return tensor
        shown = tensor.as_subclass(GatheredView)
        shown.parameter = name
        return shown

    return pytree.tree_map_only(Tensor, view, result)


class OutsideUse(torch.autograd.Function):
    """Differentiable function of all elements of a sharded tensor, for use outside of forward."""

    # Number of calls in this process, over all models. A step in backward compares the number with
    # an earlier one, to notice uses of parameters outside of forward.
    count = 0

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tensor: FlatShardTensor, function: Callable[[FlatShardTensor], Tensor]
    ) -> Tensor:
        OutsideUse.count += 1
        ctx.spec = tensor.spec
        return function(tensor)

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: Tensor) -> tuple[FlatShardTensor, None]:  # type: ignore[override]
        return _averaged(ctx.spec, gradient), None


def _averaged(spec: ShardSpec, gradient: Tensor) -> FlatShardTensor:
    """Average a gradient over the ranks, and return this rank's range.

    ``gradient``: gradient of the full parameter, or a tensor that broadcasts to the parameter's
    shape. A ``FlatShardTensor`` is averaged already, and returned unchanged.

    Collective: all ranks that train the parameter.
    """
    if isinstance(gradient, FlatShardTensor):
        return gradient
    spec.owner.start_backward()
    # Clone the gradient, because the reduction is in place and autograd may pass the same tensor to
    # other functions.
    part = gradient.contiguous().clone()
    # Average over the ranks, as data parallelism does: the loss may differ between ranks.
    for comm in (spec.comm, spec.replicas):
        comm.reduce_scalars(part, "SUM", op_name=f"gradient of {spec.name!r} used outside forward")
    return FlatShardTensor(spec.slice(part) / (spec.comm.size * spec.replicas.size), spec)


def average_full_gradients(param: FlatShardTensor) -> None:
    """Register a hook that averages full gradients before autograd adds them to ``param.grad``.

    A user's ``torch.autograd.Function`` that receives the sharded parameter returns the full
    gradient for this rank's batch, which must be averaged. All other operations return this rank's
    range of an averaged gradient.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if param.is_floating_point() or param.is_complex():
            is_trained = param.requires_grad
            # Register the hook even on a frozen parameter, because users may unfreeze it later.
            # torch refuses hooks on a frozen tensor, so unfreeze the parameter for the call.
            param.requires_grad_(True)
            Tensor.register_hook(param, partial(_averaged, param.spec))
            param.requires_grad_(is_trained)


def gathered(tensor: FlatShardTensor) -> Tensor:
    """Return ``tensor.full_tensor()``, and let autograd differentiate the call.

    Collective: all ranks of the shard group. The backward is a collective of all ranks that train
    the parameter.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        apply: Any = OutsideUse.apply
        return apply(tensor, FlatShardTensor.full_tensor)  # type: ignore[no-any-return]
    return tensor.full_tensor()
