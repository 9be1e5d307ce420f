"""``register_comm_hook``: reads and checks a communication hook, and gives it to flat parameters.

[Note: two kinds]
torch's own averaging and compressing hooks are recognised by identity and never called: they only
choose the reduce dtype. Any other hook is called instead of a reduction, which is over when the
hook returns; ``engine.reduce_queue`` says when it is called.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.comm.deadlock.watchdog import watched
from flatshard.engine.grad_reduce import CommHook
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.options.precision import MixedPrecision, ReduceMode

_DDP_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_FSDP_HOOKS = "torch.distributed.algorithms._comm_hooks.default_hooks"

_AVERAGING: dict[str, torch.dtype | None] = {
    "allreduce_hook": None,
    "reduce_scatter_hook": None,
    "fp16_compress_hook": torch.float16,
    "bf16_compress_hook": torch.bfloat16,
}
_WRAPPERS = {"fp16_compress_wrapper": torch.float16, "bf16_compress_wrapper": torch.bfloat16}

_COMPRESS = (
    "To compress, use torch's fp16_compress_hook or bf16_compress_hook, or "
    "mixed_precision=MixedPrecision(reduce_dtype=...)"
)


def register(
    units: Sequence[tuple[Unit, MixedPrecision]], state: Any, hook: Any, *, is_late: bool
) -> None:
    """Give a hook to every flat parameter of some units; see ``ShardedWrapper``.

    Collective: all ranks that train the model; compares what they register.

    Args:
        units: the units, outermost first, each with the precision that it was wrapped with.
        state: passed to the hook.
        hook: the user's hook.
        is_late: whether they are inside a model that has run a forward.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: see ``ShardedWrapper``; on every
            rank, even if only some ranks have a reason. Then no unit has the hook.
    """
    outermost, _ = units[0]
    world = outermost.topology.world
    planned: list[tuple[FlatParamHandle, CommHook]] = []
    problem: Exception | None = None
    try:
        if is_late:
            raise RuntimeError(
                f"register_comm_hook: {_describe(outermost.name)} is part of a model that has run "
                "a forward. Register a unit's hook before the first forward, or one for all units "
                "on the outermost wrapper."
            )
        with_parameters = [(unit, precision) for unit, precision in units if unit.handles]
        _check_can_register([unit for unit, _ in with_parameters])
        planned = _plan(with_parameters, state, hook, world)
    except (TypeError, ValueError, RuntimeError) as error:
        problem = error
    kinds = [(one.unit_name, its.reduce_dtype, its.reduce is None) for one, its in planned]
    # Nothing changes before all ranks agree: a hook on some ranks only would deadlock.
    _agree(kinds, problem, world)
    for handle, its in planned:
        handle.set_comm_hook(its)
    if any(its.reduce is not None for _, its in planned):
        world.set_apart()


def _agree(kinds: list[Any], problem: Exception | None, world: Communicator) -> None:
    """Raise on every rank if one has a problem, or if ``kinds`` differ. Collective."""
    everyone = world.gather_objects((kinds, problem), op_name="comparing communication hooks")
    if problem is not None:
        raise problem
    for rank, (others, their_problem) in enumerate(everyone):
        if their_problem is not None:
            raise type(their_problem)(f"on rank {world.ranks[rank]}: {their_problem}")
        if others != everyone[0][0]:
            raise ValueError(
                f"register_comm_hook: rank {world.ranks[0]} registers another kind of hook, or for "
                f"other units, than rank {world.ranks[rank]}. Register the same hook on every rank."
            )


def _check_can_register(units: list[Unit]) -> None:
    for unit in units:
        for handle in unit.handles:
            if handle.comm_hook is not None:
                raise RuntimeError(
                    f"register_comm_hook: {_describe(unit.name)} has a hook already, which cannot "
                    "be replaced. Registering on a wrapper gives the hook to all units inside it."
                )
            if handle.grad_publish.holds_gradients:
                raise RuntimeError(
                    f"register_comm_hook: {_describe(unit.name)} holds gradients accumulated under "
                    "no_sync. Register before, or after the backward that reduces them."
                )


def _plan(
    units: Sequence[tuple[Unit, MixedPrecision]], state: Any, hook: Any, world: Communicator
) -> list[tuple[FlatParamHandle, CommHook]]:
    if not callable(hook):
        raise TypeError(
            f"register_comm_hook: expected a callable as hook, got {hook!r}. The order of "
            "arguments is register_comm_hook(state, hook)."
        )
    is_average, dtype = _read_average(hook)
    if is_average:
        _check_averages_over(world, state, hook)
        for unit, precision in units:
            _check_same_dtype(unit, precision, dtype, hook)
        return [(handle, CommHook(dtype)) for unit, _ in units for handle in unit.handles]
    for unit, precision in units:
        _check_order_is_free(unit, precision, hook)
    signature = _signature(hook)
    planned = []
    for unit, _ in units:
        _check_callable_for(unit, hook, signature)
        for handle in unit.handles:
            shard_numel = handle.layout.shard_numel if unit.placement.sharded else None
            called = _UserHook(state, hook, shard_numel=shard_numel, rank=world.global_rank)
            planned.append((handle, CommHook(reduce=called)))
    return planned


# ---------------------------------------------------------------- torch's own hooks


def _read_average(hook: Any) -> tuple[bool, torch.dtype | None]:
    """Whether a hook is one of torch's that average, and its reduce dtype; None: unchanged."""
    for module in (_DDP_HOOKS, _FSDP_HOOKS):
        for name, dtype in _AVERAGING.items():
            if hook is _of_torch(module, name):
                return True, dtype
    for name, dtype in _WRAPPERS.items():
        wrapper = _of_torch(_DDP_HOOKS, name)
        # The wrapper returns a new function each time, but always with the same code object.
        made_here = () if wrapper is None else wrapper.__code__.co_consts
        if any(getattr(hook, "__code__", None) is code for code in made_here):
            wrapped = inspect.getclosurevars(hook).nonlocals["hook"]
            return wrapped is _of_torch(_DDP_HOOKS, "allreduce_hook"), dtype
    return False, None


def _of_torch(module: str, name: str) -> Any:
    """A function of torch; None if its module is not imported: then the hook is not from there."""
    # Importing the module here would need numpy.
    return getattr(sys.modules.get(module), name, None)


def _check_averages_over(world: Communicator, state: Any, hook: Any) -> None:
    """Raise if the hook's state asks for anything but the average over all ranks."""
    group = state if isinstance(state, dist.ProcessGroup) else getattr(state, "process_group", None)
    if isinstance(group, dist.ProcessGroup):
        ranks = sorted(dist.get_process_group_ranks(group))
        if ranks != sorted(world.ranks):
            raise ValueError(
                f"register_comm_hook: the state of {_name(hook)} is for ranks {ranks}, the model "
                f"trains on ranks {sorted(world.ranks)}. Pass its process group."
            )
    before = getattr(state, "gradient_predivide_factor", 1)
    after = getattr(state, "gradient_postdivide_factor", world.size)
    if before * after != world.size:
        raise ValueError(
            f"register_comm_hook: the state of {_name(hook)} divides by {before} and {after}, "
            f"which is not the average over {world.size} ranks that the hook means here. "
            "Scale the loss instead, or write a hook of your own."
        )


def _check_same_dtype(
    unit: Unit, precision: MixedPrecision, dtype: torch.dtype | None, hook: Any
) -> None:
    if dtype is not None and precision.reduce_dtype not in (None, dtype):
        raise ValueError(
            f"register_comm_hook: {_name(hook)} reduces in {dtype}, but {_describe(unit.name)} was "
            f"wrapped with MixedPrecision(reduce_dtype={precision.reduce_dtype}). Choose one."
        )


# ---------------------------------------------------------------- hooks that are called


def _check_order_is_free(unit: Unit, precision: MixedPrecision, hook: Any) -> None:
    if precision.reduce_mode is ReduceMode.FIXED_ORDER:
        raise ValueError(
            f"register_comm_hook: {_name(hook)} adds gradients in an order of its own, but "
            f"{_describe(unit.name)} was wrapped with MixedPrecision(reduce_mode="
            '"fixed_order"). Choose one.'
        )


def _signature(hook: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(hook)
    except ValueError:
        return None  # some built-in functions do not tell


def _check_callable_for(unit: Unit, hook: Any, signature: inspect.Signature | None) -> None:
    """Raise if a hook needs buckets, if the unit is HYBRID, or if the arguments do not fit."""
    takes = [] if signature is None else list(signature.parameters.values())
    if any(one.name == "bucket" or "GradBucket" in str(one.annotation) for one in takes):
        raise NotImplementedError(
            f"register_comm_hook: {_name(hook)} takes DistributedDataParallel's buckets, and there "
            f"are none here. {_COMPRESS}; anything else as {_expected(unit)}."
        )
    if unit.placement.hybrid:
        raise NotImplementedError(
            f"register_comm_hook: {_describe(unit.name)} has a HYBRID strategy, and its "
            f"gradients are reduced in two stages that no hook can replace. {_COMPRESS}; to call "
            "a hook, use FULL_SHARD."
        )
    if signature is not None:
        try:
            signature.bind(*[None] * (3 if unit.placement.sharded else 2))
        except TypeError as error:
            raise TypeError(
                f"register_comm_hook: expected {_expected(unit)}, got {_name(hook)}{signature}"
            ) from error


def _expected(unit: Unit) -> str:
    if unit.placement.sharded:
        return (
            f"hook(state, full, out) for {_describe(unit.name)}, which is sharded: it fills out, "
            "this rank's part, with the average of full over the ranks"
        )
    return (
        f"hook(state, grad) for {_describe(unit.name)}, which is not sharded: it averages "
        "grad over the ranks, in place"
    )


class _UserHook:
    """A user's hook as the reduction of one flat parameter."""

    def __init__(
        self,
        state: Any,
        hook: Callable[..., object],
        *,
        shard_numel: int | None,
        rank: int,
    ) -> None:
        """``shard_numel`` is this rank's part; None: the hook works in place on all of it."""
        self._state, self._hook = state, hook
        self._shard_numel, self._rank = shard_numel, rank

    def __call__(self, buffer: Tensor, unit_fqn: str) -> Tensor:
        """Reduce; see ``CommHook``. Adds a note with unit and rank to the hook's exceptions."""
        where = f"{_describe(unit_fqn)}, rank {self._rank}: communication hook {_name(self._hook)}"
        try:
            with watched(lambda: where):
                return self._reduce(buffer)
        except Exception as error:
            error.add_note(where)
            raise

    def _reduce(self, buffer: Tensor) -> Tensor:
        if self._shard_numel is None:
            out, shape = buffer, buffer.shape
            returned = self._hook(self._state, buffer)
        else:
            # NaN, so that elements that the hook does not fill are noticed.
            out = buffer.new_full((self._shard_numel,), math.nan)
            shape = out.shape
            returned = self._hook(self._state, buffer, out)
        if hasattr(returned, "wait"):
            raise TypeError(
                f"the hook returned a {type(returned).__name__}, but its reduction must be over "
                "when it returns: wait for it inside"
            )
        if out.shape != shape:
            raise ValueError(f"the hook made {tuple(out.shape)} of a result of {tuple(shape)}")
        return out


def _describe(unit_name: str) -> str:
    return f"unit {unit_name!r}" if unit_name else "the root unit"


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
