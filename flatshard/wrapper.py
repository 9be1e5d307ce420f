"""``ShardedWrapper``: the module that users meet. It plans, wires units, and passes calls on."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard import (
    agreement,
    checkpoint,
    comm_hook,
    config,
    grad_norm,
    inspection,
    materialise,
    optim,
    optim_state,
    peers,
    plan_report,
    starting,
    summon,
)
from flatshard.config import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from flatshard.context import RunContext
from flatshard.handle import FlatParamHandle
from flatshard.ignored import Ignored, find_ignored
from flatshard.ownership import OwnedParam, find_owners
from flatshard.settings import (
    ProcessGroups,
    Settings,
    check_grid_is_used,
    ranks_or_alone,
    read_strategy,
)
from flatshard.shard_tensor import FlatShardTensor
from flatshard.state_dict_options import as_torch, read_options
from flatshard.step_in_backward import StepInBackward
from flatshard.topology import Topology
from flatshard.unit import Unit
from flatshard.wrap import Policy, UnitPlan, check_policy, explain_no_match, find_units


class ShardedWrapper(nn.Module):
    """Shard a module's parameters, gradients and optimizer state over ranks.

    Parameters are gathered unit by unit just before they are needed and freed just after.
    ``auto_wrap_policy`` chooses the units; what it leaves over belongs to the outermost one.
    Optimizers, losses, schedulers and data loaders stay what they were, and names, shapes and
    state dicts are those of the unwrapped module.

    Collective: all ranks of the process group construct, run forward and backward, and take state
    dicts together.

    Args:
        module: any module; it is changed in place and stays available as ``.module``.
        process_group: the ranks that train this model, or for HYBRID strategies a pair (shard
            group, replicate group). None: the default group; without one, and with no other rank
            started, the wrapper runs as a plain module and warns once.
        sharding_strategy: see ``ShardingStrategy``; torch's enum and names are understood. None:
            ``FULL_SHARD``, or ``HYBRID_SHARD`` with a pair of groups or a 2-D mesh. HYBRID
            without either shards within each node, as ``LOCAL_WORLD_SIZE`` says.
        cpu_offload: see ``CPUOffload``.
        auto_wrap_policy: which submodules become units: ``"auto"`` or a policy of
            ``flatshard.wrap``. None: one unit.
        backward_prefetch: when the next unit's gather starts in backward; None: never early.
        mixed_precision: see ``MixedPrecision``.
        device_mesh: instead of ``process_group``: a 1-D mesh, or a 2-D one for HYBRID strategies,
            (replicate, shard) unless the names of its dimensions say the opposite.
        reshard_after_forward: None: as the strategy says. True or False: free parameters between
            forward and backward, or keep them. An int k, a divisor of the shard group's size:
            keep one part in k on each rank, so that backward gathers from k ranks only.
        device_id: where to put and train the parameters; an accelerator's index or a device.
            None: where they are, or the current accelerator if the process group has no CPU
            backend.
        param_init_fn: gives modules on the meta device memory and values: called with every module
            of a unit in which something is there, from the unit's root down; it is to treat the
            module's own parameters and buffers (``module.to_empty(device=..., recurse=False)``,
            then initialise). Or ``flatshard.leave_empty``. None: modules' ``reset_parameters()``,
            in the order in which constructors call it. Either way, no more than one unit is whole
            at any time.
        sync_module_states: whether all ranks take rank 0's weights; then the other ranks' may be
            on the meta device, and each is sent its part. None: if they differ, with a
            warning. False: never, with a warning if they differ.
        forward_prefetch: begin the next unit's gather before this unit computes, in the order of
            the last forward. None: yes.
        limit_all_gathers: accepted; buffers in flight are always bounded.
        use_orig_params: True: ``parameters()`` are the original objects, in their true shapes.
            False: one 1-D ``FlatParameter`` per unit (and dtype, and ``requires_grad``), which
            is frozen or trained as a whole.
        broadcast_buffers: give all ranks rank 0's buffers before each forward, as
            DistributedDataParallel does.
        collectives: ``"auto"``: what fits the backend best; ``"sockets"``: on gloo, send and
            receive even where ranks on one host could read each other's memory; ``"native"``: one
            collective of the backend per unit and purpose, for comparison.
        ignored_modules: modules to leave alone: their parameters stay plain ones that are neither
            sharded nor moved, compared or synchronised between ranks, and their gradients are this
            rank's own. So are their buffers. A parameter that also stands elsewhere is ignored
            there too. What the attribute ``_ddp_params_and_buffers_to_ignore``, as set by
            DistributedDataParallel, names (under all its names) is ignored likewise.
        ignored_states: the same for parameters or modules; not together with ``ignored_modules``.
        extra: DistributedDataParallel's other keywords: read where they mean something, ignored
            with one warning or refused where not; see docs/migration.md.

    Raises:
        TypeError: an argument of the wrong type, or an unknown keyword.
        ValueError: parameters on several devices, ranks that build different models, an
            ``auto_wrap_policy`` over a model that already contains units, something to ignore
            that is not in the model or sharded already.
        RuntimeError: several ranks were started, but there is no process group.
    """

    hidden_in_names = True
    _reason = ""  # of units that a policy chose
    _has_empty = False  # whether values are still to be loaded

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroups = None,
        sharding_strategy: ShardingStrategy | str | None = None,
        cpu_offload: CPUOffload | bool | None = None,
        auto_wrap_policy: Policy | None = None,
        backward_prefetch: BackwardPrefetch | str | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        *,
        device_mesh: DeviceMesh | None = None,
        reshard_after_forward: bool | int | None = None,
        device_id: int | str | torch.device | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        sync_module_states: bool | None = None,
        forward_prefetch: bool | None = None,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        broadcast_buffers: bool | None = None,
        collectives: str = "auto",
        ignored_modules: Iterable[nn.Module] | None = None,
        ignored_states: Iterable[nn.Parameter | nn.Module] | None = None,
        **extra: Any,
    ) -> None:
        """See the class."""
        super().__init__()
        given = peers.read_ddp_keywords(
            extra, inspect.signature(ShardedWrapper.__init__).parameters
        )
        given.check_against(
            broadcast_buffers=broadcast_buffers,
            sync_module_states=sync_module_states,
            device_id=device_id,
        )
        broadcast_buffers = given.ours.get("broadcast_buffers", broadcast_buffers)
        sync_module_states = given.ours.get("sync_module_states", sync_module_states)
        device_id = given.ours.get("device_id", device_id)
        prefetch = config.as_backward_prefetch(backward_prefetch)
        offload = config.as_cpu_offload(cpu_offload)
        if param_init_fn is not None and not callable(param_init_fn):
            raise TypeError(
                f"param_init_fn: expected a function of a module, got {param_init_fn!r}"
            )
        _check_module(module, auto_wrap_policy)
        ignored = _read_ignored(module, ignored_modules, ignored_states)
        left_alone = _owned_ids(module) | ignored.ids()
        inspection.check_params(module, left_alone)
        ranks = ranks_or_alone(process_group, device_mesh, mode=config.as_collectives(collectives))
        strategy, placement = read_strategy(sharding_strategy, reshard_after_forward, ranks)
        check_grid_is_used(ranks, placement, strategy)
        device = inspection.find_device(module, device_id, ranks.world.group, ignored)
        if offload.offload_params:
            inspection.check_offload(device)
        settings = Settings(
            ranks=ranks,
            strategy=strategy,
            placement=placement,
            precision=config.as_mixed_precision(mixed_precision),
            backward_prefetch=prefetch,
            forward_prefetch=forward_prefetch is not False,
            use_orig_params=use_orig_params,
            broadcast_buffers=broadcast_buffers is not False,
            device=device,
        )
        plans = [] if auto_wrap_policy is None else _plan(module, auto_wrap_policy, ignored)
        of_unit = {plan.module: settings.override(plan) for plan in plans}
        named = inspection.named_tensors(module, left_alone)
        if ranks.world.size > 1:
            described = f"{settings.describe()}, collectives={collectives}"
            units = [f"{plan.name}: {of_unit[plan.module].describe()}" for plan in plans]
            agreement.check_same_model(named, described, units, ignored.names, ranks.world)
        # Only now do all ranks agree on what to ask for.
        for one in (settings, *of_unit.values()):
            ranks.resolve(one.placement)
        start = starting.agree(named, sync_module_states, ranks.world)
        materialise.check_initialisable(module, start, param_init_fn, ignored.modules)
        inspection.move_buffers(module, left_alone, device)
        materialise.give_buffers(module, start, device)
        if ranks.world.rank == 0:
            if given.notes:
                warnings.warn(f"ShardedWrapper ignores {'; '.join(given.notes)}", stacklevel=2)
            # "auto" finds a small model to be one unit.
            if auto_wrap_policy not in (None, "auto") and not plans:
                message = explain_no_match(module, auto_wrap_policy, **_left_out(ignored))
                warnings.warn(message, stacklevel=2)
            if module in ignored.modules:
                warnings.warn(
                    "ShardedWrapper: the module that is wrapped is itself to be ignored, so no "
                    "parameter is sharded",
                    stacklevel=2,
                )
        owners = find_owners(module, [plan.module for plan in plans], left_alone)
        if ranks.world.rank == 0 and settings.topology.shard.size > 1:
            for remark in _judge(module, plans, owners, auto_wrap_policy, ignored):
                warnings.warn(remark, stacklevel=2)
        wrappers = {}
        for plan in plans:
            if owners[plan.module]:
                wrapper = ShardedWrapper.__new__(ShardedWrapper)
                nn.Module.__init__(wrapper)
                own = of_unit[plan.module]
                wrapper._take(plan.module, plan.name, owners[plan.module], own, ignored, start)
                wrapper._reason = plan.reason
                wrappers[plan.module] = wrapper
        _replace_children(module, wrappers)
        self._take(module, "", owners[module], settings, ignored, start)
        self._make_values(start, param_init_fn, [self, *wrappers.values()])
        self._become_root()
        optim.install()
        start.warn()

    # ------------------------------------------------------------ construction

    def _take(
        self,
        module: nn.Module,
        name: str,
        owned: list[OwnedParam],
        settings: Settings,
        ignored: Ignored,
        start: starting.Start,
    ) -> None:
        """Make ``module`` a unit that owns ``owned``."""
        self.module = module
        self.training = module.training
        self._settings = settings
        self._ignored = ignored.within(module)
        precision, topology = settings.precision, settings.topology
        unit = Unit(
            module,
            name,
            placement=settings.placement,
            topology=topology,
            compute_dtype=precision.param_dtype,
        )
        segments: dict[tuple[torch.dtype, bool], list[OwnedParam]] = {}
        for one in owned:
            segments.setdefault((one.param.dtype, one.param.requires_grad), []).append(one)
        unit.own(
            FlatParamHandle(
                params,
                name,
                topology=topology,
                device=settings.device,
                start=start,
                compute_dtype=precision.param_dtype,
                reduce_dtype=precision.reduce_dtype,
                use_orig_params=settings.use_orig_params,
                on_grad=unit.on_grad,
                on_outside_grad=unit.on_outside_grad,
            )
            for params in segments.values()
        )
        self._unit = unit
        flat = [] if settings.use_orig_params else [h.sharded[0] for h in unit.handles]
        for number, param in enumerate(flat):
            self.register_parameter(f"_flat_param_{number}", param)
        checkpoint.hook_state_dicts(unit)

    def _make_values(
        self,
        start: starting.Start,
        init_fn: materialise.InitFn | None,
        wrappers: Iterable[ShardedWrapper],
    ) -> None:
        """Give new units the values that are missing. Collective."""
        handles = [handle for wrapper in wrappers for handle in wrapper._unit.handles]
        if start.any_missing:
            made = materialise.Materialiser(self, handles, start, init_fn, self._settings.device)
            self._has_empty = made.run()
        for handle in handles:
            start.give_replicas(handle.topology, handle.shard)

    def _become_root(self) -> None:
        """Own the run; wrappers inside, made by policy or by hand, follow this one."""
        units = []
        for name, wrapper in _named_wrappers(self):
            before = wrapper._unit.name
            wrapper._unit.name = name
            for handle in wrapper._unit.handles:
                handle.rename(name, _Renaming(before, name))
            units.append(wrapper._unit)
        # Registration order, the root last: a first guess at the order of execution.
        units = [*units[1:], units[0]]
        settings = self._settings
        _check_one_world(units)
        self._context = RunContext(
            units,
            settings.ranks.world,
            buffers=self._synced_buffers,
            before_first_run=self._check_loaded,
            forward_prefetch=settings.forward_prefetch,
            backward_prefetch=settings.backward_prefetch,
        )
        for wrapper in sharded_modules(self):
            wrapper.__dict__["_context"] = self._context

    def _check_loaded(self) -> None:
        wrappers = sharded_modules(self)
        if any(wrapper._has_empty for wrapper in wrappers):
            handles = [handle for wrapper in wrappers for handle in wrapper._unit.handles]
            materialise.check_loaded(self, handles, self._settings.ranks.world)

    def _synced_buffers(self) -> Iterable[Tensor]:
        if not self._settings.broadcast_buffers:
            return ()
        ignored = self._ignored.ids()
        return [buffer for buffer in self.module.buffers() if id(buffer) not in ignored]

    # ------------------------------------------------------------ a module like the wrapped one

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module. Collective."""
        return self.module(*args, **kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The wrapped module's class, so that ``isinstance`` finds it; ``type()`` is the wrapper.

        ``isinstance(x, ShardedWrapper)`` is true as well: it looks at ``type(x)`` first.
        """
        module = self.__dict__.get("_modules", {}).get("module")
        return type(self) if module is None else module.__class__  # type: ignore[no-any-return]

    def _get_name(self) -> str:
        return type(self).__name__

    def __dir__(self) -> list[str]:
        """Names of the wrapper and of the wrapped module."""
        return sorted({*dir(type(self)), *super().__dir__()})

    def __getattr__(self, name: str) -> Any:
        """What the wrapper lacks, the wrapped module may have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        try:
            return getattr(self.module, name)
        except AttributeError:
            if name in peers.DDP_ATTRIBUTES and "_context" in self.__dict__:
                return self._as_ddp(name)
            reason = peers.refuse_method(name)
            if reason is None:
                raise
            raise AttributeError(reason) from None

    def _as_ddp(self, name: str) -> Any:
        """An attribute of DistributedDataParallel, where the wrapped module has none so named."""
        device = self._settings.device
        ids = [device.index] if device.index is not None else None
        return {
            "require_backward_grad_sync": not self._context.is_accumulating,
            "device": device,
            "device_type": device.type,
            "device_ids": ids,
            "output_device": ids[0] if ids else None,
            "find_unused_parameters": True,
            "static_graph": False,
            "broadcast_buffers": self._settings.broadcast_buffers,
            "dim": 0,
        }[name]

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module."""
        return self.module[key]  # type: ignore[index]

    def __len__(self) -> int:
        """Length of the wrapped module."""
        return len(self.module)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the wrapped module."""
        return iter(self.module)  # type: ignore[call-overload, no-any-return]

    def __bool__(self) -> bool:
        """A module is true, also where the wrapped one has a length of zero."""
        return True

    def extra_repr(self) -> str:
        """Elements and padding of the unit."""
        if "_unit" not in self.__dict__:
            return ""
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
        ranks that share it, and why it is a unit.
        """
        return plan_report.describe([wrapper._row() for wrapper in sharded_modules(self)])

    def _row(self) -> plan_report.UnitRow:
        unit, topology = self._unit, self._settings.topology
        rest = "what is left" if len(sharded_modules(self)) > 1 else "the whole model"
        return plan_report.UnitRow(
            name=unit.name,
            class_name=type(self.module).__name__,
            segments=tuple(_segment(handle, topology) for handle in unit.handles),
            strategy=self._settings.strategy.name,
            ranks=topology.shard.size,
            reason=self._reason or ("by hand" if unit.name else f"root: {rest}"),
        )

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """How this unit is sharded."""
        return self._settings.strategy

    @sharding_strategy.setter
    def sharding_strategy(self, value: ShardingStrategy | str) -> None:
        """Take another strategy over the same shards, before the first forward.

        Raises:
            RuntimeError: a forward has run.
            ValueError: the other strategy shards otherwise, or is none.
        """
        before = self._settings
        strategy, placement = read_strategy(value, None, before.ranks)
        unit = self._unit
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

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """As of the unwrapped module; the wrapper shares the name of what it wraps."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ShardedWrapper:
        """Convert shards instead of parameters: ``.to()``, ``.double()`` and their kin."""
        self._context.recover()
        self._refuse_summoned("converted")
        # All units first: what is refused leaves no unit converted.
        for wrapper in sharded_modules(self):
            for handle in wrapper._unit.handles:
                handle.check_keeps_order(fn)
        hidden = []
        for handle in self._unit.handles:
            hidden.extend(handle.hide())
        hidden_flat = dict(self._parameters)
        self._parameters.clear()
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters.update(hidden_flat)
            for parameters, attribute, param in hidden:
                parameters[attribute] = param
        for handle in self._unit.handles:
            handle.convert(fn)
        self._context.refresh()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedWrapper:
        """An independent model on the same ranks, with shards of its own; no communication."""
        self._refuse_summoned("copied")
        wrappers = sharded_modules(self) if id(self._unit) not in memo else []
        for wrapper in wrappers:
            wrapper._context.recover()
            # Copied modules call the copied unit, which is filled once they are complete.
            memo[id(wrapper._unit)] = Unit.__new__(Unit)
            for shared in (wrapper._settings, wrapper._context):
                memo[id(shared)] = shared
        twin = ShardedWrapper.__new__(ShardedWrapper)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for wrapper in wrappers:
            wrapper._unit.copy_for(memo, memo[id(wrapper._unit)])
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

    def apply(self, fn: Callable[[nn.Module], None]) -> ShardedWrapper:
        """Call ``fn`` on the modules of the unwrapped module, children first, and not on wrappers.

        It sees whole plain parameters, and what it writes is kept, also when it raises. It has to
        write the same on all ranks: seed them alike before it draws random numbers. Whole at one
        time are a unit and those around it; units further in are sharded again when ``fn`` is
        called on what contains them, and edits of them through ``parameters()`` are right or
        raise. With ``use_orig_params=False``, all units below are whole until the end.

        Collective: all ranks.

        Raises:
            RuntimeError: as ``summon_full_params``.
        """
        has_flat = any(wrapper._parameters for wrapper in sharded_modules(self))
        with ShardedWrapper.summon_full_params(self, recurse=has_flat):
            self.module.apply(fn)
        return self

    # ------------------------------------------------------------ training

    @contextlib.contextmanager
    def no_sync(
        self, *, max_bytes: int | None = None, replicas_only: bool = False
    ) -> Iterator[None]:
        """Accumulate gradients locally: backwards of forwards begun inside reduce nothing.

        The first backward after it reduces the sum. Until then every rank holds whole gradients,
        ``padded_numel`` elements of every unit in the reduce dtype. Two arguments bound that:

        Args:
            max_bytes: keep whole gradients of the smallest units, so many bytes of them together;
                the others reduce in every backward, and accumulate in their shards.
            replicas_only: where shards have replicas on other nodes, reduce within the shard
                group in every backward, and hold back only what crosses nodes. Units without
                replicas reduce as usual, units that are only replicated not at all.

        Raises:
            RuntimeError: a forward or backward of the model is running.
            ValueError: ``max_bytes`` is negative.
        """
        context = self._context
        context.recover()
        self._check_between_steps("no_sync()", context)
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"no_sync: expected max_bytes of at least 0, got {max_bytes}")
        before = context.syncs, context.under_no_sync
        context.syncs = context.plan_accumulation(max_bytes, replicas_only)
        context.under_no_sync = True
        try:
            yield
        finally:
            context.syncs, context.under_no_sync = before

    def register_comm_hook(self, state: Any, hook: Callable[..., object]) -> None:
        """Let ``hook`` reduce the gradients of this unit and of all units inside it.

        It is called once per flat parameter (one per unit, dtype and ``requires_grad``) in each
        backward that synchronises, in one order of units on all ranks, and does the reduction and
        the averaging itself, with collectives of its own that are over when it returns. In a
        backward under ``no_sync`` it is not called: what that accumulates is in the next ``full``.

        - ``hook(state, full, out)`` where the unit is sharded. ``full``: this rank's gradients,
          ``(shard_numel * ranks,)`` in the reduce dtype, zero where there is none; free to write
          on. ``out``: this rank's part of the average, ``(shard_numel,)``, to be filled: elements
          ``[rank * shard_numel, (rank + 1) * shard_numel)``. It is NaN before.
        - ``hook(state, grad)`` with ``NO_SHARD``: ``(padded_numel,)``, to be averaged in place.

        Padding in them, whatever the hook makes of it, counts as zero. What a hook raises comes
        out of that rank's backward, with a note that names the unit; the other ranks wait for it
        until the timeout of their own collective. So it is where a backward uses other parameters
        of a unit with a hook on one rank than on another.

        torch's own hooks are not called: ``allreduce_hook`` and ``reduce_scatter_hook`` mean what
        is done anyway, ``fp16_compress_hook`` and ``bf16_compress_hook`` (DistributedDataParallel's
        and FullyShardedDataParallel's, and ``fp16_compress_wrapper(allreduce_hook)``) that
        gradients of floating point parameters are reduced in that dtype, as with
        ``MixedPrecision(reduce_dtype=...)``, with any strategy.

        ``copy.deepcopy`` gives a model without hooks, as of DistributedDataParallel: register
        again. ``.double()`` and its kin keep them.

        Collective: all ranks that train the model; the same kind of hook for the same units.

        Args:
            state: passed to ``hook`` as it is.
            hook: see above.

        Raises:
            TypeError: ``hook`` is not callable, or not with these arguments.
            ValueError: a dtype other than that of ``MixedPrecision(reduce_dtype=...)``; a state
                for other ranks than the model's; ranks register different hooks.
            NotImplementedError: ``hook`` takes DistributedDataParallel's buckets (PowerSGD,
                quantization and the like), or would be called for a unit of a HYBRID strategy.
            RuntimeError: a unit has a hook already, or holds gradients of ``no_sync``; this
                wrapper is inside another one, and a forward has run; a forward or backward of the
                model is running.
        """
        context = self._context
        context.recover()
        self._check_between_steps("register_comm_hook()", context)
        comm_hook.register(
            [(one._unit, one._settings.precision) for one in sharded_modules(self)],
            state,
            hook,
            is_late=context.has_run and not self.check_is_root(),
        )
        context.refresh()

    def _check_between_steps(self, what: str, context: RunContext) -> None:
        if context.is_running_forward or context.in_backward:
            raise RuntimeError(
                f"{what} was called while a forward or backward of "
                f"{self._unit.name or 'the model'!r} is running. Call it between steps."
            )

    def step_in_backward(self, optimizer: torch.optim.Optimizer) -> StepInBackward:
        """Let ``optimizer`` step in each backward, every unit once its gradients are reduced.

        The same numbers, to the bit, as ``optimizer.step()`` and ``zero_grad()`` after backward.
        The gradients of the whole model never exist together, which saves up to the size of the
        shards. Every backward that reduces steps, and a backward under ``no_sync`` does not: what
        it accumulates is in the step of the first backward after. Learning rates and other options
        are those in ``optimizer.param_groups`` when backward begins.

        A training loop can stay as it is. ``optimizer.step()`` steps what backward did not: other
        models' parameters, ignored ones. Until it, ``zero_grad()`` or the next forward, ``.grad``
        of what was stepped holds a stand-in that raises when it is used: there is nothing to clip
        by a norm, to unscale or to log. A parameter's post-accumulate hooks run before its step,
        the optimizer's own step hooks only in ``optimizer.step()``.

        Units are stepped at the end of backward, exactly as well but without the saving, where
        more may come of them or they may still be needed: the root, and units none of whose
        inputs has a gradient; those with parameters that this rank did not use, or that have
        post-accumulate hooks; all in a backward over checkpoints with ``use_reentrant=True`` or a
        penalty on parameters outside of forward, and often in the first backward, which finds the
        order of units. A backward that fails may leave some units stepped and others not; the
        next step warns.

        Of an inner wrapper: for the whole model. ``copy.deepcopy`` gives a model without it.

        Collective: all ranks that train the model; the same optimizer on each.

        Args:
            optimizer: over any of the model's parameters, made before or after wrapping; one that
                updates every element from that element's own gradient and state: torch's own that
                do, and those given to ``declare_elementwise``.

        Returns:
            Its ``remove()`` undoes this.

        Raises:
            TypeError: not an optimizer.
            ValueError: it is not element-wise, holds no parameter of the model or some that are
                stepped in backward already; ranks pass different ones.
            RuntimeError: a forward or backward of the model is running.
        """
        context = self._context
        context.recover()
        self._check_between_steps("step_in_backward()", context)
        return context.stepping.register(optimizer, self._settings.ranks.world)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale all gradients so that their total norm is at most ``max_norm``.

        The same numbers as ``torch.nn.utils.clip_grad_norm_`` on the unwrapped model, from one
        reduction per process group. Of an inner wrapper: the gradients below it.
        Ignored parameters count with this rank's gradients: where those of ranks differ, so does
        the norm; then clip them apart.

        Collective: all ranks.

        Args:
            max_norm: the largest norm allowed.
            norm_type: the order of the norm; any number, ``inf`` and ``-inf`` too.
            error_if_nonfinite: raise when the norm is infinite or not a number; otherwise the
                gradients are scaled by it.
            foreach: one kernel for many tensors: True, False, or None for where it is supported.

        Returns:
            The total norm before; 0-dimensional, in the dtype to which the gradients' promote, or
            0 when there are none.

        Raises:
            RuntimeError: gradients accumulated under ``no_sync`` are not reduced yet; the norm is
                not finite and ``error_if_nonfinite`` is set; an optimizer steps in backward.
        """
        self._context.stepping.refuse("clip_grad_norm_()")
        handles = [h for wrapper in sharded_modules(self) for h in wrapper._unit.handles]
        grad_norm.check_reduced(
            handles, self._settings.topology.world, is_reducing=self._context.is_reducing
        )
        return grad_norm.clip_grad_norm_(
            list(self.parameters()), handles, max_norm, norm_type, error_if_nonfinite, foreach
        )

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Let the modules of ``module`` hold whole plain parameters, under the unwrapped names.

        At the end, also one by an exception, each rank keeps its own slice of what it wrote
        itself: ranks write the same, or the model is a mixture. Values and ``requires_grad`` are
        kept, and gradients with ``with_grads``; hooks and other attributes are not. One summon
        inside another shows what the outer one shows. Forwards and copies of the model are
        refused inside.

        Collective: all ranks, at entry.

        Args:
            module: a wrapper, or any module that contains some.
            recurse: nested units too. False: only the outermost ones.
            writeback: keep what is written. False: it is undone, for every strategy.
            rank0_only: only rank 0 holds whole parameters, the others keep their sharded ones and
                at most one whole unit in memory; needs ``writeback=False``. Inside, nothing that
                is collective may be called.
            offload_to_cpu: the whole parameters lie in CPU memory, copied there unit by unit.
            with_grads: ``p.grad`` is the whole reduced gradient, None where there is none. Setting
                it to None drops it, assigning one where there was none adds it.

        Raises:
            ValueError: ``rank0_only`` with ``writeback``.
            RuntimeError: a forward or backward of the model is running; ``module`` holds
                parameters of a unit that contains it; gradients are not reduced yet or only some
                ranks have them (``with_grads``). At the end: something written cannot be kept.
        """
        if rank0_only and writeback:
            raise ValueError(
                "summon_full_params: rank0_only=True needs writeback=False, got writeback=True: "
                "what rank 0 writes would not reach the other ranks' parts. To edit, let every "
                "rank write the same with rank0_only=False."
            )
        wrappers = sharded_modules(module) if recurse else _outermost_wrappers(module)
        for wrapper in wrappers:
            wrapper._context.recover()
            wrapper._check_between_steps("summon_full_params()", wrapper._context)
        _check_no_parts(module)
        request = summon.Request(writeback, rank0_only, offload_to_cpu, with_grads)
        handles = [handle for wrapper in wrappers for handle in wrapper._unit.handles]
        with summon.summoned(handles, request), _without_flat_parameters(wrappers):
            yield

    def _refuse_summoned(self, action: str) -> None:
        """Raise where whole parameters stand in for the sharded ones."""
        for wrapper in sharded_modules(self):
            if any(handle.summoned is not None for handle in wrapper._unit.handles):
                raise RuntimeError(
                    f"unit {wrapper._unit.name!r}: the model was {action} under "
                    "summon_full_params(). Leave the context first."
                )

    # ------------------------------------------------------------ names of other wrappers

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[ShardedWrapper]:
        """``sharded_modules`` under FullyShardedDataParallel's name.

        Args:
            module: a wrapper or any module.
            root_only: only those that no other one contains.
        """
        return _outermost_wrappers(module) if root_only else sharded_modules(module)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Any:
        """Say what ``state_dict()`` and ``optim_state_dict()`` give, from now on.

        No communication; on all ranks alike.

        Args:
            module: a wrapper, or any module that contains some; all of them are set.
            state_dict_type: ``FULL_STATE_DICT``; torch's enum or its name.
            state_dict_config: torch's ``FullStateDictConfig``. ``rank0_only``: ``state_dict()``,
                which all ranks call, is empty on other ranks. ``offload_to_cpu``: tensors lie in
                CPU memory, copied there unit by unit. None: on every rank and device.
            optim_state_dict_config: torch's ``FullOptimStateDictConfig``, the default of
                ``optim_state_dict``'s keywords of the same names. None: on every rank, in CPU
                memory.

        Returns:
            What it was: torch's ``StateDictSettings``.

        Raises:
            NotImplementedError: another type.
            TypeError: a config that does not belong to it.
            RuntimeError: units inside differ in what they were.
        """
        options = read_options(state_dict_type, state_dict_config, optim_state_dict_config)
        before = ShardedWrapper.get_state_dict_type(module)
        for wrapper in sharded_modules(module):
            wrapper._unit.state_dict_options = options
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> Any:
        """What ``set_state_dict_type`` said: torch's ``StateDictSettings``.

        Raises:
            RuntimeError: units inside differ.
        """
        units = [wrapper._unit for wrapper in sharded_modules(module)]
        return as_torch(checkpoint.options_of(units))

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Iterator[None]:
        """``set_state_dict_type`` for a while; then every unit is as it was."""
        options = read_options(state_dict_type, state_dict_config, optim_state_dict_config)
        units = [wrapper._unit for wrapper in sharded_modules(module)]
        with checkpoint.options_set(units, options):
            yield

    def check_is_root(self) -> bool:
        """Whether no other wrapper contains this one."""
        return self._context.root is self._unit

    def will_sync_module_buffers(self) -> bool:
        """Whether a forward that begins now gives all ranks rank 0's buffers."""
        return (
            self._settings.broadcast_buffers
            and not self._context.is_accumulating
            and any(True for _ in self.module.buffers())
        )

    # ------------------------------------------------------------ state dicts

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Full tensors under the unwrapped module's names, on every rank.

        See ``set_state_dict_type`` for rank 0 alone, or in CPU memory.

        Collective: all ranks, also those that get nothing.
        """
        self._context.recover()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the unwrapped module; each rank keeps its part.

        Dtypes are cast. DistributedDataParallel's ``module.`` prefix is understood. No
        communication: every rank passes the same dict.

        Returns:
            Missing and unexpected keys.

        Raises:
            RuntimeError: keys or shapes do not fit.
            ValueError: ``assign=True``.
        """
        self._context.recover()
        children = [name for name, _ in self.module.named_children()]
        own = checkpoint.without_ddp_prefix(dict(state_dict), children)
        return self.module.load_state_dict(own, strict=strict, assign=assign)

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        rank0_only: bool | None = None,
        offload_to_cpu: bool | None = None,
    ) -> dict[str, Any]:
        """The optimizer's state, whole, by the names of the unwrapped model.

        ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``: tensors with one
        value per element of a parameter have its shape, strides and the state's dtype; ``step``,
        options and what else there is are kept. A tied parameter has its first name. Says nothing
        of ranks, units or ``use_orig_params``, so it loads into any of them, and into a plain
        optimizer: see ``optim_state_dict_to_load``.

        Collective: all ranks, unless there is no wrapper in ``model``. Gathers unit by unit.

        Args:
            model: a wrapper, or any module that contains some; or a plain one.
            optim: an optimizer over its parameters, made before or after wrapping.
            optim_state_dict: what ``optim.state_dict()`` gave; None: asks for it.
            group: accepted; units know their ranks.
            rank0_only: only rank 0 gets the state, other ranks an empty dict. None: as
                ``set_state_dict_type`` said, otherwise False.
            offload_to_cpu: its tensors lie in CPU memory, copied there unit by unit. None: as
                ``set_state_dict_type`` said, otherwise True.

        Raises:
            ValueError: on all ranks: the optimizer has a parameter that ``model`` has not, state
                that is neither one value per element nor a number, or other state on each rank.
            RuntimeError: a forward or backward of the model is running; ``optim_state_dict`` is
                another rank's.
        """
        units = _units_at_rest(model, "optim_state_dict()")
        options = checkpoint.options_of(units)
        return optim_state.full_state(
            model,
            optim,
            units,
            optim_state_dict,
            rank0_only=options.optim_rank0_only if rank0_only is None else rank0_only,
            offload_to_cpu=(
                options.optim_offload_to_cpu if offload_to_cpu is None else offload_to_cpu
            ),
        )

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """What ``optim.load_state_dict`` takes on this rank of an ``optim_state_dict``.

        ``optim_state_dict`` is from ``optim_state_dict()``, or a plain optimizer's own
        ``state_dict()``, whose positions count the parameters in the order of ``optim``'s groups.
        Dtypes are cast by ``optim.load_state_dict``, as for plain optimizers. Without a wrapper
        in ``model`` the names only become positions.

        With ``use_orig_params=False``, an original without state beside others in a flat
        parameter gets zeros; those with state must agree on ``step``.

        Collective: all ranks, unless there is no wrapper in ``model``; compares what they load.

        Args:
            model: a wrapper, or any module that contains some; or a plain one.
            optim: an optimizer over its parameters.
            optim_state_dict: the same on every rank; left as it is.
            is_named_optimizer: ``optim.load_state_dict`` takes names instead of positions.
            load_directly: also load the result.
            group: accepted; units know their ranks.

        Returns:
            This rank's part, by position.

        Raises:
            ValueError: on all ranks: parameters are missing or unexpected, a shape is another, an
                ``optim.state_dict()`` of one rank was passed, parts of one flat parameter have
                states or options that cannot be joined, or ranks passed different state.
            RuntimeError: a forward or backward of the model is running.
        """
        loaded = optim_state.state_to_load(
            model,
            optim,
            _units_at_rest(model, "optim_state_dict_to_load()"),
            optim_state_dict,
            by_name=is_named_optimizer,
        )
        if load_directly:
            optim.load_state_dict(loaded)
        return loaded

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Let torch's recursion, which asks for ``module.``, find the unwrapped names."""
        inner = prefix + "module."
        for key in list(state_dict):
            if key.startswith(prefix):
                state_dict[inner + key.removeprefix(prefix)] = state_dict.pop(key)

        def clean(*_: Any) -> None:
            for messages in (missing_keys, unexpected_keys, error_msgs):
                messages[:] = [message.replace(inner, prefix) for message in messages]
            hook.remove()

        hook = self.register_load_state_dict_post_hook(clean)


@dataclass(frozen=True)
class _Renaming:
    """Maps names relative to one root to names relative to another."""

    before: str
    after: str

    def __call__(self, name: str) -> str:
        local = name.removeprefix(f"{self.before}.") if self.before else name
        return f"{self.after}.{local}" if self.after else local


def sharded_modules(module: nn.Module) -> list[ShardedWrapper]:
    """Every wrapper in a model, outermost first; empty for a plain model."""
    return [found for found in module.modules() if isinstance(found, ShardedWrapper)]


def _units_at_rest(module: nn.Module, what: str) -> list[Unit]:
    """The units of a model, outermost first, where no step or summon is under way."""
    wrappers = sharded_modules(module)
    for wrapper in wrappers:
        wrapper._context.recover()
        wrapper._check_between_steps(what, wrapper._context)
    for wrapper in _outermost_wrappers(module):
        wrapper._refuse_summoned(f"asked for {what}")
    return [wrapper._unit for wrapper in wrappers]


def _segment(handle: FlatParamHandle, topology: Topology) -> plan_report.Segment:
    layout = handle.layout
    is_gathered = topology.shard.size > 1
    return plan_report.Segment(
        dtype=handle.shard.dtype,
        trainable=handle.sharded[0].requires_grad,
        numel=layout.numel,
        padding_numel=layout.padding_numel,
        gathered_bytes=layout.padded_numel * handle.buffer.element_size() if is_gathered else 0,
    )


def _judge(
    module: nn.Module,
    plans: list[UnitPlan],
    owners: dict[nn.Module, list[OwnedParam]],
    policy: Policy | None,
    ignored: Ignored,
) -> list[str]:
    """What about the units of ``module`` will be slow or large."""
    inside = list(_named_wrappers(module))
    if policy is None and not inside:
        return plan_report.judge_one_unit(module, **_left_out(ignored))
    names = {one.module: one.name for one in plans}
    sizes = [
        _unit_size(names.get(unit, ""), [one.param.numel() for one in owned])
        for unit, owned in owners.items()
    ]
    for name, wrapper in inside:
        spans = [span for handle in wrapper._unit.handles for span in handle.layout.spans]
        sizes.append(_unit_size(name, [span.numel for span in spans]))
    tied = [
        (one.param.numel(), [site.name for site in one.sites])
        for owned in owners.values()
        for one in owned
        if len(one.sites) > 1
    ]
    return plan_report.judge(sizes, tied)


def _unit_size(name: str, counts: list[int]) -> plan_report.UnitSize:
    return plan_report.UnitSize(name, sum(counts), max(counts, default=0))


def _outermost_wrappers(module: nn.Module) -> list[ShardedWrapper]:
    """The wrappers in a model that no other one contains."""
    if isinstance(module, ShardedWrapper):
        return [module]
    found = [wrapper for child in module.children() for wrapper in _outermost_wrappers(child)]
    return list(dict.fromkeys(found))


def _check_no_parts(module: nn.Module) -> None:
    """Raise where a unit that is not in ``module`` owns some of its parameters."""
    inside = {
        id(spec)
        for wrapper in sharded_modules(module)
        for handle in wrapper._unit.handles
        for spec in handle._specs
    }
    for part in module.modules():
        for value in (*part._parameters.values(), *vars(part).values()):
            if isinstance(value, FlatShardTensor) and id(value._spec) not in inside:
                raise RuntimeError(
                    f"summon_full_params: parameter {value._spec.name!r} belongs to unit "
                    f"{value._spec.unit!r}, which is not in the given module. Pass its "
                    "ShardedWrapper, or the whole model."
                )


@contextlib.contextmanager
def _without_flat_parameters(wrappers: Iterable[ShardedWrapper]) -> Iterator[None]:
    """With ``use_orig_params=False``, list only the originals where they are shown."""
    hidden = []
    for wrapper in wrappers:
        if any(handle.summoned.params for handle in wrapper._unit.handles):
            hidden.append((wrapper, dict(wrapper._parameters)))
            wrapper._parameters.clear()
    try:
        yield
    finally:
        for wrapper, parameters in hidden:
            wrapper._parameters.update(parameters)


def _named_wrappers(root: nn.Module) -> Iterator[tuple[str, ShardedWrapper]]:
    for name, module in root.named_modules():
        if isinstance(module, ShardedWrapper):
            yield name, module


def _owned_ids(module: nn.Module) -> set[int]:
    """Ids of the parameters that units inside a module own already."""
    return {
        id(param)
        for wrapper in sharded_modules(module)
        for handle in wrapper._unit.handles
        for param in handle.sharded
    }


def _check_module(module: nn.Module, policy: Policy | None) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"ShardedWrapper: expected an nn.Module, got {type(module).__name__}")
    if policy is not None:
        check_policy(policy)
    inside = sharded_modules(module)
    if inside and policy is not None:
        raise ValueError(
            f"ShardedWrapper: auto_wrap_policy over a model that already contains {len(inside)} "
            "units. Wrap it without a policy, or pass the unwrapped model."
        )
    if any(one._context.stepping.is_active for one in inside):
        raise ValueError(
            "ShardedWrapper: optimizers step in the backward of a part of the module. Call "
            "step_in_backward() on the outermost wrapper, once it is made."
        )
    if isinstance(module, ShardedWrapper):
        warnings.warn(
            "ShardedWrapper: the module is a ShardedWrapper already; the outer one adds nothing",
            stacklevel=3,
        )


def _read_ignored(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter | nn.Module] | None,
) -> Ignored:
    """What the user, and the units inside, leave alone."""
    nested: dict[nn.Module, Ignored] = {
        wrapper: wrapper._ignored for wrapper in sharded_modules(module)
    }
    return find_ignored(
        module, ignored_modules, ignored_states, nested=nested, sharded=_owned_ids(module)
    )


def _left_out(ignored: Ignored) -> dict[str, Any]:
    """The keywords that tell ``wrap`` what to ignore."""
    return {"ignored_modules": ignored.modules, "ignored_params": ignored.params()}


def _plan(module: nn.Module, policy: Policy, ignored: Ignored) -> list[UnitPlan]:
    return find_units(module, policy, **_left_out(ignored))


def _check_one_world(units: list[Unit]) -> None:
    world = units[-1].topology.world
    for unit in units:
        if unit.topology.world.ranks != world.ranks:
            raise ValueError(
                f"ShardedWrapper: unit {unit.name!r} trains on ranks {unit.topology.world.ranks}, "
                f"the module around it on {world.ranks}. Pass both the same ranks."
            )


def _replace_children(root: nn.Module, wrappers: dict[nn.Module, ShardedWrapper]) -> None:
    """Put wrappers at every place of the modules they wrap."""
    for parent in list(root.modules()):
        if isinstance(parent, ShardedWrapper):
            continue
        for name, child in parent._modules.items():
            if child in wrappers:
                parent._modules[name] = wrappers[child]
