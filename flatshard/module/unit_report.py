"""``describe`` tabulates a model's units; ``lint`` warns of units that will be slow or large.

A plan that ``lint`` warns of is correct, but wastes time or memory. Its thresholds are far from
any reasonable plan, since a false alarm costs more than a missed one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

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


@dataclass(frozen=True)
class FlatParamRow:
    """One flat parameter of a unit."""

    dtype: torch.dtype  # of the shard
    trainable: bool
    numel: int
    padding_numel: int
    unsharded_bytes: int  # that an all-gather fills on each rank; 0 if nothing is sharded

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.") + ("" if self.trainable else " frozen")


@dataclass(frozen=True)
class UnitRow:
    """One unit, as ``describe`` shows it."""

    name: str  # empty for the root
    class_name: str
    flat_params: tuple[FlatParamRow, ...]  # may be none
    strategy: str
    ranks: int
    reason: str  # why it is a unit
    transport: str
    transport_reason: str = ""  # why ranks chose it; empty where they had no choice


@dataclass(frozen=True)
class UnitSize:
    """What ``lint`` knows of a unit."""

    names: tuple[str, ...]  # of its modules; one, empty for the root
    numel: int
    largest_numel: int  # of its largest parameter, which no plan can divide

    @property
    def name(self) -> str:
        return name_of(self.names)


# ------------------------------------------------------------ the table


def describe(rows: Sequence[UnitRow]) -> str:
    """Tabulate units, with a line of totals and a line per transport that says why it is used."""
    header = (
        *("unit", "class", "elements", "padding", "flat parameters", "unsharded"),
        *("strategy", "ranks", "transport", "why"),
    )
    table = [header]
    for row in rows:
        kinds = [f"{one} {one.numel:,}" for one in row.flat_params]
        if len(kinds) == 1:
            kinds = [str(row.flat_params[0])]
        rest = row.strategy, str(row.ranks), row.transport, row.reason
        first = row.name or "(root)", row.class_name
        table.append((*first, *_sizes(" + ".join(kinds) or "none", row.flat_params), *rest))
    count = f"{len(rows)} unit{'s' if len(rows) != 1 else ''}"
    sizes = _sizes("", [one for row in rows for one in row.flat_params])
    table.append(("total", count, *sizes, "", "", "", ""))
    reasons = (f"{r.transport}: {r.transport_reason}" for r in rows if r.transport_reason)
    return "\n".join([tabulate(table, numbers={2, 3, 5, 7}), *dict.fromkeys(reasons)])


def _sizes(kinds: str, flat_params: Sequence[FlatParamRow]) -> tuple[str, str, str, str]:
    numel = sum(one.numel for one in flat_params)
    padding = sum(one.padding_numel for one in flat_params)
    return (
        f"{numel:,}",
        f"{padding:,} ({padding / max(numel, 1):.1%})",
        kinds,
        show_bytes(sum(one.unsharded_bytes for one in flat_params)),
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


def lint(units: Sequence[UnitSize], tied: Iterable[tuple[int, Sequence[str]]]) -> list[str]:
    """Warnings about a plan that will be slow or large, with a remedy; none about a good plan.

    ``tied`` has the elements and the names of each weight that has several names.
    """
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
