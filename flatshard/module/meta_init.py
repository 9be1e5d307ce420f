"""Initialises parameters and buffers that are on the meta device, after sharding, group by group.

A group of modules gets full plain tensors to initialise, each rank keeps its parts of the result,
and the full tensors are freed before the next group.

[Note: the order of initialisation]
Without a ``param_init_fn`` modules are initialised children first, in registration order, which is
the order in which constructors work. So the same seed gives the values of a model built on its
device, if its constructors initialise by ``reset_parameters``. The order does not depend on units
or ranks. With a ``param_init_fn``, one unit at a time is initialised, from its root down, as
FullyShardedDataParallel does.

[Note: the pattern of unwritten memory]
Memory is filled with a pattern before it is initialised. If the pattern is still there afterwards,
an initialiser forgot the tensor, which would train on garbage; or ``leave_empty`` left it empty,
and ``load_state_dict`` did not load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import Checksum, checksum, raise_everywhere
from flatshard.comm.flat_chunks import as_bytes
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.handle_making import fill
from flatshard.module.initial_values import InitialValues, give_out, names_of_different
from flatshard.plan.module_proxy import ModuleProxy
from flatshard.tensor.sharded_tensor import attributes_of

InitFn = Callable[[nn.Module], Any]
"""The type of ``param_init_fn``."""

_PATTERN = 0xCB
_PIECE_BYTES = 1 << 16
_LEFT_EMPTY = "_flatshard_left_empty"


def leave_empty(module: nn.Module) -> None:
    """As or in a ``param_init_fn``: leave a module empty, since ``load_state_dict`` follows.

    It allocates no memory beside the shards. The first forward checks that all values were loaded.
    """
    module.__dict__[_LEFT_EMPTY] = True


# ---------------------------------------------------------------- before sharding


def check_initialisable(
    root: nn.Module, start: InitialValues, init_fn: InitFn | None, ignored: Iterable[nn.Module]
) -> None:
    """Raise if a rank must initialise tensors and cannot.

    Collective if any rank must initialise tensors.

    Raises:
        ValueError: on every rank: modules have no initialiser; names their tensors.
    """
    if not start.any_missing:
        return
    problem = None
    if start.initialises and init_fn is None:
        problem = _uninitialisable(root, start, set(ignored))
    raise_everywhere(ValueError(problem) if problem else None, start.world)


def _uninitialisable(root: nn.Module, start: InitialValues, ignored: set[nn.Module]) -> str | None:
    unknown, mixed = [], []
    for name, module in root.named_modules():
        own = {**module._parameters, **module._buffers}
        missing = [one for one, tensor in own.items() if id(tensor) in start.missing]
        if module in ignored or not missing:
            continue
        prefix = f"{name}." if name else ""
        if _reset_of(module) is None:
            unknown += [f"{prefix}{one} ({type(module).__name__})" for one in missing]
        elif any(one not in missing and p is not None for one, p in module._parameters.items()):
            mixed.append(name or "the model itself")
    if unknown:
        return (
            "ShardedWrapper: these tensors are on the meta device, and their modules have no "
            f"reset_parameters(): {', '.join(unknown)}. Pass a param_init_fn, which gives a "
            "module's own tensors memory (module.to_empty(device=..., recurse=False)) and values; "
            "flatshard.leave_empty, if load_state_dict() follows; or sync_module_states=True, "
            "where rank 0 has the weights."
        )
    if mixed:
        return (
            f"ShardedWrapper: module {mixed[0]!r} has some parameters on the meta device and "
            "others not, which its reset_parameters() would overwrite. Put all of a module's own "
            "parameters there, or none."
        )
    return None


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """The method that initialises a module's own tensors."""
    # torch's nn.MultiheadAttention has only the second.
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            return reset  # type: ignore[no-any-return]
    return None


# ---------------------------------------------------------------- attributes without values


class _ParamSlot(NamedTuple):
    """A module's attribute with a parameter; of a tied one only the first ``gives`` the values."""

    module: nn.Module
    attribute: str
    handle: FlatParamHandle
    number: int
    gives: bool

    @property
    def name(self) -> str:
        return self.handle.params.specs[self.number].name

    @property
    def shape(self) -> Sequence[int]:
        return self.handle.params.specs[self.number].shape

    @property
    def held(self) -> Tensor | None:
        return self.module._parameters.get(self.attribute)

    def show(self, device: torch.device | str) -> None:
        """Give the module a full plain parameter, with the attributes that users set on it."""
        empty = self.handle.params.specs[self.number].empty(
            self.handle.shard.new_empty(0, device=device)
        )
        params = self.handle.params
        with torch._C.DisableTorchFunctionSubclass():
            sharded = params.sharded[self.number if params.use_orig_params else 0]
            param = nn.Parameter(_patterned(empty), requires_grad=sharded.requires_grad)
            if params.use_orig_params:
                param.__dict__.update(attributes_of(sharded))
        self.module.__dict__.pop(self.attribute, None)
        self.module._parameters[self.attribute] = param


class _BufferSlot(NamedTuple):
    """A module's attribute with a buffer, and the tensor that is there on the meta device."""

    module: nn.Module
    attribute: str
    name: str
    meta: Tensor

    @property
    def shape(self) -> Sequence[int]:
        return self.meta.shape

    @property
    def held(self) -> Tensor | None:
        return self.module._buffers.get(self.attribute)

    def tensor(self) -> Tensor:
        """The buffer, which exists."""
        assert self.held is not None, f"{self.name} is a buffer"
        return self.held

    def show(self, device: torch.device | str) -> None:
        """Give the module an uninitialised buffer on ``device``."""
        empty = torch.empty_like(self.meta, device=device)
        self.module._buffers[self.attribute] = _patterned(empty)


@dataclass
class _Group:
    """Modules that are initialised together, in order, and the attributes that they fill."""

    modules: list[nn.Module]
    params: list[_ParamSlot]
    buffers: list[_BufferSlot]

    @property
    def slots(self) -> list[_ParamSlot | _BufferSlot]:
        return [*self.params, *self.buffers]


def _param_slots(handles: Sequence[FlatParamHandle]) -> dict[nn.Module, list[_ParamSlot]]:
    slots: dict[nn.Module, list[_ParamSlot]] = {}
    for handle in handles:
        given: set[int] = set()
        for module, attribute, index in handle.params.places:
            if index in handle.unfilled:
                slot = _ParamSlot(module, attribute, handle, index, index not in given)
                slots.setdefault(module, []).append(slot)
                given.add(index)
    return slots


def _buffer_slots(root: nn.Module, wanted: Callable[[Tensor], bool]) -> list[_BufferSlot]:
    return [
        _BufferSlot(module, attribute, f"{path}.{attribute}" if path else attribute, buffer)
        for path, module in root.named_modules()
        for attribute, buffer in module._buffers.items()
        if buffer is not None and wanted(buffer)
    ]


def _patterned(empty: Tensor) -> Tensor:
    """Fill dense memory of any strides with the pattern."""
    if not empty.is_meta:
        as_bytes(empty.as_strided((empty.numel(),), (1,))).fill_(_PATTERN)
    return empty


def _is_patterned(tensor: Tensor) -> bool:
    """Whether nothing wrote to a tensor since ``_patterned``."""
    if tensor.numel() == 0 or tensor.is_meta:
        return False
    # The first piece of an initialised tensor mostly differs, so `all` reads no more.
    pieces = as_bytes(tensor.detach().contiguous()).split(_PIECE_BYTES)
    return all(bool((piece == _PATTERN).all()) for piece in pieces)


# ---------------------------------------------------------------- after sharding


def broadcast_buffers(root: nn.Module, start: InitialValues, device: torch.device) -> None:
    """Broadcast rank 0's buffers if its values count. Collective if they do."""
    if not start.sends:
        return
    slots = _buffer_slots(root, lambda buffer: id(buffer) in start.buffers)
    for slot in slots:
        if slot.meta.is_meta:
            slot.show(device)
        give_out(slot.tensor(), slot.name, start.world)
    _tie(slots)


def _tie(slots: Iterable[_BufferSlot]) -> None:
    """Restore buffers that several modules shared."""
    first: dict[int, _BufferSlot] = {}
    for slot in slots:
        slot.module._buffers[slot.attribute] = first.setdefault(id(slot.meta), slot).held


class MetaInit:
    """Initialises the tensors that are on the meta device."""

    def __init__(
        self,
        root: nn.Module,
        handles: Sequence[FlatParamHandle],
        start: InitialValues,
        init_fn: InitFn | None,
        device: torch.device,
    ) -> None:
        """Group the modules; nothing is initialised yet.

        Args:
            root: the outermost module, whose units are sharded.
            handles: the flat parameters of its units.
            start: whose values count.
            init_fn: the user's ``param_init_fn``.
            device: the device of computation.
        """
        self._root, self._start, self._init_fn, self._device = root, start, init_fn, device
        self._names = {module: name for name, module in root.named_modules()}
        self._params = _param_slots(handles)
        self._all_buffers = _buffer_slots(root, lambda buffer: id(buffer) in start.missing)
        self._buffers: dict[nn.Module, list[_BufferSlot]] = {}
        for slot in self._all_buffers:
            self._buffers.setdefault(slot.module, []).append(slot)
        partition = self._by_module() if init_fn is None else self._by_unit()
        groups = [
            _Group(
                modules,
                [slot for module in modules for slot in self._params.get(module, [])],
                [slot for module in modules for slot in self._buffers.get(module, [])],
            )
            for modules in partition
        ]
        self._groups = [group for group in groups if group.slots]

    def _lacks(self, module: nn.Module) -> bool:
        return module in self._params or module in self._buffers

    def _by_module(self) -> list[list[nn.Module]]:
        """Modules that lack values, each with those below it in its unit, innermost first.

        They form one group since a module may initialise parameters of modules below it, as
        torch's attention does.
        """
        groups: list[list[nn.Module]] = []
        visited: set[nn.Module] = set()

        def visit(module: nn.Module, group: list[nn.Module] | None) -> None:
            if module in visited:
                return
            visited.add(module)
            begins = self._lacks(module) and group is None
            inner: list[nn.Module] | None = [] if begins else group
            for child in module.children():
                visit(child, None if isinstance(child, ModuleProxy) else inner)
            if inner is not None and self._lacks(module):
                inner.append(module)
            if begins and inner is not None:
                groups.append(inner)

        visit(self._root, None)
        return groups

    def _by_unit(self) -> list[list[nn.Module]]:
        """All modules of each unit, from its root down; inner units first."""
        groups: list[list[nn.Module]] = []
        visited: set[nn.Module] = set()

        def visit(module: nn.Module, group: list[nn.Module]) -> None:
            if module in visited:
                return
            visited.add(module)
            if not isinstance(module, ModuleProxy):
                group.append(module)
            for child in module.children():
                if isinstance(child, ModuleProxy):
                    below: list[nn.Module] = []
                    visit(child, below)
                    groups.append(below)
                else:
                    visit(child, group)

        top: list[nn.Module] = []
        visit(self._root, top)
        return [*groups, top]

    def run(self) -> bool:
        """Initialise all tensors, alike on all ranks unless the user forbids it.

        Collective: all ranks.

        Returns:
            Whether a module was left empty, on any rank.

        Raises:
            RuntimeError: on every rank: an initialiser fails or misses a tensor.
        """
        start, world = self._start, self._start.world
        random_state = _random_state(self._device)
        sums = self._make_all()
        if not start.sends and world.size > 1:
            everyone = world.gather_objects(list(sums.values()), op_name="comparing weights")
            if start.take_differences(names_of_different(list(sums), everyone)):
                # Rank 0 has only its shards by now. From the same random state it makes the same
                # full tensors again, and sends them.
                _set_random_state(random_state, self._device)
                self._make_all()
        _tie(self._all_buffers)
        raise_everywhere(self._forgotten(), world)
        left = any(module.__dict__.pop(_LEFT_EMPTY, False) for module in self._names)
        return any(world.gather_objects(left, op_name="comparing weights"))

    def _make_all(self) -> dict[str, Checksum]:
        """Initialise every group once; returns checksums by name if every rank does it itself."""
        start = self._start
        sums: dict[str, Checksum] = {}
        failed: RuntimeError | None = None
        for group in self._groups:
            values: dict[str, Tensor | None] = {}
            if start.initialises and failed is None:
                try:
                    values = self._make(group)
                except RuntimeError as error:
                    failed = error
            # Other ranks wait for each group that rank 0 sends, so they must hear of a failure now.
            if start.sends:
                raise_everywhere(failed, start.world)
            if failed is None:
                self._keep(group, values)
                if not start.sends:
                    sums |= self._checksums(group, values)
        if not start.sends:
            raise_everywhere(failed, start.world)
        return sums

    def _make(self, group: _Group) -> dict[str, Tensor | None]:
        """Let modules initialise full tensors; returns those of parameters by name.

        A value is None if the parameter was left empty and is not sent.
        """
        # A user's function gets meta tensors, as FullyShardedDataParallel gives it.
        memory = self._device if self._init_fn is None else "meta"
        made: dict[str, Tensor | None] = {}
        with torch.inference_mode(False), torch.no_grad():
            try:
                for slot in group.slots:
                    slot.show(memory)
                for module in group.modules:
                    self._initialise(module)
                for slot in group.slots:
                    self._fill_left_empty(slot)
                    self._check_made(slot)
                for param in group.params:
                    held = param.held
                    if param.gives and held is not None:
                        made[param.name] = None if held.is_meta else held.detach()
            finally:
                for handle in {param.handle for param in group.params}:
                    handle.params.show_sharded()
        return made

    def _initialise(self, module: nn.Module) -> None:
        what = "reset_parameters()" if self._init_fn is None else "param_init_fn"
        try:
            if self._init_fn is not None:
                self._init_fn(module)
            else:
                reset = _reset_of(module)
                assert reset is not None, "checked before sharding"
                reset()
        except Exception as error:
            raise RuntimeError(f"{self._where(module)}: {what} failed: {error}") from error

    def _where(self, module: nn.Module) -> str:
        return f"module {self._names[module]!r} ({type(module).__name__})"

    def _fill_left_empty(self, slot: _ParamSlot | _BufferSlot) -> None:
        """Allocate a tensor that was left empty if it is sent, or is a buffer."""
        held = slot.held
        left = _LEFT_EMPTY in slot.module.__dict__ and held is not None and held.is_meta
        if left and (self._start.sends or isinstance(slot, _BufferSlot)):
            slot.show(self._device)

    def _check_made(self, slot: _ParamSlot | _BufferSlot) -> None:
        """Raise if a tensor has no values, or another shape."""
        held = slot.held
        left = _LEFT_EMPTY in slot.module.__dict__
        if held is None or tuple(held.shape) != tuple(slot.shape):
            got = "nothing" if held is None else f"shape {tuple(held.shape)}"
            raise RuntimeError(f"{slot.name!r}: expected shape {tuple(slot.shape)}, got {got}")
        if held.is_meta and not left:
            raise RuntimeError(
                f"param_init_fn left {slot.name!r} on the meta device. Let it call "
                "module.to_empty(device=..., recurse=False) and then initialise the module, or "
                "flatshard.leave_empty(module) if load_state_dict() follows."
            )
        if _is_patterned(held) and not left:
            raise RuntimeError(
                f"{slot.name!r}: reset_parameters() of {self._where(slot.module)} does not "
                "initialise it. Let it do so, or pass a param_init_fn."
            )

    def _keep(self, group: _Group, values: dict[str, Tensor | None]) -> None:
        """Copy this rank's parts into its shards. Collective if rank 0's values are sent."""
        start = self._start
        with torch.inference_mode(False), torch.no_grad():
            for param in group.params:
                if not param.gives:
                    continue
                handle, value = param.handle, values.get(param.name)
                if value is None and not start.sends:
                    _patterned(handle.part(param.number))
                    handle.unfilled.discard(param.number)
                else:
                    fill(handle, param.number, value, start.source(handle.topology))
            # Shards that live on disk must not all be in memory at once.
            for handle in {param.handle for param in group.params}:
                handle.page_out()
            for buffer in group.buffers if start.sends else []:
                if start.world.rank > 0 and buffer.meta.is_meta:
                    buffer.show(self._device)
                give_out(buffer.tensor(), buffer.name, start.world)

    def _checksums(self, group: _Group, values: dict[str, Tensor | None]) -> dict[str, Checksum]:
        if self._start.world.size == 1:
            return {}
        made = values | {buffer.name: buffer.held for buffer in group.buffers}
        return {
            name: (-1, -1) if value is None else checksum(value) for name, value in made.items()
        }

    def _forgotten(self) -> RuntimeError | None:
        """Tensors on the meta device that are neither parameters nor buffers."""
        for module in self._names:
            for attribute, value in vars(module).items():
                if isinstance(value, Tensor) and value.is_meta:
                    return RuntimeError(
                        f"{self._where(module)}: attribute {attribute!r} is a tensor on the meta "
                        "device, and neither parameter nor buffer, so nothing gives it values. "
                        "Register it as a buffer, or set it in reset_parameters()."
                    )
        return None


def check_loaded(root: nn.Module, handles: Iterable[FlatParamHandle], world: Communicator) -> None:
    """Raise if a tensor that was left empty still has no values.

    Collective: all ranks.

    Raises:
        RuntimeError: on every rank; names one of the tensors.
    """
    empty = [
        handle.params.specs[index].name
        for handle in handles
        for index in range(len(handle.layout.spans))
        if _is_patterned(handle.part(index))
    ]
    empty += [slot.name for slot in _buffer_slots(root, _is_patterned)]
    others = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
    problem = None
    if empty:
        problem = RuntimeError(
            f"{empty[0]!r}{others}: left empty (flatshard.leave_empty), and no values came since. "
            "Call model.load_state_dict(...) with all of them before the first forward."
        )
    raise_everywhere(problem, world)


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _set_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
