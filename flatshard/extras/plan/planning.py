"""``choices``: predicts the memory and the time of a step under each sharding strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flatshard.extras.plan import shards
from flatshard.extras.plan.fusion import compiled
from flatshard.extras.plan.hardware import Machine, show
from flatshard.extras.plan.models import Step, language_step
from flatshard.extras.plan.replay import Outcome, PlannedFlat, Replay
from flatshard.extras.plan.trace import Checkpointing, StepTrace, checkpoint_blocks, fake, trace
from flatshard.module.model_plan import PlannedUnit
from flatshard.options.precision import MixedPrecision
from flatshard.units.module_tree import unit_text
from flatshard.units.policies import Policy

_CPU = torch.device("cpu")
# Dtypes in which models compute. Gradients are reduced, and optimizers step, in float32.
DTYPES = {
    "bf16": MixedPrecision(torch.bfloat16, torch.float32),
    "fp16": MixedPrecision(torch.float16, torch.float32),
    "fp32": MixedPrecision(),
}
STRATEGIES = ("NO_SHARD", "SHARD_OP", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")
# Bytes of the optimizer's state for each trained element in float32.
OPTIMIZERS = {"adamw": 8.0, "adam": 8.0, "sgd": 0.0, "momentum": 4.0, "muon": 4.0, "lion": 4.0}
_PERSISTENT = {"parameters": "parameter", "gradients": "gradient", "optimizer": "optimizer"}
CONTEXT_BYTES = 1.0e9  # memory of the CUDA context and of NCCL, outside of torch's allocator


@dataclass
class TracedModel:
    """A model on the meta device, and the trace of one of its steps.

    Attributes:
        model: the unwrapped model, on the meta device, with parameters in float32.
        policy: selects the units.
        precision: the mixed precision of the traced step.
        trace: the trace of the step. The trace refers to units and flat parameters by number, in
            the order of ``planned_flats``.
        buffer_bytes: bytes of the model's buffers.
        container: name of the module that contains the repeated blocks; empty if no module does.
        coalesce_bytes: see ``ShardedWrapper``.
    """

    model: nn.Module
    policy: Policy | None
    precision: MixedPrecision
    trace: StepTrace
    buffer_bytes: int
    container: str
    coalesce_bytes: int | None = None

    @classmethod
    def of(
        cls,
        build: Callable[[], Any],
        step: Step,
        *,
        policy: Policy | None,
        precision: MixedPrecision,
        checkpoint: Checkpointing = "none",
        compiles: bool = False,
        on_gpu: bool = True,
        device: torch.device = _CPU,
        coalesce_bytes: int | None = None,
    ) -> TracedModel:
        """Build the model twice on the meta device: one copy for the units, one copy to trace."""
        models = []
        for _ in range(2):
            with torch.device("meta"):
                made = build()
            model, step = made if isinstance(made, tuple) else (made, step)
            models.append(model)
        model, copy = models
        names = {id(param): name for name, param in model.named_parameters()}
        units = _plan(model, policy, precision, coalesce_bytes=coalesce_bytes).units
        flat_of: dict[str, int] = {}
        for index, (_, memory) in enumerate(_flats(units, 1)):
            flat_of.update((names[id(param)], index) for param in memory.params)
        modules = dict(copy.named_modules())
        casts = _plan(copy, policy, precision).precision
        casts.install()
        members = [
            {
                modules[name]: casts.of_unit(modules[name], unit.settings.precision)
                for name in unit.names
            }
            for unit in units
        ]
        container, blocks = _blocks(copy)
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # `step` may use real tensors
        cast = partial(_cast_dtype, casts, precision)
        fake(copy, mode, cast, device)
        checkpoint_blocks(blocks, checkpoint)
        flat_index = {id(param): flat_of[name] for name, param in copy.named_parameters()}
        found = trace(copy, step, members, flat_index, mode, on_gpu=on_gpu)
        if compiles:
            found = compiled(found, [i for i, unit in enumerate(units) if unit.name])
        buffers = {id(one): one.nbytes for one in copy.buffers()}
        nbytes = sum(buffers.values())
        return cls(model, policy, precision, found, nbytes, container, coalesce_bytes)


def _cast_dtype(casts: Any, precision: MixedPrecision, param: nn.Parameter) -> Any:
    return casts.of_param(param, precision).unsharded_dtype(param.dtype)


def _plan(model: nn.Module, policy: Policy | None, precision: MixedPrecision, **more: Any) -> Any:
    keywords: dict[str, Any] = {"world_size": 1, "sharding_strategy": "FULL_SHARD", **more}
    return shards.plan_units(model, auto_wrap_policy=policy, mixed_precision=precision, **keywords)


def _flats(
    units: Sequence[PlannedUnit], world_size: int, optimizer_bytes: float | None = None
) -> list[tuple[int, shards.FlatMemory]]:
    return [
        (number, memory)
        for number, unit in enumerate(units)
        for memory in shards.flat_memory(unit, world_size, optimizer_bytes)
    ]


def _blocks(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return the name of the module with the largest repeated blocks, and the list of the blocks.

    Checkpointing and ``torch.compile`` are applied to these blocks.
    """
    best: tuple[str, list[nn.Module]] = ("", [])
    most = 0
    for name, container in model.named_modules():
        children: list[nn.Module] = list(container.children())
        kind = Counter(type(one) for one in children).most_common(1)[0][0] if children else None
        same = [one for one in children if type(one) is kind and any(True for _ in one.children())]
        numel = sum(param.numel() for one in same for param in one.parameters())
        if len(same) > 1 and numel > most:
            best, most = (name, same), numel
    return best


def planned_flats(
    traced: TracedModel,
    *,
    world_size: int,
    strategy: str = "FULL_SHARD",
    per_node: int | None = None,
    optimizer_bytes: float | None = None,
    reshard_after_forward: bool | int | None = None,
) -> tuple[list[PlannedFlat], list[str]]:
    """Return the flat parameters of a model under ``strategy``, and the names of the units."""
    units = _plan(
        traced.model,
        traced.policy,
        traced.precision,
        world_size=world_size,
        sharding_strategy=strategy,
        ranks_per_node=per_node,
        reshard_after_forward=reshard_after_forward,
        coalesce_bytes=traced.coalesce_bytes,
    ).units
    found = []
    for number, memory in _flats(units, world_size, optimizer_bytes):
        settings = units[number].settings
        placement = settings.placement
        num_shards, gathering = shards.group_sizes(settings, world_size)
        found.append(
            PlannedFlat(
                memory,
                number,
                is_freed=shards.reshards_after_forward(units[number]),
                is_spare=placement.reshard_after_forward and memory.is_lookup,
                is_freed_after=placement.reshard_after_backward or num_shards == 1,
                gather_size=gathering if placement.sharded else 1,
                regather_size=placement.regather_size or gathering,
                replicas=world_size // (gathering if placement.sharded else 1),
                keeps_secondary=placement.over_all,
            )
        )
    return found, [unit.name for unit in units]


@dataclass(frozen=True)
class Choice:
    """The prediction for one strategy on one number of ranks.

    Attributes:
        strategy: name of the sharding strategy.
        ranks: number of ranks.
        checkpoint: the forwards that backward recomputes: ``none``, ``block`` or ``selective``.
        batch: number of sequences (or other samples) per rank.
        outcome: the predicted memory, communication and time.
        persistent: bytes of parameters, gradients and optimizer state between steps.
        fits: whether the peak and ``CONTEXT_BYTES`` fit into the device's memory.
        samples_per_second: number of samples that one rank trains per second.
    """

    strategy: str
    ranks: int
    checkpoint: Checkpointing
    batch: int
    outcome: Outcome
    persistent: dict[str, int]
    fits: bool
    samples_per_second: float

    @property
    def bound(self) -> str:
        """The part of the machine that limits the speed: the link or the computation."""
        outcome = self.outcome
        if outcome.exposed_seconds > 0.1 * outcome.seconds:
            return f"link ({outcome.exposed_seconds / outcome.seconds:.0%} exposed)"
        return "compute"


@dataclass(frozen=True)
class Target:
    """The user's machine, and the user's settings for training.

    Attributes:
        machine: devices and links.
        ranks: the numbers of ranks to compare.
        batch: number of sequences (or other samples) per rank.
        seq: number of tokens per sequence.
        optimizer: a key of ``OPTIMIZERS``, or the bytes of state per trained element.
        checkpoint: the forwards that backward recomputes: ``none``, ``block`` or ``selective``.
        compile: whether ``torch.compile`` compiles each unit.
        accumulate: number of backwards per step. All but the last backward run under ``no_sync``.
        dtype: a key of ``DTYPES``, or the mixed precision of all units.
        auto_wrap_policy: selects the units.
        strategy: names of the strategies to compare.
    """

    machine: Machine
    ranks: Sequence[int] = (8,)
    batch: int = 1
    seq: int = 2048
    optimizer: str | float = "adamw"
    checkpoint: Checkpointing = "none"
    compile: bool = False
    accumulate: int = 1
    dtype: str | MixedPrecision = "bf16"
    auto_wrap_policy: Policy | None = "auto"
    strategy: Sequence[str] = STRATEGIES

    @property
    def state_bytes(self) -> float:
        return OPTIMIZERS[self.optimizer] if isinstance(self.optimizer, str) else self.optimizer

    @property
    def precision(self) -> MixedPrecision:
        return DTYPES[self.dtype] if isinstance(self.dtype, str) else self.dtype


def choices(
    build: Callable[[], Any], step: Step | None, target: Target
) -> tuple[list[Choice], str]:
    """Trace one step, and replay the trace under each strategy on each number of ranks.

    Returns the predictions, and the name of the module that contains the repeated blocks.

    Raises ValueError if no strategy can be used, or if one unit alone needs too much memory.
    """
    traced = TracedModel.of(
        build,
        step or language_step(target.batch, target.seq),
        policy=target.auto_wrap_policy,
        precision=target.precision,
        checkpoint=target.checkpoint,
        compiles=target.compile,
        on_gpu=target.machine.device.is_gpu,
    )
    _check_memory(traced, target)
    found = []
    for ranks in target.ranks:
        for strategy in target.strategy:
            per_node = min(ranks, target.machine.per_node)
            if strategy.startswith("HYBRID") and (ranks <= per_node or ranks % per_node):
                continue  # a hybrid strategy shards within a node, and needs several nodes
            found.append(_choice(traced, target, strategy, ranks, per_node))
    if not found:
        raise ValueError(
            f"{', '.join(target.strategy)} needs several nodes: expected numbers of ranks that "
            f"are multiples of per_node={target.machine.per_node}, got {list(target.ranks)}."
        )
    return found, traced.container


def _check_memory(traced: TracedModel, target: Target) -> None:
    """Raise ValueError if the device cannot hold the largest unit, which no strategy divides."""
    flats, names = planned_flats(traced, world_size=max(target.ranks))
    unsharded, gradients = [0] * len(names), [0] * len(names)
    for flat in flats:
        memory = flat.memory
        if not memory.is_lookup:
            unsharded[flat.unit] += max(memory.gathered_bytes, memory.parameter_bytes)
        gradients[flat.unit] = max(gradients[flat.unit], memory.whole_gradient_bytes)
    needs = [sum(pair) for pair in zip(unsharded, gradients, strict=True)]
    largest, memory_bytes = max(needs), target.machine.device.memory_bytes
    if memory_bytes and largest + CONTEXT_BYTES > memory_bytes:
        raise ValueError(
            f"memory {show(memory_bytes)} is too small under every strategy: the unsharded "
            f"parameters and gradients of {unit_text(names[needs.index(largest)])} need {largest:,}"
            f" bytes ({show(largest)}), and CUDA and NCCL need {show(CONTEXT_BYTES)}. Give more "
            "memory, or an auto_wrap_policy that makes smaller units."
        )


def _choice(
    traced: TracedModel, target: Target, strategy: str, ranks: int, per_node: int
) -> Choice:
    flats, names = planned_flats(
        traced,
        world_size=ranks,
        strategy=strategy,
        per_node=per_node,
        optimizer_bytes=target.state_bytes,
    )
    outcome = Replay(
        traced.trace,
        flats,
        names,
        target.machine,
        world_size=ranks,
        buffer_bytes=traced.buffer_bytes,
        accumulate=target.accumulate,
    ).run()
    memory = target.machine.device.memory_bytes
    return Choice(
        strategy,
        ranks,
        target.checkpoint,
        target.batch,
        outcome,
        {
            kind: sum(getattr(flat.memory, f"{name}_bytes") for flat in flats)
            for kind, name in _PERSISTENT.items()
        },
        fits=not memory or outcome.peak_bytes + CONTEXT_BYTES <= memory,
        samples_per_second=target.accumulate * target.batch / outcome.seconds,
    )
