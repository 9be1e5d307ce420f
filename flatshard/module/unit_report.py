"""``report`` tabulates a model's units; ``one_unit_warning`` warns if units are missing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from flatshard.engine.handle import FlatParamHandle
from flatshard.module.sharding import Sharding, shardings_in, units_in
from flatshard.optimizer import stepper
from flatshard.plan.auto_wrap import AutoUnits
from flatshard.plan.ignored import NOTHING, Ignored
from flatshard.plan.module_tree import ModuleTree, numel

# Minimum number of elements of a model for which the choice of units matters: 40 MB in float32.
LARGE_MODEL_NUMEL = 10_000_000

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
    return (
        f"{numel:,}",
        f"{padding:,} ({padding / max(numel, 1):.1%})",
        kinds,
        show_bytes(unsharded_bytes),
    )


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


def one_unit_warning(module: nn.Module, ignored: Ignored = NOTHING) -> list[str]:
    """Return a list with a warning if a large model with repeated blocks is a single unit."""
    # Do not warn about a module without repeated blocks: the user may wrap a model part by part.
    tree = ModuleTree(module, ignored)
    size = numel(tree.params(module))
    blocks = len(AutoUnits(tree).blocks()) if size >= LARGE_MODEL_NUMEL else 0
    if not blocks:
        return []
    return [
        f"ShardedWrapper: all {size:,} elements of {type(module).__name__} are one unit, so every "
        f'rank holds the full model during a step. auto_wrap_policy="auto" makes a unit of each '
        f"of {blocks} repeated blocks, so that about two blocks at a time are unsharded. "
        "[FS-ONE-UNIT]"
    ]
