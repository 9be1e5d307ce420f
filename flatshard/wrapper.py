"""``ShardedWrapper``: the module that users meet. It says what they may ask for, and passes it on.

Like every ``ModuleProxy`` it shows the attributes of the module inside. Its own state is a
``Sharding``, made by ``construction``: the unit, the settings, and the run of the whole model.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard.compat import comm_hook, torch_names
from flatshard.diagnostics import recording
from flatshard.diagnostics.non_finite import watch_non_finite
from flatshard.diagnostics.step_report import StepReport
from flatshard.module import construction, inspection
from flatshard.module.construction import Construction
from flatshard.module.conversion import convert, copy_model
from flatshard.module.run import accumulating
from flatshard.module.settings import (
    ProcessGroups,
    Settings,
    check_grid_is_used,
    ranks_or_alone,
    read_strategy,
)
from flatshard.module.sharding import (
    Sharding,
    handles_in,
    outermost_shardings,
    shardings_in,
    state_dicts_in,
    units_between_steps,
)
from flatshard.module.summon import summon
from flatshard.optimizer import grad_norm, in_backward
from flatshard.optimizer import step as optimizer_step
from flatshard.optimizer.in_backward import StepInBackward
from flatshard.options.collectives import as_coalesce_bytes, as_transport
from flatshard.options.offload import CPUOffload, as_cpu_offload
from flatshard.options.precision import MixedPrecision, as_mixed_precision
from flatshard.options.strategy import BackwardPrefetch, ShardingStrategy, as_backward_prefetch
from flatshard.plan.module_proxy import ModuleProxy
from flatshard.plan.wrap import Policy
from flatshard.state import model_state, optim_state
from flatshard.state.full_params import Request
from flatshard.state.model_state import as_torch, read_options


class ShardedWrapper(ModuleProxy):
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
        backward_prefetch: when the next unit's gather starts in backward, see
            ``BackwardPrefetch``; None: never early.
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
        coalesce_bytes: neighbours among a policy's units are gathered and reduced together, as one
            unit, while their parameters take no more than this many bytes: a collective of less
            is mostly waiting. 0: each by itself, as always with ``use_orig_params=False``. None:
            4 MiB.
        broadcast_buffers: give all ranks rank 0's buffers before each forward, as
            DistributedDataParallel does.
        collectives: ``"auto"``: what fits the backend best; ``"sockets"``: on gloo, send and
            receive even where ranks on one host could read each other's memory; ``"native"``: one
            collective of the backend per unit and purpose, for comparison.
        wire_dtype: ``torch.bfloat16``: over gloo's sockets, wider floating point parameters are
            rounded to it before forward and backward gather them, alike on all ranks, and
            gradients before they are sent; shards, computation and sums stay in their own dtypes,
            and state dicts are exact. Ranks on one host then use sockets too. None: nothing is
            rounded.
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
        OffloadError: on all ranks, before anything is changed: the disk of ``cpu_offload`` is full.
    """

    _sharding: Sharding

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroups = None,
        sharding_strategy: ShardingStrategy | str | None = None,
        cpu_offload: CPUOffload | bool | None = None,
        auto_wrap_policy: Policy | None = None,
        backward_prefetch: BackwardPrefetch | str | None = BackwardPrefetch.AUTO,
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
        coalesce_bytes: int | None = None,
        broadcast_buffers: bool | None = None,
        collectives: str = "auto",
        wire_dtype: torch.dtype | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        ignored_states: Iterable[nn.Parameter | nn.Module] | None = None,
        **extra: Any,
    ) -> None:
        """See the class."""
        super().__init__()
        given = torch_names.read_ddp_keywords(
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
        prefetch = as_backward_prefetch(backward_prefetch)
        offload = as_cpu_offload(cpu_offload)
        if param_init_fn is not None and not callable(param_init_fn):
            raise TypeError(
                f"param_init_fn: expected a function of a module, got {param_init_fn!r}"
            )
        construction.check_module(module, auto_wrap_policy)
        ignored = construction.read_ignored(module, ignored_modules, ignored_states)
        inspection.check_params(module, construction.left_alone(module, ignored))
        transport = as_transport(collectives, wire_dtype)
        ranks = ranks_or_alone(process_group, device_mesh, mode=transport)
        strategy, placement = read_strategy(sharding_strategy, reshard_after_forward, ranks)
        check_grid_is_used(ranks, placement, strategy)
        device = inspection.find_device(module, device_id, ranks.world.group, ignored)
        inspection.check_transport(device, transport)
        inspection.check_offload(device, offload)
        if ranks.world.size > 1 and placement.sharded:
            inspection.check_no_gradients(module, construction.left_alone(module, ignored))
        settings = Settings(
            ranks=ranks,
            strategy=strategy,
            placement=placement,
            precision=as_mixed_precision(mixed_precision),
            offload=offload,
            backward_prefetch=prefetch,
            forward_prefetch=forward_prefetch is not False,
            use_orig_params=use_orig_params,
            coalesce_bytes=as_coalesce_bytes(coalesce_bytes),
            broadcast_buffers=broadcast_buffers is not False,
            device=device,
        )
        built = Construction(module, auto_wrap_policy, settings, ignored, param_init_fn)
        initial_values = built.agree(sync_module_states)
        if ranks.world.rank == 0:
            if given.notes:
                warnings.warn(f"ShardedWrapper ignores {'; '.join(given.notes)}", stacklevel=2)
            for warning in built.warnings():
                warnings.warn(warning, stacklevel=2)
        built.make_units(self, ShardedWrapper, initial_values)
        optimizer_step.install()
        initial_values.warn()

    # ------------------------------------------------------------ training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module. Collective.

        Raises:
            RuntimeError: a flat parameter was replaced.
        """
        self._sharding.check_flat_parameters()
        return super().forward(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(
        self, *, max_bytes: int | None = None, replicas_only: bool = False
    ) -> Iterator[None]:
        """Accumulate gradients locally: backwards of forwards begun inside reduce nothing.

        The first backward after it reduces the sum. Until then every rank holds whole gradients,
        ``padded_numel`` elements of every unit; from the second backward on in the parameters' own
        dtype where the reduce dtype is narrower: sums are rounded only to be sent. Two arguments
        bound that:

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
        context = self._sharding.check_between_steps("no_sync()")
        with accumulating(context, max_bytes, replicas_only=replicas_only):
            yield

    def free_buffers(self) -> None:
        """Give back memory that is kept for the next step.

        Pages for gathered parameters, that is, and gradients that nobody holds. A forward without
        gradients does the same when it begins. No communication.
        """
        self._sharding.context.give_back()

    @contextlib.contextmanager
    def record_steps(
        self, *, trace: recording.PathLike = None, memory: recording.PathLike = None
    ) -> Iterator[list[StepReport]]:
        """Record the steps of the model, all units of it, inside the context.

        Gives the list of their reports, which grows as steps end: a step ends when the next one
        begins, or with the context. Everything is kept until then: record a few steps.

        Files are written at the end, unless it is by an exception, by the first rank, about all
        ranks; or, with ``{rank}`` in their name, by every rank about itself.

        Collective: all ranks that train the model, at entry, and at the end to write a file.

        Args:
            trace: write what chrome://tracing and Perfetto read, JSON, there.
            memory: draw bytes held over the last step there, at most 8 ranks; needs matplotlib.

        Raises:
            ValueError: a file cannot be written, or ranks were given others; at entry, on all
                ranks.
            ImportError: matplotlib is not installed; likewise.
            RuntimeError: steps are being recorded already, or a forward or backward is running.
        """
        context = self._sharding.check_between_steps("record_steps()")
        settings = self._sharding.settings
        with recording.recording(
            context, settings.ranks.world, settings.device, trace=trace, memory=memory
        ) as reports:
            yield reports

    def step_report(self) -> StepReport:
        """Of the last recorded step, this rank's: ``print`` it for a table. No communication.

        Inside ``record_steps`` of the step under way, as far as it got.

        Raises:
            RuntimeError: none was recorded.
        """
        return recording.last_report(self._sharding.context)

    def warn_non_finite(self, enabled: bool = True) -> None:
        """Warn, once, at the first gradient that is inf or NaN; of an inner wrapper: of the model.

        Looks at what autograd gives this rank, before it is averaged, so the rank that warns is
        one that it comes from. Costs a reading of each gradient, and on an accelerator a wait for
        it at the end of each backward; nothing any more after the warning. Under ``GradScaler``
        overflows are ordinary. No communication.

        Args:
            enabled: False: no more.
        """
        rank = self._sharding.settings.ranks.world.global_rank
        watch_non_finite(self._sharding.context.observers, rank if enabled else None)

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
        until the timeout of their own collective. Where ranks use different parameters of a unit
        in a backward, its hook and those after it are called at the end of backward.

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
        context = self._sharding.check_between_steps("register_comm_hook()")
        self._sharding.check_has_all_modules("given a hook")
        precisions = {one.unit: one.settings.precision for one in shardings_in(self)}
        is_late = context.has_run and not self.check_is_root()
        comm_hook.register(list(precisions.items()), state, hook, is_late=is_late)
        context.refresh()

    def step_in_backward(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None
    ) -> StepInBackward:
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
            scaler: the one that scales the loss, to be checked: gradients cannot be unscaled here.

        Returns:
            Its ``remove()`` undoes this.

        Raises:
            TypeError: not an optimizer.
            ValueError: ``scaler`` is enabled; the optimizer is not element-wise, or holds no
                parameter of the model, or some that are stepped in backward already; ranks pass
                different ones.
            RuntimeError: a forward or backward of the model is running.
        """
        context = self._sharding.check_between_steps("step_in_backward()")
        return in_backward.register(context, optimizer, scaler)

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
        context, world = self._sharding.context, self._sharding.settings.topology.world
        in_backward.refuse(context, "clip_grad_norm_()")
        handles = handles_in(self)
        grad_norm.check_reduced(handles, world, is_reducing=context.is_reducing)
        return grad_norm.clip_grad_norm_(
            list(self.parameters()), handles, max_norm, norm_type, error_if_nonfinite, foreach
        )

    # ------------------------------------------------------------ full parameters and state

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
        request = Request(writeback, rank0_only, offload_to_cpu, with_grads)
        with summon(module, request, recurse=recurse):
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
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
        has_flat = any(one.wrapper._parameters for one in shardings_in(self))
        with summon(self, Request(), recurse=has_flat):
            self.module.apply(fn)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Full tensors under the unwrapped module's names, on every rank.

        See ``set_state_dict_type`` for rank 0 alone, or in CPU memory.

        Collective: all ranks, also those that get nothing.
        """
        self._sharding.context.recover()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the unwrapped module; each rank keeps its part.

        Dtypes are cast. DistributedDataParallel's ``module.`` prefix is understood. No
        communication: every rank passes the same dict. That some ranks did not load at all is an
        error at the end of the next backward.

        Returns:
            Missing and unexpected keys.

        Raises:
            RuntimeError: keys or shapes do not fit.
            ValueError: ``assign=True``.
        """
        self._sharding.context.recover()
        return model_state.load(self.module, handles_in(self), state_dict, strict, assign)

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
        units = units_between_steps(model, "optim_state_dict()")
        options = model_state.options_of(state_dicts_in(model))
        if rank0_only is None:
            rank0_only = options.optim_rank0_only
        if offload_to_cpu is None:
            offload_to_cpu = options.optim_offload_to_cpu
        return optim_state.full_state(
            model,
            optim,
            units,
            optim_state_dict,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
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
        units = units_between_steps(model, "optim_state_dict_to_load()")
        loaded = optim_state.state_to_load(
            model, optim, units, optim_state_dict, by_name=is_named_optimizer
        )
        if load_directly:
            optim.load_state_dict(loaded)
        return loaded

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
        for part in state_dicts_in(module):
            part.options = options
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> Any:
        """What ``set_state_dict_type`` said: torch's ``StateDictSettings``.

        Raises:
            RuntimeError: units inside differ.
        """
        return as_torch(model_state.options_of(state_dicts_in(module)))

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
        with model_state.options_set(state_dicts_in(module), options):
            yield

    # ------------------------------------------------------------ what it is

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """How this unit is sharded."""
        return self._sharding.settings.strategy

    @sharding_strategy.setter
    def sharding_strategy(self, value: ShardingStrategy | str) -> None:
        """Take another strategy over the same shards, before the first forward.

        Raises:
            RuntimeError: a forward has run; or it is a small one that shares a unit.
            ValueError: the other strategy shards otherwise, or is none.
        """
        self._sharding.change_strategy(value)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that train this model; None when it runs alone."""
        return self._sharding.settings.ranks.world.group

    def extra_repr(self) -> str:
        """Elements and padding of the unit."""
        return self._sharding.summary() if "_sharding" in self.__dict__ else ""

    def unit_report(self) -> str:
        """A table of the units from this one down, outermost first. No communication.

        A line has the unit's name and class, elements of its parameters and of padding, dtype and
        whether frozen of each flat parameter, bytes that a gather fills on every rank, strategy,
        ranks that share it, what moves its tensors between them, and why it is a unit.
        """
        return self._sharding.report()

    def check_is_root(self) -> bool:
        """Whether no other wrapper contains this one."""
        return self._sharding.context.root is self._sharding.unit

    def will_sync_module_buffers(self) -> bool:
        """Whether a forward that begins now gives all ranks rank 0's buffers."""
        sharding = self._sharding
        return (
            sharding.settings.broadcast_buffers
            and not sharding.context.is_accumulating
            and any(True for _ in self.module.buffers())
        )

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[ShardedWrapper]:
        """``sharded_modules`` under FullyShardedDataParallel's name.

        Args:
            module: a wrapper or any module.
            root_only: only those that no other one contains.
        """
        found = outermost_shardings(module) if root_only else shardings_in(module)
        return [one.wrapper for one in found if isinstance(one.wrapper, ShardedWrapper)]

    # ------------------------------------------------------------ as a module

    def __getattr__(self, name: str) -> Any:
        """What neither wrapper nor module has, another wrapper may have had."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name in torch_names.DDP_ATTRIBUTES and "_sharding" in self.__dict__:
                return torch_names.ddp_attribute(name, self._sharding)
            reason = torch_names.why_refused(name)
            raise (error if reason is None else AttributeError(reason)) from None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Convert shards instead of parameters: ``.to()``, ``.double()`` and their kin."""
        apply = super()._apply
        convert(self._sharding, fn, lambda: apply(fn, recurse), recurse=recurse)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """An independent model on the same ranks, with shards of its own; no communication.

        Ranks that train or gather the copy make it all, in one order of copies.
        """
        return copy_model(self._sharding, memo)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Not available: a shard means nothing in another process.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "a ShardedWrapper cannot be pickled: it belongs to a process group. Save "
            "model.state_dict(), and load it into a model that was wrapped anew."
        )

    def _fqn_modifiers(self) -> dict[str, str]:
        """Of which child ``torch.distributed.checkpoint.state_dict`` leaves out the name.

        Its functions ask for this first, on all ranks.

        Raises:
            RuntimeError: there is a flat parameter, which they would take for one of the model's,
                so that some ranks fail while others wait for them.
        """
        if self._parameters:
            name = self._sharding.unit.name
            raise RuntimeError(
                f"{f'unit {name!r}' if name else 'the model'} was wrapped with "
                "use_orig_params=False, which the functions of "
                "torch.distributed.checkpoint.state_dict do not know. Call model.state_dict(), "
                "model.load_state_dict(), ShardedWrapper.optim_state_dict() and "
                "optim_state_dict_to_load(), or wrap with use_orig_params=True."
            )
        return {"": "module"}


def sharded_modules(module: nn.Module) -> list[ShardedWrapper]:
    """Every wrapper in a model, outermost first; empty for a plain model."""
    return [found for found in module.modules() if isinstance(found, ShardedWrapper)]
