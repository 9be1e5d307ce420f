"""``plan_wrapped``: compares the prediction for a wrapped model with the measured bytes."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from flatshard.extras import tabulate
from flatshard.extras.plan.hardware import Machine, device_of, show
from flatshard.extras.plan.models import Step
from flatshard.extras.plan.planning import TracedModel
from flatshard.extras.plan.replay import Outcome, Replay
from flatshard.extras.plan.trace import emptied
from flatshard.memory.buffers import storage_bytes
from flatshard.module.wrappers import handles_in, unit_of, units_in
from flatshard.units.module_proxy import ModuleProxy
from flatshard.units.policies import CustomPolicy


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
    ranks, placement, kind = settings.ranks, settings.placement, settings.device.type
    chosen = {module for unit in units if not unit.is_root for module in unit.modules}
    measured = _measure(wrapper, optimizer)
    held = measured.get("optimizer")
    handles = handles_in(wrapper)
    trained = sum(h.layout.shard_numel for h in handles if h.params[0].requires_grad)
    with _unwrapped(wrapper):
        traced = TracedModel.of(
            lambda: wrapper.module,
            step,
            on_gpu=kind == "cuda",
            device=str(settings.device),
            auto_wrap_policy=CustomPolicy(chosen.__contains__),
            mixed_precision=settings.mixed_precision,
        )
        flats = traced.flats(
            ranks.world.size,
            # The optimizer has no state before its first step. Until then, count two tensors per
            # parameter: AdamW keeps two.
            optimizer_bytes=held / trained if held and trained else None,
            sharding_strategy=settings.strategy.name,
            ranks_per_node=ranks.ranks_per_node,
            reshard_after_forward=placement.regather_size or placement.reshard_after_forward,
        )
    in_background = unit_of(wrapper).topology.intra_group.transport_for().gathers_in_background
    on_cpu = "sockets" if in_background else "native"
    machine = Machine(device_of(kind), transport="nccl" if kind == "cuda" else on_cpu)
    outcome = Replay(traced.trace, flats, machine).run()
    predicted = {
        **outcome.persistent,
        "unsharded": outcome.highest.get("unsharded", 0),
        "peak": outcome.peak_bytes,
    }
    return RankPlan(predicted, measured, outcome)


def _measure(wrapper: Any, optimizer: Optimizer | None) -> dict[str, int]:
    handles = handles_in(wrapper)
    found = {"parameters": storage_bytes(handle.flat_param for handle in handles)}
    grads = [p.grad for handle in handles for p in handle.sharded if p.grad is not None]
    if grads:
        found["gradients"] = _local_bytes(grads)
    if optimizer is not None and optimizer.state:
        states = (value for one in optimizer.state.values() for value in one.values())
        found["optimizer"] = _local_bytes(states)
    with contextlib.suppress(RuntimeError):  # `step_report` raises if no step was recorded
        report = wrapper.step_report()
        found["unsharded"] = report.peak_gathered_bytes
        if report.peak_allocated_bytes is not None:
            found["peak"] = report.peak_allocated_bytes
    return found


def _local_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of this rank's parts of ``tensors``. Numbers, such as step counters, are left out."""
    local = (getattr(one, "local", one) for one in tensors)
    return storage_bytes(one for one in local if isinstance(one, Tensor) and one.dim())


@contextlib.contextmanager
def _unwrapped(wrapper: ModuleProxy) -> Iterator[None]:
    """In the block, the wrapped module has no hooks and wrappers, and tensors on the meta device.

    The block changes the module itself, not a copy. A copy would not work after
    ``checkpoint_blocks``, which sets ``forward`` to a function that calls the original module.
    """
    with contextlib.ExitStack() as stack:
        for module in wrapper.modules():
            # Restore the whole `__dict__` at the end. This also removes attributes that the step
            # has added, such as transformers' mark that a module has hooks: no hook remains either.
            stack.callback(object.__setattr__, module, "__dict__", {**module.__dict__})
            hooks = [name for name in module.__dict__ if "_hooks" in name]
            module.__dict__.update({name: OrderedDict() for name in hooks})
            module.__dict__["_modules"] = {
                name: None if one is None else next(one.modules())
                for name, one in module._modules.items()
            }
        stack.enter_context(emptied(wrapper, {}, "meta"))
        yield
