"""``ShardedWrapper``: the public API. Each method checks its arguments and calls other modules.

A wrapper is a ``ModuleProxy``, so the wrapper also has the attributes of the wrapped module. The
wrapper's own state is its ``Unit``: parameters that are sharded together (see ``engine.unit``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard.engine.forward import call_of, surround_calls
from flatshard.engine.run_state import temporarily
from flatshard.engine.unit import Unit
from flatshard.module import wrappers
from flatshard.module.construction import local_parts, summary, wrap
from flatshard.module.model_plan import ModelPlan, read_ignored
from flatshard.module.run import accumulating
from flatshard.module.settings import ProcessGroups, Settings
from flatshard.optimizer import step as optimizer_step
from flatshard.optimizer.state_dicts import is_getting_shards
from flatshard.options import BackwardPrefetch, CPUOffload, ShardingStrategy
from flatshard.options.extras import default_extra, extra
from flatshard.options.precision import MixedPrecision
from flatshard.state import model_state
from flatshard.state.optim_state import OptimState
from flatshard.tensor.flat_parameter import FlatParameter
from flatshard.units.module_proxy import UNIT, ModuleProxy, put_in_place
from flatshard.units.policies import Policy

if TYPE_CHECKING:  # never at runtime: torch's modules load slowly, and the extras can be deleted
    from torch.distributed.fsdp.api import StateDictSettings
    from torch.nn.modules.module import _IncompatibleKeys

    from flatshard.extras.recording.step_report import StepReport
    from flatshard.extras.step_in_backward import StepInBackward


# Rarely used keywords. They are passed in ``others``, to keep the signature short.
RARE = ("forward_prefetch", "ignored_modules", "limit_all_gathers")


class _NamesMissing(type):
    """Metaclass that explains why ``ShardedWrapper`` lacks an attribute of torch's wrappers."""

    def __getattr__(cls, name: str) -> NoReturn:
        torch_names = default_extra("torch_names")
        reason = torch_names and torch_names.why_missing(name)
        raise AttributeError(reason or f"type object {cls.__name__!r} has no attribute {name!r}")


class ShardedWrapper(ModuleProxy, metaclass=_NamesMissing):
    """Shard a module's parameters, gradients and optimizer state over ranks.

    ``auto_wrap_policy`` divides the module into units. A unit's parameters are unsharded
    (all-gathered) together before use, and resharded (freed) afterwards. Names, shapes and state
    dicts are those of the unwrapped module.

    Collective: all ranks construct the wrapper, run forward and backward, and take state dicts.

    Example:
        ```python
        model = ShardedWrapper(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loss_fn(model(inputs), labels).backward()
        optimizer.step()
        ```

    Args:
        module: the module to shard, which is changed in place and available as ``.module``.
        process_group: the ranks that train the model, or for HYBRID strategies a pair (shard group,
            replicate group). None: the default group, or this process only if there is no group.
        sharding_strategy: see ``ShardingStrategy``; torch's enum and names are accepted. None:
            ``FULL_SHARD``, or ``HYBRID_SHARD`` with a pair of groups or a 2-D mesh. HYBRID
            strategies without a pair or mesh shard within nodes of ``LOCAL_WORLD_SIZE`` ranks.
        cpu_offload: see ``CPUOffload``.
        auto_wrap_policy: chooses the submodules that become units: ``"auto"`` or a policy of
            ``flatshard.wrap``. Other parameters belong to the outermost unit. None: one unit.
        backward_prefetch: when backward starts the next unit's all-gather: see
            ``BackwardPrefetch``. None: when the unit is needed.
        mixed_precision: see ``MixedPrecision``.
        device_mesh: instead of ``process_group``: a 1-D mesh, or for HYBRID strategies a 2-D mesh
            (replicate, shard). Parameters may be DTensors over another dimension.
        device_id: device of parameters and computation, or an accelerator's index. None: the
            parameters' device; the current accelerator if the group has no CPU backend.
        sync_module_states: True: all ranks take rank 0's weights; other ranks' weights may be on
            the meta device. None: the same if the ranks' weights differ, with a warning. False:
            each rank keeps its weights.
        param_init_fn: called with each module that has its own tensors on the meta device, to give
            them memory and values (``module.to_empty(device=..., recurse=False)``, then values).
            ``flatshard.leave_empty``: give no values, because a checkpoint is loaded later. None:
            call ``reset_parameters()``, then transformers' ``_init_weights``.
        reshard_after_forward: whether to reshard parameters between forward and backward. None: the
            strategy decides. An int k, a divisor of the shard group's size: backward all-gathers
            from only k ranks, which store larger (secondary) shards.
        broadcast_buffers: broadcast rank 0's buffers when DistributedDataParallel would. False:
            each rank keeps its own buffers.
        ignored_states: modules or parameters that are not sharded, moved, compared or synchronised.
            Each rank keeps its own gradients of them.
        allow_divergence: classes, names or modules whose units some ranks skip, or run in another
            order (experts, dropped layers). True: all units. They stay unsharded from the outermost
            forward to the end of backward.
        coalesce_bytes: join neighbouring units into units of at most this many bytes. 0: never.
            None: 4 MiB.
        boundary: where shards may cut a parameter. ``"element"``: anywhere; ``"row"``: between rows
            of its outermost dimension in memory; ``"tensor"``: nowhere; an int: at multiples of
            this number of elements. ``unit_report()`` shows the padding.
        collectives: ``"auto"``: the best transport for the backend; ``"sockets"``: on gloo, send
            even if ranks on one host could share memory; ``"native"``: the backend's
            own collectives, for comparison.
        wire_dtype: ``torch.bfloat16``: over gloo's sockets, round parameters and gradients before
            sending. Shards and sums keep their dtypes.
        others: ``forward_prefetch``, ``ignored_modules``, ``limit_all_gathers``, and keywords of
            DistributedDataParallel and ``fully_shard`` (see the migration page).

    Raises:
        TypeError: an argument of the wrong type, or an unknown keyword.
        ValueError: parameters are on several devices; ranks build different models; a policy for a
            model that contains units; an ignored parameter is sharded already; more than 25 %
            padding; contradicting keywords.
        NotImplementedError: an option does not support DTensor parameters.
        RuntimeError: several ranks were started, but no process group exists.
        OffloadError: on all ranks, before any change: the disk of ``cpu_offload`` is too full.
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
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        reshard_after_forward: bool | int | None = None,
        broadcast_buffers: bool | None = None,
        ignored_states: Iterable[nn.Parameter | nn.Module] | None = None,
        allow_divergence: Any = False,
        coalesce_bytes: int | None = None,
        boundary: str | int = "element",
        collectives: str = "auto",
        wire_dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        known = ShardedWrapper.__init__.__annotations__
        given = {name: value for name, value in dict(locals()).items() if name in known}
        given |= {name: others.pop(name, None) for name in RARE}
        super().__init__()
        without_effect: list[str] = []
        if others:  # keywords of torch's wrappers, or misspelled keywords
            torch_names = extra("torch_names", f"the keyword {next(iter(others))!r}")
            given, without_effect = torch_names.read_keywords(others, given)
        ignored = read_ignored(module, given)
        settings = Settings.read(module, ignored, given)
        notes = [f"ShardedWrapper ignores {'; '.join(without_effect)}"] if without_effect else []
        with local_parts(module, ignored, settings):
            wrap(ModelPlan(module, settings, ignored), self, notes)

    @property
    def _sharded_unit(self) -> Unit:
        return wrappers.unit_of(self)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the wrapped module's call, with the arguments of ``torch.compile``.

        The all-gather of this wrapper's unit stays outside of the graph. If the module contains
        units, the graph ends at each of these units.
        """
        module = self.module
        module.__dict__["_compiled_call_impl"] = torch.compile(call_of(module), *args, **kwargs)
        surround_calls(self._sharded_unit, module)

    def no_sync(
        self, *, max_bytes: int | None = None, replicas_only: bool = False
    ) -> AbstractContextManager[None]:
        """Accumulate gradients without reducing them, for forwards that begin inside the context.

        The first backward after the context reduces the sum. Until then every rank holds unsharded
        gradients of every unit. Sums of several backwards have the parameters' own dtype, even if
        the reduce dtype is narrower, because sums are rounded only before they are sent. Each of
        the two arguments limits the memory of unsharded gradients.

        Under SHARD_OP and NO_SHARD, ranks may run different numbers of forwards and backwards
        inside the context, because these need no all-gathers there.

        Example:
            ```python
            with model.no_sync():
                for inputs, labels in micro_batches[:-1]:
                    loss_fn(model(inputs), labels).backward()
            inputs, labels = micro_batches[-1]
            loss_fn(model(inputs), labels).backward()  # reduces the sum of all gradients
            optimizer.step()
            ```

        Args:
            max_bytes: accumulate unsharded gradients only for the smallest units, up to this many
                bytes in total. The other units reduce in every backward, and accumulate sharded
                gradients.
            replicas_only: if shards have replicas on other nodes, reduce-scatter within the shard
                group in every backward, and omit only the all-reduce between nodes. Units without
                replicas reduce as usual. Units that are only replicated do not reduce.

        Raises:
            RuntimeError: a forward or backward of the model is running.
            ValueError: ``max_bytes`` is negative.
        """
        return accumulating(self._sharded_unit.context, max_bytes, replicas_only=replicas_only)

    def average_over(self, count: float | Tensor) -> None:
        """Average the gradients of the next backward over counts, such as tokens, not over ranks.

        Without this call, gradients are averaged over ranks, so ranks and micro-batches with few
        tokens count too much. With this call, let the loss be a sum over tokens. The gradient is
        then the sum over all ranks and micro-batches, divided by the sum of all counts. Counts add
        up under ``no_sync``, and are sent in the message that ends a reducing backward. Gradients
        are first averaged over ranks as usual, in the reduce dtype, and then scaled once, in the
        dtype of ``.grad``. With float16 gradients, choose a smaller loss scale, because sums are
        larger than means.

        Call before each backward, on every rank. A rank without tokens passes 0. No communication.

        Example:
            ```python
            model.average_over((labels != -100).sum())
            loss = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
            loss.backward()
            optimizer.step()
            ```

        Args:
            count: number of tokens in this rank's micro-batch; a number or a tensor with one
                element, at least 0.

        Raises:
            RuntimeError: raised by the next backward: an optimizer steps in backward, or a
                communication hook is registered. Raised by the next reducing backward, on all
                ranks, before ``.grad`` is set: a count is negative or not finite, all counts are
                0, or only some ranks passed a count.
            TypeError: ``count`` is no number.
        """
        average_over = extra("average_over", "ShardedWrapper.average_over()")
        average_over.count(self._sharded_unit.context, count)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        optimizers: Iterable[torch.optim.Optimizer] = (),
    ) -> AbstractContextManager[None]:
        """Train on uneven inputs inside a context, as with DistributedDataParallel's ``join``.

        A rank without inputs left repeats the collective calls of the other ranks with zero
        gradients: forwards, backwards, ``model.clip_grad_norm_``, and steps of element-wise
        optimizers with the other ranks' learning rates. So all ranks end with the same model and
        optimizer state. Buffers come from the highest rank that has input. Operations that a rank
        without input cannot repeat raise an error. Each forward costs a small exchange; once a rank
        has no input, each all-gather costs another exchange.

        Collective: all ranks, at entry and at the end; on the outermost wrapper.

        Example:
            ```python
            with model.join():
                for inputs, labels in batches[: 1 + dist.get_rank()]:  # fewest on rank 0
                    optimizer.zero_grad()
                    loss_fn(model(inputs), labels).backward()
                    optimizer.step()
            ```

        Args:
            divide_by_initial_world_size: True: average gradients over all ranks. False: average
                only over the ranks that still have input.
            enable: whether the context has an effect.
            throw_on_early_termination: raise on all ranks once some rank has no input.
            optimizers: optimizers that step inside the context. Pass them only if a rank may have
                no input at all: otherwise each rank sees the optimizers when they step.

        Raises:
            NotImplementedError: units with ``allow_divergence``, a process group of their own, a
                communication hook or secondary shards.
            RuntimeError: this is not the outermost wrapper, or an optimizer steps in backward.
        """
        if not enable:
            return nullcontext()
        how = divide_by_initial_world_size, throw_on_early_termination
        return extra("join", "ShardedWrapper.join()").joining(self, optimizers, *how)  # type: ignore[no-any-return]

    def free_buffers(self) -> None:
        """Free the gradient buffers that are cached for the next step.

        A forward without gradients also frees these buffers. No communication.
        """
        self._sharded_unit.context.forward.give_back()

    def record_steps(self) -> AbstractContextManager[list[StepReport]]:
        """Record the steps of all units of the model inside the context.

        The context yields the list of ``StepReport``s, which grows as steps end: a step ends when
        the next step begins, or with the context. All reports stay in memory until the context
        ends, so record only a few steps. No communication: any of the ranks may record.

        Example:
            ```python
            with model.record_steps() as reports:
                for inputs, labels in batches:
                    optimizer.zero_grad()
                    loss_fn(model(inputs), labels).backward()
                    optimizer.step()
            print(reports[-1])  # time, bytes sent and memory of each unit
            ```

        Raises:
            RuntimeError: steps are being recorded already, or a forward or backward is running.
        """
        return extra("recording", "ShardedWrapper.record_steps()").record_steps(self)  # type: ignore[no-any-return]

    def register_comm_hook(self, state: Any, hook: Callable[..., object]) -> None:
        """Let ``hook`` reduce the gradients of this unit and of all units inside it.

        The hook is called once per flat parameter (one per unit, dtype and ``requires_grad``) in
        each backward that reduces gradients, in the same order on all ranks. The hook itself
        reduces and averages, and its collectives must be finished when it returns. After
        ``no_sync``, the hook gets the sum of the accumulated gradients.

        - ``hook(state, full, out)`` if the unit is sharded. ``full``: this rank's gradients,
          ``(shard_numel * ranks,)`` in the reduce dtype, zero for parameters without a gradient.
          The hook may overwrite ``full``, and must fill ``out``, ``(shard_numel,)``, with elements
          ``[rank * shard_numel, (rank + 1) * shard_numel)`` of the average (NaN before the call).
        - ``hook(state, grad)`` with ``NO_SHARD``. The hook averages ``grad``, ``(padded_numel,)``,
          in place.

        If the hook raises, backward raises the exception on this rank; the other ranks wait until
        the timeout of their own collective. If ranks use different parameters of a unit in a
        backward, hooks are called at the end of backward.

        torch's own hooks are not called. ``allreduce_hook`` and ``reduce_scatter_hook`` change
        nothing. ``fp16_compress_hook`` and ``bf16_compress_hook`` set the dtype in which gradients
        are reduced, like ``MixedPrecision(reduce_dtype=...)``. ``copy.deepcopy`` returns a model
        without hooks.

        Collective: all ranks that train the model; the same kind of hook for the same units.

        Example:
            ```python
            def average(state, full, out):
                dist.all_reduce(full)
                part = full.chunk(dist.get_world_size())[dist.get_rank()]
                torch.div(part, dist.get_world_size(), out=out)

            model.register_comm_hook(None, average)
            ```

        Raises:
            TypeError: ``hook`` is not callable, or does not accept these arguments.
            ValueError: ``hook`` reduces in another dtype than ``MixedPrecision(reduce_dtype=...)``;
                ``state`` has a process group of other ranks than the model's; ranks register
                different hooks; another rank raised.
            NotImplementedError: ``hook`` takes DistributedDataParallel's buckets (for example
                PowerSGD), or would be called for a unit of a HYBRID strategy.
            RuntimeError: a unit has a hook already, or holds gradients of ``no_sync``; this wrapper
                is inside another one, and a forward has run; a forward or backward of the model is
                running.
        """
        extra("reduction", "ShardedWrapper.register_comm_hook()").register(self, state, hook)

    def step_in_backward(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None
    ) -> StepInBackward:
        """Let ``optimizer`` step each unit during backward, once its gradients are reduced.

        The results are bitwise equal to ``optimizer.step()`` and ``zero_grad()`` after backward.
        The units' gradients never all exist at once, which saves up to the size of the shards.
        A backward under ``no_sync`` does not step; its gradients are part of the next step.
        Learning rates and other options are read when backward begins.

        The training loop needs no change: ``optimizer.step()`` steps only the remaining parameters
        (ignored parameters, and parameters of other models). Until ``optimizer.step()``, ``.grad``
        of a stepped parameter raises when used: gradients cannot be clipped by norm, unscaled or
        logged. The optimizer's step hooks run only in ``optimizer.step()``.

        Units that may get more gradients are stepped only at the end of backward, without saving
        memory: the outermost unit; units whose inputs have no gradient; units with unused
        parameters or post-accumulate hooks. All units are stepped only at the end if activation
        checkpoints have ``use_reentrant=True``, if the loss has a penalty on weights, and often in
        the first backward. If a backward fails, some units may be stepped and others not; the next
        step warns. On an inner wrapper this method acts on the whole model. ``copy.deepcopy``
        returns a model that does not step in backward.

        Collective: all ranks that train the model; the same optimizer on each.

        Example:
            ```python
            model.step_in_backward(optimizer)
            for inputs, labels in batches:
                loss_fn(model(inputs), labels).backward()  # also steps each unit
                optimizer.step()
                optimizer.zero_grad()
            ```

        Args:
            optimizer: an optimizer over any of the model's parameters, made before or after
                wrapping. It must be element-wise: it updates every element from the element's own
                gradient and state only. Most of torch's optimizers are, and optimizers given to
                ``declare_elementwise`` count as element-wise.
            scaler: the scaler of the loss; it must be disabled, since gradients cannot be unscaled.

        Returns:
            A handle. After its ``remove()`` the optimizer no longer steps in backward.

        Raises:
            TypeError: not an optimizer.
            ValueError: ``scaler`` is enabled; the optimizer is not element-wise, holds no parameter
                of the model, or holds parameters that are stepped in backward already; ranks pass
                different optimizers.
            RuntimeError: a forward or backward of the model is running.
        """
        context = self._sharded_unit.context.check_between_steps("step_in_backward()")
        in_backward = extra("step_in_backward", "ShardedWrapper.step_in_backward()")
        return in_backward.register(context, optimizer, scaler)  # type: ignore[no-any-return]

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale all gradients so that their total norm is at most ``max_norm``.

        The result equals ``torch.nn.utils.clip_grad_norm_`` on the unwrapped model, and costs one
        all-reduce per process group. On an inner wrapper, only gradients within this wrapper are
        clipped. For ignored parameters, each rank uses its own gradients. If these gradients differ
        between ranks, each rank gets a different norm, so clip these gradients separately.
        Collective: all ranks.

        Example:
            ```python
            loss_fn(model(inputs), labels).backward()
            norm = model.clip_grad_norm_(1.0)
            optimizer.step()
            ```

        Args:
            max_norm: the largest norm allowed.
            norm_type: the order of the norm: any number, also ``inf`` and ``-inf``.
            error_if_nonfinite: raise if the norm is infinite or NaN. False: scale the gradients
                even by such a norm.
            foreach: use one kernel for many tensors; None: if supported.

        Returns:
            The total norm before clipping; 0-dimensional, in the dtype to which the gradients'
            dtypes promote; 0 if there are no gradients.

        Raises:
            RuntimeError: gradients accumulated under ``no_sync`` are not reduced yet; the norm is
                not finite and ``error_if_nonfinite`` is set; an optimizer steps in backward; an
                inner unit (of experts, for example) trains only on some of the model's ranks.
        """
        context, world = self._sharded_unit.context, self._sharded_unit.settings.topology.world
        for extension in context.extensions:
            extension.needs_gradients("clip_grad_norm_()")
        handles = wrappers.handles_in(self)
        optimizer_step.check_alike(handles, world)
        limits = max_norm, norm_type, error_if_nonfinite, foreach
        with ExitStack() as stack:
            for extension in context.extensions:
                stack.enter_context(extension.clipping(self, limits))
            optimizer_step.check_reduced(handles, world, reduces=context.is_reducing)
            return optimizer_step.clip_grad_norm_(list(self.parameters()), handles, *limits)

    def norms(
        self, kind: Literal["grad", "param"] = "grad", *, norm_type: float = 2.0
    ) -> dict[str, float]:
        """Return the norms of all full parameters or gradients, keyed by unwrapped name.

        Costs one collective if all units train on the same ranks. The host waits once for the GPU.

        Collective: all ranks, between steps.

        Example:
            ```python
            loss_fn(model(inputs), labels).backward()
            for name, norm in model.norms("grad").items():
                print(name, norm)
            ```

        Args:
            kind: ``"grad"``: the gradients in ``.grad``; parameters without a gradient are left
                out. ``"param"``: the parameters.
            norm_type: the p of the p-norm; ``math.inf``: the largest absolute value; 0: the number
                of elements that are not zero.

        Raises:
            ValueError: ``kind`` has another value.
            RuntimeError: a forward or backward of the model is running; gradients were accumulated
                under ``no_sync`` and not reduced.
        """
        return extra("weights", "norms()").norms(self, kind, norm_type)  # type: ignore[no-any-return]

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """Give modules full plain parameters, under the unwrapped names, inside a context.

        At the end of the context, even after an exception, each rank copies its own range of the
        full values into its shards. All ranks must write the same values, otherwise the model
        becomes inconsistent. With ``writeback``, edits of values and ``requires_grad`` are kept,
        and with ``with_grads`` also edits of gradients. Hooks and other attributes that are set
        inside the context are lost. Forwards inside the context do not communicate, and compute in
        the parameters' own dtype. A backward that computes gradients of these parameters, a copy of
        the model, or a nested summon of the same parameters raises an error.

        Collective: all ranks, at entry.

        Example:
            ```python
            with ShardedWrapper.summon_full_params(model), torch.no_grad():
                print(model.head.weight.norm())  # a plain parameter in its full shape
                model.head.weight[0] = 0  # the same edit on every rank
            ```

        Args:
            module: a wrapper, or any module that contains wrappers.
            recurse: also summon nested units. False: only the outermost units.
            writeback: keep edits. False: edits are undone, for every strategy.
            rank0_only: only rank 0 gets full parameters and can run forwards. On other ranks, the
                parameters stay sharded, except that each unit is unsharded once, while rank 0
                copies it. Needs ``writeback=False``. Run no collective operation inside the
                context.
            offload_to_cpu: copy the full parameters to CPU memory, unit by unit.
            with_grads: ``p.grad`` is the full reduced gradient, or None if ``p`` has no gradient.
                Setting ``p.grad`` to None drops the gradient. Assigning a tensor adds or replaces
                the gradient.

        Raises:
            ValueError: ``rank0_only`` with ``writeback``.
            RuntimeError: a forward or backward of the model is running; ``module`` lies inside a
                unit, and holds only some of the unit's parameters; gradients are not reduced yet or
                exist only on some ranks (``with_grads``). At the end: an edit cannot be kept.
        """
        summon = extra("summon", "ShardedWrapper.summon_full_params()")
        request = summon.Request(writeback, rank0_only, offload_to_cpu, with_grads)
        return summon.summon(module, request, recurse=recurse)  # type: ignore[no-any-return]

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` with each module of the unwrapped module, children first, without wrappers.

        ``fn`` sees full plain parameters, and its edits are kept, even if ``fn`` raises. ``fn``
        must write the same values on all ranks: if ``fn`` draws random numbers, use the same seed
        on all ranks. Only a unit and the units around it are unsharded at the same time.

        Collective: all ranks.

        Example:
            ```python
            def init(module):
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=0.02)

            torch.manual_seed(0)  # the same seed on every rank
            model.apply(init)
            ```

        Raises:
            RuntimeError: see ``summon_full_params``.
        """
        _apply_by_unit(self.module, fn)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the full state dict, with the names of the unwrapped module, on every rank.

        As with an unwrapped model, a program may change the model by writing into the tensors in
        place. The values are copied into the model at its next use, which raises RuntimeError if
        the model itself has also changed since ``state_dict()``. Unlike with an unwrapped model,
        later steps do not change the tensors: call ``state_dict`` again.

        To get the state dict only on rank 0, in CPU memory, use
        ``flatshard.checkpoint.full_state_dict`` or ``set_state_dict_type``. Collective: all ranks,
        including ranks that get nothing.

        Example:
            ```python
            state = model.state_dict()  # on all ranks
            plain = Model()
            plain.load_state_dict(state)
            ```
        """
        self._sharded_unit.context.forward.recover()
        return self.module.state_dict(*args, **kwargs)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the state dict with only this rank's part of each parameter; no communication.

        Names, shapes and dtypes are the unwrapped module's. Sharded values share memory with the
        model: ``torch.distributed.checkpoint`` saves these values, and loads checkpoints from any
        number of ranks in place, into these values. Buffers, empty parameters and parameters that
        this rank holds whole are plain tensors. ``load_state_dict`` accepts the dict, on the same
        rank of the same model.

        Example:
            ```python
            import torch.distributed.checkpoint as dcp

            dcp.save({"model": model.sharded_state_dict()}, checkpoint_id="step-1")
            dcp.load({"model": model.sharded_state_dict()}, checkpoint_id="step-1")  # in place
            ```

        Raises:
            RuntimeError: a forward of the model is running.
        """
        options = model_state.StateDictOptions(is_sharded=True)
        with temporarily(wrappers.state_dicts_in(self), options=options):
            return self.state_dict()

    def load_state_dict(
        self, state_dict: Any, strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load a state dict of the unwrapped module, from which each rank copies only its part.

        Tensors are cast to the model's dtypes. DistributedDataParallel's ``module.`` prefix is
        accepted. No communication, so every rank must pass the same dict. If only some ranks load,
        the next backward raises at its end. Returns missing and unexpected keys.

        Example:
            ```python
            if dist.get_rank() == 0:
                torch.save(Model().state_dict(), "model.pt")
            dist.barrier()
            model.load_state_dict(torch.load("model.pt", map_location="cpu", mmap=True))
            ```

        Raises:
            RuntimeError: keys or shapes do not fit.
            TypeError: the state dict is not a dict.
            ValueError: ``assign=True``.
        """
        if not isinstance(state_dict, Mapping):
            got = type(state_dict).__name__
            raise TypeError(f"load_state_dict: expected a dict of tensors by name, got a {got}.")
        self._sharded_unit.context.forward.recover()
        members = *self.module.named_parameters(), *self.module.named_buffers()
        own = model_state.without_ddp_prefix(dict(state_dict), {name for name, _ in members})
        missing_and_unexpected = self.module.load_state_dict(own, strict=strict, assign=assign)
        for handle in wrappers.handles_in(self):
            handle.page_out()
        return missing_and_unexpected

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
        """Return the optimizer's full state, keyed by the names of the unwrapped model.

        The result is ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``.
        Tensors with one value per element of a parameter have the parameter's shape and strides,
        and the state's dtype. ``step``, options and other entries are kept. A tied parameter
        appears only under its first name.

        The result does not depend on ranks or units, so it can be loaded with any number of ranks
        and any units, and into an optimizer of the unwrapped model: see
        ``optim_state_dict_to_load``.

        Collective: all ranks, unless ``model`` contains no wrapper. All-gathers unit by unit.

        Example:
            ```python
            # The call is collective: make it on all ranks, also on ranks that get no state.
            state = ShardedWrapper.optim_state_dict(model, optimizer, rank0_only=True)
            if dist.get_rank() == 0:
                torch.save(state, "optimizer.pt")
            ```

        Args:
            model: a wrapper, a module that contains wrappers, or an unwrapped model.
            optim: an optimizer over the model's parameters, made before or after wrapping.
            optim_state_dict: the result of ``optim.state_dict()``. None: the call is made here.
            group: no effect, because each unit knows its ranks.
            rank0_only: only rank 0 gets the state, other ranks an empty dict. None: the setting of
                ``set_state_dict_type``, by default False.
            offload_to_cpu: copy the tensors to CPU memory, unit by unit. None: the setting of
                ``set_state_dict_type``, by default True.

        Raises:
            ValueError: on all ranks: the optimizer has a parameter that ``model`` lacks, state that
                is neither one value per element nor a number, or ranks have different state.
            RuntimeError: a forward or backward of the model is running; ``optim_state_dict`` is
                the state dict of another rank's optimizer.
        """
        units = wrappers.units_between_steps(model, "optim_state_dict()")
        options = model_state.options_of(wrappers.state_dicts_in(model))
        to_cpu = options.optim_offload_to_cpu if offload_to_cpu is None else offload_to_cpu
        device = torch.device("cpu") if to_cpu else None
        state = OptimState(model, optim, units)
        if options.is_sharded:
            return state.sharded(optim_state_dict, device)
        rank0_only = options.optim_rank0_only if rank0_only is None else rank0_only
        return state.full(optim_state_dict, device, rank0_only)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return this rank's part of ``optim_state_dict``, for ``optim.load_state_dict``.

        ``optim_state_dict`` is from ``optim_state_dict()``, or the ``state_dict()`` of an optimizer
        of the unwrapped model. In a ``state_dict()``, positions refer to parameters in the order of
        ``optim``'s groups. ``optim.load_state_dict`` casts dtypes as usual. If ``model`` contains
        no wrapper, this function only replaces names by positions.

        Collective: all ranks, unless ``model`` contains no wrapper. Ranks compare the state that
        they load.

        Example:
            ```python
            state = ShardedWrapper.optim_state_dict(model, optimizer)

            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            state = ShardedWrapper.optim_state_dict_to_load(model, optimizer, state)
            optimizer.load_state_dict(state)
            ```

        Args:
            model: a wrapper, a module that contains wrappers, or an unwrapped model.
            optim: an optimizer over the model's parameters.
            optim_state_dict: the state, the same on every rank. It is not changed.
            is_named_optimizer: whether ``optim.load_state_dict`` takes names instead of positions.
            load_directly: whether to pass the result to ``optim.load_state_dict``, too.
            group: no effect, because each unit knows its ranks.

        Returns:
            This rank's part of the state, keyed by position.

        Raises:
            ValueError: on all ranks: parameters are missing or unexpected, a shape differs, one
                rank's ``optim.state_dict()`` was passed, parameters of one group have different
                options, or ranks passed different state.
            RuntimeError: a forward or backward of the model is running.
        """
        units = wrappers.units_between_steps(model, "optim_state_dict_to_load()")
        state = OptimState(model, optim, units)
        loaded = state.to_load(optim_state_dict, by_name=is_named_optimizer)
        if load_directly:
            optim.load_state_dict(loaded)
        return loaded

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> StateDictSettings:
        """Set the format of ``state_dict()`` and ``optim_state_dict()``; call it on all ranks.

        Example:
            ```python
            from torch.distributed.fsdp import FullStateDictConfig, StateDictType

            on_rank_0 = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            ShardedWrapper.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, on_rank_0)
            state = model.state_dict()  # empty on all ranks but rank 0
            ```

        Args:
            module: a wrapper, or any module that contains wrappers. The setting applies to all of
                these wrappers.
            state_dict_type: a member of torch's ``StateDictType``, or its name. Either
                ``FULL_STATE_DICT``, or ``SHARDED_STATE_DICT``, for
                ``torch.distributed.checkpoint``. A sharded state dict is made without communication
                (see ``sharded_state_dict``).
            state_dict_config: torch's ``FullStateDictConfig`` or ``ShardedStateDictConfig``,
                according to the type. ``rank0_only``: all ranks call ``state_dict()``, but the
                result is empty on all ranks except rank 0. ``offload_to_cpu``: tensors are copied
                to CPU memory, unit by unit. If the config is None, every rank gets the tensors, on
                the rank's own device.
            optim_state_dict_config: torch's ``FullOptimStateDictConfig``. Its fields are the
                defaults of the keywords of ``optim_state_dict`` with the same names. If None, every
                rank gets the optimizer's state, in CPU memory.

        Returns:
            The previous setting, as torch's ``StateDictSettings``.

        Raises:
            NotImplementedError: the type is neither ``FULL_STATE_DICT`` nor ``SHARDED_STATE_DICT``.
            TypeError: a config does not belong to the type.
            RuntimeError: the units had different settings before the call, so there is no single
                setting to return.
        """
        names = extra("torch_names", "ShardedWrapper.set_state_dict_type()")
        options = names.read_options(state_dict_type, state_dict_config, optim_state_dict_config)
        before = ShardedWrapper.get_state_dict_type(module)
        for part in wrappers.state_dicts_in(module):
            part.options = options
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the setting of ``set_state_dict_type``, as torch's ``StateDictSettings``.

        Raises:
            RuntimeError: units have different settings.
        """
        names = extra("torch_names", "ShardedWrapper.get_state_dict_type()")
        return names.as_torch(model_state.options_of(wrappers.state_dicts_in(module)))

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> AbstractContextManager[None]:
        """Call ``set_state_dict_type``, and restore the earlier settings after the context."""
        names = extra("torch_names", "ShardedWrapper.state_dict_type()")
        options = names.read_options(state_dict_type, state_dict_config, optim_state_dict_config)
        return temporarily(wrappers.state_dicts_in(module), options=options)

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The sharding strategy of this unit."""
        return self._sharded_unit.settings.strategy

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group that trains this model; None without a process group."""
        return self._sharded_unit.settings.ranks.world.group

    def extra_repr(self) -> str:
        """Return a text with the unit's numbers of elements and padding, for ``print(model)``."""
        return summary(self._sharded_unit)

    def unit_report(self) -> str:
        """Return a table of this unit and the units inside, outermost first. No communication.

        Columns: the unit's name and class, elements of parameters and of padding, flat parameters
        (dtype, and whether frozen), bytes of unsharded parameters on every rank, strategy, number
        of ranks that share the unit, transport, and the reason why the module is a unit. Below the
        table is a line for each optimizer that has stepped full parameters. The line says how the
        optimizer steps, and how many extra bytes the optimizer needs.

        Example:
            ```python
            model = ShardedWrapper(model, auto_wrap_policy="auto")
            if dist.get_rank() == 0:
                print(model.unit_report())
            ```
        """
        return extra("unit_report", "ShardedWrapper.unit_report()").report(self)  # type: ignore[no-any-return]

    def flat_parameters(self) -> list[FlatParameter]:
        """Return this rank's chunks of the flat parameters of this unit and units inside.

        A unit has one flat parameter for each dtype and ``requires_grad`` of its parameters.
        ``print`` a flat parameter to see the chunks of all ranks, the padding, and the position of
        each original parameter. To edit values, write to the parameters themselves. No
        communication.

        Example:
            ```python
            for flat_param in model.flat_parameters():
                print(flat_param)
                assert flat_param.shape == (flat_param.flat_layout.shard_numel,)
            ```
        """
        return [handle.flat_param for handle in wrappers.handles_in(self)]

    def check_is_root(self) -> bool:
        """Whether this wrapper is the outermost wrapper."""
        return self._sharded_unit.is_root

    def will_sync_module_buffers(self) -> bool:
        """Whether a forward that begins now broadcasts rank 0's buffers."""
        sync = self._sharded_unit.context.buffers
        return sync is not None and sync.is_due and any(True for _ in self.module.buffers())

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[ShardedWrapper]:
        """Return a wrapper for each module of a unit, or only the outermost, as in FSDP1."""
        made: dict[nn.Module, Any] = {one.module: one for one in wrappers.wrappers_in(module)}
        found = wrappers.unit_modules(module, nested=not root_only)
        return [made.get(inner) or _wrapper_of(inner) for inner in found]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            torch_names = default_extra("torch_names")
            if torch_names is None:
                raise
            # A wrapper that is still being built or copied has no unit. Then pass None.
            module = self._module_if_set()
            unit = None if module is None else module.__dict__.get(UNIT)
            return torch_names.attribute(name, unit, error)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # Called by `.to()`, `.double()` and similar conversions.
        extra("conversion", "model.to()").convert(self, fn, recurse=recurse)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        # Ranks that train a copy together must copy their models in the same order: each copy gets
        # the next free tags (numbers by which ranks match messages).
        return extra("conversion", "copy.deepcopy(model)").copy_model(self, memo)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RuntimeError(
            "a ShardedWrapper cannot be pickled or copied by copy.copy(), because it belongs to a "
            "process group. To copy it, call copy.deepcopy(model). To save it, call "
            "flatshard.checkpoint.save(path, model). To load it, in this or another program, wrap "
            "a new model and call flatshard.checkpoint.load(path, model)."
        )

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell ``torch.distributed.checkpoint.state_dict`` to leave ``module.`` out of FQNs."""
        # Check here whether all of the model's ranks train the unit: torch's `get_state_dict` calls
        # this method first, on all ranks. A later check is not possible, because an optimizer's
        # hooks do not know which ranks train a unit.
        if is_getting_shards():
            self._sharded_unit.state_dict.check_names()
        return {"": "module"}


def _wrapper_of(module: nn.Module) -> ShardedWrapper:
    """Return a new wrapper around a module that is a unit already. The model stays as it is."""
    wrapper = ShardedWrapper.__new__(ShardedWrapper)
    nn.Module.__init__(wrapper)
    for name in _REGISTER:  # hooks go to the module: the model does not call this wrapper
        wrapper.__dict__[name] = getattr(module, name)
    return put_in_place(wrapper, module)


_REGISTER = (
    *("register_forward_pre_hook", "register_forward_hook", "register_backward_hook"),
    *("register_full_backward_pre_hook", "register_full_backward_hook"),
)


def _apply_by_unit(module: nn.Module, fn: Callable[[nn.Module], None]) -> None:
    """Call ``fn`` as ``Module.apply`` does, with the units around each module unsharded."""
    module = module.module if isinstance(module, ShardedWrapper) else module
    with ExitStack() as stack:
        if UNIT in module.__dict__:
            stack.enter_context(ShardedWrapper.summon_full_params(module, recurse=False))
        for child in module.children():
            _apply_by_unit(child, fn)
        fn(module)


def sharded_modules(module: nn.Module) -> list[ShardedWrapper]:
    """Return a wrapper for each module of a unit, outermost first. Empty for an unwrapped model.

    The modules themselves stay in the model as they are: a call of ``model.layers[0]`` unshards its
    unit, and ``sharded_modules(model.layers[0])[0]`` has the methods of ``ShardedWrapper``.

    Example:
        ```python
        for unit in flatshard.sharded_modules(model):
            print(type(unit.module).__name__, unit.sharding_strategy.name)
        ```
    """
    return ShardedWrapper.fsdp_modules(module)
