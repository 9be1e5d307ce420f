"""``compiled``: changes a trace to the trace that the model has under ``torch.compile``.

Three changes by the compiler matter for memory and time:

- The compiler removes operators whose results no operator reads, such as the recomputed output
  of a block.
- The compiler saves fewer tensors for backward (``torch._functorch.partitioners``). Backward
  computes cheap tensors again, from the saved results of matrix products and attention.
- The compiler joins neighbouring pointwise operators and reductions into one kernel. The tensors
  between the joined operators never reach memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

from flatshard.extras.plan.trace import Alloc, Event, Free, Mark, Op, StepTrace


def compiled(trace: StepTrace, units: Collection[int]) -> StepTrace:
    """Return ``trace`` as if ``torch.compile`` had compiled each module of ``units`` separately."""
    regions = _regions(trace, units)
    ops = [(i, event) for i, event in enumerate(trace.events) if isinstance(event, Op)]
    backward = next(i for i, event in enumerate(trace.events) if event == Mark("backward"))
    made_by = {block: i for i, op in reversed(ops) for block, _ in op.writes}
    # Results of a unit's forward that an operator outside of the unit reads. These results are in
    # memory anyway, so backward need not compute them again.
    results = {
        block
        for i, op in ops
        for block, _ in op.reads
        if i < backward and regions[i] != regions[made_by.get(block, i)]
    }
    sources: dict[int, frozenset[int]] = {}

    def origin(block: int) -> frozenset[int]:
        """The saved blocks from which backward can compute ``block`` again."""
        if block not in sources:
            sources[block] = frozenset((block,))
            maker = made_by.get(block, backward)
            op = trace.events[maker]
            if maker < backward and regions[maker] and isinstance(op, Op) and op.kind == "fusible":
                # Small blocks, such as the statistics of norms, are saved.
                if block not in results and trace.sizes[block] > 1 << 20:
                    inputs = [one for one, _ in op.reads if one >= 0 and one != block]
                    sources[block] = frozenset().union(*map(origin, inputs))
        return sources[block]

    # Find the operators whose results are used, and the last use of each block.
    needed_marks = {event.block for event in trace.events if isinstance(event, Mark)}
    needed = set(needed_marks)
    last_use: dict[int, int] = {}
    live: list[tuple[int, Op]] = []
    for i, op in reversed(ops):
        written = [block for block, _ in op.writes]
        if regions[i] and not any(block < 0 or block in needed for block in written):
            continue
        live.append((i, op))
        for block, _ in op.reads:
            if block >= 0:
                crosses = i > backward and made_by.get(block, i) < backward
                # Inputs of backward's matrix products are saved: a matrix product reads its inputs
                # from memory, so an input that is computed again would need memory again.
                again = crosses and regions[i] and op.kind == "fusible"
                for one in origin(block) if again else (block,):
                    needed.add(one)
                    last_use.setdefault(one, i)
    live.reverse()
    inner = _inner_blocks(live, regions) - needed_marks
    return _rewrite(trace, regions, dict(live), last_use, inner)


def _regions(trace: StepTrace, units: Collection[int]) -> list[int]:
    """For each event, the number of the compiled region that contains the event, or 0 if none.

    A region is one forward or one backward of a unit.
    """
    found, piece, number, owner, in_backward = [], 0, 0, -1, False
    for event in trace.events:
        if isinstance(event, Mark) and event.what in ("enter", "enter backward"):
            if event.unit in units and (event.unit != owner or not piece):
                number += 1
                piece, owner = number, event.unit
            elif event.unit not in units:
                piece = 0
        elif isinstance(event, Mark) and event.what in ("leave", "backward") and not in_backward:
            piece, in_backward = 0, event.what == "backward"
        found.append(piece)
    return found


def _inner_blocks(live: list[tuple[int, Op]], regions: list[int]) -> set[int]:
    """Return the blocks that are read and written only inside of one fused kernel."""
    homes: dict[int, int] = {}
    outer: set[int] = set()
    for i, op in live:
        for block, _ in (*op.reads, *op.writes):
            fits = op.kind == "fusible" and regions[i] and homes.setdefault(block, i) >= 0
            if not fits or regions[homes[block]] != regions[i]:
                outer.add(block)
    return homes.keys() - outer


def _rewrite(
    trace: StepTrace,
    regions: list[int],
    live: dict[int, Op],
    last_use: dict[int, int],
    inner: set[int],
) -> StepTrace:
    made: list[Event] = []
    allocated: set[int] = set()
    gradients = {e.block for e in trace.events if isinstance(e, Mark) and e.what == "gradient"}
    in_region = {e.block for i, e in enumerate(trace.events) if isinstance(e, Alloc) and regions[i]}
    ends: dict[int, list[int]] = defaultdict(list)
    for block, i in last_use.items():
        if block in in_region and block not in gradients:
            ends[i].append(block)

    def free(block: int) -> None:
        if block in allocated:
            allocated.remove(block)
            made.append(Free(block))

    seen: set[int] = set()  # blocks that the current kernel has already read
    for i, event in enumerate(trace.events):
        if isinstance(event, Op):
            op = live.get(i)
            if op is not None and op.kind == "fusible" and regions[i]:
                reads = tuple(x for x in op.reads if x[0] not in inner | seen)
                writes = tuple(x for x in op.writes if x[0] not in inner)
                seen.update(block for block, _ in reads if block >= 0)
                if reads or writes:
                    made.append(op._replace(reads=reads, writes=writes))
            elif op is not None:
                seen.clear()
                made.append(op)
            for block in ends[i]:
                free(block)
        elif isinstance(event, Alloc):
            is_used = event.block in last_use or event.block in gradients
            if event.block not in inner and (is_used or not regions[i]):
                allocated.add(event.block)
                made.append(event)
        elif isinstance(event, Free):
            free(event.block)
        else:
            made.append(event)
    return replace(trace, events=made)
