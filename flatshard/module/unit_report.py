"""``report`` tabulates a model's units; ``plan_warnings`` warns of settings without effect."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flatshard.engine.handle import FlatParamHandle
from flatshard.module.model_plan import ModelPlan
from flatshard.module.sharding import Sharding, shardings_in, units_in
from flatshard.optimizer import stepper
from flatshard.units.module_proxy import ModuleProxy
from flatshard.units.policies import explain_no_match, one_unit_warning

_HEADER = (
    *("unit", "class", "elements", "padding", "flat parameters", "unsharded"),
    *("strategy", "ranks", "transport", "why"),
)

# ------------------------------------------------------------ the table


def report(root: Sharding) -> str:
    """Return a table of the units in a wrapper, with totals.

    Lines below the table give the reason for each transport, and say how optimizers step.
    """
    inside = shardings_in(root.wrapper)
    # One row per unit: if several wrappers share a unit, the row describes the first wrapper.
    first = {sharding.unit: sharding for sharding in reversed(inside)}
    units = units_in(root.wrapper)
    rest = "what is left" if len(inside) > 1 else "the whole model"
    count = f"{len(units)} unit{'s' if len(units) != 1 else ''}"
    sizes = _sizes("", [handle for unit in units for handle in unit.handles])
    table = [_HEADER, *(_row(first[unit], rest) for unit in units)]
    table.append(("total", count, *sizes, "", "", "", ""))
    topologies = [first[unit].settings.topology for unit in units]
    # `transport_reason` is empty if only one transport was possible. Then add no line.
    reasons = (f"{t.transport}: {t.transport_reason}" for t in topologies if t.transport_reason)
    steppers = stepper.reports(root.wrapper.parameters())
    return "\n".join([tabulate(table, numbers={2, 3, 5, 7}), *dict.fromkeys(reasons), *steppers])


def _row(sharding: Sharding, rest: str) -> tuple[str, ...]:
    unit, topology = sharding.unit, sharding.settings.topology
    kinds = [
        str(handle.flat_param.dtype).removeprefix("torch.")
        + ("" if handle.params[0].requires_grad else " frozen")
        + (f" {handle.layout.numel:,}" if len(unit.handles) > 1 else "")
        for handle in unit.handles
    ]
    reason = sharding.reason or ("by hand" if unit.name else f"root: {rest}")
    return (
        unit.name or "(root)",
        ", ".join(dict.fromkeys(type(module).__name__ for module in unit.modules)),
        *_sizes(" + ".join(kinds) or "none", unit.handles),
        sharding.settings.strategy.name,
        str(topology.shard.size),
        topology.transport,
        reason + (f", {len(unit.modules)} coalesced" if len(unit.modules) > 1 else ""),
    )


def _sizes(kinds: str, handles: Sequence[FlatParamHandle]) -> tuple[str, str, str, str]:
    numel = sum(handle.layout.numel for handle in handles)
    padding = sum(handle.layout.padding_numel for handle in handles)
    unsharded_bytes = sum(
        handle.layout.padded_numel * handle.buffer.element_size()
        for handle in handles
        if handle.topology.shard.size > 1
    )
    padded = f"{padding:,} ({padding / max(numel, 1):.1%})"
    return f"{numel:,}", padded, kinds, show_bytes(unsharded_bytes)


def tabulate(table: Sequence[Sequence[str]], *, numbers: Collection[int]) -> str:
    """Align cells in columns, flush right in the columns whose indices are in ``numbers``."""
    columns = []
    for index, column in enumerate(zip(*table, strict=True)):
        width = max(map(len, column))
        align = str.rjust if index in numbers else str.ljust
        columns.append([align(cell, width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def show_bytes(count: int) -> str:
    """Return a number of bytes as text in B, KiB, MiB or GiB."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{count} B"


# ------------------------------------------------------------ warnings


def plan_warnings(plan: ModelPlan) -> list[str]:
    """Return warnings for rank 0: settings without effect, and units that are slow or large."""
    module, settings, ignored = plan.module, plan.settings, plan.ignored
    offload = settings.cpu_offload
    found = plan.precision_plan.warnings()
    # Do not warn if "auto" chose no unit: "auto" keeps a small model in one unit on purpose.
    if settings.auto_wrap_policy not in (None, "auto") and not plan.chosen:
        found.append(explain_no_match(plan.tree, settings.auto_wrap_policy))
    if module in ignored.modules:
        found.append(
            "ShardedWrapper: the wrapped module itself is ignored, so no parameter is sharded. "
            "Leave the module out of ignored_modules and ignored_states."
        )
    modules = {*plan.settings_of, *(sharding.wrapper.module for sharding in plan.shardings)}
    if plan.divergent and plan.divergent.isdisjoint(modules):
        found.append(
            "allow_divergence has no effect, because none of the given modules is a unit: outer "
            "units all-gather their parameters. Make the modules units (auto_wrap_policy)."
        )
    if ignored.is_elsewhere:
        found.append(
            "ignored_modules, ignored_states: none of the given modules and parameters is in the "
            f"wrapped {type(module).__name__}, so nothing is ignored. Pass modules of the wrapped "
            "model."
        )
    if isinstance(module, ModuleProxy):
        found.append(
            f"ShardedWrapper: the module, a {module.module.__class__.__name__}, is in a "
            "ShardedWrapper already, and the outer wrapper adds nothing. Wrap the module once, "
            "with all settings."
        )
    if offload.is_on and not offload.path and settings.device.type == "cpu":
        found.append("cpu_offload has no effect on parameters in CPU memory. Omit cpu_offload.")
    # Read the topology (the process groups of a strategy) from the root unit, not from `settings`,
    # the settings of the whole model. With `allow_divergence=True`, ranks may skip any unit, which
    # changes the placement of every unit, so no unit has created the groups for the placement in
    # `settings`. Then `settings.topology` would create these groups, which is collective. But this
    # function runs only on rank 0, so rank 0 would wait forever.
    num_shards = plan.units[-1].settings.topology.shard.size
    if settings.auto_wrap_policy is None and num_shards > 1 and not plan.shardings:
        found += one_unit_warning(plan.tree)
    return found
