"""Extra: users' communication hooks, which replace reductions, and all-gathers in float8.

Without this folder, ``ShardedWrapper.register_comm_hook()`` and
``MixedPrecision(gather_dtype=...)`` raise ``MissingExtraError``.

[Note: float8]
With ``gather_dtype``, each rank quantises its shard to float8 before an all-gather, with a scale
per block of elements, as in ZeRO++ (arXiv 2306.10209): a large element reduces only the precision
of its block. Scales are powers of two, so values are rounded only once, by the quantisation.
"""

import contextlib
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import Facts, agreed
from flatshard.comm.process_groups import ranks_text
from flatshard.comm.work import watched
from flatshard.engine.events import StepExtension
from flatshard.engine.grad_reduce import CommHook
from flatshard.engine.gradients import GradSync
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Phase, Unit
from flatshard.extras.model_shards import check_has_all_modules
from flatshard.module.wrappers import unit_of, units_in
from flatshard.options.precision import ReduceMode
from flatshard.tensor.flat_parameter import FlatParamPlan
from flatshard.units.layout import ALIGNMENT_BYTES, round_up
from flatshard.units.module_proxy import ModuleProxy
from flatshard.units.module_tree import unit_text

_DDP_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_FSDP_HOOKS = "torch.distributed.algorithms._comm_hooks.default_hooks"

_AVERAGING = {
    "allreduce_hook": None,
    "reduce_scatter_hook": None,
    "fp16_compress_hook": torch.float16,
    "bf16_compress_hook": torch.bfloat16,
}

_COMPRESS = (
    "To compress, use torch's fp16_compress_hook or bf16_compress_hook, or "
    "mixed_precision=MixedPrecision(reduce_dtype=...)"
)


def register(root: ModuleProxy, state: Any, hook: Any) -> None:
    """Use ``hook`` to reduce the gradients of all units; see ``register_comm_hook``.

    Collective: all ranks of the model. If a rank raises, no unit gets the hook, and all other ranks
    raise the error, with the name of the rank.
    """
    outermost = unit_of(root)
    context, world = outermost.context, outermost.topology.world
    context.check_between_steps("register_comm_hook()")
    check_has_all_modules(root, "given a hook")

    def prepare() -> tuple[dict[Unit, CommHook], Facts]:
        if context.has_run and context.root is not outermost:
            raise RuntimeError(
                f"register_comm_hook() of {unit_text(outermost.name)} came after the model's first "
                "forward. Register the hook of an inner wrapper before the first forward, or "
                "register one hook for all units on the outermost wrapper."
            )
        planned = _plan([unit for unit in units_in(root) if unit.handles], state, hook, world)
        return planned, {
            f"the hook of {unit_text(unit.name)}": (
                f"an average, reduce_dtype={its.reduce_dtype}" if its.reduce is None else "called"
            )
            for unit, its in planned.items()
        }

    # Either all ranks register the hook or none: a hook on only some ranks would deadlock.
    remedy = "Register the same hook on every rank."
    planned = agreed(prepare, [world.host], "register_comm_hook", remedy)
    for unit, its in planned.items():
        for handle in unit.handles:
            handle.grads.use(handle.plan_gradients(handle.flat_param.dtype, its))
    call_hooks(context)
    context.refresh()


def call_hooks(state: RunState) -> None:
    """Call users' hooks in backward from now on, if the model has such hooks. Collective."""
    has_hooks = any(handle.grads.plan.hook is not None for handle in state.handles)
    if has_hooks and state.extension("reduction") is None:
        state.extend(HookCalls(state))


class HookCalls(StepExtension):
    """Calls users' communication hooks in backward.

    A user's hook blocks this rank's backward until the hook runs on all other ranks. So all ranks
    must call the hook at the same point of the step: just before a unit is unsharded for backward,
    where all ranks meet anyway. At this point, the ranks exchange how many flat parameters have
    complete gradients on each rank, and call the hooks of flat parameters that are ready on all
    ranks. After a rank has reached the end of backward, every rank calls the remaining hooks at the
    end of its own backward.
    """

    name, watches, is_made_anew = "reduction", True, True

    def __init__(self, state: RunState) -> None:
        """Collective: all ranks of the model."""
        self._queue, self._num = state.backward.queue, len(state.handles)
        # A separate process group for `_agree`, so that other collectives can run meanwhile.
        self._side_group = state.world.side_group
        self._asks = True  # False once a rank is at the end of its backward

    def begin_backward(self) -> None:
        self._asks = True

    def enter_forward(self, unit: Unit, recomputes: bool) -> None:
        if recomputes:
            self.enter_backward(unit)

    def enter_backward(self, unit: Unit) -> None:
        is_first = unit.phase is not Phase.BACKWARD
        if is_first and unit.for_backward and not unit.may_diverge:
            self._agree(is_at_end=False)
            self._queue.start_ready()

    def votes(self) -> bytes:
        self._agree(is_at_end=True)
        return b""

    def _agree(self, *, is_at_end: bool) -> None:
        """Exchange how many flat parameters are ready, if this is still needed. Collective."""
        if not self._asks or self._queue.limit == self._num:
            return
        said = [self._queue.num_ready(), int(not is_at_end)]
        values = torch.tensor(said, device=self._side_group.host.device)
        op_name = "communication hooks that can be called in backward"
        self._side_group.reduce_scalars(values, "MIN", op_name=op_name)
        # Take the minimum over the ranks: if some rank cannot call a hook yet, the ranks that call
        # the hook would wait.
        self._queue.limit, asks = values.tolist()
        self._asks = bool(asks)


def _plan(units: list[Unit], state: Any, hook: Any, world: Communicator) -> dict[Unit, CommHook]:
    """Return the ``CommHook`` of each unit. Raises if a unit cannot use the hook."""
    if not callable(hook):
        raise TypeError(
            f"expected a callable as hook, got {hook!r}. Pass the state first "
            "and then the hook: register_comm_hook(state, hook)."
        )
    is_average, dtype = _read_average(hook)
    group = state if isinstance(state, dist.ProcessGroup) else getattr(state, "process_group", None)
    if is_average and isinstance(group, dist.ProcessGroup):
        ranks = sorted(dist.get_process_group_ranks(group))
        if ranks != sorted(world.ranks):
            raise ValueError(
                f"the state of {_name(hook)} has a process group of ranks {ranks_text(ranks)}, but "
                f"the model trains on ranks {world.ranks_text}. Pass the model's process group."
            )
    planned = {}
    for unit in units:
        _check(unit, hook, dtype, is_average)
        # A hook that only averages is never called: flatshard reduces in the hook's dtype.
        reduce = None if is_average else _user_hook(state, hook, unit.placement.sharded)
        planned[unit] = CommHook(dtype, reduce)
    return planned


def _read_average(hook: Any) -> tuple[bool, torch.dtype | None]:
    """Return whether ``hook`` is a hook of torch that only averages, and in which dtype.

    If the dtype is None, the hook averages in the dtype of the gradients.
    """
    # Compare the functions, not their names, which ``functools.wraps`` copies. Do not import
    # torch's modules of hooks, which need numpy: a program with such a hook has imported them.
    ddp, fsdp = sys.modules.get(_DDP_HOOKS), sys.modules.get(_FSDP_HOOKS)
    for name, dtype in _AVERAGING.items():
        if hook is getattr(ddp, name, None) or hook is getattr(fsdp, name, None):
            return True, dtype
    return False, None


def _check(unit: Unit, hook: Any, dtype: torch.dtype | None, is_average: bool) -> None:
    """Raise if the unit cannot use the hook."""
    where, name, precision = unit_text(unit.name), _name(hook), unit.settings.mixed_precision
    if any(handle.grads.plan.comm_hook is not None for handle in unit.handles):
        raise RuntimeError(
            f"{where} already has a hook, which cannot be replaced. register_comm_hook() of a "
            "wrapper also sets the hook of all wrappers inside, so call register_comm_hook() only "
            "once for each wrapper."
        )
    if any(handle.grads.waits_for(GradSync.FULL) for handle in unit.handles):
        raise RuntimeError(
            f"{where} holds gradients accumulated under no_sync. Register the hook before no_sync, "
            "or after the backward that reduces the gradients."
        )
    if dtype is not None and precision.reduce_dtype not in (None, dtype):
        raise ValueError(
            f"{name} reduces in {dtype}, but {where} was wrapped with MixedPrecision(reduce_dtype="
            f"{precision.reduce_dtype}). Leave out the hook or reduce_dtype."
        )
    if is_average:
        return
    if precision.reduce_mode is ReduceMode.FIXED_ORDER:
        raise ValueError(
            f"{name} may add gradients in any order, but {where} was wrapped with MixedPrecision("
            'reduce_mode="fixed_order"). Leave out the hook or reduce_mode.'
        )
    arguments, kind = "state, grad", "not sharded: the hook averages grad over ranks, in place"
    if unit.placement.sharded:
        arguments, kind = "state, full, out", "sharded: the hook fills out, this rank's part, with "
        kind += "the average of full over the ranks"
    expected = f"hook({arguments}) for {where}, which is {kind}"
    # Some built-in functions have no signature. Assume that such functions take all arguments.
    signature = inspect.signature(lambda *_: None)
    with contextlib.suppress(ValueError):
        signature = inspect.signature(hook)
    takes = signature.parameters.values()
    if any(one.name == "bucket" or "GradBucket" in str(one.annotation) for one in takes):
        raise NotImplementedError(
            f"{name} takes a bucket of DistributedDataParallel, and flatshard has no "
            f"buckets. {_COMPRESS}. Any other hook must have the form {expected}."
        )
    if unit.placement.hybrid:
        raise NotImplementedError(
            f"{where} has a HYBRID strategy, which reduces gradients in two stages, and one hook "
            f"cannot replace both. {_COMPRESS}. To keep this hook, use FULL_SHARD."
        )
    try:
        signature.bind(*arguments.split())
    except TypeError:
        raise TypeError(f"expected {expected}, got {name}{signature}") from None


def _user_hook(
    state: Any, hook: Callable[..., object], is_sharded: bool
) -> Callable[[Tensor, FlatParamPlan], Tensor]:
    """Return a function that reduces a unit's gradients by the user's hook; see ``CommHook``."""

    def reduce(buffer: Tensor, flat: FlatParamPlan) -> Tensor:
        unit, topology = unit_text(flat.unit_name), flat.topology
        where = f"{unit}, rank {topology.world.global_rank}: communication hook {_name(hook)}"
        # Fill `out` with NaN, which shows the user the elements that the hook does not write. The
        # hook of an unsharded unit (NO_SHARD) averages `buffer` in place.
        shape = torch.Size([buffer.numel() // topology.shard.size])
        out = buffer.new_full(shape, math.nan) if is_sharded else buffer
        try:
            with watched(where):
                returned = hook(state, buffer, out) if is_sharded else hook(state, buffer)
            # Refuse a future, which DistributedDataParallel's hooks return: flatshard would not
            # wait for it.
            if hasattr(returned, "wait"):
                raise TypeError(
                    f"the hook returned a {type(returned).__name__}, but the reduction must be "
                    "finished when the hook returns. Call wait() in the hook."
                )
            if out.shape != shape:
                raise ValueError(
                    f"the hook resized `out`: expected shape {tuple(shape)}, got "
                    f"{tuple(out.shape)}. Write to `out` in place: out.copy_(...)."
                )
        except Exception as error:
            error.add_note(where)
            raise
        # The hook may have added noise to all elements, but padding must stay zero.
        first = topology.index * len(out)
        for _, *gap in flat.layout.gaps:
            start, end = (min(max(bound - first, 0), len(out)) for bound in gap)
            out[start:end].zero_()
        return out

    return reduce


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


# ------------------------------------------------------------ float8 all-gathers

BLOCK_NUMEL = 256


@dataclass(frozen=True)
class Float8Shard:
    """Quantises shards to float8. The bytes of a shard are ``[scales | elements | padding]``."""

    dtype: torch.dtype  # float8 dtype of the elements; the scales are float32
    numel: int  # number of elements of the shard

    @property
    def num_blocks(self) -> int:
        return -(-self.numel // BLOCK_NUMEL)

    @property
    def nbytes(self) -> int:
        return round_up(self.num_blocks * torch.float32.itemsize + self.numel, ALIGNMENT_BYTES)

    def pack(self, shard: Tensor) -> Tensor:
        """Quantise a shard of shape ``(numel,)``, and return uint8 of shape ``(nbytes,)``.

        If a block has an element that is inf or NaN, all elements of the block become NaN.
        """
        blocks = shard.new_zeros(self.num_blocks * BLOCK_NUMEL, dtype=torch.float32)
        blocks[: self.numel].copy_(shard)
        blocks = blocks.view(self.num_blocks, BLOCK_NUMEL)
        largest = blocks.abs().amax(1) / torch.finfo(self.dtype).max
        scales = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
        scales = torch.where(largest.isfinite(), scales, torch.nan)
        packed = shard.new_zeros(self.nbytes, dtype=torch.uint8)
        own_scales, elements = self._split(packed)
        own_scales.copy_(scales)
        elements.copy_((blocks / scales[:, None]).view(-1)[: self.numel])
        return packed

    def unpack(self, everything: Tensor, out: Tensor) -> None:
        """Undo ``pack`` for the shards of all ranks."""
        full_blocks = self.numel // BLOCK_NUMEL
        # Unpack all shards in one call, because launching a small kernel takes longer than running
        # it.
        scales, elements = self._split(everything.view(-1, self.nbytes))
        parts = out.view(-1, self.numel)
        parts.copy_(elements)
        scales = scales.to(parts.dtype)
        blocks = parts[:, : full_blocks * BLOCK_NUMEL].unflatten(1, (full_blocks, BLOCK_NUMEL))
        blocks.mul_(scales[:, :full_blocks, None])
        if full_blocks < self.num_blocks:
            parts[:, full_blocks * BLOCK_NUMEL :].mul_(scales[:, full_blocks:])

    def _split(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        first = self.num_blocks * torch.float32.itemsize
        scales, values = packed[..., :first], packed[..., first : first + self.numel]
        return scales.view(torch.float32), values.view(self.dtype)
