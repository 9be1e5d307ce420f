"""``UnitModule``: a stand-in with its unit, in a tree of which the outermost owns the run."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, Self

import torch.distributed as dist
from torch import Tensor, nn

from flatshard.comm.tags import copying
from flatshard.comm.topology import Topology
from flatshard.diagnostics import late_modules
from flatshard.diagnostics.unit_report import Segment, UnitRow, describe
from flatshard.engine.context import RunContext
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.module import meta_init
from flatshard.module.settings import Settings, read_strategy
from flatshard.options.strategy import ShardingStrategy
from flatshard.plan.ignored import Ignored
from flatshard.plan.module_proxy import ModuleProxy
from flatshard.precision.casts import convert_buffers


class UnitModule(ModuleProxy):
    """What a unit is as a module: converted, copied, described; ``construction`` fills it."""

    _unit: Unit
    _settings: Settings
    _ignored: Ignored
    _context: RunContext
    _reason = ""  # of units that a policy chose
    _has_empty = False  # whether values are still to be loaded
    _num_registered = 0  # assigned to modules when they were last looked at

    # ------------------------------------------------------------ the run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module. Collective.

        Raises:
            RuntimeError: a flat parameter was replaced.
        """
        for handle, flat in zip(self._unit.handles, self._parameters.values(), strict=False):
            if flat is not handle.sharded[0]:
                raise RuntimeError(
                    f"the flat parameter of unit {self._unit.name!r} was replaced, by "
                    "torch.func.functional_call(), say: its values would not be used. Assign "
                    "values with p.copy_(...), or wrap with use_orig_params=True."
                )
        return super().forward(*args, **kwargs)

    def _become_root(self) -> None:
        """Own the run; wrappers inside, made by policy or by hand, follow this one."""
        names: dict[Unit, list[str]] = {}
        for name, wrapper in named_unit_modules(self):
            names.setdefault(wrapper._unit, []).append(name)
        for unit, its_own in names.items():
            unit.rename(its_own, is_root=unit is self._unit)
        # Registration order, the root last: a first guess at the order of execution.
        first, *rest = names
        units = [*rest, first]
        settings = self._settings
        _check_one_world(units)
        # A copy, which perhaps one rank makes alone, has the number of what it is a copy of.
        former = self.__dict__.get("_context")
        number = settings.ranks.world.new_model() if former is None else former.number
        self._context = RunContext(
            units,
            settings.ranks.world,
            buffers=self._synced_buffers,
            check=self._check_modules,
            number=number,
            forward_prefetch=settings.forward_prefetch,
            backward_prefetch=settings.backward_prefetch,
        )
        for wrapper in unit_modules(self):
            wrapper.__dict__["_context"] = self._context

    def _check_modules(self) -> None:
        """Before the first forward, and those that come after something was assigned to modules."""
        is_first = not self._context.has_run
        if is_first or self._num_registered != late_modules.count():
            self._check_all_owned()
        self._num_registered = late_modules.count()
        if is_first and any(wrapper._has_empty for wrapper in unit_modules(self)):
            handles = [handle for unit in units_in(self) for handle in unit.handles]
            meta_init.check_loaded(self, handles, self._settings.ranks.world)

    def _check_all_owned(self) -> None:
        """Raise where modules were added since wrapping: nobody would average their gradients."""
        late_modules.watch(self.modules())
        handles = [handle for unit in units_in(self) for handle in unit.handles]
        is_summoned = any(handle.summoned is not None for handle in handles)
        if self._settings.ranks.world.size == 1 or is_summoned:
            return
        for handle in handles:
            handle.params.check_places()
        known = self._ignored.ids()
        known.update(id(param) for handle in handles for param in handle.sharded)
        for name, param in self.named_parameters():
            if id(param) not in known and param.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was added after wrapping: it would be trained on each "
                    "rank's own gradients. Add modules before wrapping, freeze it, or let "
                    "ShardedWrapper ignore it (ignored_states) and average its gradient yourself."
                )

    def _synced_buffers(self) -> Iterable[Tensor]:
        if not self._settings.broadcast_buffers:
            return ()
        ignored = self._ignored.ids()
        return [buffer for buffer in self.module.buffers() if id(buffer) not in ignored]

    def _check_between_steps(self, what: str, context: RunContext) -> None:
        if context.is_running_forward or context.in_backward:
            raise RuntimeError(
                f"{what} was called while a forward or backward of "
                f"{self._unit.name or 'the model'!r} is running. Call it between steps."
            )

    def _refuse_summoned(self, action: str) -> None:
        """Raise where whole parameters stand in for the sharded ones."""
        for unit in units_in(self):
            if any(handle.summoned is not None for handle in unit.handles):
                raise RuntimeError(
                    f"unit {unit.name!r}: the model was {action} under "
                    "summon_full_params(). Leave the context first."
                )

    def _refuse_part(self, action: str) -> None:
        """Raise where a unit of several modules has only some of them in this one."""
        inside = set(self.modules())
        for unit in units_in(self):
            if not inside.issuperset(unit.modules):
                raise RuntimeError(
                    f"unit {unit.name!r}: {self._own_name!r} cannot be {action} alone: it is small "
                    "and shares a flat parameter with its neighbours. Do it with the whole model, "
                    "or wrap with coalesce_bytes=0."
                )

    @property
    def _own_name(self) -> str:
        """The name of this module alone."""
        unit = self._unit
        return dict(zip(unit.modules, unit.names, strict=True))[self.module]

    # ------------------------------------------------------------ conversions and copies

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Convert shards instead of parameters: ``.to()``, ``.double()`` and their kin."""
        if self._context.is_converting:  # with what is around
            return super()._apply(fn, recurse)
        self._context.recover()
        self._refuse_summoned("converted")
        self._refuse_part("converted")
        units = units_in(self) if recurse else [self._unit]
        handles = [handle for unit in units for handle in unit.handles]
        # All units first: what is refused leaves no unit converted.
        for handle in handles:
            handle.check_keeps_order(fn)
        self._context.is_converting = True
        try:
            with _hidden(unit_modules(self), handles):
                apply = super()._apply
                convert_buffers(self.modules(), lambda: apply(fn, recurse), fn)
        finally:
            self._context.is_converting = False
        for handle in handles:
            handle.convert(fn)
        self._context.refresh()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """An independent model on the same ranks, with shards of its own; no communication.

        Ranks that train or gather the copy make it all, in one order of copies.
        """
        self._refuse_summoned("copied")
        wrappers = unit_modules(self) if id(self._unit) not in memo else []
        units = units_in(self) if wrappers else []
        if wrappers:
            self._refuse_part("copied")
        for wrapper in wrappers:
            wrapper._context.recover()
            for shared in (wrapper._settings, wrapper._context):
                memo[id(shared)] = shared
        for unit in units:
            # Copied modules call the copied unit, which is filled once they are complete.
            memo[id(unit)] = Unit.__new__(Unit)
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        with copying():
            for unit in units:
                unit.copy_for(memo, memo[id(unit)])
        if wrappers:
            twin._become_root()
        return twin

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Not available: a shard means nothing in another process.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "a ShardedWrapper cannot be pickled: it belongs to a process group. Save "
            "model.state_dict(), and load it into a model that was wrapped anew."
        )

    # ------------------------------------------------------------ what it is

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """How this unit is sharded."""
        return self._settings.strategy

    @sharding_strategy.setter
    def sharding_strategy(self, value: ShardingStrategy | str) -> None:
        """Take another strategy over the same shards, before the first forward.

        Raises:
            RuntimeError: a forward has run; or it is a small one that shares a unit.
            ValueError: the other strategy shards otherwise, or is none.
        """
        before = self._settings
        strategy, placement = read_strategy(value, None, before.ranks)
        unit = self._unit
        self._refuse_part("given another strategy")
        if self._context.has_run:
            raise RuntimeError(
                f"unit {unit.name!r}: its strategy {before.strategy.name} cannot become "
                f"{strategy.name} after the first forward. Wrap the model anew: save "
                "model.state_dict() and load it there."
            )
        freeing = {"reshard_after_forward": True, "reshard_after_backward": True}
        if dataclasses.replace(placement, **freeing) != dataclasses.replace(
            before.placement, **freeing
        ):
            raise ValueError(
                f"unit {unit.name!r}: {strategy.name} places parameters otherwise than "
                f"{before.strategy.name}. Pass it to ShardedWrapper instead."
            )
        self._settings = dataclasses.replace(before, strategy=strategy, placement=placement)
        unit.placement = placement

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that train this model; None when it runs alone."""
        return self._settings.ranks.world.group

    def extra_repr(self) -> str:
        """Elements and padding of the unit."""
        if "_unit" not in self.__dict__:
            return ""
        if len(self._unit.modules) > 1:
            return f"{self._settings.strategy.name}: part of unit {self._unit.name}"
        layouts = [handle.layout for handle in self._unit.handles]
        numel = sum(layout.numel for layout in layouts)
        padding = sum(layout.padding_numel for layout in layouts)
        ranks = self._settings.topology.shard.size
        return (
            f"{self._settings.strategy.name}: {numel:,} elements + {padding:,} padding "
            f"over {ranks} rank{'s' if ranks != 1 else ''}"
        )

    def unit_report(self) -> str:
        """A table of the units from this one down, outermost first. No communication.

        A line has the unit's name and class, elements of its parameters and of padding, dtype and
        whether frozen of each flat parameter, bytes that a gather fills on every rank, strategy,
        ranks that share it, what moves its tensors between them, and why it is a unit.
        """
        first = {wrapper._unit: wrapper for wrapper in reversed(unit_modules(self))}
        return describe([first[unit]._row() for unit in units_in(self)])

    def _row(self) -> UnitRow:
        unit, topology = self._unit, self._settings.topology
        rest = "what is left" if len(unit_modules(self)) > 1 else "the whole model"
        together = f", {len(unit.modules)} small ones together" if len(unit.modules) > 1 else ""
        return UnitRow(
            name=unit.name,
            class_name=", ".join(dict.fromkeys(type(one).__name__ for one in unit.modules)),
            segments=tuple(_segment(handle, topology) for handle in unit.handles),
            strategy=self._settings.strategy.name,
            ranks=topology.shard.size,
            reason=(self._reason or ("by hand" if unit.name else f"root: {rest}")) + together,
            transport=topology.transport,
        )


@contextlib.contextmanager
def without_flat_parameters(wrappers: Iterable[UnitModule]) -> Iterator[None]:
    """Take the flat parameters of ``use_orig_params=False`` out of wrappers for a while."""
    flat = [(wrapper, dict(wrapper._parameters)) for wrapper in wrappers]
    for wrapper, _ in flat:
        wrapper._parameters.clear()
    try:
        yield
    finally:
        for wrapper, parameters in flat:
            wrapper._parameters.update(parameters)


@contextlib.contextmanager
def _hidden(wrappers: Iterable[UnitModule], handles: Iterable[FlatParamHandle]) -> Iterator[None]:
    """Take all parameters that handles own out of the modules for a while."""
    hidden = [one for handle in handles for one in handle.params.hide()]
    try:
        with without_flat_parameters(wrappers):
            yield
    finally:
        for held, attribute, param in hidden:
            held[attribute] = param


def _check_one_world(units: list[Unit]) -> None:
    world = units[-1].topology.world
    for unit in units:
        if unit.topology.world.ranks != world.ranks:
            raise ValueError(
                f"ShardedWrapper: unit {unit.name!r} trains on ranks {unit.topology.world.ranks}, "
                f"the module around it on {world.ranks}. Pass both the same ranks."
            )
    _check_one_grid([unit for unit in units if unit.topology.intra_group.size > 1])


def _check_one_grid(units: list[Unit]) -> None:
    """Refuse units of which one is replicated where another is sharded, and the reverse.

    The same on all ranks: a rank's row and column have no other rank in common.
    """
    grids = [(unit, *unit.topology.grid) for unit in units if unit.topology.crosses]
    for unit, shard, replicate in grids:
        outermost, its_shard, its_replicate = grids[-1]
        if (shard, replicate) == (its_replicate, its_shard):
            raise ValueError(
                f"ShardedWrapper: unit {unit.name!r} shards over ranks {shard} and replicates over "
                f"{replicate}, {outermost.name or 'the module around it'!r} the other way round. "
                "Pass both the same pair of groups (shard group, replicate group)."
            )


def _segment(handle: FlatParamHandle, topology: Topology) -> Segment:
    layout = handle.layout
    is_gathered = topology.shard.size > 1
    return Segment(
        dtype=handle.shard.dtype,
        trainable=handle.sharded[0].requires_grad,
        numel=layout.numel,
        padding_numel=layout.padding_numel,
        gathered_bytes=layout.padded_numel * handle.buffer.element_size() if is_gathered else 0,
    )


# ---------------------------------------------------------------- unit modules in a model


def unit_modules(module: nn.Module) -> list[UnitModule]:
    """Those in a model, outermost first; none in a plain model."""
    return [found for found in module.modules() if isinstance(found, UnitModule)]


def units_in(module: nn.Module) -> list[Unit]:
    """The units of a model, outermost first; none of a plain one."""
    return list(dict.fromkeys(wrapper._unit for wrapper in unit_modules(module)))


def named_unit_modules(root: nn.Module) -> Iterator[tuple[str, UnitModule]]:
    """The same with their names in the unwrapped model."""
    for name, module in root.named_modules():
        if isinstance(module, UnitModule):
            yield name, module


def outermost_unit_modules(module: nn.Module) -> list[UnitModule]:
    """Those that no other one contains."""
    if isinstance(module, UnitModule):
        return [module]
    found = [wrapper for child in module.children() for wrapper in outermost_unit_modules(child)]
    return list(dict.fromkeys(found))


def units_at_rest(module: nn.Module, what: str) -> list[Unit]:
    """The units of a model, outermost first, where no step or summon is under way."""
    wrappers = unit_modules(module)
    for wrapper in wrappers:
        wrapper._context.recover()
        wrapper._check_between_steps(what, wrapper._context)
    for wrapper in outermost_unit_modules(module):
        wrapper._refuse_summoned(f"asked for {what}")
    return units_in(module)
