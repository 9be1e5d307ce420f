"""Unsharded tensors that users keep and use outside of the forward that made them.

[Note: freed parameters]
A user may keep an unsharded parameter from a forward and read it after the unit was resharded.
Reading freed memory would end the process. With the shared-memory transport the read would see some
shards before the optimizer's step and others after the step. So resharding a unit changes the class
of its full parameters to ``FreedParameter``, and unsharding changes the class back. An operation on
a ``FreedParameter`` raises and says what to do instead. Views that were made in forward cannot be
changed. For views ``forbid`` lets torch raise when an operation, also in C++, reads the memory.
Where torch cannot raise, the read ends the process, and ``python -X faulthandler`` prints the line.

[Note: gathered copies]
An operation on a sharded parameter outside of forward gets a full copy of the parameter. A write to
the copy would not reach the parameter. So views of the copy are ``GatheredView``s, which raise on
writes.
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

# Functions that read no element of the tensor.
_WITHOUT_VALUES = {getattr(Tensor, name) for name in _METHODS} | {
    method
    for name in _PROPERTIES
    for method in (getattr(Tensor, name).__get__, getattr(Tensor, name).__set__)
}


class FreedParameter(nn.Parameter):
    """Class of a freed full parameter; see the note. Only ``set_accessible`` assigns the class."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function that needs no values, bring the values back, or raise."""
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        freed = next(t for t in pytree.tree_leaves((args, kwargs)) if type(t) is FreedParameter)
        spec: ShardSpec | None = freed._full_of()  # type: ignore[attr-defined]
        where = "of a model that is gone" if spec is None else repr(spec.name)
        if func is Tensor.__repr__:
            return f"FreedParameter({where})"
        # If backward needs a value after all, the unit is unsharded for it.
        if spec is not None and spec.owner.bring_back(spec):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        # The function is the accessor of a property. Its name says only that it gets or sets.
        is_property = name in ("__get__", "__set__")
        raise RuntimeError(
            f"parameter {where}: {f'.{func.__self__.__name__}' if is_property else f'{name}()'} on "
            "the object that it was in forward, which was resharded with its unit. Compute with it "
            "inside of forward, or keep a clone() from there. Outside, take it from the module "
            "again: norms, sums and element-wise operations work on the sharded parameter, and "
            "full_tensor(), called on all ranks, gives the full one. [FS-FREED]"
        )


def set_accessible(params: Iterable[nn.Parameter], may_read: bool) -> None:
    """Allow or forbid operations on full parameters."""
    # Change the class instead of setting a flag: an unsharded parameter then costs no dispatch in
    # forward.
    kind = nn.Parameter if may_read else FreedParameter
    for param in params:
        param.__class__ = kind


_forbid: Any = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_allow: Any = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)  # not in 2.11


def forbid(buffer: Tensor, unit: str, rank: int) -> None:
    """Let torch raise, if it can, when a freed buffer or a view of the buffer is read."""
    if _forbid is not None and _allow is not None:
        _forbid(buffer.untyped_storage()._cdata, _message(unit, rank))


@functools.cache  # called for every unit in every step
def _message(unit: str, rank: int) -> str:
    return (
        f"{unit_text(unit)}, rank {rank}: a view of its unsharded parameters was read that "
        "forward, a hook or a torch.autograd.Function kept (weight[0], weight.detach()). They "
        "were resharded since. Keep a clone(), or use ctx.save_for_backward()."
    )


def allow(buffer: Tensor) -> None:
    """Undo ``forbid``, because the buffer gets memory."""
    if _allow is not None:
        _allow(buffer.untyped_storage()._cdata)


class GatheredView(Tensor):
    """A view of a full copy of a parameter.

    Reads give the right values. A write would not reach the parameter, and therefore raises.
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
            # The plain aliases share the version counter with the views. With plain aliases, torch
            # also calls `__torch_function__` of sharded tensors among the arguments.
            views = [t for t in leaves if isinstance(t, GatheredView)]
            plain = {id(t): t.as_subclass(Tensor) for t in views}
        before = [tensor._version for tensor in plain.values()]
        if is_collective(func):  # a collective does not raise the version counter
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
    """The result of an operation; tensors that share memory with ``of`` become ``GatheredView``s.

    ``name``: name of the parameter. ``copies``: clone the tensors, because the memory of ``of`` is
    about to be freed.
    """
    storages = {tensor.untyped_storage()._cdata for tensor in of}

    def view(tensor: Tensor) -> Tensor:
        if tensor.is_sparse or tensor.untyped_storage()._cdata not in storages:
            return tensor
        if copies:
            # A tensor that is made in inference mode has no version counter, and a `GatheredView`
            # detects writes by the counter.
            with torch.inference_mode(False):
                tensor = tensor.clone()
        # If the tensor requires a gradient, autograd itself raises on an in-place write.
        if tensor.requires_grad:
            return tensor
        shown = tensor.as_subclass(GatheredView)
        shown.parameter = name
        return shown

    return pytree.tree_map_only(Tensor, view, result)


class OutsideUse(torch.autograd.Function):
    """A function of all elements of a sharded tensor, used outside of forward under autograd."""

    # Number of uses, over all models. An operation on parameters of two models counts only for the
    # first model.
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
    """This rank's range of a parameter's gradient, averaged over the ranks.

    ``gradient``: gradient of the full parameter, or a tensor that broadcasts to the parameter's
    shape.

    Collective: all ranks that train the parameter.
    """
    if isinstance(gradient, FlatShardTensor):
        return gradient
    spec.owner.start_backward()
    # A clone: the reduction is in place, and autograd may pass the same gradient to other
    # functions.
    part = gradient.contiguous().clone()
    # Average over the ranks, as data parallelism does: the loss may differ between ranks.
    for comm in (spec.comm, spec.replicas):
        comm.reduce_scalars(part, "SUM", op_name=f"gradient of {spec.name!r} used outside forward")
    return FlatShardTensor(spec.slice(part) / (spec.comm.size * spec.replicas.size), spec)


def average_full_gradients(param: FlatShardTensor) -> None:
    """Average full gradients over the ranks before autograd adds them to ``param.grad``.

    A ``torch.autograd.Function`` that gets the sharded parameter returns the gradient of this
    rank's batch only. Gradients from other operations are averaged ranges already.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if param.is_floating_point() or param.is_complex():
            is_trained = param.requires_grad
            param.requires_grad_(True)  # a frozen tensor refuses hooks, and may be unfrozen later
            Tensor.register_hook(param, partial(_averaged, param.spec))
            param.requires_grad_(is_trained)


def gathered(tensor: FlatShardTensor) -> Tensor:
    """The differentiable version of ``tensor.full_tensor()``.

    Collective: all ranks of the shard group; backward is a collective of all ranks that train the
    parameter.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        apply: Any = OutsideUse.apply
        return apply(tensor, FlatShardTensor.full_tensor)  # type: ignore[no-any-return]
    return tensor.full_tensor()
