"""``FreedParameter``: an unsharded parameter while its unit is resharded.

Users may keep one from a forward and read it later. The read would end the process; with the
shared-memory transport it would see some shards before the optimizer's step and others after it. So
the parameter changes its class when the unit is resharded, and back when it is unsharded; in
between, an operation on it raises and says what to do instead. Views that were made in forward
cannot be reached: ``forbid`` lets torch raise for what reads their memory, also within C++. Where
torch cannot, the read ends the process, and ``python -X faulthandler`` prints the line.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatshard.plan.module_tree import unit_text
from flatshard.tensor.shard_spec import ShardSpec

_METHODS = """__hash__ data_ptr dim element_size is_complex is_contiguous is_floating_point numel
    register_hook register_post_accumulate_grad_hook requires_grad_ size storage_offset stride
    untyped_storage""".split()
_PROPERTIES = """_backward_hooks _version device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta
    is_sparse itemsize layout nbytes ndim requires_grad shape""".split()

# Functions that read no element.
_WITHOUT_VALUES = {getattr(Tensor, name) for name in _METHODS} | {
    method
    for name in _PROPERTIES
    for method in (getattr(Tensor, name).__get__, getattr(Tensor, name).__set__)
}


class FreedParameter(nn.Parameter):
    """See the module. Made by ``set_accessible``, never by a constructor."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let through what needs no values, bring the values back, or raise."""
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
        # The accessor of a property: its own name says only that it gets or sets.
        is_property = name in ("__get__", "__set__")
        raise RuntimeError(
            f"parameter {where}: {f'.{func.__self__.__name__}' if is_property else f'{name}()'} on "
            "the object that it was in forward, which was resharded with its unit. Compute with it "
            "inside of forward, or keep a clone() from there. Outside, take it from the module "
            "again: norms, sums and element-wise operations work on the sharded parameter, and "
            "full_tensor(), called on all ranks, gives the full one. [FS-FREED]"
        )


def name(param: nn.Parameter, spec: ShardSpec) -> None:
    """Let errors of a full parameter say which it is."""
    # Weak: the spec refers to the parameter, and a cycle would live until the collector runs.
    param._full_of = weakref.ref(spec)  # type: ignore[attr-defined]


def set_accessible(params: Iterable[nn.Parameter], may_read: bool) -> None:
    """Let operations on full parameters pass, or raise."""
    # The class, not a flag: an unsharded parameter pays no dispatch in forward.
    kind = nn.Parameter if may_read else FreedParameter
    for param in params:
        param.__class__ = kind


_forbid: Any = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_allow: Any = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)  # not in 2.11


def forbid(buffer: Tensor, unit: str, rank: int) -> None:
    """Let torch raise for what reads a buffer that was freed, or a view of it, if it can."""
    if _forbid is not None and _allow is not None:
        _forbid(buffer.untyped_storage()._cdata, _message(unit, rank))


@functools.cache  # every unit of every step asks
def _message(unit: str, rank: int) -> str:
    return (
        f"{unit_text(unit)}, rank {rank}: a view of its unsharded parameters was read that "
        "forward, a hook or a torch.autograd.Function kept (weight[0], weight.detach()). They "
        "were resharded since. Keep a clone(), or use ctx.save_for_backward()."
    )


def allow(buffer: Tensor) -> None:
    """Undo ``forbid``: the buffer gets memory."""
    if _allow is not None:
        _allow(buffer.untyped_storage()._cdata)
