"""``SavedTensors``: replaces views of unsharded buffers that autograd saves for backward.

Autograd saves views of parameters for backward, but the unsharded buffer is freed between forward
and backward. So saved-tensor hooks replace each view of a buffer by a ``SavedView``. When autograd
asks for the tensor, the hooks unshard the unit again and make a new view. So a saved tensor is
valid in any order of backward.

Autograd does not check the version of packed tensors, so this module checks for edits in place.
Other saved-tensor hooks around a forward (of an activation checkpoint or ``save_on_cpu``) still
receive every tensor that is not a view of an unsharded buffer.

[Note: forwards without hooks]
Autograd calls the hooks for every tensor, which takes a fifth of the host's time for a step. So the
hooks are left out once they have made no difference in three steps: autograd asked for every
``SavedView``, and each time the unit was unsharded already, because the gradient of the unit's
output had arrived before (``Backward.enter``). Then plain views are enough, because a buffer is
filled again at the same address and with the same version.

Without hooks, a unit's forward is compared with the forwards that had hooks, by the number of nodes
that autograd has made. In a forward with another number, autograd may have saved a view that
backward reads at another time. Then the memory of the unit's buffer is kept until the unit is used
in the next step, and forwards have hooks again.

A program may also start a backward at a tensor inside of a unit, and did not do so in earlier
steps. So forwards also have hooks if an attribute of a module holds such a tensor, and while a
module inside of a unit has hooks of the program. If the program kept the tensor in another way,
autograd raises when it reads the freed buffer ([Note: versions of the buffer] in ``handle``).

Without hooks, a unit's backward is usually over once all gradients of parameters have arrived: in
the steps with hooks, autograd has read no view later (``Unit.is_read_late``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatshard.engine.backward import Backward
from flatshard.engine.handle import FlatParamHandle, ShardState
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Call, Phase, Unit, written_since_forward
from flatshard.precision import tensors_in
from flatshard.tensor.sharded_tensor import untraced
from flatshard.units.module_tree import unit_text

_PLAIN = (torch.Tensor, nn.Parameter)

CLEAN_ROUNDS = 3
"""Number of consecutive rounds in which hooks must make no difference before they are left out.

More than one, because a program may do something different in every second step, for example.
"""

_REGISTERED = ("_parameters", "_buffers", "_modules")  # attributes of an `nn.Module`

# Maximum number of forwards without hooks that are unlike all earlier forwards. After this number,
# every forward has hooks.
_MAX_UNLIKE = 8


@dataclass(slots=True, eq=False)
class SavedView:
    """The object that autograd saves for a view of an unsharded buffer: the view's place."""

    handle: FlatParamHandle
    version: int  # version of the shard
    # The saved tensor, if it is a full parameter, which stays valid as long as the buffer. None:
    # `unpack` makes a new view at `place`.
    param: nn.Parameter | None
    place: tuple[Any, ...] = ()  # size, stride and offset of the view
    round: int = -1  # `SavedTensors._round`; -1 once the view was read


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
        # For each forward under way, whether the forward installed hooks. False if the forward
        # needs no hooks, or if the hooks of an outer forward were on top already.
        self.active: list[bool] = []
        self._installed: list[torch.autograd.graph.saved_tensors_hooks] = []
        self._usual_pair = self._pair(None)
        # The attributes below are for [Note: forwards without hooks]. `_known`: kinds of forwards
        # that need no hooks. `_new`: kinds of forwards since the last backward. A kind is a unit
        # and a number of autograd's nodes.
        self.has_hooks = bool(self._owners)
        self.had_hooks = True  # whether all forwards of this round have had hooks
        self._known: set[tuple[Unit, int]] = set()
        self._new: set[tuple[Unit, int]] = set()
        # number of forwards without hooks that were unlike all earlier forwards
        self._num_unlike = 0
        # Hooks of modules inside of units, by which the program sees tensors inside of a unit, or
        # reads parameters in backward.
        self._hooks: list[Mapping[int, Any]] = []
        # Number of views saved in this round that were not read in the unit's own backward, plus
        # the number of reads at other times. A round begins with the first outermost forward after
        # a backward.
        self._num_unread = self._round = 0
        # number of the latest consecutive rounds in which hooks made no difference
        self._num_clean = 0
        self.backward_has_ended = False  # whether a backward has ended in this round

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

    def begin_forward(self) -> None:
        """Begin the outermost forward, and a new round if a backward has ended since the last one.

        Leave out the hooks from now on, if they made no difference in the last rounds.
        """
        is_new, self.backward_has_ended = self.backward_has_ended, False
        if is_new:
            is_clean = self.had_hooks and self._new and not self._num_unread
            self._num_clean = self._num_clean + 1 if is_clean else 0
            if self._num_clean >= CLEAN_ROUNDS:
                self._learn()
            self._num_unread, self._round = 0, self._round + 1
            if not self._num_clean:
                self._new.clear()
            for unit in self._state.units:
                unit.keeps_views = False
        # The program may keep a tensor inside of a unit by a hook, and start a backward there.
        if any(self._hooks):
            self.has_hooks = bool(self._owners)
        self.had_hooks = self.has_hooks and (self.had_hooks or is_new)

    def _learn(self) -> None:
        self._known |= self._new
        self._num_clean = 0
        self.has_hooks = self._num_unlike > _MAX_UNLIKE
        units = {module for unit in self._state.units for module in unit.modules}
        inside = {one for module in self._state.root.modules for one in module.modules()}
        self._hooks = [
            hooks
            for one in inside - units
            for hooks in (one._forward_hooks, one._forward_pre_hooks)
        ]
        for one in inside:
            self._hooks += (one._backward_hooks, one._backward_pre_hooks)

    def begin_call(self, unit: Unit, call: Call, *, recomputes: bool) -> None:
        """Begin a forward of ``unit``: install hooks, if the forward needs any."""
        is_foreign = self.push(needed=self.has_hooks or recomputes)
        if not (is_foreign or recomputes):
            call.has_hooks = self.has_hooks
            call.first_node = torch._C._autograd._get_sequence_nr()

    def ends_with_gradients(self, unit: Unit, call: Call) -> bool:
        """Whether the backward of ``call`` is over once all gradients of parameters have arrived.

        If not, the gradients of the call's inputs must have arrived, too.
        """
        return not (call.has_hooks or unit.is_read_late) and unit.trains_all

    def end_call(self, unit: Unit, call: Call) -> None:
        """Compare the ended forward of ``unit`` with earlier forwards, or record the forward."""
        num_nodes = torch._C._autograd._get_sequence_nr() - call.first_node
        if call.first_node < 0 or not num_nodes:
            return
        if call.has_hooks:
            self._new.add((unit, num_nodes))
            if self._num_clean == CLEAN_ROUNDS - 1:
                self._num_unread += _keeps_tensor(unit)  # so hooks stay
            return
        call.versions = {h: h.clean_version for h in unit.for_backward if h.was_read}
        if self._known and (unit, num_nodes) not in self._known:
            self.keep_views(unit)

    def keep_views(self, unit: Unit) -> None:
        """Keep the memory of the buffers of ``unit``: backward may read a view at any time.

        From now on, forwards have hooks again.
        """
        unit.keeps_views = True
        self._num_unlike += not self.has_hooks
        self.has_hooks = bool(self._owners)

    def push(self, *, needed: bool = True) -> bool:
        """Put this model's saved-tensor hooks on top of autograd's stack, if not there already.

        Each call needs a later call of ``pop``. Returns whether other code's hooks were on top.
        With ``needed=False``, hooks are installed only on top of these.
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
        # Every unit's forward calls `push`, not only the outermost. An activation checkpoint
        # between an outer and an inner unit must receive the same tensors in forward and in
        # recomputation, and in recomputation the outer unit does not run. So the inner unit puts
        # flatshard's hooks on top of the checkpoint's hooks.
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        ours = self._installed[-1].pack_hook if self._installed else None
        is_foreign = outer is not None and outer[0] is not ours
        self.active.append(is_foreign or (needed and outer is None))
        if self.active[-1]:
            # Torch calls only the topmost pair, so pass other tensors to the pair below.
            pair = self._usual_pair if outer is None else self._pair(outer)
            self._installed.append(torch.autograd.graph.saved_tensors_hooks(*pair))
            self._installed[-1].__enter__()
        return is_foreign

    def pop(self) -> None:
        if self.active.pop():
            self._installed.pop().__exit__(None, None, None)

    def _pair(
        self, outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
    ) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        state, backward = self._state, self._backward

        def pack(tensor: Any) -> Any:
            found = self._owner(tensor)
            if found is None:
                if outer is not None:
                    return outer[0](tensor)
                # Save a detached tensor. If a node of the graph saved its own output, node and
                # output would refer to each other, and only a backward would free both. After
                # `unpack`, autograd reconnects the tensor to its node.
                return tensor.detach(), tensor._version
            self._num_unread += 1
            if type(tensor) not in _PLAIN:  # a DTensor, without the version counter of its buffer
                return SavedDTensor(type(tensor), pack(tensor._local_tensor), tensor._spec)
            handle, copies = found
            if handle.buffer._version != handle.clean_version:
                state.edits.check_values(handle)
            if type(tensor) is nn.Parameter and not copies:
                return SavedView(handle, handle.gathered_version, tensor, round=self._round)
            # `as_strided` cannot rebuild these: a view in another dtype, conjugated or negated.
            reinterprets = tensor.dtype != handle.buffer.dtype
            if reinterprets or tensor.is_conj() or tensor.is_neg() or copies:
                copy = tensor.clone()  # rare, so the memory of the copies is small
                return (copy, copy._version) if outer is None else outer[0](copy)
            place = tensor.size(), tensor.stride(), int(tensor.storage_offset())
            return SavedView(handle, handle.gathered_version, None, place, self._round)

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
            handle = packed.handle
            # Unshard if the unit was resharded, or if an optimizer step made the buffer stale.
            version = handle.version if handle.is_whole else handle.flat_param._version
            is_current = handle.state is ShardState.UNSHARDED and handle.gathered_version == version
            if not is_current:
                backward.unshard_again(handle.unit)
                version = handle.version
            if not is_current or handle.unit.phase is not Phase.BACKWARD:
                self._num_unread += 1  # so hooks stay: without hooks, this read would have failed
            elif packed.round == self._round:
                packed.round, handle.was_read = -1, True
                self._num_unread -= 1
                handle.unit.is_read_late |= handle.unit.has_all_gradients
            # Autograd does not check the version of packed tensors.
            if version != packed.version:
                raise written_since_forward(handle.unit)
            if packed.param is not None:
                return packed.param
            return handle.buffer.as_strided(*packed.place)

        # Keep Dynamo from tracing these functions: a graph cannot contain units and handles.
        return untraced(pack), untraced(unpack)


def _keeps_tensor(unit: Unit) -> bool:
    """Whether a module in ``unit`` keeps a tensor with a graph, from which a backward may start."""
    inside = [one for module in unit.modules for one in module.modules()]
    kept = [value for one in inside for name, value in vars(one).items() if name not in _REGISTERED]
    return any(tensor.grad_fn is not None for tensor in tensors_in(kept, depth=0))


def _edited(tensor: Tensor, version: int) -> RuntimeError:
    """Return the error that autograd raises if a tensor was edited after it was saved."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a {tuple(tensor.shape)} {tensor.dtype} tensor is at version "
        f"{tensor._version}, not {version}. Edit the tensor after backward, or edit a clone()."
    )
