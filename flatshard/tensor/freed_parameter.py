"""``FreedParameter``: a full parameter while its memory is given back.

Whoever kept one from a forward could not know. Reading it would end the process; where it shows the
ranks' shards, it would show some before the optimizer's step and some after it. So what is kept
changes its class when the unit is freed, and back when it is gathered; an operation on it then says
what to do instead. Views of it that were made in forward can't be told: to read one still ends the
process, which at least says in which line (``show_crashes``).

What backward is expected to do without, and asks for after all, is brought back
(``ShardSpec.bring_back``).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatshard.tensor.shard_spec import ShardSpec

_NAMES = (
    "__hash__",
    "data_ptr",
    "dim",
    "element_size",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
    "untyped_storage",
)
_PROPERTIES = (
    "_backward_hooks",
    "_version",
    "device",
    "dtype",
    "grad",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_sparse",
    "itemsize",
    "layout",
    "nbytes",
    "ndim",
    "requires_grad",
    "shape",
)

_WITHOUT_VALUES = {getattr(Tensor, name) for name in _NAMES} | {
    method
    for name in _PROPERTIES
    for method in (getattr(Tensor, name).__get__, getattr(Tensor, name).__set__)
}
"""What looks at no element."""


class FreedParameter(nn.Parameter):
    """See the module. Made by ``set_accessible``, never by a constructor."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Let through what needs no values, or brings them back.

        Raises:
            RuntimeError: ``func`` needs values that are gone.
        """
        kwargs = kwargs or {}
        if func not in _WITHOUT_VALUES:
            spec = _spec(args, kwargs)
            where = "of a model that is gone" if spec is None else repr(spec.name)
            if func is Tensor.__repr__:
                return f"FreedParameter({where})"
            if spec is not None and spec.bring_back():
                return func(*args, **kwargs)
            raise RuntimeError(
                f"parameter {where}: {_name_of(func)} on the object that it was in forward, which "
                "was freed with its unit. Compute with it inside of forward, or keep a clone() "
                "from there. Outside, take it from the module again: norms, sums and element-wise "
                "operations count for the whole, and full_tensor(), on all ranks, is the whole."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _spec(*args: Any) -> ShardSpec | None:
    found = next(one for one in pytree.tree_leaves(args) if type(one) is FreedParameter)
    spec: ShardSpec | None = found._full_of()  # type: ignore[attr-defined]
    return spec


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f".{getattr(getattr(func, '__self__', None), '__name__', name)}"
    return f"{name}()"


def name(param: nn.Parameter, spec: ShardSpec) -> None:
    """Let errors of a full parameter say which it is."""
    param._full_of = weakref.ref(spec)  # type: ignore[attr-defined]


def set_accessible(params: Iterable[nn.Parameter], may_read: bool) -> None:
    """Let operations on full parameters raise, or not any more."""
    kind = nn.Parameter if may_read else FreedParameter
    for param in params:
        param.__class__ = kind


def show_crashes() -> None:
    """Let a process that ends by SIGSEGV say in which line it was, by Python's ``faulthandler``.

    Not where ``FLATSHARD_FAULTHANDLER=0`` is in the environment, nor where any of the signals
    that ``faulthandler`` takes over has a handler: an embedded JVM, say, needs its own.
    """
    if os.environ.get("FLATSHARD_FAULTHANDLER") == "0" or sys.__stderr__ is None:
        return
    if not faulthandler.is_enabled() and not any(map(_has_handler, _FATAL_SIGNALS)):
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # that is no file, or closed
            # Ranks write all at once: each no more than what ended it.
            faulthandler.enable(sys.__stderr__, all_threads=False)


_FATAL_SIGNALS = ("SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL")
# ``signal.getsignal`` knows only what Python set, or found when it started.
_sigaction = None if sys.platform == "win32" else ctypes.CDLL(None).sigaction


def _has_handler(name: str) -> bool:
    """Whether somebody, perhaps in C, handles a signal; True also where that cannot be told."""
    number = getattr(signal, name, None)
    if number is None or _sigaction is None:
        return False
    action = (ctypes.c_void_p * 64)()  # any system's ``struct sigaction``, the handler first
    return _sigaction(number, None, action) != 0 or bool(action[0])
