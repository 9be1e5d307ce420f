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

from flatshard.plan.auto_wrap import count_blocks
from flatshard.plan.ignored import NOTHING, Ignored
from flatshard.plan.module_tree import ModuleTree, name_of, numel

LARGE_MODEL_NUMEL = 10_000_000
"""Elements from which unit sizes matter: 40 MB of float32. For smaller models any plan will do."""

FEW_ELEMENTS = 10_000
"""Elements below which a unit's all-gather is latency-bound."""

MANY_UNITS = 32
"""So many small units are too many: each costs a fraction of a millisecond per pass."""

LARGE_TIE_NUMEL = 1_000_000
"""Elements from which it matters in which unit a tied weight is."""

UNEVEN = 10
"""A unit may hold so many times the median."""

AUTO = 'auto_wrap_policy="auto"'


@dataclass(frozen=True)
class FlatParamRow:
    """One flat parameter of a unit.

    Attributes:
        dtype: of the shard.
        trainable: whether it takes gradients.
        numel: elements of its parameters.
        padding_numel: elements of padding in the full flat parameter.
        unsharded_bytes: bytes that an all-gather fills on each rank; 0 if nothing is sharded.
    """

    dtype: torch.dtype
    trainable: bool
    numel: int
    padding_numel: int
    unsharded_bytes: int

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.") + ("" if self.trainable else " frozen")


@dataclass(frozen=True)
class UnitRow:
    """One unit, as ``describe`` shows it.

    Attributes:
        name: its FQN; empty for the root.
        class_name: of its module.
        flat_params: its flat parameters; may be none.
        strategy: the strategy's name.
        ranks: how many ranks share it.
        reason: why it is a unit.
        transport: the transport of its parameters and gradients.
        transport_reason: why ranks chose it; empty where they had no choice.
    """

    name: str
    class_name: str
    flat_params: tuple[FlatParamRow, ...]
    strategy: str
    ranks: int
    reason: str
    transport: str
    transport_reason: str = ""


@dataclass(frozen=True)
class UnitSize:
    """What ``lint`` knows of a unit.

    Attributes:
        names: the FQNs of its modules; one, empty for the root.
        numel: elements of its parameters.
        largest_numel: elements of its largest parameter, which no plan can divide.
    """

    names: tuple[str, ...]
    numel: int
    largest_numel: int

    @property
    def name(self) -> str:
        """The unit's name in messages."""
        return name_of(self.names)


# ------------------------------------------------------------ the table


def describe(rows: Sequence[UnitRow]) -> str:
    """Tabulate units, with a line of totals and a line per transport that says why it is used."""
    header = (
        *("unit", "class", "elements", "padding", "flat parameters", "unsharded"),
        *("strategy", "ranks", "transport", "why"),
    )
    table = tabulate([header, *map(_cells, rows), _totals(rows)], numbers={2, 3, 5, 7})
    reasons = (f"{r.transport}: {r.transport_reason}" for r in rows if r.transport_reason)
    return "\n".join([table, *dict.fromkeys(reasons)])


def tabulate(table: Sequence[Sequence[str]], *, numbers: Collection[int]) -> str:
    """Align cells in columns; the columns whose indices are in ``numbers`` flush right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(_line(cells, widths, numbers) for cells in table)


def _line(cells: Sequence[str], widths: Sequence[int], numbers: Collection[int]) -> str:
    padded = [
        cell.rjust(width) if index in numbers else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()


def _cells(row: UnitRow) -> tuple[str, ...]:
    flat_params = row.flat_params
    if len(flat_params) == 1:
        kinds = str(flat_params[0])
    else:
        kinds = " + ".join(f"{one} {one.numel:,}" for one in flat_params)
    return (
        row.name or "(root)",
        row.class_name,
        f"{sum(one.numel for one in flat_params):,}",
        f"{sum(one.padding_numel for one in flat_params):,}",
        kinds or "none",
        show_bytes(sum(one.unsharded_bytes for one in flat_params)),
        row.strategy,
        str(row.ranks),
        row.transport,
        row.reason,
    )


def _totals(rows: Sequence[UnitRow]) -> tuple[str, ...]:
    flat_params = [one for row in rows for one in row.flat_params]
    return (
        "total",
        f"{len(rows)} unit{'s' if len(rows) != 1 else ''}",
        f"{sum(one.numel for one in flat_params):,}",
        f"{sum(one.padding_numel for one in flat_params):,}",
        "",
        show_bytes(sum(one.unsharded_bytes for one in flat_params)),
        *("", "", "", ""),
    )


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

    Args:
        units: every unit of the model, the root too.
        tied: elements and names of each weight that has several names.
    """
    warnings = [_many_small(units), _uneven(units)]
    warnings += [_pulled_up(count, names, units) for count, names in tied]
    return [warning for warning in warnings if warning]


def lint_one_unit(module: nn.Module, ignored: Ignored = NOTHING) -> list[str]:
    """Warn if a large model with repeated blocks becomes one unit."""
    # A large module without repeated blocks may be a part that the user wraps by hand.
    tree = ModuleTree(module, ignored)
    size = numel(tree.params(module))
    blocks = count_blocks(tree) if size >= LARGE_MODEL_NUMEL else 0
    if not blocks:
        return []
    return [
        f"ShardedWrapper: all {size:,} elements of {type(module).__name__} are one unit, so every "
        f"rank holds the full model during a step. {AUTO} makes a unit of each of {blocks} "
        "repeated blocks, so that about two blocks at a time are unsharded."
    ]


def _many_small(units: Sequence[UnitSize]) -> str:
    small = [unit for unit in units if 0 < unit.numel < FEW_ELEMENTS]
    if len(small) < MANY_UNITS:
        return ""
    return (
        f"ShardedWrapper: {len(small)} of {len(units)} units hold fewer than {FEW_ELEMENTS:,} "
        f"elements ({_some(unit.name or '(root)' for unit in small)}); each has an "
        "all-gather and a reduce-scatter of its own, which are latency-bound. Choose larger "
        f"modules: {AUTO}, or a size_based_auto_wrap_policy with a larger min_num_params."
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
    where = f"unit {largest.name!r}" if largest.name else "the root"
    return (
        f"ShardedWrapper: {where} holds {largest.numel:,} elements, more than {UNEVEN} times the "
        f"median of {len(filled)} units ({int(middle):,}), and is unsharded at once. Make units "
        f"of the modules in it too (embeddings and heads, say), or use {AUTO}. "
        "model.unit_report() lists the units."
    )


def _pulled_up(count: int, names: Sequence[str], units: Sequence[UnitSize]) -> str:
    if count < LARGE_TIE_NUMEL:
        return ""
    nearest = list(dict.fromkeys(_nearest(name, units) for name in names))
    if len(nearest) < 2:
        return ""
    # If one of the units contains all others, the weight is in it anyway.
    lowest = max(nearest, key=len)
    if all(_contains(unit, lowest) for unit in nearest):
        return ""
    where = _some(repr(unit) if unit else "the root" for unit in nearest)
    return (
        f"ShardedWrapper: {' and '.join(map(repr, names))} are one weight of {count:,} elements, "
        f"but units {where} each use it, so it moved up to a unit that contains them all. "
        f"Choose a policy that makes no units there: {AUTO} does not."
    )


def _nearest(parameter: str, units: Sequence[UnitSize]) -> str:
    """The name of the innermost unit around a parameter."""
    names = [name for unit in units for name in unit.names]
    return max((name for name in names if _contains(name, parameter)), key=len)


def _contains(unit: str, name: str) -> bool:
    return not unit or name == unit or name.startswith(f"{unit}.")


def _some(names: Iterable[str]) -> str:
    """The first three, and how many more there are."""
    found = list(names)
    more = [f"{len(found) - 3} more"] if len(found) > 3 else []
    return ", ".join([*found[:3], *more])
