"""``SavedTensors``: autograd saves places in the unsharded buffers instead of their memory.

A unit's buffer is resharded between forward and backward, while autograd keeps views of it.
Saved-tensor hooks, active during every forward, turn each such view into a ``SavedView``. When
autograd asks for the view, the unit is unsharded again. So no saved tensor can dangle, whatever the
order of backward is.

Saved-tensor hooks switch off autograd's own check for in-place edits of saved tensors, so this
module checks versions. Outer hooks (checkpointing, ``save_on_cpu``) get every tensor that is not a
view of a unit's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatshard.engine.backward import Backward
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.plan.module_tree import unit_text
from flatshard.precision import tensors_in

_PLAIN = (torch.Tensor, nn.Parameter)


class SavedView(NamedTuple):
    """Place of a view in an unsharded buffer; ``version`` is the shard's when it was saved."""

    unit: Unit
    handle: FlatParamHandle
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int


class SavedDTensor(NamedTuple):
    """A DTensor over an unsharded buffer."""

    kind: Any  # the DTensor class, kept here because importing it is slow
    local: Any  # this rank's local tensor, packed
    layout: Any

    def around(self, local: Tensor) -> Tensor:
        """Rebuild the DTensor over ``local``."""
        return self.kind(local, self.layout, requires_grad=False)  # type: ignore[no-any-return]


class SavedTensors:
    def __init__(self, handles: Iterable[tuple[Unit, FlatParamHandle]], backward: Backward) -> None:
        self._backward = backward
        # Units and handles, keyed by the storage of the buffer. A buffer keeps its storage object
        # for life, also while the storage is resized to nothing.
        self._buffers = {
            handle.buffer.untyped_storage()._cdata: (unit, handle)
            for unit, handle in handles
            if handle.buffer_bytes
        }
        # One entry for each forward under way. None: an outer forward's hooks are already on top.
        self._active: list[torch.autograd.graph.saved_tensors_hooks | None] = []

    def _owner(self, tensor: Tensor) -> tuple[Unit, FlatParamHandle] | None:
        plain: Any = tensor if type(tensor) in _PLAIN else getattr(tensor, "_local_tensor", None)
        if type(plain) not in _PLAIN or plain.layout is not torch.strided:
            return None
        return self._buffers.get(plain.untyped_storage()._cdata)

    def protect(self, output: Any, unit_name: str) -> Any:
        """Return a module's output with views of unsharded buffers replaced by copies.

        The buffers are freed after the forward.
        """
        if not any(map(self._owner, tensors_in(output))):
            return output
        output = pytree.tree_map_only(Tensor, lambda t: t.clone() if self._owner(t) else t, output)
        if any(map(self._owner, tensors_in(output))):
            raise RuntimeError(
                f"{unit_text(unit_name)} returns a view of its parameters inside an object. They "
                "are resharded after forward: return a clone()."
            )
        return output

    def push(self) -> None:
        """Install our saved-tensor hooks, unless they are on top already; pairs with ``pop``."""
        # Every unit's forward comes here, not only the outermost: a checkpoint between two units
        # puts its own hooks on top. The checkpoint counts the tensors that it packs, in forward and
        # again in recomputation, where the outer unit does not run. Both counts must agree.
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        ours = next((one for one in reversed(self._active) if one is not None), None)
        if outer is not None and ours is not None and outer[0] is ours.pack_hook:
            self._active.append(None)
            return
        # Torch calls only the topmost pair of hooks, so ours pass the remaining tensors to the
        # outer pair.
        hooks = torch.autograd.graph.saved_tensors_hooks(*self._pair(outer))
        hooks.__enter__()
        self._active.append(hooks)

    def pop(self) -> None:
        hooks = self._active.pop()
        if hooks is not None:
            hooks.__exit__(None, None, None)

    def _pair(
        self, outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
    ) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        backward = self._backward
        outer_pack, outer_unpack = outer if outer is not None else (_pack, _unpack)

        def pack(tensor: Any) -> Any:
            found = self._owner(tensor)
            if found is None:
                return outer_pack(tensor)
            if type(tensor) not in _PLAIN:
                return SavedDTensor(type(tensor), pack(tensor._local_tensor), tensor._spec)
            unit, handle = found
            # `as_strided` of the buffer could not rebuild these tensors (another dtype, or lazily
            # conjugated or negated).
            reinterprets = tensor.dtype != handle.buffer.dtype
            if reinterprets or tensor.is_conj() or tensor.is_neg() or unit.copies_saved(handle):
                return outer_pack(tensor.clone())  # all these cases are rare
            size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
            return SavedView(unit, handle, size, stride, int(offset), handle.version)

        def unpack(packed: Any) -> Tensor:
            if type(packed) is SavedDTensor:
                return packed.around(unpack(packed.local))
            if type(packed) is not SavedView:
                return outer_unpack(packed)
            unit, handle, size, stride, offset, version = packed
            # The unit was resharded since, or its kept buffer is stale after an optimizer step.
            if not handle.is_current:
                backward.unshard_again(unit)
            # Torch checks no versions of tensors that hooks pack.
            if handle.version != version:
                raise RuntimeError(
                    f"{unit_text(handle.unit_name)}: its parameters were modified between forward "
                    "and backward (an optimizer step, or an edit in place), and backward needs "
                    "them as they were. Run backward first, or forward again."
                )
            return handle.buffer.as_strided(size, stride, offset)

        # Keep the hooks out of compiled graphs: Dynamo would trace the hooks, but cannot represent
        # units and handles.
        return torch.compiler.disable(pack), torch.compiler.disable(unpack)


def _pack(tensor: Tensor) -> tuple[Tensor, int]:
    # Detach: otherwise a node with its own output as a saved tensor is in a reference cycle, and is
    # never freed without a backward. Autograd reconnects the output.
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
