"""Extra: initialises models that were built on the meta device, after sharding, group by group.

A group is a module with all submodules, or a whole unit. ``construction.wrap`` calls ``MetaInit``,
which gives the modules of a group full plain tensors. The modules' own functions (or the user's
``param_init_fn``) initialise the tensors. Then ``MetaInit`` copies this rank's parts into the
shards, and frees the full tensors before the next group. So the full model never has to fit in
memory.

Without this folder, wrapping a model with parameters or buffers on the meta device raises
``MissingExtraError``. Only one case works without this folder: ``sync_module_states=True``, if rank
0 has all values, and all other ranks have tensors on the meta device.

[Note: the pattern of unwritten memory]
``_write_pattern`` fills new tensors with a pattern. If a tensor still has the pattern after
initialisation, the initialiser forgot the tensor. If a tensor still has the pattern at the first
forward, ``leave_empty`` left it empty, and ``load_state_dict`` did not load it.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import raise_everywhere
from flatshard.engine.handle import FlatParamHandle
from flatshard.memory import Checksum, checksum
from flatshard.module.construction import LEFT_EMPTY, InitialValues, names_of_different
from flatshard.module.model_plan import ModelPlan
from flatshard.module.wrappers import handles_in, unit_of
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.units.layout import as_bytes
from flatshard.units.module_proxy import UNIT, ModuleProxy, is_sharded, put_in_place
from flatshard.units.module_tree import places_in

# For each module: its initialising functions, keyed by texts such as "reset_parameters()".
Resets = dict[nn.Module, dict[str, Callable[[], Any]]]

_PATTERN = 0xCB
_PIECE_BYTES = 1 << 16


class _LeftOut(ModuleProxy):
    """Takes the place of a unit's module, so that ``apply`` and ``to_empty`` skip the module."""

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        return self


@contextlib.contextmanager
def _left_out(root: nn.Module) -> Iterator[None]:
    """Hide the units inside of ``root`` from the functions that initialise outer modules."""
    with contextlib.ExitStack() as undo:
        for module in [*root.modules()]:
            for name, child in module._modules.items():
                if child is not None and is_sharded(child):
                    undo.callback(module._modules.__setitem__, name, child)
                    module._modules[name] = put_in_place(_LeftOut(), child)
        yield


def _initialises(start: InitialValues) -> bool:
    """Whether this rank initialises tensors. If rank 0 sends all values, only rank 0 does."""
    return bool(start.missing) and (not start.sends or start.world.rank == 0)


def _find_resets(plan: ModelPlan, start: InitialValues) -> Resets:
    """Return the functions that initialise each module of the model. Collective: all ranks.

    Raises ValueError, on every rank, if a module has no such function, or if the function would
    overwrite parameters that already have values.
    """
    resets: Resets = {}
    owners: dict[nn.Module, Callable[[nn.Module], Any] | None] = {}
    init_fn, ignored = plan.settings.param_init_fn, plan.ignored
    unknown, mixed, problem = list[str](), list[str](), None
    for name, module in plan.module.named_modules():
        if module in ignored.modules:
            continue
        owner = _init_weights_of(module) or owners.get(module)
        owners.update(dict.fromkeys(module.children(), owner))
        own = {**module._parameters, **module._buffers}
        missing = [one for one, tensor in own.items() if id(tensor) in start.missing]
        found = resets[module] = {}
        # torch's modules have `reset_parameters`; nn.MultiheadAttention has `_reset_parameters`.
        for reset in ("_reset_parameters", "reset_parameters"):
            if missing and callable(call := getattr(module, reset, None)):
                found["reset_parameters()"] = call
        # `_init_weights` may also set tensors of submodules. Use it only if no tensor has values.
        below = [*module.parameters(), *module.buffers()]
        if owner is not None and below and all(id(one) in start.missing for one in below):
            found["_init_weights()"] = partial(owner, module)
        # Whether initialisation would overwrite existing values. `reset_parameters` overwrites all
        # of the module's parameters. A `param_init_fn` that calls `to_empty` overwrites ignored
        # parameters.
        overwrites = any(
            not (param is None or param.is_meta)
            and (init_fn is None or (module, attribute) in ignored.places)
            for attribute, param in module._parameters.items()
        )
        if init_fn is None and not found:
            prefix = f"{name}." if name else ""
            unknown += [f"{prefix}{one} ({type(module).__name__})" for one in missing]
        elif missing and overwrites:
            mixed.append(name or "the model itself")
    if unknown:
        problem = (
            "ShardedWrapper: these tensors are on the meta device, and their modules have no "
            f"reset_parameters(): {', '.join(unknown)}. Pass a param_init_fn that gives a module's "
            "own tensors memory (module.to_empty(device=..., recurse=False)) and values, or "
            "param_init_fn=flatshard.leave_empty if load_state_dict() follows, or "
            "sync_module_states=True if rank 0 has the weights."
        )
    elif mixed:
        problem = (
            f"ShardedWrapper: module {mixed[0]!r} has some parameters on the meta device and "
            f"others with values, which {'param_init_fn' if init_fn else 'reset_parameters()'} "
            "would overwrite. Put all of the module's own parameters on the meta device, or none."
        )
    fails = problem is not None and _initialises(start)
    raise_everywhere(ValueError(problem) if fails else None, start.world)
    return resets


def _init_weights_of(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    # In transformers, constructors call the model's `_init_weights(module)` for all modules.
    found = getattr(module, "_init_weights", None)
    takes_module = inspect.ismethod(found) and len(inspect.signature(found).parameters) == 1
    return found if takes_module else None


@dataclass(frozen=True, eq=False)
class _Slot:
    """An attribute whose tensor needs values: a parameter, or if ``handle`` is None, a buffer."""

    module: nn.Module
    attribute: str
    name: str
    like: Tensor  # a tensor on the meta device with the full shape
    handle: FlatParamHandle | None
    param: OriginalParam | None
    # If several attributes have the same tensor (a tied parameter): the first slot of the tensor,
    # or None for the first slot itself. All slots are initialised, so that later tensors get the
    # same random numbers as in the model's constructor, but only the first slot's values are kept.
    first: "_Slot | None"

    @property
    def holder(self) -> dict[str, Any]:
        return self.module._buffers if self.handle is None else self.module._parameters

    @property
    def tensor(self) -> Any:
        return self.holder.get(self.attribute)

    def allocate(self, device: torch.device | str) -> None:
        """Give the module a full plain tensor without values."""
        tensor = torch.empty_like(self.like, device=device)
        if not tensor.is_meta:
            _write_pattern(tensor)
        if self.param is not None:
            tensor = nn.Parameter(tensor, requires_grad=self.param.sharded.requires_grad)
            tensor.__dict__ = self.param.sharded.__dict__  # attributes that users set
        self.holder[self.attribute] = tensor


def _write_pattern(tensor: Tensor) -> None:
    # Write the memory as 1-D, because the tensor may have any strides. The tensor is dense.
    as_bytes(tensor.as_strided((tensor.numel(),), (1,))).fill_(_PATTERN)


def _is_patterned(tensor: Tensor) -> bool:
    """Whether a tensor still has the pattern from ``_write_pattern`` everywhere."""
    if tensor.numel() == 0 or tensor.is_meta:
        return False
    # Compare piece by piece: for an initialised tensor, usually the first piece decides.
    pieces = as_bytes(tensor.detach().contiguous()).split(_PIECE_BYTES)
    return all(bool((piece == _PATTERN).all()) for piece in pieces)


class MetaInit:
    """Initialises all tensors of a model that are on the meta device. Collective: all ranks."""

    def __init__(self, plan: ModelPlan, start: InitialValues) -> None:
        self._start, self._resets = start, _find_resets(plan, start)
        self._init_fn, self._device = plan.settings.param_init_fn, plan.settings.device
        self._names: dict[nn.Module, str] = {}
        # Each module's own parameters and buffers that need values.
        self._slots: dict[nn.Module, list[_Slot]] = {}

    def run(self, root: ModuleProxy, handles: Iterable[FlatParamHandle]) -> None:
        """Initialise all tensors of ``root`` that need values, after the units were sharded.

        If ``leave_empty`` left tensors empty, the first forward will check that
        ``load_state_dict`` has filled them. Collective: all ranks.
        """
        start, world = self._start, self._start.world
        self._names = {module: name for name, module in root.named_modules()}
        # The tensors' ids in `start.missing` are still valid: sharding keeps the tensor objects.
        owners = {id(param.sharded): (one, param) for one in handles for param in one.params}
        firsts: dict[int, _Slot] = {}  # the first slot of each tensor
        for name, module, attribute, tensor in places_in(root):
            if (key := id(tensor)) in start.missing:
                handle, param = owners.get(key, (None, None))
                if handle is not None and param is not None:
                    tensor = param.spec.empty(handle.flat_param.new_empty(0, device="meta"))
                slot = _Slot(module, attribute, name, tensor, handle, param, firsts.get(key))
                firsts.setdefault(key, slot)
                self._slots.setdefault(module, []).append(slot)
        groups = self._find_groups(root)
        with _left_out(root):
            sums = self._make_all(groups)
        if not start.sends and world.size > 1:
            start.different = names_of_different(sums, world)
            if start.different and start.settings.sync_module_states is None:
                name, *others = start.different
                more = f" and {len(others)} more" if others else ""
                raise ValueError(
                    f"ShardedWrapper: the ranks initialised {name!r}{more}, which were on the "
                    "meta device, with different values. Call torch.manual_seed() with one seed on "
                    "all ranks before wrapping, or pass sync_module_states=True to take rank 0's."
                )
        # If modules shared a buffer on the meta device, let these modules share the new buffer.
        for slot in (slot for slots in self._slots.values() for slot in slots):
            if slot.first is not None and slot.handle is None:
                slot.holder[slot.attribute] = slot.first.tensor
        left_empty = any(module.__dict__.pop(LEFT_EMPTY, False) for module in self._names)
        if any(world.maxima(bytes([left_empty]), op_name="comparing weights")):
            unit_of(root).check_loaded = check_loaded

    def _find_groups(self, root: nn.Module) -> list[list[nn.Module]]:
        """Divide the modules into groups, in the order of initialisation.

        A group is a module that needs values, with all submodules in the same unit. With a
        ``param_init_fn`` or an ``_init_weights``, a group is a whole unit.
        """
        # The order and the groups depend on the function that initialises the modules:
        # - `reset_parameters`: children first, in registration order, as constructors do. Then a
        #   seed gives the same values as for a model built on its device, whatever the units are. A
        #   group contains all submodules of a module, because the module may initialise parameters
        #   of submodules, as nn.MultiheadAttention does.
        # - `param_init_fn`: parents first within a unit, as in FullyShardedDataParallel.
        # - `_init_weights`: children first, as in `apply`. A group is a whole unit, because the
        #   function may set tensors of any submodule.
        root_first = self._init_fn is not None
        by_unit = root_first or any("_init_weights()" in one for one in self._resets.values())
        groups: list[list[nn.Module]] = []
        visited: set[nn.Module] = set()

        def visit(module: nn.Module, group: list[nn.Module] | None) -> None:
            if module in visited:
                return
            visited.add(module)
            if is_unit := UNIT in module.__dict__:
                group = None
            needs_values = module in self._slots
            begins = is_unit if by_unit else needs_values and group is None
            inner = [] if begins else group
            is_called = needs_values or (by_unit and module in self._resets)
            num_before = len(inner or ())
            # Do not use `children()`, which leaves out the module of a wrapper.
            for child in filter(None, module._modules.values()):
                visit(child, inner)
            if inner is not None and is_called:
                inner.insert(num_before if root_first else len(inner), module)
            if inner is not None and begins:
                groups.append(inner)

        visit(root, None)
        return groups

    def _make_all(self, groups: Iterable[Sequence[nn.Module]]) -> dict[str, Checksum]:
        """Initialise the modules of each group, and copy this rank's parts into the shards.

        Returns checksums of the values, keyed by tensor name, to compare the values between ranks.
        Returns {} if rank 0 sends all values. Collective: all ranks.
        """
        start, failed = self._start, None
        sums: dict[str, Checksum] = {}
        for modules in groups:
            slots = [slot for module in modules for slot in self._slots.get(module, ())]
            values: dict[str, Tensor | None] = {}
            try:
                if slots and _initialises(start):
                    values = self._make(modules, slots)
            except RuntimeError as error:
                failed = error
                if not start.sends:
                    break
            if start.sends and slots:
                # Raise on all ranks: otherwise the other ranks would wait for rank 0's values of
                # this group.
                raise_everywhere(failed, start.world)
            self._keep(slots, values)
            if not start.sends and start.world.size > 1:
                sums |= {k: -1 if v is None else checksum(v) for k, v in values.items()}
        raise_everywhere(failed, start.world)
        return sums

    def _make(self, modules: Sequence[nn.Module], slots: Sequence[_Slot]) -> dict[str, Any]:
        """Give the modules of one group full tensors, and initialise the tensors.

        Returns the full tensors, keyed by name. If ``leave_empty`` left a tensor empty, the value
        is None.
        """
        # Leave the tensors on the meta device for a `param_init_fn`, which calls `to_empty`, as for
        # FullyShardedDataParallel.
        memory = self._device if self._init_fn is None else "meta"
        # Leave inference mode: tensors created in inference mode cannot be trained.
        with torch.inference_mode(False), torch.no_grad():
            try:
                for slot in slots:
                    slot.allocate(memory)
                for module in modules:
                    init_fn, calls = self._init_fn, self._resets[module]
                    if init_fn is not None:
                        calls = {"param_init_fn": partial(init_fn, module)}
                    self._call(module, calls)
                    if LEFT_EMPTY in module.__dict__:
                        self._fill_unsaved(module)
                for slot in slots:
                    self._check_made(slot)
                made = ((slot.name, slot.tensor) for slot in slots if slot.first is None)
                return {name: None if one.is_meta else one.detach() for name, one in made}
            finally:
                for handle in _handles_of(slots):
                    handle.put_back()

    def _fill_unsaved(self, module: nn.Module) -> None:
        """Initialise a module if only non-persistent buffers are empty: no state dict has them."""
        slots = self._slots.get(module, [])
        if slots and all(slot.attribute in module._non_persistent_buffers_set for slot in slots):
            for slot in slots:
                slot.allocate(self._device)
            self._call(module, self._resets[module])

    def _call(self, module: nn.Module, calls: dict[str, Callable[[], Any]]) -> None:
        for what, call in calls.items():
            try:
                call()
            except Exception as error:
                raise RuntimeError(f"{self._where(module)}: {what} failed: {error}") from error

    def _where(self, module: nn.Module) -> str:
        return f"module {self._names[module]!r} ({type(module).__name__})"

    def _check_made(self, slot: _Slot) -> None:
        """Raise if initialisation changed the shape of a tensor, or left it without values."""
        tensor, expected = slot.tensor, tuple(slot.like.shape)
        if tensor is None or tuple(tensor.shape) != expected:
            got = "no tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise RuntimeError(
                f"{slot.name!r}: expected shape {expected}, got {got} after initialising. Let "
                "reset_parameters() or param_init_fn keep the shapes of the meta module."
            )
        if LEFT_EMPTY in slot.module.__dict__:
            # A parameter of a left-empty module needs no full tensor, because the shard already has
            # memory. But a buffer has no shard, and rank 0 can send only a full tensor.
            if tensor.is_meta and (self._start.sends or slot.handle is None):
                slot.allocate(self._device)
        elif tensor.is_meta:
            raise RuntimeError(
                f"param_init_fn left {slot.name!r} on the meta device. In the function, call "
                "module.to_empty(device=..., recurse=False) and then initialise the module, or "
                "call flatshard.leave_empty(module) if load_state_dict() follows."
            )
        elif _is_patterned(tensor):
            raise RuntimeError(
                f"{' and '.join(self._resets[slot.module])} of {self._where(slot.module)} left "
                f"{slot.name!r} without values. Set the values there, or pass a param_init_fn."
            )

    def _keep(self, slots: Sequence[_Slot], values: dict[str, Any]) -> None:
        """Copy this rank's parts of ``values`` into the shards. Collective if rank 0 sends."""
        start = self._start
        with torch.inference_mode(False), torch.no_grad():
            for slot in slots:
                value, handle, param = values.get(slot.name), slot.handle, slot.param
                if handle is None or param is None:
                    if start.sends:
                        slot.holder[slot.attribute] = start.take_buffer(slot.tensor, slot.name)
                elif slot.first is None and (value is not None or start.sends):
                    start.take_part(handle.flat_param, param, value)
                elif slot.first is None:
                    _write_pattern(handle.flat_param[param.spec.range])
            # Release the pages of shards on disk: otherwise the shards of all groups would be in
            # memory at the end.
            for handle in _handles_of(slots):
                handle.page_out()


def _handles_of(slots: Iterable[_Slot]) -> set[FlatParamHandle]:
    return {slot.handle for slot in slots if slot.handle is not None}


def check_loaded(root: nn.Module, world: Communicator) -> None:
    """Raise, on every rank, if a tensor from ``leave_empty`` was not loaded. Collective."""
    params = ((handle, param) for handle in handles_in(root) for param in handle.params)
    empty = [p.name for handle, p in params if _is_patterned(handle.flat_param[p.spec.range])]
    empty += [name for name, buffer in root.named_buffers() if _is_patterned(buffer)]
    problem = None
    if empty:
        others = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        problem = RuntimeError(
            f"{empty[0]!r}{others}: left empty (flatshard.leave_empty) and not loaded since. Call "
            "model.load_state_dict(...) with all parameters and buffers before the first forward. "
            "Buffers with persistent=False are in no state dict: initialise them in the "
            "param_init_fn, and call leave_empty(module) there only for other modules."
        )
    raise_everywhere(problem, world)
