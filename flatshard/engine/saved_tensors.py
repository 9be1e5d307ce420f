"""``SavedTensors``: autograd saves a place in an unsharded buffer instead of a view of the buffer.

Autograd saves views of parameters for backward, but the unsharded buffer is freed between. So
saved-tensor hooks, active in every forward, replace each view of a buffer by a ``SavedView``. When
autograd asks for the tensor, the hooks unshard the unit again and make a new view. So a saved
tensor is valid in any order of backward.

Autograd does not check the version of packed tensors, so this module checks for edits in place.
Other saved-tensor hooks around a forward (of an activation checkpoint or ``save_on_cpu``) still
receive every tensor that is not a view of an unsharded buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatshard.engine.backward import Backward
from flatshard.engine.handle import FlatParamHandle, ShardState
from flatshard.engine.run_state import RunState
from flatshard.precision import tensors_in
from flatshard.tensor.sharded_tensor import untraced
from flatshard.units.module_tree import unit_text

_PLAIN = (torch.Tensor, nn.Parameter)


class SavedView(tuple[Any, ...]):
    """The tuple that autograd saves for a view of an unsharded buffer.

    The flat parameter's handle, the view's size, stride and offset, and the shard's version. For a
    full parameter, the parameter stands in place of the size, and stays valid as long as the
    buffer. Not a ``NamedTuple``, which takes longer to create.
    """

    __slots__ = ()


class SavedDTensor(NamedTuple):
    """The tuple that autograd saves for a DTensor whose local tensor is a view of a buffer."""

    kind: Any  # the DTensor class; stored because importing the class is slow

    # This rank's local tensor, as a `SavedView` or as the user's saved-tensor hook packed it.
    local: Any
    layout: Any

    def around(self, local: Tensor) -> Tensor:
        """Rebuild the DTensor, with ``local`` as the local tensor of this rank."""
        return self.kind(local, self.layout, requires_grad=False)  # type: ignore[no-any-return]


class SavedTensors:
    """The saved-tensor hooks of one model."""

    def __init__(self, state: RunState, backward: Backward) -> None:
        self._state, self._backward = state, backward
        # For each storage of a buffer, its handle and whether to save copies (`Unit.copies_saved`).
        # The address is a valid key: freeing the buffer only resizes the storage to zero.
        self._owners = {
            handle.buffer.untyped_storage()._cdata: (handle, handle.unit.copies_saved(handle))
            for handle in state.handles
            if handle.buffer_bytes
        }
        # For each forward under way, whether it installed hooks. It did not if the hooks of an
        # outer forward were on top.
        self.active: list[bool] = []
        self._installed: list[torch.autograd.graph.saved_tensors_hooks] = []
        self._usual_pair = self._pair(None)

    def _owner(self, tensor: Tensor) -> tuple[FlatParamHandle, bool] | None:
        plain: Any = tensor if type(tensor) in _PLAIN else getattr(tensor, "_local_tensor", None)
        if type(plain) not in _PLAIN or plain.layout is not torch.strided:
            return None
        return self._owners.get(plain.untyped_storage()._cdata)

    def protect(self, output: Any, unit_name: str) -> Any:
        """Return a module's output, with copies in place of views of unsharded buffers.

        The views would be invalid, because the buffers are freed after the forward.
        """
        if not any(map(self._owner, tensors_in(output))):
            return output
        output = pytree.tree_map_only(Tensor, lambda t: t.clone() if self._owner(t) else t, output)
        if any(map(self._owner, tensors_in(output))):
            raise RuntimeError(
                f"{unit_text(unit_name)} returns a view of its parameters in an object that is no "
                "tuple, list or dict. Resharding after forward frees the view: return a clone()."
            )
        return output

    def push(self) -> None:
        """Put this model's saved-tensor hooks on top of autograd's stack, if not there already.

        Each call needs a later call of ``pop``.
        """
        if torch._C._functorch.maybe_current_level() is not None:
            raise RuntimeError(
                "torch.func.jvp, vmap, grad and other transforms cannot call a sharded model: its "
                "forward communicates. For derivatives along a direction, call the model with dual "
                "numbers (torch.autograd.forward_ad.make_dual), which backward() supports, too. "
                "Otherwise, under ShardedWrapper.summon_full_params(model, writeback=False), let "
                "the transformed function call model.module instead of the model, and take "
                "gradients by torch.autograd.grad()."
            )
        # Every unit's forward calls `push`, because an activation checkpoint may be between an
        # outer and an inner unit, and needs the same tensors in forward and in recomputation, where
        # the outer unit does not run. So the inner unit puts flatshard's hooks on top of the
        # checkpoint's.
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        ours = self._installed[-1].pack_hook if self._installed else None
        self.active.append(outer is None or outer[0] is not ours)
        if self.active[-1]:
            # Torch calls only the topmost pair, so pass other tensors to the pair below.
            pair = self._usual_pair if outer is None else self._pair(outer)
            self._installed.append(torch.autograd.graph.saved_tensors_hooks(*pair))
            self._installed[-1].__enter__()

    def pop(self) -> None:
        if self.active.pop():
            self._installed.pop().__exit__(None, None, None)

    def _pair(
        self, outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
    ) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        state, backward, owners = self._state, self._backward, self._owners

        def pack(tensor: Any) -> Any:
            # Autograd calls this function for every tensor that it saves, so make few calls here.
            is_plain = type(tensor) in _PLAIN
            if is_plain and tensor.layout is torch.strided:
                found = owners.get(tensor.untyped_storage()._cdata)
            else:
                found = self._owner(tensor)
            if found is None:
                if outer is not None:
                    return outer[0](tensor)
                # If a node of the graph saved its own output, node and output would refer to each
                # other, and only a backward would free both. Autograd reconnects the unpacked
                # tensor to its node.
                return tensor.detach(), tensor._version
            if not is_plain:
                return SavedDTensor(type(tensor), pack(tensor._local_tensor), tensor._spec)
            handle, copies = found
            if handle.buffer._version != handle.clean_version:
                state.edits.check_values(handle)
            if type(tensor) is nn.Parameter and not copies:
                return SavedView((handle, tensor, None, 0, handle.gathered_version))
            # `as_strided` cannot rebuild these: a view in another dtype, conjugated or negated.
            reinterprets = tensor.dtype != handle.buffer.dtype
            if reinterprets or tensor.is_conj() or tensor.is_neg() or copies:
                copy = tensor.clone()  # rare, so the memory of the copies is small
                return (copy, copy._version) if outer is None else outer[0](copy)
            size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
            return SavedView((handle, size, stride, int(offset), handle.gathered_version))

        def unpack(packed: Any) -> Tensor:
            kind = type(packed)
            if kind is SavedDTensor:
                return packed.around(unpack(packed.local))
            if kind is not SavedView:
                if outer is not None:
                    return outer[1](packed)
                tensor, version = packed
                if tensor._version != version:
                    raise _edited(tensor, version)
                return tensor
            handle, size, stride, offset, saved_version = packed
            # Unshard if the unit was resharded, or if an optimizer step made the buffer stale.
            version = handle.version if handle.is_whole else handle.flat_param._version
            if handle.state is not ShardState.UNSHARDED or handle.gathered_version != version:
                backward.unshard_again(handle.unit)
                version = handle.version
            # Autograd does not check the version of packed tensors.
            if version != saved_version:
                raise RuntimeError(
                    f"{unit_text(handle.unit_name)}: its parameters were modified between forward "
                    "and backward (by an optimizer step, or by an edit in place), but backward "
                    "needs the values of the forward. Run backward before the modification, or run "
                    "forward again."
                )
            return size if stride is None else handle.buffer.as_strided(size, stride, offset)

        # Dynamo cannot represent units and handles in a graph.
        return untraced(pack), untraced(unpack)


def _edited(tensor: Tensor, version: int) -> RuntimeError:
    """Return the error that autograd raises if a tensor was edited after it was saved."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a {tuple(tensor.shape)} {tensor.dtype} tensor is at version "
        f"{tensor._version}, not {version}. Edit the tensor after backward, or edit a clone()."
    )
