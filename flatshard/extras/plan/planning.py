"""``TracedModel``, ``predict``, ``plan_wrapped``: predictions for a model and for a wrapped model.

``TracedModel`` has the trace of a step. ``predict`` needs no step, and leaves out activations.
``plan_wrapped`` compares the prediction for a wrapped model with the measured bytes.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatshard.extras import tabulate
from flatshard.extras.plan.hardware import CPU_CORE, DEVICES, Machine, show
from flatshard.extras.plan.models import Checkpointing, Step
from flatshard.extras.plan.replay import Outcome, Replay
from flatshard.extras.plan.shards import FlatMemory, plan_flats
from flatshard.extras.plan.trace import Mark, StepTrace, checkpoint_blocks, emptied, trace
from flatshard.memory import storage_bytes
from flatshard.module.model_plan import ModelPlan
from flatshard.module.wrappers import handles_in, unit_of, units_in
from flatshard.tensor.sharded_tensor import local_range
from flatshard.units.module_proxy import ModuleProxy
from flatshard.units.policies import CustomPolicy

_ROWS = 24  # maximum number of rows in a table; if there are more, the middle is left out


class TracedModel:
    """A model on the meta device, and the trace of one of its steps, ``trace``."""

    def __init__(
        self,
        build: Callable[[], Any],
        step: Step,
        *,
        checkpoint: Checkpointing = "none",
        on_gpu: bool = True,
        device: str = "cpu",
        **keywords: Any,
    ) -> None:
        """Build a model on the meta device, and trace one step.

        ``keywords``: keywords of ``plan_flats`` that do not depend on the number of ranks.
        """
        with torch.device("meta"):
            made = build()
        self._model, step = made if isinstance(made, tuple) else (made, step)
        self._keywords = keywords
        plan, flats = plan_flats(self._model, world_size=1, **keywords)
        checkpoint_blocks(self._model, checkpoint)
        self.trace = trace(plan, flats, step, on_gpu=on_gpu, device=device)

    def replay(
        self, machine: Machine, world_size: int, accumulate: int = 1, **keywords: Any
    ) -> Outcome:
        """Predict a step on ``world_size`` ranks. ``keywords``: more keywords of ``plan_flats``."""
        _, flats = plan_flats(self._model, world_size=world_size, **self._keywords, **keywords)
        return Replay(self.trace, flats, machine, accumulate).run()


# ---------------------------------------------------------------- memory without activations


@dataclass(frozen=True)
class UnitMemory:
    """Memory of one unit on one rank, in bytes.

    Each numeric attribute of ``FlatMemory`` is also an attribute of the unit: the sum over the
    unit's flat parameters. Examples are ``numel``, ``parameter_bytes`` and ``gathered_bytes``.

    Attributes:
        name: the unit's name in the unwrapped model; empty for the root.
        flats: the flat parameters, usually one.
    """

    name: str
    flats: Sequence[FlatMemory]

    def __getattr__(self, attribute: str) -> int:
        if attribute != "numel" and not attribute.endswith("_bytes"):
            raise AttributeError(f"{type(self).__name__} has no attribute {attribute!r}")
        return sum(getattr(flat, attribute) for flat in self.flats)

    def row(self, unsharded: str) -> tuple[str, ...]:
        sizes = self.parameter_bytes, self.gradient_bytes, self.optimizer_bytes
        return self.name or "(root)", f"{self.numel:,}", *map(show, sizes), unsharded


@dataclass(frozen=True)
class MemoryPlan(UnitMemory):
    """Predicted memory of each rank, in bytes: sums over all units. ``str()`` returns a table.

    Attributes:
        units: all units in the order of forward, the root last.
        buffer_bytes: bytes of the modules' buffers, which are not sharded.
        peak_gathered_bytes: peak bytes of unsharded parameters and secondary shards.
        peak_gradient_bytes: peak bytes of gradients and of the buffers of reductions.
        step_bytes: peak bytes of a step without activations.
    """

    units: Sequence[UnitMemory]
    buffer_bytes: int
    peak_gathered_bytes: int
    peak_gradient_bytes: int
    step_bytes: int

    @property
    def persistent_bytes(self) -> int:
        """Bytes that stay allocated between two optimizer steps, gradients included."""
        shards = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return shards + self.kept_bytes + self.buffer_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak, without activations."""
        return max(self.step_bytes, self.persistent_bytes)

    def __str__(self) -> str:
        header = ("unit", "elements", "parameters", "gradients", "optimizer", "unsharded")
        rows = [unit.row(show(unit.gathered_bytes)) for unit in self.units]
        if len(rows) > _ROWS:
            rows[_ROWS // 2 : -_ROWS // 2] = [(f"... {len(rows) - _ROWS} more", *5 * ("",))]
        rows.append(self.row(f"peak {show(self.peak_gathered_bytes)}"))
        return (
            f"{tabulate([header, *rows], numbers=range(1, 6))}\n"
            f"each rank: persistent memory {show(self.persistent_bytes)}, peak "
            f"{show(self.peak_bytes)}, without activations"
        )


def predict(
    model: nn.Module, *, world_size: int, collectives: str = "nccl", **keywords: Any
) -> MemoryPlan:
    """Predict the memory of each rank if ``ShardedWrapper`` wraps ``model`` with these keywords.

    The prediction needs no process group and does not communicate, so ``world_size`` may be any
    number. The prediction excludes activations, and the memory of libraries and of Python.

    Example:
        ```python
        from flatshard import memory_plan

        with torch.device("meta"):
            planned = Model()
        policy = ModuleWrapPolicy({Block})
        print(memory_plan.predict(planned, world_size=8, auto_wrap_policy=policy))
        ```

    Args:
        model: the unwrapped model, on any device; a model built under ``torch.device("meta")``
            needs no memory. The model is not changed.
        world_size: number of ranks that train the model.
        collectives: transport of the collectives, which determines the buffers: ``nccl``, or on
            CPUs ``native`` (gloo) or ``sockets``.
        keywords: keywords of ``ShardedWrapper``: ``auto_wrap_policy``, ``sharding_strategy``,
            ``mixed_precision``, ``reshard_after_forward``, ``coalesce_bytes`` and ``boundary``.
            ``ranks_per_node``, for HYBRID strategies: number of ranks that share one copy of the
            model. ``optimizer_bytes``: bytes of the optimizer's state per trained element; by
            default two tensors of the parameter's dtype, as AdamW keeps.

    Raises:
        TypeError: ``auto_wrap_policy`` is no policy, or another keyword has the wrong type.
        ValueError: ``world_size`` is below 1; a HYBRID strategy has no ``ranks_per_node``, or
            ``ranks_per_node`` does not divide ``world_size``; ``boundary`` needs too much padding;
            or the model is already sharded.
    """
    plan, flats = plan_flats(model, world_size=world_size, **keywords)
    device = replace(DEVICES["h100"], is_gpu=collectives == "nccl")
    empty = _empty_trace(plan, flats)
    outcome = Replay(empty, flats, Machine(device, transport=collectives)).run()
    units = [UnitMemory(u.name, [f for f in flats if f.unit == u.number]) for u in plan.units]
    peaks = [outcome.highest.get(kind, 0) for kind in ("unsharded", "gradients")]
    peaks.append(outcome.peak_bytes)
    return MemoryPlan("total", flats, units, empty.buffer_bytes, *peaks)


def _empty_trace(plan: ModelPlan, flats: Sequence[FlatMemory]) -> StepTrace:
    """Return the trace of a step without activations: backward computes only parameter gradients.

    Modules run in the order of registration. The backward of a unit computes the gradient of the
    unit's last parameter, then runs the backward of the units inside, and then computes the unit's
    other gradients. This fits most roots: the last parameter is the head, which forward uses last,
    and the first parameter is the embedding.
    """
    units, found = plan.units, StepTrace(plan)
    # The marks (`Mark`) of forward, the last mark first. `units` has children before parents, so
    # the loop in reverse order reaches a unit before the units inside the unit.
    reverse, around = list[Mark](), list[int]()
    for unit in range(len(units))[::-1]:
        name = units[unit].names[0]
        while len(around) > 1 and not name.startswith(f"{units[around[-1]].names[0]}."):
            reverse.append(Mark("enter", around.pop()))
        reverse.append(Mark("leave", unit))
        around.append(unit)
    reverse += [Mark("enter", unit) for unit in around[::-1]]
    for mark in reverse[::-1]:
        found.events.append(mark)
        if mark.what == "enter" and units[mark.unit].name:
            found.events.append(Mark("input", mark.unit))
    found.events.append(Mark("backward"))
    grads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index, flat in enumerate(flats):
        sizes = [param.numel() * flat.compute_dtype.itemsize for param in flat.params]
        grads[flat.unit] += [(index, size) for size in sizes if flat.is_trained]
    for mark in reverse:
        begins = mark.what == "leave"
        if begins:
            found.events.append(Mark("enter backward", mark.unit))
        for index, nbytes in grads[mark.unit][-1:] if begins else grads[mark.unit][-2::-1]:
            found.events.append(Mark("gradient", index, found.allocate(nbytes, "backward")))
        if not begins:
            found.events.append(Mark("leave backward", mark.unit))
    return found


# ---------------------------------------------------------------- wrapped models


@dataclass(frozen=True)
class RankPlan:
    """Predicted and measured bytes of this rank. ``str()`` returns a table.

    Attributes:
        predicted: bytes, keyed by the names of parts (``parameters``, ``gradients`` and so on).
        measured: bytes, keyed by the names of parts. A part without a measurement is left out.
        outcome: all predictions for the step.
    """

    predicted: dict[str, int]
    measured: dict[str, int]
    outcome: Outcome

    @property
    def differing(self) -> list[str]:
        """Parts whose measured bytes differ by more than 10 % from the predicted bytes."""
        pairs = ((name, self.predicted[name], found) for name, found in self.measured.items())
        return [name for name, planned, found in pairs if abs(found - planned) > 0.1 * planned]

    def __str__(self) -> str:
        rows = [("part", "predicted", "measured", "difference")]
        for name, planned in self.predicted.items():
            found = self.measured.get(name)
            shown = "-" if found is None else show(found)
            off = f"{found / planned - 1:+.1%}" if planned and found is not None else ""
            rows.append((name, show(planned), shown, off))
        lines = [tabulate(rows, numbers=range(1, 4)), f"The peak is in {self.outcome.peak_at}."]
        if self.differing:
            lines.append(f"More than 10 % off: {', '.join(self.differing)}.")
        return "\n".join(lines)


def plan_wrapped(wrapper: Any, step: Step, optimizer: Optimizer | None) -> RankPlan:
    """Predict the memory of a wrapped model in a step, and measure the model's memory now."""
    settings, units = unit_of(wrapper).settings, units_in(wrapper)
    ranks, placement = settings.ranks, settings.placement
    on_gpu = settings.device.type == "cuda"
    chosen = {module for unit in units if not unit.is_root for module in unit.modules}
    measured = _measure(wrapper, optimizer)
    held, handles = measured.get("optimizer"), handles_in(wrapper)
    trained = sum(h.layout.shard_numel for h in handles if h.params[0].requires_grad)
    in_background = unit_of(wrapper).topology.intra_group.transport_for().gathers_in_background
    on_cpu = Machine(CPU_CORE, transport="sockets" if in_background else "native")
    with _unwrapped(wrapper):
        traced = TracedModel(
            lambda: wrapper.module,
            step,
            on_gpu=on_gpu,
            device=str(settings.device),
            auto_wrap_policy=CustomPolicy(chosen.__contains__),
            mixed_precision=settings.mixed_precision,
        )
        outcome = traced.replay(
            Machine(DEVICES["h100"]) if on_gpu else on_cpu,
            ranks.world.size,
            # The optimizer has no state before its first step. Until then, count two tensors per
            # parameter: AdamW keeps two.
            optimizer_bytes=held / trained if held and trained else None,
            sharding_strategy=settings.strategy.name,
            ranks_per_node=ranks.ranks_per_node,
            reshard_after_forward=placement.regather_size or placement.reshard_after_forward,
        )
    peaks = {"unsharded": outcome.highest.get("unsharded", 0), "peak": outcome.peak_bytes}
    return RankPlan(outcome.persistent | peaks, measured, outcome)


def _measure(wrapper: Any, optimizer: Optimizer | None) -> dict[str, int]:
    handles = handles_in(wrapper)
    found = {"parameters": storage_bytes(handle.flat_param for handle in handles)}
    if grads := [p.grad for handle in handles for p in handle.sharded if p.grad is not None]:
        found["gradients"] = _local_bytes(grads)
    if optimizer is not None and optimizer.state:
        states = (value for one in optimizer.state.values() for value in one.values())
        found["optimizer"] = _local_bytes(states)
    with contextlib.suppress(RuntimeError):  # `step_report` raises if no step was recorded
        report = wrapper.step_report()
        found["unsharded"] = report.peak_gathered_bytes
        if (peak := report.peak_allocated_bytes) is not None:
            found["peak"] = peak
    return found


def _local_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of this rank's parts of ``tensors``. Numbers, such as step counters, are left out."""
    local = map(local_range, tensors)
    return storage_bytes(one for one in local if isinstance(one, Tensor) and one.dim())


@contextlib.contextmanager
def _unwrapped(wrapper: ModuleProxy) -> Iterator[None]:
    """Remove hooks and wrappers from a wrapped module within the context, and empty its tensors.

    The context changes the module itself, not a copy. A copy would not work after
    ``checkpoint_blocks``, which sets ``forward`` to a function that calls the original module.
    """
    with contextlib.ExitStack() as stack:
        for module in wrapper.modules():
            # Restore the whole `__dict__` at the end. So attributes that the step adds are removed,
            # too. For example, transformers marks modules that have hooks, and the hooks are gone.
            stack.callback(object.__setattr__, module, "__dict__", {**module.__dict__})
            hooks = [name for name in module.__dict__ if "_hooks" in name]
            module.__dict__.update({name: OrderedDict() for name in hooks})
            module.__dict__["_modules"] = {
                name: None if one is None else next(one.modules())
                for name, one in module._modules.items()
            }
        stack.enter_context(emptied(wrapper, {}, "meta"))
        yield
