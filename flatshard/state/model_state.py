"""State dicts of models: full or sharded tensors, under the names of the unwrapped model.

torch's ``state_dict()`` recurses over the modules. Hooks that flatshard registers on the modules
then replace sharded values in the result (by full values, for example). So the order of entries,
extra state, users' hooks and ``state_dict()`` of a submodule work as in an unwrapped model.

[Note: writes into state dicts]
In an unwrapped model's state dict, the tensors share memory with the parameters, and some classes
for moving averages (timm's) write into these tensors. In a sharded model's state dict, the tensors
are full copies of the parameters. So ``WriteThrough`` looks for writes into the copies when the
model or the parameter is used next or when a copy is freed, and then copies the written values to
the shards. After ``p.data = t``, where ``p`` is a sharded parameter, ``WriteThrough`` also copies
later writes to the plain tensor ``t`` to the shard of ``p``.
"""

import sys
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatshard.comm.host_exchange import HostExchange
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.memory import ALONE, num_uses, sample
from flatshard.optimizer.state_dicts import StateDict, check_order, is_for_rank_0, torch_request
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.tensor.sharded_tensor import WATCHING, FlatShardTensor, local_range, state_shard
from flatshard.units.layout import view_of
from flatshard.units.module_tree import unit_text


def gather_full(handle: FlatParamHandle, on: torch.device | None, *, is_kept: bool) -> list[Tensor]:
    """Return copies of all original parameters of ``handle``, on device ``on``, in full shapes.

    Returns an empty list unless ``is_kept``. Collective: all ranks of the shard group, unless the
    unsharded buffer already has the values.
    """
    summoned = handle.summoned
    if summoned is not None and not summoned.is_held and not handle.is_whole:
        rank = handle.topology.world.global_rank
        raise RuntimeError(
            f"{unit_text(handle.unit.name)}, rank {rank}: a full state dict was requested under "
            "summon_full_params(rank0_only=True). In this context only rank 0 has full tensors, "
            "and no all-gather runs. Request the state dict on rank 0, or outside of the context."
        )
    # Make ordinary tensors: users could not write to inference tensors outside of inference mode.
    with torch.inference_mode(False), torch.no_grad():
        flat = handle.flat_param.detach()
        if not handle.is_whole:
            is_gathered = handle.is_current and handle.buffer.dtype == flat.dtype
            flat = handle.buffer if is_gathered else handle.gather_flat(flat)
        spans = handle.layout.spans if is_kept else ()
        return [view_of(flat, span).to(on or flat.device, copy=True) for span in spans]


def original_of(handle: FlatParamHandle, tensor: Any) -> OriginalParam | None:
    """Return the original parameter to which an entry of a state dict belongs, or None.

    Returns None for an ``nn.Parameter``, because the entry must not change: with ``keep_vars=True``
    the user wants the parameters themselves instead of full tensors.
    """
    if not isinstance(tensor, Tensor) or isinstance(tensor, nn.Parameter):
        return None
    if isinstance(tensor, FlatShardTensor):
        return next((param for param in handle.params if param.spec is tensor.spec), None)
    tensor = getattr(tensor, "_local_tensor", tensor)  # the local tensor of a DTensor
    if tensor.untyped_storage()._cdata != handle.buffer.untyped_storage()._cdata:
        return None
    place = tensor.storage_offset(), tuple(tensor.shape)
    return next((p for p in handle.params if (p.span.start, p.span.shape) == place), None)


def hosts_of(parts: Iterable[FlatParamHandle | Unit]) -> list[HostExchange]:
    """Return the ``HostExchange`` of each group of ranks that trains some of ``parts``."""
    return [*{part.topology.world.ranks: part.topology.world.host for part in parts}.values()]


class StateDictOptions(NamedTuple):
    """The form and device of state dicts, and the ranks that get them (as in FSDP1's configs)."""

    is_sharded: bool = False  # whether values are sharded, for `torch.distributed.checkpoint`
    offload_to_cpu: bool = False
    rank0_only: bool = False
    optim_offload_to_cpu: bool = True
    optim_rank0_only: bool = False


class UnitStateDict:
    """The state dict hooks of one unit's modules, and the options for the unit's values."""

    def __init__(self, unit: Unit) -> None:
        self.options = StateDictOptions()
        self.writes = WriteThrough()  # shared by all units of a model
        self.unit = unit
        # Number of nested calls of `state_dict()`. Only the outermost call replaces values.
        self._depth = 0
        places = (place for handle in unit.handles for place in handle.places)
        for module in {*unit.modules, *(module for module, _, _ in places)}:
            # torch sets an attribute on the first two hooks, which a bound method does not allow.
            module.register_state_dict_pre_hook(partial(self._enter))
            module.register_state_dict_post_hook(partial(self._after_save))
            module.register_load_state_dict_pre_hook(self._before_load)
            module.register_load_state_dict_post_hook(self._after_load)

    def _after_save(self, _: nn.Module, state_dict: StateDict, prefix: str, *rest: Any) -> None:
        if not self._leave():
            return
        # While torch's `get_state_dict` runs, its options replace the unit's.
        options, asked = self.options, torch_request()
        if asked is not None:
            only_rank_0 = is_for_rank_0(asked)
            options = StateDictOptions(not asked.full_state_dict, asked.cpu_offload, only_rank_0)
        if options.is_sharded:
            self.check_names()
            for handle in self.unit.handles:
                _keep_sharded(handle, state_dict, options.offload_to_cpu)
        is_saving = not options.rank0_only or self.unit.topology.world.rank == 0
        for handle in () if options.is_sharded else self.unit.handles:
            given = _replace_by_full(handle, state_dict, options.offload_to_cpu, is_saving)
            # A user's write into a tensor of the state dict must change the model, except if the
            # user asked for a state dict on the CPU or on rank 0.
            if not (options.offload_to_cpu or options.rank0_only):
                for param, full in given.items():
                    self.writes.watch(handle, param, full)
        for key in [key for key in state_dict if key.startswith(prefix)]:
            _treat_rest(state_dict, key, options.offload_to_cpu, is_saving)

    def check_names(self) -> None:
        """Raise NotImplementedError if only some of the model's ranks train the unit."""
        if self.unit.settings.ranks.world.size < self.unit.context.world.size:
            raise NotImplementedError(
                f"{unit_text(self.unit.name)} trains only on ranks "
                f"{self.unit.topology.world.ranks_text} of the model's ranks. Other ranks may hold "
                "other parameters of the same names, but a sharded checkpoint keeps one parameter "
                "per name. Save the unit's state dict separately, under other names."
            )

    def _before_load(
        self, module: nn.Module, state_dict: StateDict, prefix: str, metadata: StateDict, *rest: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise ValueError(
                "load_state_dict(assign=True) would replace shards by full tensors. Load without "
                "assign: then values are copied into the shards, and cast to the shards' dtype."
            )
        if (asked := torch_request()) is not None:
            for param in chain.from_iterable(handle.params for handle in self.unit.handles):
                check_order(asked, param.spec)
        for handle in self.unit.handles:
            for place, attribute, param in handle.places:
                key = prefix + attribute
                # If tensor parallelism splits the parameter, torch expects the shape of the local
                # part, which is the module's parameter.
                if place is module and key in state_dict:
                    state_dict[key] = param.spec.split(state_dict[key])
        self._enter(module)

    def _after_load(self, *_: Any) -> None:
        if self._leave():
            self.unit.count_load("a state dict")

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if module in self.unit.modules:
            # The call for a unit's own module is the outermost call. Reset the depth, which may be
            # wrong if an earlier call has raised.
            self._depth = 0
        self.writes.check()
        self._depth += 1

    def _leave(self) -> bool:
        self._depth -= 1
        return self._depth <= 0


def _replace_by_full(
    handle: FlatParamHandle, state_dict: StateDict, to_cpu: bool, is_saving: bool
) -> dict[OriginalParam, Tensor]:
    """Replace sharded parameters of ``handle`` in ``state_dict`` by full copies, and return these.

    Removes the parameters unless ``is_saving``. Collective: all ranks of the shard group or mesh.
    """
    found = {key: original_of(handle, value) for key, value in state_dict.items()}
    param_of_key = {key: param for key, param in found.items() if param is not None}
    if not param_of_key:
        return {}
    device = torch.device("cpu") if to_cpu else handle.device
    full = gather_full(handle, device, is_kept=is_saving)
    # All ranks must call `unsplit` in the same order: it is a collective over a DTensor's mesh.
    wanted = sorted({*param_of_key.values()}, key=lambda param: param.index) if is_saving else ()
    full_of = {param: param.spec.unsplit(full[param.index]) for param in wanted}
    for key, param in param_of_key.items():
        value = state_dict.pop(key) if not is_saving else state_dict[key]
        # The program may have computed the entry from the parameter (`_save_to_state_dict`, hooks).
        entry = full_of.get(param)
        if isinstance(value, FlatShardTensor) and not value.shard_origin.is_fixed:
            entry = param.spec.unsplit(value.full_tensor().to(device))
        if is_saving:
            state_dict[key] = entry
    return full_of


def _keep_sharded(handle: FlatParamHandle, state_dict: StateDict, to_cpu: bool) -> None:
    """Replace parameters of ``handle`` by shards that ``torch.distributed.checkpoint`` accepts.

    The shards share memory with the model, so that a load in place changes the model.
    """
    for key, value in list(state_dict.items()):
        if original_of(handle, value) is None:
            continue
        # Under NO_SHARD, the value may be a plain tensor in the shard's memory. Leave it as it is.
        if isinstance(value, FlatShardTensor):
            local = value.local.cpu() if to_cpu else value.local
            state_dict[key] = state_shard(local, value.spec, value.shard_role)
        elif value.untyped_storage()._cdata != handle.flat_param.untyped_storage()._cdata:
            raise RuntimeError(
                f"{unit_text(handle.unit.name)}: a sharded state dict was requested in the forward "
                "of the unit. Call state_dict() between steps."
            )


def _treat_rest(state_dict: StateDict, key: str, to_cpu: bool, is_saving: bool) -> None:
    """Move or remove entry ``key``, if it is a buffer, extra state or ignored parameter."""
    value = state_dict[key]
    # With keep_vars=True, the value may be the module's parameter.
    is_parameter = isinstance(value, nn.Parameter)
    if isinstance(value, FlatShardTensor) and not is_parameter:
        # Leave a parameter of another unit in the state dict: the other unit's hooks run later, and
        # all-gather the parameter on all ranks.
        return
    if not is_saving:
        del state_dict[key]
    elif to_cpu and isinstance(value, Tensor) and not is_parameter:
        state_dict[key] = value.cpu()


def options_of(parts: Sequence[UnitStateDict]) -> StateDictOptions:
    """Return the options that all units of a model share, or the default without units."""
    options = {part.options: part.unit.name for part in parts}
    if len(options) > 1:
        (first, one), (second, other), *_ = options.items()
        raise RuntimeError(
            f"state_dict_type: {unit_text(one)} and {unit_text(other)} have different types: "
            f"{first} and {second}. Set the same type for the whole model."
        )
    return next(iter(options), StateDictOptions())


def without_ddp_prefix(state_dict: StateDict, own: Collection[str]) -> dict[str, Any]:
    """Remove DistributedDataParallel's prefix ``module.`` from the names, if present.

    ``own``: the model's names. If the model has a child named ``module``, the prefix is removed
    only if this gives a name of the model.
    """
    if not all(key.startswith("module.") and key not in own for key in state_dict):
        return state_dict
    stripped = {key.removeprefix("module."): value for key, value in state_dict.items()}
    has_child = any(name.startswith("module.") for name in own)
    return state_dict if has_child and stripped.keys().isdisjoint(own) else stripped


# ------------------------------------------------------------ writes into state dicts


@dataclass(eq=False)
class WatchedCopy:
    """A tensor that ``state_dict()`` returned, or that a user has assigned to ``p.data``."""

    user: weakref.ref[Tensor]
    copy: Tensor  # shares memory and version counter with the user's tensor

    # Version and some values of `copy` (see `_state`) at the time when `copy` and the shard last
    # had equal values. None: since then, the extra `device_checks` has found a write to `copy`.
    state: tuple[int, list[int]] | None
    handle: FlatParamHandle
    param: OriginalParam
    shard: tuple[Any, ...]  # identity and version of the shard when `state` was read


class WriteThrough:
    """Watches tensors that stand for parameters, and copies users' writes to the shards.

    A tensor is watched as long as the user refers to it. See [Note: writes into state dicts].
    """

    def __init__(self) -> None:
        # The watched tensors, keyed by the id of the weak reference to the tensor.
        self.given: dict[int, WatchedCopy] = {}

        # Name of a parameter whose copy was written after the shard had changed, or "".
        self.lost = ""

    def __deepcopy__(self, memo: object) -> "WriteThrough":
        return type(self)()  # no user has a state dict of the copied model yet

    def watch(self, handle: FlatParamHandle, param: OriginalParam, full: Tensor) -> None:
        """Start copying values that the user writes into ``full`` to the shard."""
        # If other tensors share the memory, writes to them also reach the parameter, even after
        # `full` is freed.
        is_shared = num_uses(local_range(full)) > ALONE
        ref = weakref.ref(full, (lambda _: None) if is_shared else self._died)
        with torch.inference_mode(False):
            copy = full.detach()
        self.given[id(ref)] = WatchedCopy(ref, copy, _state(copy), handle, param, identity(handle))
        WATCHING.add(self)

    def assign(self, handle: FlatParamHandle, param: OriginalParam, value: Tensor) -> None:
        """Carry out ``p.data = value``. Later writes to ``value`` also reach the parameter."""
        self.given = {k: one for k, one in [*self.given.items()] if one.param is not param}
        self._write(handle, param, value)
        self.watch(handle, param, value)

    def _write(self, handle: FlatParamHandle, param: OriginalParam, value: Tensor) -> None:
        before = identity(handle)
        # Disable `__torch_function__`, which would call `check` while the shards are written.
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            param.sharded.copy_(value)
        handle.page_out()
        for given in [*self.given.values()]:
            if given.handle is handle and given.shard == before:
                given.shard = identity(handle)

    def _died(self, user: weakref.ref[Tensor], is_ending: Any = sys.is_finalizing) -> None:
        # When the program ends, torch's functions and this module's globals may already be gone.
        if (given := self.given.pop(id(user), None)) and not is_ending():
            self.take_over([given])

    def check(self, params: Collection[OriginalParam] | None = None) -> None:
        """Copy to the shards the values that users wrote to the watched tensors.

        Raises RuntimeError if written values are lost. ``params``: if given, check only the flat
        parameters that contain one of these parameters.
        """
        given = [*self.given.values()]
        handles = {one.handle for one in given if params is None or one.param in params}
        self.take_over([one for one in given if one.handle in handles])
        self.raise_lost()
        if not self.given:
            WATCHING.discard(self)

    def raise_lost(self) -> None:
        """Raise RuntimeError if values that the user wrote to a watched tensor are lost."""
        lost, self.lost = self.lost, ""
        if lost:
            raise RuntimeError(
                f"parameter {lost!r}: a tensor of state_dict(), or a tensor assigned to .data, was "
                "written, but the parameter had changed after the tensor was taken or assigned, so "
                "the written values are lost. Write to the parameter, or to a new state_dict(). To "
                "change a tensor without the parameter, clone the tensor first. To tie parameters, "
                "put one parameter into both modules before wrapping, instead of q.data = p.data."
            )

    def take_over(self, some: Sequence[WatchedCopy]) -> None:
        """Copy values that users wrote into the watched tensors ``some`` to the shards."""
        for given in some:
            if given.user() is None and num_uses(local_range(given.copy)) <= ALONE:
                self.given.pop(id(given.user), None)
            before, given.state = given.state, _state(given.copy)
            # After `q.data = p.data`, a write to `q` would have to change `p`, too.
            is_tied = isinstance(given.copy, FlatShardTensor) and given.copy.shard_origin.is_fixed
            is_written = given.state != before or (is_tied and given.param.sharded.requires_grad)
            if is_written and given.shard != identity(given.handle):
                self.lost = given.param.name
            elif given.state != before:
                self._write(given.handle, given.param, given.param.spec.split(given.copy))
                given.handle.unit.count_load(f"parameter {given.param.name!r}")


def _state(copy: Tensor) -> tuple[int, list[int]]:
    """Return the version counter of ``copy`` and, if ``copy`` is on the CPU, some values.

    On an accelerator, ``flatshard/extras/device_checks`` finds writes that change only values.
    """
    # Most writes increase the version, also under no_grad. But the program's collectives, such as
    # ``dist.all_reduce(value)``, change only the values.
    return local_range(copy)._version, sample(local_range(copy))


def identity(handle: FlatParamHandle) -> tuple[Any, ...]:
    return handle.flat_param.data_ptr(), handle.flat_param.dtype, handle.version
