"""What autograd saves of gathered parameters: a note where they lie instead of the memory.

A unit's buffer is freed between forward and backward, while autograd keeps views of it. Hooks
around the outermost forward turn each such view into a ``SavedView``, which gathers the unit again
when autograd wants it back. So nothing saved can dangle, whatever order backward takes.

Hooks switch off autograd's own check for in-place edits of what they pack, so it is done here.
Hooks that were there before (checkpointing, ``save_on_cpu``) get everything that is not a view of
a unit's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from flatshard.engine.handle import FlatParamHandle

_PLAIN = (torch.Tensor, nn.Parameter)


class Regather(Protocol):
    """Brings a unit's parameters back during backward."""

    def regather(self) -> None:
        """Gather the unit unless it is there. Collective."""

    def copies_saved(self, handle: FlatParamHandle) -> bool:
        """Whether to save copies of its parameters, as other ranks may not gather them again."""


class SavedView(NamedTuple):
    """A view of an unsharded buffer, by its place; ``version`` is the shard's at that time."""

    unit: Regather
    handle: FlatParamHandle
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int

    def restore(self) -> Tensor:
        """The view, gathered again if need be.

        Raises:
            RuntimeError: the parameters were edited since.
        """
        handle = self.handle
        if not handle.is_current:
            self.unit.regather()
        if handle.version != self.version:
            raise RuntimeError(
                f"unit {handle.unit_name!r}: its parameters were modified between forward "
                "and backward (an optimizer step, or an edit in place), and backward needs them "
                "as they were. Run backward first, or forward again."
            )
        return handle.buffer.as_strided(self.size, self.stride, self.offset)


class SavedTensors:
    """The pair of hooks for one tree of units.

    Args:
        units: every unit with its flat parameters.
    """

    def __init__(self, units: Iterable[tuple[Regather, Iterable[FlatParamHandle]]]) -> None:
        self._buffers = {
            handle.buffer.untyped_storage()._cdata: (unit, handle)
            for unit, handles in units
            for handle in handles
            if handle.buffer_bytes
        }
        self._active: list[torch.autograd.graph.saved_tensors_hooks | None] = []
        self._packs: list[Callable[[Tensor], Any]] = []

    def owner(self, tensor: Tensor) -> tuple[Regather, FlatParamHandle] | None:
        """The unit whose unsharded buffer ``tensor`` looks into, or None."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return None
        return self._buffers.get(tensor.untyped_storage()._cdata)

    def push(self) -> None:
        """Start packing, unless our hooks are on top already; pairs with ``pop``.

        Every unit asks: a checkpoint between two units puts its own hooks on top, and it counts
        what it sees, in forward and again in recomputation, where the outer unit is not running.
        """
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is not None and self._packs and outer[0] is self._packs[-1]:
            self._active.append(None)
            return
        pack, unpack = self._pair(outer)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        hooks.__enter__()
        self._active.append(hooks)
        self._packs.append(pack)

    def pop(self) -> None:
        """Undo the last ``push``."""
        hooks = self._active.pop()
        if hooks is not None:
            self._packs.pop()
            hooks.__exit__(None, None, None)

    def _pair(
        self, outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
    ) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        buffers = self._buffers
        outer_pack, outer_unpack = outer if outer is not None else (_pack, _unpack)

        def pack(tensor: Tensor) -> Any:
            if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                found = buffers.get(tensor.untyped_storage()._cdata)
                if found is not None:
                    unit, handle = found
                    reinterprets = tensor.dtype != handle.buffer.dtype
                    reinterprets |= tensor.is_conj() or tensor.is_neg()
                    if reinterprets or unit.copies_saved(handle):  # both are rare
                        return outer_pack(tensor.clone())
                    return SavedView(
                        unit,
                        handle,
                        tensor.size(),
                        tensor.stride(),
                        int(tensor.storage_offset()),
                        handle.version,
                    )
            return outer_pack(tensor)

        def unpack(packed: Any) -> Tensor:
            if type(packed) is SavedView:
                return packed.restore()
            return outer_unpack(packed)

        return pack, unpack


def _pack(tensor: Tensor) -> tuple[Tensor, int]:
    # Detached: a node that saves its own output would otherwise be held by that, and never freed
    # without a backward. Autograd remembers by itself what the output is connected to.
    return tensor.detach(), tensor._version


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a {tuple(tensor.shape)} {tensor.dtype} tensor is at version "
            f"{tensor._version}, expected version {version}"
        )
    return tensor
