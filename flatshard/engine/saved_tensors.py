"""``SavedTensors``: replaces views of unsharded buffers that autograd saves for backward.

Autograd saves views of parameters for backward, but the unsharded buffer is freed between forward
and backward. So saved-tensor hooks replace each view of a buffer by a ``SavedView``. When autograd
asks for the tensor, the hooks unshard the unit, if necessary, and make a new view.

Autograd does not check the versions of tensors that hooks have replaced, so this module does.
Other saved-tensor hooks around a forward (of ``save_on_cpu``, for example) still receive every
tensor that is not a view of an unsharded buffer.

[Note: checkpoints]
A unit's forward inside an activation checkpoint (``torch.utils.checkpoint``, not reentrant) runs
without flatshard's hooks. In forward, the checkpoint saves no tensors. In backward, the recomputed
forward saves plain views, which backward reads while the unit is unsharded, or soon afterwards. As
long as views exist, the buffer keeps its memory (``FlatParamHandle.had_views``).

[Note: forwards without hooks]
Autograd calls the hooks for every saved tensor, which takes a fifth of the host's time for a step.
So later steps run without hooks if the hooks have made no difference in two consecutive steps. (A
step begins with the first forward after a backward, and includes the next backward.) The hooks make
no difference under two conditions: backward reads every ``SavedView``, and only at times at which
``Backward.enter`` has already unsharded the unit. Then plain views work too, because a buffer is
filled again at the same address and with the same version.

A forward without hooks may differ from the earlier forwards, and save a view that backward reads
while the unit is resharded. To notice this, the number of graph nodes that autograd makes in a
unit's forward is compared with the numbers in forwards with hooks. After a forward with a new
number, the unit's buffer keeps its memory until the next step, and later forwards have hooks again.

A program may also keep a tensor from inside of a unit, and start a backward there. So forwards also
have saved-tensor hooks if an attribute of a module contains such a tensor, and while modules inside
of a unit have forward or backward hooks. If the program has kept the tensor in another way,
autograd raises when it reads the freed buffer ([Note: versions of the buffer], ``handle.py``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatshard.engine.backward import Backward
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Call, Phase, Unit, written_since_forward
from flatshard.precision import tensors_in
from flatshard.tensor.sharded_tensor import untraced
from flatshard.units.module_tree import unit_text

_PLAIN = (torch.Tensor, nn.Parameter)
_CHECKPOINT = "torch.utils.checkpoint"  # the module of torch's hooks for activation checkpointing

CLEAN_STEPS = 2
"""After this number of steps in which hooks made no difference, forwards run without hooks.

More than one, because a program may do something different in every second step, for example.
"""

_REGISTERED = ("_parameters", "_buffers", "_modules")  # attributes of each `nn.Module`

# If more than this number of forwards without hooks have differed from all earlier forwards, all
# later forwards have hooks.
_MAX_UNLIKE = 8


@dataclass(slots=True, eq=False)
class SavedView:
    """The object that autograd saves in place of a view of an unsharded buffer."""

    handle: FlatParamHandle  # the flat parameter of the buffer
    version: int  # version of the shard when the view was saved
    # The saved tensor, if it is a whole unsharded parameter: the tensor becomes valid again when
    # the buffer is filled again. None: `unpack` makes a new view at `place`.
    param: nn.Parameter | None
    place: tuple[Any, ...] = ()  # size, stride and offset of the view
    step: int = -1  # the step in which the view was saved; -1 once the view was read


class SavedDTensor(NamedTuple):
    """The object that autograd saves in place of a DTensor around a view of an unsharded buffer."""

    kind: Any  # the class DTensor; stored because importing it is slow
    local: Any  # the result of `pack` for this rank's local tensor
    layout: Any  # the DTensor's `_spec`

    def around(self, local: Tensor) -> Tensor:
        """Rebuild the DTensor, with ``local`` as the local tensor of this rank."""
        return self.kind(local, self.layout, requires_grad=False)  # type: ignore[no-any-return]


class SavedTensors:
    """The saved-tensor hooks of one model."""

    def __init__(self, state: RunState, backward: Backward) -> None:
        self._state, self._backward = state, backward
        # The keys are the addresses of unsharded buffers' storage objects, which stay the same:
        # freeing a buffer only resizes its storage to zero. The values are the flat parameter, and
        # whether to save copies (`Unit.copies_saved`).
        self._owners = {
            handle.buffer.untyped_storage()._cdata: (handle, handle.unit.copies_saved(handle))
            for handle in state.handles
            if handle.buffer_bytes
        }
        # For each running forward of a unit, whether the forward has installed saved-tensor hooks.
        # False if it needs no hooks, or if an outer forward has installed the hooks already.
        self.active: list[bool] = []
        self._installed: list[torch.autograd.graph.saved_tensors_hooks] = []
        self._usual_pair = self._pair(None)
        # The attributes below are for [Note: forwards without hooks].
        self.has_hooks = bool(self._owners)  # whether forwards have hooks now
        self.had_hooks = True  # whether all forwards of this step have had hooks
        # `_known`: forwards that need no hooks. `_new`: the forwards with hooks since the last step
        # that needed hooks (`_num_unread` was not 0). For each forward: the unit, and the number of
        # graph nodes that autograd made.
        self._known: set[tuple[Unit, int]] = set()
        self._new: set[tuple[Unit, int]] = set()
        # Number of forwards without hooks that differed from all earlier forwards.
        self._num_unlike = 0
        # Hooks on modules inside of units (dicts). The program's hooks may keep tensors from inside
        # of a unit, or read parameters in backward.
        self._hooks: list[Mapping[int, Any]] = []
        # `_num_unread`: number of views saved in this step that were not read in the unit's own
        # backward yet, plus the number of reads at other times. If it is 0, hooks made no
        # difference. `_step`: number of the present step.
        self._num_unread = self._step = 0
        # Number of consecutive steps, up to now, in which hooks made no difference.
        self._num_clean = 0
        self.backward_has_ended = False  # whether a backward has ended in this step

    def _owner(self, tensor: Tensor) -> tuple[FlatParamHandle, bool] | None:
        plain: Any = tensor if type(tensor) in _PLAIN else getattr(tensor, "_local_tensor", None)
        if type(plain) not in _PLAIN or plain.layout is not torch.strided:
            return None
        return self._owners.get(plain.untyped_storage()._cdata)

    def protect(self, output: Any, unit_name: str) -> Any:
        """Return a module's output, with copies in place of views of unsharded buffers.

        The buffers are freed after the forward, so views would be invalid.
        """
        if not any(map(self._owner, tensors_in(output))):
            return output
        output = pytree.tree_map_only(Tensor, lambda t: t.clone() if self._owner(t) else t, output)
        if any(map(self._owner, tensors_in(output))):
            raise RuntimeError(
                f"{unit_text(unit_name)} returns a view of its parameters in an object that is no "
                "tuple, list or dict. Resharding frees the view after forward. Return a clone()."
            )
        return output

    def begin_forward(self) -> None:
        """Prepare for a forward of the model. The first forward after a backward begins a new step.

        Decides whether forwards have hooks from now on ([Note: forwards without hooks]).
        """
        is_new, self.backward_has_ended = self.backward_has_ended, False
        if is_new:
            is_clean = self.had_hooks and self._new and not self._num_unread
            self._num_clean = self._num_clean + 1 if is_clean else 0
            if self._num_clean >= CLEAN_STEPS:
                self._learn()
            self._num_unread, self._step = 0, self._step + 1
            if not self._num_clean:
                self._new.clear()
            for unit in self._state.units:
                unit.keeps_views = False
        # If the program has registered hooks on inner modules, it may keep a tensor from inside of
        # a unit, and start a backward there.
        if any(self._hooks):
            self.has_hooks = bool(self._owners)
        self.had_hooks = self.has_hooks and (self.had_hooks or is_new)

    def _learn(self) -> None:
        self._known |= self._new
        self._num_clean = 0
        self.has_hooks = self._num_unlike > _MAX_UNLIKE
        self._hooks = [
            hooks
            for module in self._state.root.modules
            for one in module.modules()
            for hooks in (
                *(one._forward_hooks, one._forward_pre_hooks),
                *(one._backward_hooks, one._backward_pre_hooks),
            )
        ]

    def begin_call(self, unit: Unit, call: Call, *, recomputes: bool) -> None:
        """Begin a forward of ``unit``: install hooks, if the forward needs any."""
        is_foreign = self.push(needed=self.has_hooks or recomputes, in_checkpoint=False)
        if is_foreign and not self.active[-1]:  # see [Note: checkpoints]
            # `has_hooks` is False for a recomputed forward, whose inputs need not be counted: no
            # backward runs through its graph.
            call.has_hooks = not recomputes
            for handle in unit.handles:
                handle.had_views = True
        elif not (is_foreign or recomputes):
            call.has_hooks = self.has_hooks
            call.first_node = torch._C._autograd._get_sequence_nr()

    def ends_with_gradients(self, unit: Unit, call: Call) -> bool:
        """Whether the backward of ``call`` is over once it has computed all parameters' gradients.

        If False, the gradients of the call's inputs must have been computed, too.
        """
        return not (call.has_hooks or unit.is_read_late) and unit.trains_all

    def end_call(self, unit: Unit, call: Call) -> None:
        """Record a forward with hooks. Compare a forward without hooks with recorded forwards."""
        num_nodes = torch._C._autograd._get_sequence_nr() - call.first_node
        if call.first_node < 0 or not num_nodes:
            return
        if call.has_hooks:
            self._new.add((unit, num_nodes))
            if self._num_clean == CLEAN_STEPS - 1:
                self._num_unread += _keeps_tensor(unit)  # an increment keeps the hooks installed
            return
        call.versions = {h: h.clean_version for h in unit.for_backward if h.was_read}
        if self._known and (unit, num_nodes) not in self._known:
            self.keep_views(unit)

    def keep_views(self, unit: Unit) -> None:
        """Keep the memory of the unit's buffers, because backward may read a view at any time.

        From now on, forwards have hooks again.
        """
        unit.keeps_views = True
        self._num_unlike += not self.has_hooks
        self.has_hooks = bool(self._owners)

    def push(self, *, needed: bool = True, in_checkpoint: bool = True) -> bool:
        """Put this model's saved-tensor hooks on top of autograd's stack, unless already on top.

        Returns whether hooks of other code (``save_on_cpu``, for example) were on top. With
        ``needed=False``, hooks are installed only in this case. Call ``pop`` afterwards.

        ``in_checkpoint``: whether to install hooks if an activation checkpoint's hooks are on top.
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
        # The forward of every unit calls `push`, not only the outermost. An activation checkpoint
        # between an outer and an inner unit must receive the same saved tensors in forward and in
        # recomputation. In recomputation, only the inner unit runs. So whether the inner unit
        # installs hooks on top of other hooks must not depend on the outer unit, nor on the step.
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        ours = self._installed[-1].pack_hook if self._installed else None
        is_foreign = outer is not None and outer[0] is not ours
        is_left_out = not in_checkpoint and is_foreign and outer[0].__module__ == _CHECKPOINT
        self.active.append(not is_left_out and (is_foreign or (needed and outer is None)))
        if self.active[-1]:
            # Torch calls only the topmost pair of hooks. So flatshard's pair passes all tensors
            # that are not views of buffers to the pair below (`outer`).
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
                # Save a detached tensor. If a graph node saved its own output undetached, node and
                # output would refer to each other, and leak unless a backward runs. After `unpack`,
                # autograd connects the tensor to the node again.
                return tensor.detach(), tensor._version
            self._num_unread += 1
            if type(tensor) not in _PLAIN:  # a DTensor around a view
                return SavedDTensor(type(tensor), pack(tensor._local_tensor), tensor._spec)
            handle, copies = found
            if handle.buffer._version != handle.clean_version:
                state.edits.check_values(handle)
            if type(tensor) is nn.Parameter and not copies:
                return SavedView(handle, handle.gathered_version, tensor, step=self._step)
            # Copy views that `as_strided` cannot rebuild: in another dtype, conjugated or negated.
            reinterprets = tensor.dtype != handle.buffer.dtype
            if reinterprets or tensor.is_conj() or tensor.is_neg() or copies:
                copy = tensor.clone()  # happens rarely, so these copies need little memory
                return (copy, copy._version) if outer is None else outer[0](copy)
            place = tensor.size(), tensor.stride(), int(tensor.storage_offset())
            return SavedView(handle, handle.gathered_version, None, place, self._step)

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
            # Unshard if the buffer was freed, or if an optimizer step has written the shards since.
            if not (is_current := handle.is_current):
                backward.unshard_again(handle.unit)
            if not is_current or handle.unit.phase is not Phase.BACKWARD:
                self._num_unread += 1  # keeps the hooks: without hooks, this read would fail
            elif packed.step == self._step:
                packed.step, handle.was_read = -1, True
                self._num_unread -= 1
                handle.unit.is_read_late |= handle.unit.has_all_gradients
            if handle.version != packed.version:
                raise written_since_forward(handle.unit)
            if packed.param is not None:
                return packed.param
            return handle.buffer.as_strided(*packed.place)

        # Keep Dynamo from tracing these functions: a compiled graph cannot unshard units.
        return untraced(pack), untraced(unpack)


def _keeps_tensor(unit: Unit) -> bool:
    """Whether an attribute of a module in ``unit`` has a tensor where a backward may start."""
    inside = [one for module in unit.modules for one in module.modules()]
    kept = [value for one in inside for name, value in vars(one).items() if name not in _REGISTERED]
    return any(tensor.grad_fn is not None for tensor in tensors_in(kept, depth=0))


def _edited(tensor: Tensor, version: int) -> RuntimeError:
    """Return an error like autograd's, for a tensor that was edited after it was saved."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a {tuple(tensor.shape)} {tensor.dtype} tensor is at version "
        f"{tensor._version}, not {version}. Edit the tensor after backward, or edit a clone()."
    )
