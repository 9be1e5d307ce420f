"""Boundaries: how a layout keeps rows, blocks or whole parameters on one rank.

Only positions in the flat parameter change. Every rank still holds one range, all of equal length,
so that collectives stay what they are; the price is padding, which ``check_padding`` bounds.

    a:(2,3) b:(2,2) c:(4,) on 2 ranks, alignment 1     boundary "tensor", shard_numel 8
      rank 0 | a a a a a a . . |   rank 1 | b b b b c c c c |

Like the layout it is a pure function of shapes, memory orders, alignment and world size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from flatshard.plan.layout import ALIGNMENT_BYTES, PAGE_BYTES, PAGED_BYTES, FlatLayout, ParamSpan
from flatshard.plan.module_tree import unit_text

# "element", "row", "tensor", or a number of elements; see `ShardedWrapper`.
Boundary = str | int

_CHOICES = "element", "row", "tensor"

# The most padding that a unit may have, as a fraction of its elements ...
MAX_PADDING = 0.25
# ... unless it has no more elements of padding than this, which cost nothing.
FREE_PADDING = 1 << 18

# Lengths of shards that `move` tries, each a little longer: up to an eighth longer than without
# boundaries. Whole parameters in bins need more in rare cases alone.
_TRIES = 64
_FINENESS = 512


def as_boundary(value: object) -> Boundary:
    """Read ``boundary``. Raises TypeError, or ValueError, for what is none."""
    expected = f"boundary: expected {', '.join(map(repr, _CHOICES))} or a number of elements"
    # True is an int: it would mean one element.
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"{expected}, got {value!r}")
    if value not in _CHOICES if isinstance(value, str) else value < 1:
        raise ValueError(f"{expected}, at least 1, got {value!r}")
    return "element" if value == 1 else value


def block_numel(span: ParamSpan, boundary: Boundary) -> int:
    """Elements that stay together: a parameter is cut only at multiples of them from its start."""
    if isinstance(boundary, int):
        return boundary
    if boundary == "element" or not span.numel:
        return 1
    # Rows of the outermost dimension in memory. A number is one row.
    is_cut = boundary == "row" and span.order
    return span.numel // span.shape[span.order[0]] if is_cut else span.numel


def move(layout: FlatLayout, boundary: Boundary, itemsize: int, first: int = 0) -> FlatLayout:
    """The same parameters at places where no shard cuts one elsewhere than ``boundary`` allows.

    ``layout`` is one without boundaries. The result's spans ascend too, but in another order.
    Where whole parameters are dealt out, rank ``first``, counted on, gets the largest.
    """
    spans, world_size, lower = layout.spans, layout.world_size, layout.shard_numel
    align = max(1, ALIGNMENT_BYTES // itemsize)
    blocks = [math.lcm(block_numel(span, boundary), align) for span in spans]
    if world_size == 1 or boundary == "element" or not lower:
        return layout

    def length(numel: int, multiple: int) -> int:
        numel = _round_up(numel, multiple)
        is_paged = numel * itemsize >= PAGED_BYTES
        return _round_up(numel, math.lcm(multiple, PAGE_BYTES // itemsize)) if is_paged else numel

    # Whole parameters in bins suit every boundary, and are the longest.
    bins, used = _in_bins(spans, world_size, align)
    shard_numel = length(used, align)
    starts = [(first + rank) % world_size * shard_numel + at for rank, at in bins]
    for multiple in _multiples(spans, blocks, lower, align):
        for number in range(_TRIES):
            tried = length(lower + number * (lower // _FINENESS), multiple)
            if tried > shard_numel:
                break
            in_order = _in_order(spans, blocks, tried, world_size, align)
            if in_order is not None:
                starts, shard_numel = in_order, tried
                break
    moved = [
        replace(span, start=start, end=start + span.numel)
        for span, start in zip(spans, starts, strict=True)
    ]
    # Empty parameters stand where the next one starts.
    moved.sort(key=lambda span: (span.start, span.end))
    return FlatLayout(tuple(moved), world_size, shard_numel)


def _in_bins(
    spans: Sequence[ParamSpan], world_size: int, align: int
) -> tuple[list[tuple[int, int]], int]:
    """Rank and place of each parameter, the largest first to the emptiest; what the fullest has."""
    loads, ranks = [0] * world_size, [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda index: -spans[index].numel):
        ranks[index] = loads.index(min(loads))
        loads[ranks[index]] += _round_up(spans[index].numel, align)
    ends, places = [0] * world_size, []
    for rank, span in zip(ranks, spans, strict=True):
        places.append((rank, ends[rank]))
        ends[rank] += _round_up(span.numel, align)
    return places, max(loads)


def _multiples(
    spans: Sequence[ParamSpan], blocks: Sequence[int], lower: int, align: int
) -> list[int]:
    """What shards' length may be a multiple of: of its block where a parameter is cut twice."""
    found = [align]
    for span, block in sorted(zip(spans, blocks, strict=True), key=lambda one: -one[0].numel):
        joint = math.lcm(found[-1], block)
        if span.numel > block and found[-1] < joint <= lower:
            found.append(joint)
    return found


def _in_order(
    spans: Sequence[ParamSpan], blocks: Sequence[int], shard_numel: int, world_size: int, align: int
) -> list[int] | None:
    """Starts of parameters one after the other; None where shards of this length are too short."""
    starts: list[int] = []
    end = 0
    for span, block in zip(spans, blocks, strict=True):
        start = _first_place(_round_up(end, align), span.numel, block, shard_numel)
        if start is None:
            return None
        starts.append(start)
        end = start + span.numel
    return starts if end <= shard_numel * world_size else None


def _first_place(start: int, numel: int, block: int, shard_numel: int) -> int | None:
    """Where, from ``start`` on, it is cut at multiples of ``block`` only; None: nowhere."""
    edge = start - start % shard_numel + shard_numel
    if start + numel <= edge:
        return start
    if min(numel, block) > shard_numel:
        return None
    start = edge if numel <= block else start + (edge - start) % block
    if start == edge:
        return _first_place(edge, numel, block, shard_numel)
    # It is cut again, a shard further on.
    if start + numel > edge + shard_numel and shard_numel % block:
        return None
    return start


def check_padding(unit: str, layouts: Iterable[FlatLayout], boundary: Boundary) -> None:
    """Raise ValueError where a unit has more padding than it may; it has these flat parameters."""
    layouts = list(layouts)
    numel = sum(layout.numel for layout in layouts)
    padding = sum(layout.padding_numel for layout in layouts)
    if padding <= max(FREE_PADDING, MAX_PADDING * numel):
        return
    worst = max(layouts, key=lambda layout: layout.padding_numel)
    span = max(worst.spans, key=lambda span: block_numel(span, boundary))
    block = min(block_numel(span, boundary), span.numel)
    raise ValueError(
        f"boundary={boundary!r}: {unit_text(unit)} would have {padding:,} elements of padding, "
        f"{padding / numel:.0%} of its {numel:,}; at most {MAX_PADDING:.0%} are allowed. "
        f"Parameter {span.name!r}, {span.shape}, keeps {block:,} elements together on one of "
        f"{worst.world_size} ranks. Make the unit larger (a coarser policy, or coalesce_bytes), "
        "or let a CustomPolicy return another boundary for it."
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
