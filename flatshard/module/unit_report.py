"""``report`` tabulates a model's units; ``lint`` warns of units that will be slow or large.

A plan that ``lint`` warns of is correct, but wastes time or memory. Its thresholds are far from
any reasonable plan, since a false alarm costs more than a missed one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from torch import nn

from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.module.model_plan import ModelPlan
from flatshard.module.sharding import Sharding, shardings_in, units_in
from flatshard.optimizer import stepper
from flatshard.plan.auto_wrap import AutoUnits
from flatshard.plan.ignored import NOTHING, Ignored
from flatshard.plan.module_tree import ModuleTree, name_of, numel, unit_text

# Elements from which unit sizes matter: 40 MB of float32. For smaller models any plan will do.
LARGE_MODEL_NUMEL = 10_000_000
# Elements below which a unit's all-gather is latency-bound.
FEW_ELEMENTS = 10_000
# So many small units are too many: each costs a fraction of a millisecond per pass.
MANY_UNITS = 32
# Elements from which it matters in which unit a tied weight is.
LARGE_TIE_NUMEL = 1_000_000
# A unit may hold so many times the median.
UNEVEN = 10

_AUTO = 'auto_wrap_policy="auto"'


_HEADER = (
    *("unit", "class", "elements", "padding", "flat parameters", "unsharded"),
    *("strategy", "ranks", "transport", "why"),
)

# ------------------------------------------------------------ the table


def report(root: Sharding) -> str:
    """Tabulate the units below a wrapper, with totals, and a line per transport that says why."""
    inside = shardings_in(root.wrapper)
    # One row per unit: of wrappers that share a unit, the first counts.
    first = {sharding.unit: sharding for sharding in reversed(inside)}
    units = units_in(root.wrapper)
    rest = "what is left" if len(inside) > 1 else "the whole model"
    count = f"{len(units)} unit{'s' if len(units) != 1 else ''}"
    sizes = _sizes("", [handle for unit in units for handle in unit.handles])
    table = [_HEADER, *(_row(first[unit], rest) for unit in units)]
    table.append(("total", count, *sizes, "", "", "", ""))
    topologies = [first[unit].settings.topology for unit in units]
    # Empty where ranks had no choice.
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
    """Align cells in columns; the columns whose indices are in ``numbers`` flush right."""
    columns = []
    for index, column in enumerate(zip(*table, strict=True)):
        width = max(map(len, column))
        align = str.rjust if index in numbers else str.ljust
        columns.append([align(cell, width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def show_bytes(count: int) -> str:
    """A size in B, KiB, MiB or GiB."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{count} B"


# ------------------------------------------------------------ warnings


def lint(plan: ModelPlan, units: Sequence[Unit]) -> list[str]:
    """Warnings about the units of a plan that will be slow or large, with a remedy.

    ``units`` are the units of the model, also those that were made before.
    """
    if plan.settings.policy is None and len(units) == 1:
        return lint_one_unit(plan.module, plan.ignored)
    sizes = []
    for unit in units:
        numels = [param.span.numel for handle in unit.handles for param in handle.params]
        sizes.append(UnitSize(tuple(unit.names), sum(numels), max(numels, default=0)))
    # Modules that own no parameter are no unit. Their tied weights are further up.
    names = {name for unit in units for name in unit.names}
    sizes += [UnitSize((one.name,), 0, 0) for one in plan.chosen if one.name not in names]
    infos = [info for unit in plan.units for info in unit.owned if len(info.locations) > 1]
    return lint_sizes(
        sizes, [(info.param.numel(), [place.name for place in info.locations]) for info in infos]
    )


@dataclass(frozen=True)
class UnitSize:
    """The size of a unit for ``lint_sizes``."""

    names: tuple[str, ...]  # of its modules; one, empty for the root
    numel: int
    largest_numel: int  # of its largest parameter, which no plan can divide

    @property
    def name(self) -> str:
        return name_of(self.names)


def lint_sizes(units: Sequence[UnitSize], tied: Iterable[tuple[int, Sequence[str]]]) -> list[str]:
    """Warnings about units of these sizes; ``tied`` has the elements and names of tied weights."""
    warnings = [_many_small(units), _uneven(units)]
    warnings += [_pulled_up(count, names, units) for count, names in tied]
    return [f"ShardedWrapper: {warning}" for warning in warnings if warning]


def lint_one_unit(module: nn.Module, ignored: Ignored = NOTHING) -> list[str]:
    """Warn if a large model with repeated blocks becomes one unit."""
    # A large module without repeated blocks may be a part that the user wraps by hand.
    tree = ModuleTree(module, ignored)
    size = numel(tree.params(module))
    blocks = len(AutoUnits(tree).blocks()) if size >= LARGE_MODEL_NUMEL else 0
    if not blocks:
        return []
    return [
        f"ShardedWrapper: all {size:,} elements of {type(module).__name__} are one unit, so every "
        f"rank holds the full model during a step. {_AUTO} makes a unit of each of {blocks} "
        "repeated blocks, so that about two blocks at a time are unsharded. [FS-ONE-UNIT]"
    ]


def _many_small(units: Sequence[UnitSize]) -> str:
    small = [unit.name or "(root)" for unit in units if 0 < unit.numel < FEW_ELEMENTS]
    if len(small) < MANY_UNITS:
        return ""
    return (
        f"{len(small)} of {len(units)} units hold fewer than {FEW_ELEMENTS:,} elements "
        f"({_some(small)}); each has an all-gather and a reduce-scatter of its own, which are "
        f"latency-bound. Choose larger modules: {_AUTO}, or a size_based_auto_wrap_policy with a "
        "larger min_num_params."
    )


def _uneven(units: Sequence[UnitSize]) -> str:
    filled = [unit for unit in units if unit.numel]
    if len(filled) < 4 or sum(unit.numel for unit in filled) < LARGE_MODEL_NUMEL:
        return ""
    middle = median(unit.numel for unit in filled)
    largest = max(filled, key=lambda unit: unit.numel)
    # If one parameter is most of the unit, no plan makes the unit much smaller.
    if largest.numel <= UNEVEN * middle or largest.largest_numel > largest.numel / 2:
        return ""
    where = f"{unit_text(largest.name)}" if largest.name else "the root"
    return (
        f"{where} holds {largest.numel:,} elements, more than {UNEVEN} times the median of "
        f"{len(filled)} units ({int(middle):,}), and is unsharded at once. Make units of the "
        f"modules in it too (embeddings and heads, say), or use {_AUTO}. model.unit_report() "
        "lists the units."
    )


def _pulled_up(count: int, names: Sequence[str], units: Sequence[UnitSize]) -> str:
    if count < LARGE_TIE_NUMEL:
        return ""
    modules = [name for unit in units for name in unit.names]
    innermost = (max((m for m in modules if _contains(m, name)), key=len) for name in names)
    nearest = list(dict.fromkeys(innermost))
    # If one of the units contains all others, the weight is in it anyway.
    lowest = max(nearest, key=len)
    if all(_contains(unit, lowest) for unit in nearest):
        return ""
    return (
        f"{' and '.join(map(repr, names))} are one weight of {count:,} elements, but units "
        f"{_some([repr(unit) if unit else 'the root' for unit in nearest])} each use it, so it "
        "moved up to a unit that contains them all. Choose a policy that makes no units there: "
        f"{_AUTO} does not."
    )


def _contains(unit: str, name: str) -> bool:
    return not unit or name == unit or name.startswith(f"{unit}.")


def _some(names: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return ", ".join([*names[:3], *more])
