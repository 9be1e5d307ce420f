"""Guards full parameters after resharding; averages gradients of parameters used out of forward.

[Note: freed parameters]
In forward, a user may store an unsharded parameter, and read it after its unit (a module with its
flat parameters) was resharded. The read would crash the process or, with the shared-memory
transport, might mix values from before and after an optimizer step. So resharding changes the class
of full parameters to ``FreedParameter``, whose operations raise. Unsharding changes the class back.

The user may also store a view of a parameter, such as ``weight[0]``. For views, ``forbid`` makes
torch raise when an operation reads the memory, in C++ too. If the installed torch cannot do this,
the read crashes the process, and ``python -X faulthandler`` prints the line.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatshard.tensor import sharded_tensor
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import FlatShardTensor, Origin, Source, untraced
from flatshard.units.module_tree import unit_text

_METHODS = """__hash__ data_ptr dim element_size is_complex is_contiguous is_floating_point numel
    register_hook register_post_accumulate_grad_hook requires_grad_ size storage_offset stride
    untyped_storage""".split()
_PROPERTIES = """_backward_hooks _version device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta
    is_sparse itemsize layout nbytes ndim requires_grad shape""".split()

# Methods and attributes of a tensor that read no elements. A `FreedParameter` allows them.
_WITHOUT_VALUES = {getattr(Tensor, name) for name in _METHODS}
_found = (getattr(Tensor, name) for name in _PROPERTIES)
_WITHOUT_VALUES |= {method for one in _found for method in (one.__get__, one.__set__)}


class FreedParameter(nn.Parameter):
    """Class of a full parameter while its unit is resharded; see [Note: freed parameters]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` if it reads no values, or if the model can unshard the unit now."""
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        freed = next(t for t in pytree.tree_leaves((args, kwargs)) if type(t) is FreedParameter)
        spec: ShardSpec | None = freed._full_of()  # type: ignore[attr-defined]
        where = "of a model that is gone" if spec is None else repr(spec.name)
        if func is Tensor.__repr__:
            return f"FreedParameter({where})"
        # In backward, autograd may read an embedding table. flatshard did not unshard the table,
        # because the backward of a lookup does not read the table.
        if spec is not None and spec.owner.bring_back(spec):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        # If the program uses an attribute, ``func`` is `__get__` or `__set__` of ``func.__self__``.
        used = f".{func.__self__.__name__}" if name in sharded_tensor.ATTRIBUTES else f"{name}()"
        raise RuntimeError(
            f"parameter {where}: the program used {used} on an unsharded parameter that was kept "
            "from a forward, after its unit was resharded. Compute with the parameter inside of "
            "forward, or keep a clone(). Outside of forward, read the sharded parameter from its "
            "module: norms, sums and element-wise operations work, and full_tensor(), called on "
            "all ranks, returns the full tensor. [FS-FREED]"
        )


def set_accessible(params: Iterable[nn.Parameter], may_read: bool) -> None:
    """Allow or forbid operations on full parameters, by changing the class of the parameters."""
    # Use a class instead of a flag. To check a flag, unsharded parameters would need
    # ``__torch_function__``, too, which would slow down forward.
    kind = nn.Parameter if may_read else FreedParameter
    for param in params:
        param.__class__ = kind


# `allow(storage)` undoes `forbid` before a buffer gets memory again. torch 2.11 lacks the function,
# so `allow` is `hash`, which changes nothing, and `forbid` does nothing.
allow: Any = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", hash)


def forbid(storage: int, unit: str, rank: int) -> None:
    """Make torch raise when a freed buffer, or a view of the buffer, is read (not in torch 2.11).

    ``storage`` is the address of the buffer's storage (``_cdata``).
    """
    if allow is not hash:
        sharded_tensor.set_access_error(storage, _message(unit, rank))


@cache  # because this function is called for every unit in every step
def _message(unit: str, rank: int) -> str:
    return (
        f"{unit_text(unit)}, rank {rank}: a view of an unsharded parameter (weight[0], "
        "weight.detach()) was read after the unit was resharded. A forward, a hook or a "
        "torch.autograd.Function kept the view. Keep a clone(), or use ctx.save_for_backward()."
    )


class OutsideUse(torch.autograd.Function):
    """Differentiable function of a sharded tensor, for use outside of forward.

    The function that ``forward`` calls, such as a sum or ``full_tensor``, uses the elements of all
    ranks, but autograd sees only this rank's elements. So ``backward`` averages the full gradient
    over the ranks, and returns this rank's range of the average.
    """

    # Number of calls of `forward`, by which `step_in_backward` notices uses outside of forward.
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
    def backward(ctx: Any, gradient: Tensor) -> tuple[FlatShardTensor | None, None]:  # type: ignore[override]
        return averaged(ctx.spec, gradient), None


def use_outside(tensor: FlatShardTensor, function: Callable[[FlatShardTensor], Tensor]) -> Tensor:
    """Return ``function(tensor)``, recorded for backward as ``OutsideUse``.

    Raises if the gradient would go to a leaf that the program has made, such as
    ``p.detach().clone().requires_grad_()``. Under DistributedDataParallel, such a leaf gets this
    rank's full gradient, but a sharded leaf can store only a range of the gradient.
    """
    # Do not raise inside of a `torch.autograd.Function` of the program (such as a fused loss that
    # computes its gradient in forward): the function's gradient is averaged by `averaged`.
    is_of_program = sharded_tensor.caller_of_operator() is sharded_tensor.Caller.PROGRAM
    if is_of_program and (leaf := _leaf_of_program(tensor)) is not None:
        raise NotImplementedError(
            f"{leaf.spec.where()}: the program computed a sharded tensor from the parameter "
            f"({leaf.text}), and set requires_grad on it. This rank's full gradient would not fit "
            "into the sharded tensor. Make the tensor on all ranks from the full parameter: "
            "p.full_tensor().detach().requires_grad_()."
        )
    return OutsideUse.apply(tensor, function)  # type: ignore[no-any-return,no-untyped-call]


def edge_of(tensor: Tensor) -> Any:
    """Return the gradient edge of ``tensor`` (torch's ``GradientEdge``)."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(tensor)


def _leaf_of_program(tensor: FlatShardTensor) -> FlatShardTensor | None:
    """Return a sharded leaf of the tensor's autograd graph that is not a parameter, or None."""
    nodes: list[Any] = [edge_of(tensor).node]
    # The loop also visits the nodes that it adds. These are few, because the graph has only
    # operations on sharded tensors.
    for node in nodes:
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, FlatShardTensor) and not leaf.is_unit_parameter:
            return leaf
        nodes += {one for one, _ in node.next_functions if one is not None}.difference(nodes)
    return None


@untraced  # because autograd also calls this function as a hook in a compiled step
def averaged(spec: ShardSpec, gradient: Tensor | None) -> Any:
    """Average a gradient over the ranks, and return this rank's range of the average.

    Collective: all ranks that train the parameter, unless ``gradient`` is already averaged (an
    earlier call of this function returned it, or autograd computed it from such a result).

    ``gradient``: gradient of the full parameter, or a tensor that broadcasts to the parameter's
    shape. None: the user's function returned no gradient.
    """
    if gradient is None:
        return None
    if spec.original is not None and spec.original.full._backward_hooks:
        # A hook must get the sum of all gradients of the parameter. But gradients of uses in
        # forward go to the full parameter, and this gradient goes to the sharded parameter.
        raise RuntimeError(
            f"{spec.where()}: a hook on the parameter (register_hook) would get only a part of the "
            "gradient, because the loss also uses the parameter outside of its unit's forward. Use "
            "the parameter inside of forward, or remove the hook and change p.grad after backward."
        )
    if isinstance(gradient, FlatShardTensor):
        if gradient.shard_origin.is_arriving and gradient.is_alike:
            return gradient  # averaged already
        if not gradient.is_alike:
            raise RuntimeError(
                f"{spec.where()}: backward got a sharded tensor ({gradient.text}) as the gradient. "
                "A sharded gradient lacks the elements outside of this rank's range, which other "
                "ranks need for the average. Expected a full, plain tensor. In the "
                "backward of a torch.autograd.Function, begin with "
                "weight.new_zeros(weight.shape). Elsewhere, compute the gradient from full tensors."
            )
        gradient = gradient.full_tensor()  # equal on all ranks, so the average is the same
    spec.owner.start_backward()
    # Copy the gradient: the reduction overwrites its input, and autograd may pass the same gradient
    # to other functions, too.
    part = gradient.contiguous().clone()
    for comm in (spec.comm, spec.replicas):
        comm.reduce_scalars(part, "SUM", op_name=f"gradient of {spec.name!r} used outside forward")
    local = spec.slice(part) / (spec.comm.size * spec.replicas.size)
    origin = Origin(Source.GRADIENTS, is_fixed=True, graph_task=torch._C._current_graph_task_id())
    return FlatShardTensor(local, spec, role=sharded_tensor.GRADIENT, origin=origin)


def register_hook(param: Tensor, register: Callable[..., Any], hook: Callable[..., Any]) -> None:
    """Call ``register(param, hook)``, except for a parameter of integers, which has no gradient."""
    if param.is_floating_point() or param.is_complex():
        is_trained = param.requires_grad
        # torch refuses hooks on a frozen parameter, but users may unfreeze the parameter later.
        param.requires_grad_(True)
        register(param, hook)
        param.requires_grad_(is_trained)


def _refuse_node(p: Any, other: Any) -> Any:
    """Raise for ``p.expand_as(p)`` and ``p.view_as(p)``, which give programs ``p``'s autograd node.

    Autograd accumulates gradients in the full parameter, so hooks on the node would never run. In
    the forward of a ``torch.autograd.Function``, there is no node: then do not raise.
    """
    if other is p and p.is_unit_parameter and p.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{p.spec.where()}: hooks on its autograd node (p.expand_as(p).grad_fn, "
            "register_multi_grad_hook) would never run. Call p.register_hook(hook) instead."
        )
    return NotImplemented


sharded_tensor.ABOVE_AUTOGRAD |= dict.fromkeys((Tensor.view_as, Tensor.expand_as), _refuse_node)
# Make `full_tensor` differentiable. Inside `OutsideUse.forward`, gradients are disabled, and
# `full_tensor` only gathers.
sharded_tensor.ABOVE_AUTOGRAD[FlatShardTensor.full_tensor] = partial(
    use_outside, function=FlatShardTensor.full_tensor
)
