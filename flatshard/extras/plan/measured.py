"""``plan_wrapped``: compares the prediction for a wrapped model with the measured bytes."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatshard.extras.plan.hardware import TRANSPORTS, Machine, device_of, show
from flatshard.extras.plan.models import Step
from flatshard.extras.plan.planning import TracedModel, planned_flats
from flatshard.extras.plan.replay import Outcome, Replay
from flatshard.memory.buffers import storage_bytes
from flatshard.module.sharding import Sharding, units_in
from flatshard.module.unit_report import tabulate
from flatshard.units.module_proxy import ModuleProxy
from flatshard.units.policies import CustomPolicy

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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
            shown, off = ("-", "") if found is None else (show(found), "")
            if found is not None and planned:
                off = f"{found / planned - 1:+.1%}"
            rows.append((name, show(planned), shown, off))
        lines = [tabulate(rows, numbers=range(1, 4)), f"The peak is in {self.outcome.peak_at}."]
        if self.differing:
            lines.append(f"More than 10 % off: {', '.join(self.differing)}.")
        return "\n".join(lines)


def plan_wrapped(sharding: Sharding, step: Step, optimizer: Optimizer | None) -> RankPlan:
    """Predict the memory of a wrapped model in a step, and measure the model's memory now."""
    wrapped, settings = sharding.wrapper, sharding.settings
    units = units_in(wrapped)
    chosen = {id(module) for unit in units if not unit.is_root for module in unit.modules}
    originals: dict[int, int] = {}  # id of a copied module -> id of the module in the model

    def build() -> nn.Module:
        made = _bare(wrapped.module, {}, originals)
        alive.append(made)
        return made

    alive: list[nn.Module] = []
    placement = settings.placement
    traced = TracedModel.of(
        build,
        step,
        policy=CustomPolicy(lambda module: originals.get(id(module)) in chosen),
        precision=settings.precision,
        on_gpu=settings.device.type == "cuda",
        device=settings.device,
    )
    world = settings.ranks.world.size
    measured = _measure(sharding, optimizer)
    held = measured.get("optimizer")
    handles = [handle for unit in units for handle in unit.handles]
    trained = sum(h.layout.shard_numel for h in handles if h.params[0].requires_grad)
    flats, names = planned_flats(
        traced,
        world_size=world,
        strategy=settings.strategy.name,
        per_node=settings.ranks.ranks_per_node,
        # The optimizer has no state before its first step. Until then, count two tensors per
        # parameter: AdamW keeps two.
        optimizer_bytes=held / trained if held and trained else None,
        reshard_after_forward=placement.regather_size or placement.reshard_after_forward,
    )
    kind = settings.device.type
    transport = sharding.unit.topology.intra_group.transport_for()
    sends = "sockets" if transport.gathers_in_background else "native"
    outcome = Replay(
        traced.trace,
        flats,
        names,
        Machine(device_of(kind), transport=TRANSPORTS["nccl" if kind == "cuda" else sends]),
        world_size=world,
        buffer_bytes=traced.buffer_bytes,
    ).run()
    predicted = {
        name: sum(getattr(flat.memory, f"{kind}_bytes") for flat in flats)
        for name, kind in (("parameters", "parameter"), ("gradients", "gradient"))
    }
    predicted["optimizer"] = sum(flat.memory.optimizer_bytes for flat in flats)
    predicted["unsharded"] = max(held.get("unsharded", 0) for _, held in outcome.timeline)
    predicted["peak"] = outcome.peak_bytes
    return RankPlan(predicted, measured, outcome)


def _measure(sharding: Sharding, optimizer: Optimizer | None) -> dict[str, int]:
    handles = [handle for unit in units_in(sharding.wrapper) for handle in unit.handles]
    found = {"parameters": storage_bytes(handle.flat_param for handle in handles)}
    grads = [p.grad for handle in handles for p in handle.sharded if p.grad is not None]
    if grads:
        found["gradients"] = _local_bytes(grads)
    if optimizer is not None and optimizer.state:
        states = (value for one in optimizer.state.values() for value in one.values())
        found["optimizer"] = _local_bytes(states)
    with contextlib.suppress(RuntimeError):  # `step_report` raises if no step was recorded
        report = sharding.wrapper.step_report()
        found["unsharded"] = report.peak_gathered_bytes
        if report.peak_allocated_bytes is not None:
            found["peak"] = report.peak_allocated_bytes
    return found


def _local_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of this rank's parts of ``tensors``. Numbers, such as step counters, are left out."""
    local = (getattr(one, "local", one) for one in tensors)
    return storage_bytes(one for one in local if isinstance(one, Tensor) and one.dim())


def _bare(module: nn.Module, memo: dict[int, Any], originals: dict[int, int]) -> nn.Module:
    """Copy a module without its hooks. The copy's tensors are on the meta device."""
    if isinstance(module, ModuleProxy):
        module = module.module
    if id(module) in memo:
        return memo[id(module)]  # type: ignore[no-any-return]
    made = type(module).__new__(type(module))
    made.__dict__.update(module.__dict__)
    memo[id(module)], originals[id(made)] = made, id(module)
    made.__dict__.update({name: OrderedDict() for name in _HOOKS})
    made._parameters = {name: _meta(one, memo) for name, one in module._parameters.items()}
    made._buffers = {name: _meta(one, memo) for name, one in module._buffers.items()}
    made._modules = {
        name: None if one is None else _bare(one, memo, originals)
        for name, one in module._modules.items()
    }
    return made


def _meta(tensor: Tensor | None, memo: dict[int, Any]) -> Any:
    if tensor is None or id(tensor) in memo:
        return None if tensor is None else memo[id(tensor)]
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    memo[id(tensor)] = made
    return made
