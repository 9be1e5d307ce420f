"""Extra: lays out flat parameters so that each row, block or parameter is on one rank.

The option ``boundary`` of ``ShardedWrapper`` enables this extra. Without this folder, the option
raises ``MissingExtraError``, except with the default ``"element"``.

Only the positions of parameters in the flat parameter change. Every rank still holds one range, and
all ranges have the same length, so collectives are unchanged. The cost is padding, limited by
``check_padding``.

    a:(2,3) b:(2,2) c:(4,) on 2 ranks, alignment 1     boundary "tensor", shard_numel 8
      rank 0 | a a a a a a . . |   rank 1 | b b b b c c c c |

The result depends only on shapes, memory orders, alignment and world size, so all ranks compute the
same result without communication.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from flatshard.tensor.flat_parameter import FlatParamPlan
from flatshard.units.layout import ALIGNMENT_BYTES, FlatLayout, ParamSpan, round_up, shard_length
from flatshard.units.module_tree import unit_text

# Where the end of a shard may cut a parameter: "element" (anywhere), "row" (between rows), "tensor"
# (nowhere), or a number of elements (at multiples of the number).
Boundary = str | int
Spans = Sequence[ParamSpan]

_CHOICES = "element", "row", "tensor"

# Maximum padding of a unit, as a fraction of the unit's elements.
MAX_PADDING = 0.25
# Elements of padding that are always allowed, because they cost next to nothing.
FREE_PADDING = 1 << 18

# `move` tries `_TRIES` shard lengths. The first is the length without boundaries. Each later length
# is greater by 1 / `_FINENESS` of the first length, so the last length is an eighth greater.
_TRIES = 64
_FINENESS = 512


def as_boundary(value: object) -> Boundary:
    """Check the option ``boundary``."""
    expected = f"boundary: expected {', '.join(map(repr, _CHOICES))} or a number of elements"
    # Refuse True, which would mean one element.
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"{expected}, got {value!r}.")
    if value not in _CHOICES if isinstance(value, str) else value < 1:
        raise ValueError(f"{expected}, at least 1, got {value!r}.")
    return "element" if value == 1 else value


def block_numel(span: ParamSpan, boundary: Boundary) -> int:
    """Return the number of elements in a block (such as a row), which must stay on one rank."""
    if isinstance(boundary, int):
        return boundary
    if boundary == "element" or not span.numel:
        return 1
    if boundary == "row" and span.order:
        # Rows are slices along the dimension that is outermost in memory.
        return span.numel // span.shape[span.order[0]]
    return span.numel  # "tensor", or a 0-D parameter, which has no rows


def move_all(flats: Collection[FlatParamPlan], boundary: Boundary, name: str, first: int) -> None:
    """Move the parameters of unit ``name`` so that no shard ends inside a block, or raise."""
    for plan in flats:
        plan.layout = move(plan.layout, boundary, plan.dtype.itemsize, first)
        infos = {info.name: info for info in plan.infos}
        plan.infos = [infos[span.name] for span in plan.layout.spans]
    check_padding(name, [plan.layout for plan in flats], boundary)


def move(layout: FlatLayout, boundary: Boundary, itemsize: int, first: int = 0) -> FlatLayout:
    """Return a layout in which shards cut parameters only where ``boundary`` allows."""
    spans, world_size, lower = layout.spans, layout.world_size, layout.shard_numel
    align = max(1, ALIGNMENT_BYTES // itemsize)
    blocks = [math.lcm(block_numel(span, boundary), align) for span in spans]
    if world_size == 1 or boundary == "element" or not lower:
        return layout

    # A first solution puts each parameter on one rank, which may need long shards. The loop below
    # looks for a solution with shorter shards: all parameters in sequence, cut at allowed places.
    bins, used = _in_bins(spans, world_size, align)
    shard_numel = shard_length(used, align, itemsize=itemsize)
    starts = [(first + rank) % world_size * shard_numel + at for rank, at in bins]
    for multiple in _multiples(spans, blocks, lower, align):
        for number in range(_TRIES):
            numel = lower + number * (lower // _FINENESS)
            tried = shard_length(numel, multiple, itemsize=itemsize)
            if tried > shard_numel:
                break
            in_order = _in_order(spans, blocks, tried, world_size, align)
            if in_order is not None:
                starts, shard_numel = in_order, tried
                break
    pairs = zip(spans, starts, strict=True)
    moved = [replace(span, start=start, end=start + span.numel) for span, start in pairs]
    # Sort by start, then by end. Then an empty parameter comes before a parameter with elements
    # that begins at the same position.
    moved.sort(key=lambda span: (span.start, span.end))
    return FlatLayout(tuple(moved), world_size, shard_numel)


def _in_bins(spans: Spans, world_size: int, align: int) -> tuple[list[tuple[int, int]], int]:
    """Put each parameter, largest first, on the rank that has the fewest elements so far.

    Returns each parameter's rank and position in the shard, and the length of the longest shard.
    """
    loads, ranks = [0] * world_size, [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda index: -spans[index].numel):
        ranks[index] = loads.index(min(loads))
        loads[ranks[index]] += round_up(spans[index].numel, align)
    ends, places = [0] * world_size, []
    for rank, span in zip(ranks, spans, strict=True):
        places.append((rank, ends[rank]))
        ends[rank] += round_up(span.numel, align)
    return places, max(loads)


def _multiples(spans: Spans, blocks: Sequence[int], lower: int, align: int) -> list[int]:
    """Return numbers of elements. ``move`` tries multiples of each number as shard lengths."""
    # If two shard ends cut a parameter, the shard length must be a multiple of the block size.
    found = [align]
    for span, block in sorted(zip(spans, blocks, strict=True), key=lambda one: -one[0].numel):
        joint = math.lcm(found[-1], block)
        if span.numel > block and found[-1] < joint <= lower:
            found.append(joint)
    return found


def _in_order(
    spans: Spans, blocks: Sequence[int], shard_numel: int, world_size: int, align: int
) -> list[int] | None:
    """Return the parameters' starts, one after another, or None if ``shard_numel`` is too small."""
    starts, end = list[int](), 0
    for span, block in zip(spans, blocks, strict=True):
        start = _first_place(round_up(end, align), span.numel, block, shard_numel)
        if start is None:
            return None
        starts.append(start)
        end = start + span.numel
    return starts if end <= shard_numel * world_size else None


def _first_place(start: int, numel: int, block: int, shard_numel: int) -> int | None:
    """Return the first allowed position of a parameter at or after ``start``, or None.

    A position is allowed if shard ends cut the parameter only at multiples of ``block``.
    """
    edge = start - start % shard_numel + shard_numel
    if start + numel <= edge:
        return start
    if min(numel, block) > shard_numel:
        return None
    start = edge if numel <= block else start + (edge - start) % block
    if start == edge:
        return _first_place(edge, numel, block, shard_numel)
    # If a second shard end cuts the parameter, the shard length must be a multiple of `block`, too.
    if start + numel > edge + shard_numel and shard_numel % block:
        return None
    return start


def check_padding(name: str, layouts: Sequence[FlatLayout], boundary: Boundary) -> None:
    """Raise ValueError if the flat parameters of unit ``name`` have too much padding."""
    numel = sum(layout.numel for layout in layouts)
    padding = sum(layout.padding_numel for layout in layouts)
    if padding <= max(FREE_PADDING, MAX_PADDING * numel):
        return
    worst = max(layouts, key=lambda layout: layout.padding_numel)
    span = max(worst.spans, key=lambda span: block_numel(span, boundary))
    block = min(block_numel(span, boundary), span.numel)
    raise ValueError(
        f"boundary={boundary!r}: {unit_text(name)} would have {padding:,} elements of padding, "
        f"{padding / numel:.0%} of its {numel:,} elements. At most {MAX_PADDING:.0%} are allowed. "
        f"In parameter {span.name!r} of shape {span.shape}, blocks of {block:,} elements must not "
        f"be cut ({worst.world_size} ranks). Make the unit larger (coarser policy, coalesce_bytes) "
        "or let a CustomPolicy return another boundary for the unit."
    )
