"""``ShardedWrapper``: the module that users meet. It says what they may ask for, and passes it on.

Its bases are rooms of their own: a ``ModuleProxy`` for the wrapped module, a ``UnitModule`` among
others, a ``FullModel`` to be seen and saved, and ``PeerNames``, names of other wrappers.
``construction`` makes units of modules.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard.compat import comm_hook, torch_names
from flatshard.compat.torch_surface import PeerNames
from flatshard.diagnostics import recording
from flatshard.diagnostics.non_finite import NonFiniteWatch
from flatshard.diagnostics.step_report import StepReport
from flatshard.module import construction, inspection
from flatshard.module.construction import Construction
from flatshard.module.full_model import FullModel
from flatshard.module.settings import (
    ProcessGroups,
    Settings,
    check_grid_is_used,
    ranks_or_alone,
    read_strategy,
)
from flatshard.module.unit_module import (
    outermost_unit_modules,
    unit_modules,
    units_in,
)
from flatshard.optimizer import grad_norm
from flatshard.optimizer import step as optimizer_step
from flatshard.optimizer.in_backward import StepInBackward
from flatshard.options import strategy as strategies
from flatshard.options.offload import CPUOffload, as_cpu_offload
from flatshard.options.precision import MixedPrecision, as_mixed_precision
from flatshard.options.strategy import BackwardPrefetch, ShardingStrategy
from flatshard.plan.wrap import Policy


class ShardedWrapper(FullModel, PeerNames):
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
        prefetch = strategies.as_backward_prefetch(backward_prefetch)
        offload = as_cpu_offload(cpu_offload)
        if param_init_fn is not None and not callable(param_init_fn):
            raise TypeError(
                f"param_init_fn: expected a function of a module, got {param_init_fn!r}"
            )
        construction.check_module(module, auto_wrap_policy)
        ignored = construction.read_ignored(module, ignored_modules, ignored_states)
        inspection.check_params(module, construction.left_alone(module, ignored))
        transport = strategies.as_transport(collectives, wire_dtype)
        ranks = ranks_or_alone(process_group, device_mesh, mode=transport)
        strategy, placement = read_strategy(sharding_strategy, reshard_after_forward, ranks)
        check_grid_is_used(ranks, placement, strategy)
        device = inspection.find_device(module, device_id, ranks.world.group, ignored)
        inspection.check_transport(device, transport)
        inspection.check_offload(device, offload)
        if ranks.world.size > 1 and strategy is not ShardingStrategy.NO_SHARD:
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
            coalesce_bytes=strategies.as_coalesce_bytes(coalesce_bytes),
            broadcast_buffers=broadcast_buffers is not False,
            device=device,
        )
        built = Construction(module, auto_wrap_policy, settings, ignored, param_init_fn)
        start = built.agree(sync_module_states)
        if ranks.world.rank == 0:
            if given.notes:
                warnings.warn(f"ShardedWrapper ignores {'; '.join(given.notes)}", stacklevel=2)
            for remark in built.remarks():
                warnings.warn(remark, stacklevel=2)
        built.make_units(self, ShardedWrapper, start)
        optimizer_step.install()
        start.warn()

    # ------------------------------------------------------------ training

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

    def free_buffers(self) -> None:
        """Give back memory that is kept for the next step.

        Pages for gathered parameters, that is, and gradients that nobody holds. A forward without
        gradients does the same when it begins. No communication.
        """
        self._context.give_back()

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
        self._context.recover()
        self._check_between_steps("record_steps()", self._context)
        settings = self._settings
        with recording.recording(
            self._context, settings.ranks.world, settings.device, trace=trace, memory=memory
        ) as reports:
            yield reports

    def step_report(self) -> StepReport:
        """Of the last recorded step, this rank's: ``print`` it for a table. No communication.

        Inside ``record_steps`` of the step under way, as far as it got.

        Raises:
            RuntimeError: none was recorded.
        """
        return recording.last_report(self._context)

    def warn_non_finite(self, enabled: bool = True) -> None:
        """Warn, once, at the first gradient that is inf or NaN; of an inner wrapper: of the model.

        Looks at what autograd gives this rank, before it is averaged, so the rank that warns is
        one that it comes from. Costs a reading of each gradient, and on an accelerator a wait for
        it at the end of each backward; nothing any more after the warning. Under ``GradScaler``
        overflows are ordinary. No communication.

        Args:
            enabled: False: no more.
        """
        rank = self._settings.ranks.world.global_rank
        self._context.non_finite = NonFiniteWatch(rank) if enabled else None

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
        context = self._context
        context.recover()
        self._check_between_steps("register_comm_hook()", context)
        self._refuse_part("given a hook")
        precisions = {one._unit: one._settings.precision for one in sharded_modules(self)}
        comm_hook.register(
            list(precisions.items()),
            state,
            hook,
            is_late=context.has_run and not self.check_is_root(),
        )
        context.refresh()

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
        handles = [handle for unit in units_in(self) for handle in unit.handles]
        grad_norm.check_reduced(
            handles, self._settings.topology.world, is_reducing=self._context.is_reducing
        )
        return grad_norm.clip_grad_norm_(
            list(self.parameters()), handles, max_norm, norm_type, error_if_nonfinite, foreach
        )

    # ------------------------------------------------------------ modules

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[ShardedWrapper]:
        """``sharded_modules`` under FullyShardedDataParallel's name.

        Args:
            module: a wrapper or any module.
            root_only: only those that no other one contains.
        """
        found = outermost_unit_modules(module) if root_only else unit_modules(module)
        return [wrapper for wrapper in found if isinstance(wrapper, ShardedWrapper)]


def sharded_modules(module: nn.Module) -> list[ShardedWrapper]:
    """Every wrapper in a model, outermost first; empty for a plain model."""
    return [found for found in module.modules() if isinstance(found, ShardedWrapper)]
