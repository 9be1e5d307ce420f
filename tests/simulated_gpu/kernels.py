"""`Kernels`: computes on the CPU what a simulated GPU's streams come to.

What an operation needs is looked up when it is called, as a kernel gets its arguments: addresses,
not tensors, so that memory which torch gives to another tensor meanwhile has that one's values.
"""

import ctypes
import itertools
import os
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_runtime = ctypes.CDLL(None)  # it was loaded before everything else
_waiting: dict[int, Callable[[], None]] = {}
_numbers = itertools.count()


@ctypes.CFUNCTYPE(None, ctypes.c_long)
def _compute(number: int) -> None:
    try:
        with torch.inference_mode():  # a program may have called the kernel in this mode
            _waiting.pop(number)()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # in a thread of a stream: nobody else would notice


def driver_calls(*kinds: str) -> Counter[str]:
    """How many calls of the driver of each kind the threads that launch kernels have made."""
    count = _runtime.simulated_calls
    count.restype = ctypes.c_long
    return Counter({kind: count(kind.encode()) for kind in kinds})


def _push(work: Callable[[], None]) -> None:
    number = next(_numbers)
    _waiting[number] = work
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _runtime.simulated_push(stream, _compute, ctypes.c_long(number))


def _barrier(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A barrier, without the kernel that fills the tensor that NCCL's barrier reduces."""
    _runtime.simulated_leave_out_kernels(1)
    try:
        return func(*args, **kwargs)
    finally:
        _runtime.simulated_leave_out_kernels(0)


def _on_cpu(tensor: Tensor) -> Tensor:
    """A tensor on the device, as a kernel knows it: its memory as it is when the kernel runs."""
    storage, dtype = tensor.untyped_storage(), tensor.dtype
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    flat = flat[: storage.nbytes() // dtype.itemsize * dtype.itemsize].view(dtype)
    found = flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    found = torch.conj(found) if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found


def _is_ours(value: Any) -> bool:
    device = value.device if isinstance(value, Tensor) else value
    return isinstance(device, torch.device) and device.type == "cuda"


def _like(tensor: Tensor, device: torch.device | str) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _like(value, "meta")
    return torch.device("meta") if _is_ours(value) else value


def _to_argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _on_cpu(value) if _is_ours(value) else value.clone()
    return torch.device("cpu") if _is_ours(value) else value


def _widened(value: Any) -> Any:
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_narrow else value


_WITHOUT_A_KERNEL = {
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::is_pinned"),
    *("aten::new_empty", "aten::new_empty_strided", "aten::record_stream", "aten::resize_"),
    "aten::set_",
}
_TELLS_THE_HOST = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"}
_IN_FLOAT32 = {"aten::native_layer_norm", "aten::native_layer_norm_backward"}
"""CUDA's keep their statistics in float32, the CPU's want them in the inputs' dtype."""


class Kernels(TorchDispatchMode):
    """Takes every operation on the simulated device.

    With ``loads_lazily``, the first operation of a kind waits for all operations before it, as CUDA
    may do when it loads a kernel.
    """

    def __init__(self, *, loads_lazily: bool = False) -> None:
        super().__init__()
        self._loads_lazily = loads_lazily
        self._loaded: set[str] = set()

    def __enter__(self) -> Any:
        # What is left is the one that consists of other operations.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for kind in types:
            if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                with self:
                    return kind.__torch_dispatch__(func, types, args, kwargs)
        schema = func._schema
        if schema.name == "c10d::barrier":
            return _barrier(func, args, kwargs)
        is_ours = any(map(_is_ours, tree_leaves((args, kwargs))))
        if not is_ours or not schema.name.startswith("aten::") or schema.name in _WITHOUT_A_KERNEL:
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        aliases = [returned.alias_info for returned in schema.returns]
        if aliases and all(alias is not None and not alias.is_write for alias in aliases):
            return func(*args, **kwargs)  # a view
        if schema.name in _TELLS_THE_HOST:
            torch.cuda.current_stream().synchronize()
            found = func(*tree_map(_to_argument, args))
            return found.cuda() if isinstance(found, Tensor) else found
        if schema.name == "aten::copy_":
            return self._copy(*args, **kwargs)
        if schema.name == "aten::_to_copy":
            source = args[0]
            device = torch.device(kwargs.get("device") or source.device)
            if device.type != source.device.type:
                like = torch.empty_like(_to_meta(source), dtype=kwargs.get("dtype"))
                return self._copy(_like(like, device), source, bool(kwargs.get("non_blocking")))
        return self._launch(func, args, kwargs)

    def _launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make what it returns; have the stream fill it."""
        if self._loads_lazily and func.name() not in self._loaded:
            self._loaded.add(func.name())
            torch.cuda.synchronize()
        planned = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
        is_many = isinstance(planned, tuple) and len(func._schema.returns) > 1
        outs = [
            self._out(func._schema, number, one, args, kwargs)
            for number, one in enumerate(planned if is_many else [planned])
        ]
        arguments, named = tree_map(_to_argument, args), tree_map(_to_argument, kwargs)
        places = tree_map(_to_argument, outs)
        widen = func._schema.name in _IN_FLOAT32

        def compute() -> None:
            inputs = tree_map(_widened, arguments) if widen else arguments
            found = func(*inputs, **named)
            values = tree_leaves(found if is_many else [found])
            for place, one in zip(tree_leaves(places), values, strict=True):
                if isinstance(place, Tensor) and isinstance(one, Tensor):
                    if place.data_ptr() != one.data_ptr():
                        place.copy_(one.view_as(place))

        _push(compute)
        return tuple(outs) if is_many else outs[0]

    def _out(self, schema: Any, number: int, planned: Any, args: Any, kwargs: Any) -> Any:
        alias = schema.returns[number].alias_info if schema.returns else None
        if alias is not None and alias.is_write:
            given = dict(zip((one.name for one in schema.arguments), args, strict=False)) | kwargs
            return next(
                given[one.name]
                for one in schema.arguments
                if one.alias_info is not None and one.alias_info.before_set == alias.before_set
            )
        return tree_map(self._new, planned)

    def _new(self, planned: Any) -> Any:
        if not isinstance(planned, Tensor):
            return planned
        return _like(planned, "cuda")

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        copy = torch.ops.aten.copy_.default
        if _is_ours(to) and _is_ours(source):
            places = _on_cpu(to), _on_cpu(source)
            _push(lambda: places[0].copy_(places[1]))
            return to
        is_plain = (
            to.dtype == source.dtype
            and to.size() == source.size()
            and to.is_contiguous()
            and source.is_contiguous()
            and not source.is_conj()
            and not source.is_neg()
        )
        if is_plain:
            return copy(to, source, non_blocking)  # the runtime's
        if _is_ours(to):
            source = source.resolve_conj().resolve_neg().expand(to.size())
            there = torch.empty(to.size(), dtype=to.dtype, device="cuda")
            copy(there, source.to(to.dtype).contiguous(), False)
            return self._copy(to, there)
        there = torch.empty(source.size(), dtype=to.dtype, device="cuda")
        self._copy(there, source)
        here = torch.empty(source.size(), dtype=to.dtype)
        copy(here, there, False)
        return to.copy_(here.expand(to.size()))
