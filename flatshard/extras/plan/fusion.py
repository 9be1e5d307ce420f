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
from dataclasses import replace

from flatshard.extras.plan.trace import Alloc, Event, Free, Mark, Op, StepTrace

_SMALL_BYTES = 1 << 20  # small blocks, such as the statistics of norms, are saved for backward


def compiled(trace: StepTrace) -> StepTrace:
    """Return ``trace`` as if ``torch.compile`` had compiled each unit but the root separately."""
    return replace(trace, events=_Compiler(trace).events())


def _regions(trace: StepTrace) -> list[int]:
    """Return, for each event, the number of the compiled region of the event, or 0 for no region.

    A region is one forward or one backward of a unit.
    """
    found, region, number, owner, in_backward = [], 0, 0, -1, False
    for event in trace.events:
        if isinstance(event, Mark) and event.what in ("enter", "enter backward"):
            if not trace.names[event.unit]:
                region = 0
            elif event.unit != owner or not region:
                number += 1
                region, owner = number, event.unit
        elif isinstance(event, Mark) and event.what in ("leave", "backward") and not in_backward:
            region, in_backward = 0, event.what == "backward"
        found.append(region)
    return found


class _Compiler:
    """Finds which operators and blocks of a trace remain after compilation.

    Attributes:
        ops: the operators that remain, keyed by the index of the event.
        fused: for each event, the number of its region (a forward or a backward of a unit) if the
            event is an operator that can be part of a fused kernel, and otherwise 0.
        made_by: for each block, the index of the operator that makes the block.
        results: results of a unit's forward that an operator outside of the unit reads. These
            results are in memory anyway, so backward need not compute them again.
        gradients: the blocks of parameters' gradients.
        last_use: for each block that an operator reads, the index of the last operator.
        inner: blocks that are read and written only inside of one fused kernel.
    """

    def __init__(self, trace: StepTrace) -> None:
        self.trace, self.regions = trace, _regions(trace)
        self.ops = {i: event for i, event in enumerate(trace.events) if isinstance(event, Op)}
        fuses = (getattr(event, "kind", "") == "fusible" for event in trace.events)
        self.fused = [region * is_op for region, is_op in zip(self.regions, fuses, strict=True)]
        self.backward = trace.events.index(Mark("backward"))
        self.made_by = {block: i for i in reversed(self.ops) for block, _ in self.ops[i].writes}
        self.results = {
            block
            for i, op in self.ops.items()
            for block, _ in op.reads
            if i < self.backward and self.regions[i] != self.regions[self.made_by.get(block, i)]
        }
        self.gradients = {event.block for event in trace.events if isinstance(event, Mark)}
        self.sources: dict[int, frozenset[int]] = {}
        self.last_use: dict[int, int] = {}
        self._find_uses()
        users: dict[int, set[int]] = defaultdict(set)
        for i, op in self.ops.items():
            for block, _ in (*op.reads, *op.writes):
                users[block].add(self.fused[i])
        inner = {block for block, found in users.items() if len(found) == 1 and 0 not in found}
        self.inner = inner - self.gradients

    def _origin(self, block: int) -> frozenset[int]:
        """The saved blocks from which backward can compute ``block`` again."""
        if block not in self.sources:
            self.sources[block] = frozenset((block,))
            maker, nbytes = self.made_by.get(block, self.backward), self.trace.sizes[block]
            if self.fused[maker] and block not in self.results and nbytes > _SMALL_BYTES:
                inputs = [one for one, _ in self.ops[maker].reads if one >= 0 and one != block]
                self.sources[block] = frozenset().union(*map(self._origin, inputs))
        return self.sources[block]

    def _find_uses(self) -> None:
        """Find the last use of each block, and remove operators whose results are not used."""
        needed = set(self.gradients)
        for i in reversed(list(self.ops)):
            writes = self.ops[i].writes
            if self.regions[i] and not any(block < 0 or block in needed for block, _ in writes):
                del self.ops[i]
                continue
            for block in (block for block, _ in self.ops[i].reads if block >= 0):
                # Inputs of backward's matrix products are saved: a matrix product reads its inputs
                # from memory, so an input that is computed again would need memory again.
                again = self.fused[i] and i > self.backward > self.made_by.get(block, i)
                for one in self._origin(block) if again else (block,):
                    needed.add(one)
                    self.last_use.setdefault(one, i)

    def events(self) -> list[Event]:
        """Return the events of the compiled step."""
        made: list[Event] = []
        allocated, seen = set[int](), set[int]()  # `seen`: blocks that the kernel has already read
        ends: dict[int, list[int]] = defaultdict(list)
        for i, event in enumerate(self.trace.events):
            frees = ends[i]
            if isinstance(event, Alloc):
                block, is_gradient = event.block, event.block in self.gradients
                is_used = is_gradient or block in self.last_use or not self.regions[i]
                if is_used and block not in self.inner:
                    allocated.add(block)
                    made.append(event)
                if is_used and self.regions[i] and not is_gradient:
                    ends[self.last_use[block]].append(block)
            elif isinstance(event, Free):
                frees = [event.block]
            elif isinstance(event, Mark):
                made.append(event)
            elif i in self.ops and self.fused[i]:
                reads = tuple(one for one in event.reads if one[0] not in self.inner | seen)
                writes = tuple(one for one in event.writes if one[0] not in self.inner)
                seen.update(block for block, _ in reads if block >= 0)
                made += [event._replace(reads=reads, writes=writes)] if reads or writes else []
            elif i in self.ops:
                seen.clear()
                made.append(event)
            made += [Free(block) for block in frees if block in allocated]
            allocated.difference_update(frees)
        return made
