"""``repeated``: makes the trace of a deep model from the trace of a model with four layers.

All layers run the same operators. So the trace of the third of four layers, with new numbers for
the blocks of memory, is also the trace of each layer in the middle of a deep model. This takes
seconds, and tracing the deep model takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from flatshard.extras.plan.trace import Alloc, Event, Free, Mark, Op, StepTrace


class Units(NamedTuple):
    """Names of a model's units, and for each flat parameter the index of its unit."""

    names: Sequence[str]
    owners: Sequence[int]


class _Home(NamedTuple):
    """Where a block of memory is allocated.

    ``is_backward`` and ``layer``: the layer, and whether its backward allocates the block. Layer
    -1: no layer allocates the block. ``number`` counts the blocks of one layer's forward or
    backward.
    """

    is_backward: bool
    layer: int
    number: int


def repeated(
    trace: StepTrace, shallow: Units, deep: Units, layers: int, period: int = 1
) -> StepTrace:
    """Return the trace of a deep model, made from the trace of a shallow model.

    A layer is a group of ``period`` consecutive blocks, which may differ from each other (for
    example, only every second block is checkpointed). The shallow model has 4 layers.

    Args:
        trace: trace of the shallow model.
        shallow: units of the shallow model. Blocks have the names ``blocks.0``, ``blocks.1``, ...
        deep: units of the deep model.
        layers: number of layers of the deep model, at least 4.
        period: number of blocks in a layer.

    Raises:
        ValueError: the second and the third layer of ``trace`` allocate different memory.
    """
    names, deep_names = shallow.names, deep.names
    layer_of = {
        unit: int(name.split(".")[1]) // period
        for unit, name in enumerate(names)
        if name.startswith("blocks.")
    }
    number_of = {name: unit for unit, name in enumerate(deep_names)}

    def deep_unit(unit: int, shift: int) -> int:
        if unit not in layer_of:
            return number_of[names[unit]]
        return number_of[f"blocks.{int(names[unit].split('.')[1]) + shift * period}"]

    def deep_flat(flat: int, shift: int) -> int:
        unit = shallow.owners[flat]
        place = flat - shallow.owners.index(unit)
        return list(deep.owners).index(deep_unit(unit, shift)) + place

    parts = _parts(trace, layer_of)
    homes: dict[int, _Home] = {}
    counts: dict[tuple[bool, int], int] = {}
    for is_backward, layer, events in parts:
        for event in events:
            if isinstance(event, Alloc):
                key = (is_backward, layer)
                homes[event.block] = _Home(*key, counts.setdefault(key, 0))
                counts[key] += 1
    sizes = {home: trace.sizes[block] for block, home in homes.items()}
    for home, size in sizes.items():
        if home.layer == 2 and sizes.get(home._replace(layer=1)) != size:
            raise ValueError(
                "repeated: the second and third layer of the trace allocate different memory"
            )
    made = StepTrace(names=list(deep_names), buffer_bytes=trace.buffer_bytes)
    known: dict[_Home, int] = {}

    def renumbered(shift: int) -> Callable[[int], int]:
        def block(old: int) -> int:
            if old not in homes:
                return old
            home = homes[old]
            moved = shift if shift >= 0 else (layers - 4) * (home.layer >= 2)
            home = home._replace(layer=home.layer + moved * (home.layer >= 0))
            if home not in known:
                known[home] = len(made.sizes)
                made.sizes.append(trace.sizes[old])
                made.makers.append(trace.makers[old])
            return known[home]

        return block

    for index, (_, layer, events) in enumerate(parts):
        shifts = {-1: [-1], 2: list(range(layers - 3)), 3: [layers - 4]}.get(layer, [0])
        for shift in shifts if not parts[index][0] else reversed(shifts):
            made.events += _moved(events, renumbered(shift), deep_unit, deep_flat, max(shift, 0))
    return made


def _parts(trace: StepTrace, layer_of: dict[int, int]) -> list[tuple[bool, int, list[Event]]]:
    """Split a trace into the events of each layer's forward and backward, and the events between.

    Each part is: whether backward runs, the layer (-1: between layers), and the events.
    """
    last = max(layer_of.values())
    last_unit = max(layer_of)
    parts: list[tuple[bool, int, list[Event]]] = [(False, -1, [])]
    is_backward = False
    for event in trace.events:
        leaves = False
        if isinstance(event, Mark):
            is_backward = is_backward or event.what == "backward"
            layer = layer_of.get(event.unit, -1)
            begins = event.what == ("enter backward" if is_backward else "enter")
            if begins and layer >= 0 and (is_backward, layer) != parts[-1][:2]:
                parts.append((is_backward, layer, []))
            leaves = event.what == "leave" and not is_backward and event.unit == last_unit
        parts[-1][2].append(event)
        if leaves and parts[-1][1] == last:
            parts.append((False, -1, []))
    return parts


def _moved(
    events: Sequence[Event],
    block: Callable[[int], int],
    unit: Callable[[int, int], int],
    flat: Callable[[int, int], int],
    shift: int,
) -> list[Event]:
    found: list[Event] = []
    for event in events:
        if isinstance(event, Op):
            reads, writes = (
                tuple((block(one) if one >= 0 else one, size) for one, size in side)
                for side in (event.reads, event.writes)
            )
            found.append(event._replace(reads=reads, writes=writes))
        elif isinstance(event, Alloc | Free):
            found.append(event._replace(block=block(event.block)))
        else:
            number = flat if event.what == "gradient" else unit
            moved = event._replace(unit=number(event.unit, shift)) if event.unit >= 0 else event
            found.append(moved._replace(block=block(moved.block)) if moved.block >= 0 else moved)
    return found


def held_by_collectives(trace: StepTrace, launches: int) -> StepTrace:
    """Return the trace with later frees of the memory that tensor-parallel collectives use.

    ``torch.Tensor.record_stream`` delays the reuse of a collective's inputs and outputs until the
    GPU has run the collective. ``launches``: number of kernels by which the GPU is behind the host.
    """
    used = {
        block
        for event in trace.events
        if isinstance(event, Op) and event.name in ("published.gather", "published.scatter")
        for block, _ in (*event.reads, *event.writes)
    }
    made: list[Event] = []
    waiting: list[tuple[int, Free]] = []
    launched = 0
    for event in trace.events:
        launched += isinstance(event, Op)
        if isinstance(event, Free) and event.block in used:
            waiting.append((launched + launches, event))
        else:
            made.append(event)
        while waiting and waiting[0][0] <= launched:
            made.append(waiting.pop(0)[1])
    return replace(trace, events=[*made, *(free for _, free in waiting)])


def freed_at_last_use(trace: StepTrace) -> StepTrace:
    """Return the trace with each block freed after the last operator that uses the block.

    A graph of the whole step frees its tensors in this way. Without a graph, Python's variables
    and activation checkpointing hold tensors that no later operator reads.
    """
    last: dict[int, int] = {}
    for index, event in enumerate(trace.events):
        if isinstance(event, Op):
            last.update((block, index) for block, _ in (*event.reads, *event.writes))
        elif isinstance(event, Mark) and event.block >= 0:
            last[event.block] = len(trace.events)  # gradients stay allocated to the end
    ends: dict[int, list[int]] = {}
    for block, index in last.items():
        if block >= 0:
            ends.setdefault(index, []).append(block)
    made: list[Event] = []
    for index, event in enumerate(trace.events):
        if not isinstance(event, Free) or event.block not in last:
            made.append(event)
        made += [Free(block) for block in ends.get(index, ())]
    return replace(trace, events=made)
