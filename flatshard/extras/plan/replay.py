"""``Replay``: replays a trace under a sharding strategy, and finds the peak memory and the time.

A trace contains the computation of one rank. The replay adds the work of flatshard's engine, in the
engine's order (``flatshard/engine/forward.py``, ``backward.py``): all-gathers and prefetches,
resharding, gradient buffers, reductions, ``.grad`` and the optimizer's state. The replay keeps two
clocks: one clock for the device's computation, and one clock for the link. Collectives use the link
one after another.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flatshard.extras.plan.allocator import CachingAllocator, Place
from flatshard.extras.plan.hardware import Machine
from flatshard.extras.plan.shards import FlatMemory
from flatshard.extras.plan.trace import Alloc, Free, Mark, Op, StepTrace

# The same thresholds as in ``engine.grad_buffer``: gradients of at least this size are copied into
# the buffer at once, and the transport reads gradients of at least this mean size in place.
_SMALL_BYTES, _MEAN_IN_PLACE_BYTES = 1 << 20, 1 << 16


@dataclass(frozen=True)
class PlannedFlat:
    """A flat parameter, and the sizes of the groups in which ranks gather and reduce."""

    memory: FlatMemory
    unit: int
    is_freed: bool  # whether the unit reshards between forward and backward
    # Whether the flat parameter is freed after forward although the unit is not: the flat
    # parameter contains only embeddings, and backward does not read embeddings.
    is_spare: bool
    is_freed_after: bool  # whether the unit reshards after backward
    gather_size: int  # number of ranks in an all-gather of forward
    regather_size: int  # number of ranks in an all-gather of backward
    replicas: int  # number of ranks with the same shard, or in the second stage of a reduction
    keeps_secondary: bool = False  # whether the secondary shard is kept between steps


class Held(NamedTuple):
    """A block of memory that is allocated at the moment."""

    category: str
    nbytes: int
    place: Place


@dataclass
class Reduction:
    """A running reduction: the buffers, and the time of the end.

    ``nbytes`` counts towards the limit of memory for reductions (``max_in_flight``).
    """

    buffers: list[Held]
    nbytes: int
    ends: float
    bucket: Sequence[int] = ()
    reports_end: bool = True
    has_crossed: bool = True  # whether the second stage, over the replicas, has begun


@dataclass
class Outcome:
    """Memory, communication and time that a replay predicts for one step.

    Attributes:
        peak: bytes at the moment of the peak, keyed by category.
        peak_at: operator or action at the moment of the peak, and the unit that was running.
        reserved_bytes: bytes that torch's allocator has reserved at the end of the last step.
        seconds: duration of one step.
        compute_seconds: duration of the step's operators and of the optimizer.
        link_seconds: time in which the step's collectives use the link.
        sent_bytes: two numbers: bytes that this rank sends in a step to ranks of its node, and
            bytes that this rank sends to other nodes.
        timeline: pairs of a time in the step and the bytes at this time, keyed by category. A pair
            is recorded when a unit's forward or backward begins or ends.
    """

    peak: dict[str, int] = field(default_factory=dict)
    peak_at: str = ""
    reserved_bytes: int = 0
    seconds: float = 0.0
    compute_seconds: float = 0.0
    link_seconds: float = 0.0
    sent_bytes: list[float] = field(default_factory=lambda: [0.0, 0.0])
    timeline: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def exposed_seconds(self) -> float:
        """Time in which the device only waits for collectives."""
        return self.seconds - self.compute_seconds


class Replay:
    """Replays the steps of one rank."""

    # Names of the streams on which all-gathers and reductions allocate. flatshard allocates
    # everything on the stream of the computation.
    gather_stream = reduce_stream = "compute"

    def __init__(
        self,
        trace: StepTrace,
        flats: Sequence[PlannedFlat],
        names: Sequence[str],  # names of the units
        machine: Machine,
        *,
        world_size: int,
        buffer_bytes: int = 0,
        accumulate: int = 1,  # backwards per step, all but the last under ``no_sync``
        expandable_segments: bool = True,  # a setting of torch's allocator
    ) -> None:
        self.trace, self.flats, self.names, self.machine = trace, flats, names, machine
        self.world_size, self._accumulate = world_size, accumulate
        self.outcome = Outcome()
        self._totals: dict[str, int] = defaultdict(int)
        self._sum = 0
        self._allocator = CachingAllocator(expandable=expandable_segments)
        self.clock = self._link_free = 0.0
        self._ends: dict[int, float] = {}  # flat parameter -> when its current all-gather ends
        self.unsharded: dict[int, list[Held]] = {}
        self.of_unit: dict[int, list[int]] = defaultdict(list)
        self._bucket_of: dict[int, tuple[int, ...]] = {}
        for index, flat in enumerate(flats):
            self.of_unit[flat.unit].append(index)
        for indices in self.of_unit.values():
            trained = [i for i in indices if flats[i].memory.is_trained]
            together = tuple(i for i in trained if not flats[i].memory.reduces_alone)
            for i in trained:
                self._bucket_of[i] = (i,) if flats[i].memory.reduces_alone else together
        # The same limits as in ``engine.reduce_queue``.
        on_gpu = machine.device.is_gpu
        buckets = [*(self._bucket_of if on_gpu else self.of_unit).values()]
        self.max_in_flight = 2 * max(map(self._bucket_bytes, buckets), default=0)
        self._counted = 1 if on_gpu else 2
        self._budget = max(map(self._unit_bytes, self.of_unit), default=0)
        # Copies of shards in the compute dtype, while an all-gather sends the copies.
        self._sources: dict[int, Held] = {}
        # Flat parameters that are still unsharded, but whose shard the optimizer has changed.
        self._stale: set[int] = set()
        self._secondary: dict[int, Held] = {}
        self._brief: list[tuple[float, Held]] = []  # temporary memory, with the time of its end
        self._now, self._place = "start", ""
        for flat in flats:
            self.allocate(flat.memory.parameter_bytes, "parameters")
            if flat.keeps_secondary:
                self.allocate(flat.memory.secondary_bytes, "unsharded")
        self.allocate(buffer_bytes, "buffers")

    def _bucket_bytes(self, bucket: Sequence[int]) -> int:
        return sum(self.flats[i].memory.whole_gradient_bytes for i in bucket)

    def _unit_bytes(self, unit: int) -> int:
        return sum(self.flats[i].memory.gathered_bytes for i in self.of_unit[unit])

    # ------------------------------------------------------------ memory

    def allocate(self, nbytes: int, category: str, stream: str = "compute") -> Held:
        while self._brief and self._brief[0][0] <= self.clock:
            self.free(self._brief.pop(0)[1])
        held = Held(category, nbytes, self._allocator.allocate(nbytes, stream))
        self._totals[category] += nbytes
        self._sum += nbytes
        if self._sum > self.outcome.peak_bytes:
            self.outcome.peak = dict(self._totals)
            self.outcome.peak_at = f"{self._now}, {self._place}"
        return held

    def free(self, held: Held) -> None:
        self._totals[held.category] -= held.nbytes
        self._sum -= held.nbytes
        self._allocator.free(held.place)

    # ------------------------------------------------------------ time

    def _send(self, nbytes: float, size: int, in_node: int) -> float:
        """Start a collective, and return the time at which the collective ends."""
        seconds = self.machine.collective_seconds(nbytes, size, in_node)
        self._link_free = max(self._link_free, self.clock) + seconds
        self.outcome.link_seconds += seconds
        self.outcome.sent_bytes[size > in_node] += nbytes * (size - 1) / size
        return self._link_free

    def wait(self, ends: float) -> None:
        self.clock = max(self.clock, ends)

    def op_seconds(self, op: Op) -> float:
        return self.machine.device.seconds(op)

    # ------------------------------------------------------------ all-gathers

    def start_gather(self, index: int, *, backward: bool) -> None:
        flat, memory = self.flats[index], self.flats[index].memory
        is_new = index not in self.unsharded
        if index in self._ends or not (is_new or index in self._stale) or not memory.gathered_bytes:
            return
        self._stale.discard(index)
        if is_new:
            self.unsharded[index] = [self.allocate(memory.gathered_bytes, "unsharded")]
        size = flat.regather_size if backward else flat.gather_size
        if memory.is_cast and flat.gather_size > 1 and index not in self._secondary:
            source = self.allocate(memory.gathered_bytes // flat.gather_size, "unsharded")
            self._sources[index] = source
        ends = self._send(memory.gathered_bytes, size, self.machine.per_node)
        copies = self.machine.transport.gather_copies if size > 1 else 0
        if copies:
            brief = self.allocate(int(copies * memory.gathered_bytes), "temporary")
            self._brief.append((ends, brief))
        self._ends[index] = ends

    def unshard(self, unit: int, *, backward: bool) -> None:
        needed = [
            i for i in self.of_unit[unit] if not (backward and self.flats[i].memory.is_lookup)
        ]
        for index in needed:
            self.start_gather(index, backward=backward)
        for index in self.of_unit[unit]:
            if index in self._ends:
                self.wait(self._ends.pop(index))
                if index in self._sources:
                    self.free(self._sources.pop(index))

    def prefetch(self, unit: int, *, backward: bool) -> None:
        """Start the all-gathers of the units that are expected after ``unit``."""
        order = self.trace.order[::-1] if backward else self.trace.order
        expected = order[order.index(unit) + 1 :] if unit in order else []
        self._start_expected(expected, backward=backward)

    def _start_expected(self, expected: Sequence[int], *, backward: bool) -> None:
        """Start all-gathers of the next units, as ``engine.prefetch`` does.

        One unit is gathered ahead. If the transport works in the background, more units are
        gathered ahead, until the memory budget is reached.
        """
        first = None
        for unit in expected:
            flats = self.of_unit[unit]
            if backward:
                flats = [i for i in flats if not self.flats[i].memory.is_lookup]
            if not flats:
                continue
            if first is not None and not self._fits_ahead(unit):
                return
            first = unit
            if not (backward and unit in self._in_backward):
                for index in flats:
                    self.start_gather(index, backward=backward)

    def _fits_ahead(self, unit: int) -> bool:
        under_way = {self.flats[index].unit for index in self._ends} | {unit}
        fits = sum(map(self._unit_bytes, under_way)) <= self._budget
        return self.machine.transport.gathers_in_background and fits

    def _needs_soon(self, unit: int) -> bool:
        """Whether the unit stays unsharded after forward, because backward begins with this unit.

        ``engine.prefetch`` has the same rule for ``BackwardPrefetch.AUTO``.
        """
        begins = self.machine.transport.gathers_in_background and unit == self.trace.order[-1]
        return begins and all(
            self.flats[i].regather_size == self.flats[i].gather_size for i in self.of_unit[unit]
        )

    def reshard(self, unit: int, *, after_backward: bool) -> None:
        for index in self.of_unit[unit]:
            flat = self.flats[index]
            if after_backward:
                frees = flat.is_freed_after
                if index in self._secondary:
                    self.free(self._secondary.pop(index))
            else:
                frees = flat.is_freed and not self._needs_soon(unit)
                frees = frees or (flat.is_spare and self._syncs)
            if not frees or index not in self.unsharded or index in self._ends:
                continue
            if not after_backward and flat.memory.secondary_bytes and not flat.keeps_secondary:
                self._secondary[index] = self.allocate(flat.memory.secondary_bytes, "unsharded")
            for held in self.unsharded.pop(index):
                self.free(held)

    # ------------------------------------------------------------ gradients

    def receive(self, index: int, block: Held) -> None:
        """Handle the complete gradient of one parameter. ``block``: memory of the gradient."""
        memory, slots = self.flats[index].memory, self._slots[index]
        place = self._arrived[index]
        self._arrived[index] += 1
        # With gradient accumulation: the gradient is added to the gradient of an earlier backward.
        is_added = place < len(slots)
        if is_added:
            pass
        elif self._is_in_place(index) or block.nbytes < _SMALL_BYTES:
            slots.append(block)
        else:
            if index not in self._buffers:
                self._now = "copying gradients"
                self._buffers[index] = self.allocate(memory.whole_gradient_bytes, "reduction")
            slots.append(None)
        is_kept = not is_added and slots[-1] is block
        bucket = self._bucket_of[index]
        if all(self._arrived[i] == len(self.flats[i].memory.params) for i in bucket):
            if self._syncs:
                self.reduce(bucket)
            self.end_unit(self.flats[index].unit)
        if not is_kept:  # `Backward.receive` refers to the gradient until the reduction has begun
            self.free(block)

    def end_unit(self, unit: int) -> None:
        """Reshard a unit if its backward is over."""
        trained = [i for i in self.of_unit[unit] if self.flats[i].memory.is_trained]
        has_all = all(self._arrived[i] == len(self.flats[i].memory.params) for i in trained)
        sees_end = self._inputs[unit] or len(trained) == len(self.of_unit[unit])
        if has_all and sees_end and unit in self._in_backward and not self._outstanding[unit]:
            self.reshard(unit, after_backward=True)

    def _is_in_place(self, index: int) -> bool:
        """Whether the transport reads the gradients from autograd's memory, without a copy."""
        flat, least = self.flats[index], self.machine.transport.in_place_bytes
        whole = flat.memory.whole_gradient_bytes
        is_large = whole >= max(_SMALL_BYTES, _MEAN_IN_PLACE_BYTES * len(flat.memory.params))
        return least is not None and flat.gather_size > 1 and is_large

    def fill(self, index: int) -> list[Held]:
        """Return the memory from which the transport sends the gradients of a flat parameter."""
        memory, slots = self.flats[index].memory, self._slots.pop(index, [])
        if not self._is_in_place(index):
            buffer = self._buffers.pop(index, None)
            if buffer is None:
                buffer = self.allocate(memory.whole_gradient_bytes, "reduction")
            for slot in slots:
                if slot is not None:
                    self.free(slot)
            return [buffer]
        sent = []
        least = self.machine.transport.in_place_bytes or 0
        for slot in slots:
            assert slot is not None, "kept in place"
            nbytes = slot.nbytes // memory.compute_itemsize * memory.reduce_itemsize
            if nbytes != slot.nbytes or nbytes < least:
                sent.append(self.allocate(nbytes, "reduction"))
                self.free(slot)
            else:
                sent.append(slot)
        return sent

    def reduce(self, bucket: Sequence[int]) -> None:
        """Start the reductions of a bucket, and finish earlier reductions that have ended."""
        self._now = f"reduction of {self.names[self.flats[bucket[0]].unit] or '(root)'}"
        transport = self.machine.transport
        buffers, ends, has_stages = [], self.clock, False
        for index in bucket:
            flat = self.flats[index]
            memory, sent = flat.memory, self.fill(index)
            has_stages |= flat.replicas > 1
            if flat.gather_size == 1:
                self._results.setdefault(index, []).extend(sent)
                continue
            nbytes = self._sum_bytes(index, memory.crossing_bytes)
            part = self.allocate(nbytes, "reduction", self.reduce_stream)
            self._results.setdefault(index, []).append(part)
            # Sockets receive the first rank's gradients into the result if the dtypes are equal.
            rows = flat.gather_size - 1 - (nbytes == memory.crossing_bytes)
            more = transport.receives * rows * memory.crossing_bytes
            more += int(transport.reduce_copies * memory.whole_gradient_bytes)
            buffers += [*sent, self.allocate(more, "reduction")]
            whole = memory.whole_gradient_bytes
            ends = self._send(whole, flat.gather_size, self.machine.per_node)
        is_scattered = any(self.flats[i].gather_size > 1 for i in bucket)
        reduction = Reduction(
            buffers,
            self._counted * self._bucket_bytes(bucket),
            ends,
            bucket,
            transport.reports_end or not is_scattered,
            not has_stages,
        )
        self._in_flight.append(reduction)
        if has_stages and (self.machine.device.is_gpu or not is_scattered):
            self.cross(reduction)
        self.finish_old()

    def _sum_bytes(self, index: int, nbytes: int) -> int:
        itemsize = self.flats[index].memory.reduce_itemsize
        is_wider = self.machine.transport.sums_in_fp32 and itemsize < 4
        return nbytes // itemsize * 4 if is_wider else nbytes

    def cross(self, reduction: Reduction) -> None:
        """Begin the second stage of a reduction: over the replicas, or over the other nodes."""
        if reduction.has_crossed:
            return
        reduction.has_crossed = True
        if not self.machine.device.is_gpu:
            self.wait(reduction.ends)
            self._free_buffers(reduction)
        for index in reduction.bucket:
            flat, memory = self.flats[index], self.flats[index].memory
            # The second stage is an all-reduce: a reduce-scatter and an all-gather. If each rank
            # keeps only a part of the result, the second stage is only a reduce-scatter.
            steps = 1 if memory.reduced_bytes < memory.crossing_bytes else 2
            if steps == 1:
                reduction.buffers += self._results.pop(index)
                copies = int(self.machine.transport.reduce_copies * memory.crossing_bytes)
                reduction.buffers.append(self.allocate(copies, "reduction"))
                nbytes = self._sum_bytes(index, memory.reduced_bytes)
                self._results[index] = [self.allocate(nbytes, "reduction", self.reduce_stream)]
            nbytes = steps * memory.crossing_bytes
            in_node = max(1, self.machine.per_node // flat.gather_size)
            reduction.ends = self._send(nbytes, flat.replicas, in_node)

    def start_reduction(self, buffers: list[Held], nbytes: int, ends: float) -> None:
        self._in_flight.append(Reduction(buffers, nbytes, ends))

    def finish_old(self) -> None:
        """Finish reductions that have ended, and wait if reductions hold too much memory."""
        while self._in_flight:
            first = self._in_flight[0]
            if first.reports_end and first.ends <= self.clock:
                self.cross(first)
            over = sum(one.nbytes for one in self._in_flight) > self.max_in_flight
            if not first.reports_end or (first.ends > self.clock and not over):
                return
            self.finish_first()

    def finish_first(self) -> None:
        first = self._in_flight.pop(0)
        self.cross(first)
        self.wait(first.ends)
        self._free_buffers(first)
        for index in first.bucket:
            self._cast_results(index)

    def _free_buffers(self, reduction: Reduction) -> None:
        while reduction.buffers:
            self.free(reduction.buffers.pop())

    def _cast_results(self, index: int) -> None:
        """Cast reduced gradients to the dtype of ``.grad``."""
        results, nbytes = self._results[index], self.flats[index].memory.gradient_bytes
        for place, held in enumerate(results):
            if held.nbytes != nbytes:
                results[place] = self.allocate(nbytes, "gradients")
                self.free(held)

    # ------------------------------------------------------------ a step

    def run(self, steps: int = 3) -> Outcome:
        """Replay ``steps`` steps, and return the outcome of the last step.

        The first step begins without optimizer state.
        """
        self.state: list[Held] = []
        self.grads: list[Held] = []
        for number in range(steps):
            is_last = number == steps - 1
            self.outcome.timeline.clear()
            self.outcome.compute_seconds = self.outcome.link_seconds = 0.0
            self.outcome.sent_bytes = [0.0, 0.0]
            self.clock = self._link_free = 0.0
            for grad in self.grads:
                self.free(grad)
            self.grads = []
            self._stale.update(self.unsharded)
            self._begin_accumulation()
            for backward in range(self._accumulate):
                self._syncs = backward == self._accumulate - 1
                self._play(is_last)
            self._step()
            self.outcome.seconds = self.clock
        self.outcome.reserved_bytes = self._allocator.reserved_bytes
        return self.outcome

    def _begin_accumulation(self) -> None:
        self._results: dict[int, list[Held]] = {}
        self._buffers: dict[int, Held] = {}
        # The gradients of each flat parameter. None: the gradient was copied into the buffer.
        self._slots: dict[int, list[Held | None]] = defaultdict(list)
        self._in_flight: list[Reduction] = []

    def _play(self, records: bool) -> None:
        self._arrived: Counter[int] = Counter()
        self._in_backward: set[int] = set()  # units whose backward has begun
        self._inputs: Counter[int] = Counter()  # unit -> number of inputs that need a gradient
        self._outstanding: Counter[int] = Counter()
        live: dict[int, Held] = {}
        taken: set[int] = set()
        in_backward = False
        kept = _kept_for_backward(self.trace)
        for event in self.trace.events:
            if isinstance(event, Op):
                seconds = self.op_seconds(event)
                self.clock += seconds
                self.outcome.compute_seconds += seconds
            elif isinstance(event, Alloc):
                self._now = self.trace.makers[event.block]
                category = "activations" if event.block in kept else "temporary"
                live[event.block] = self.allocate(self.trace.sizes[event.block], category)
            elif isinstance(event, Free):
                if event.block not in taken:
                    self.free(live.pop(event.block))
            else:
                if event.what == "gradient":
                    taken.add(event.block)
                    self.receive(event.unit, live.pop(event.block))
                else:
                    self.pass_mark(event, in_backward)
                    in_backward = in_backward or event.what == "backward"
                    self._place = f"{'backward' if in_backward else 'forward'} of " + (
                        self.names[event.unit] or "(root)"
                    )
                if records:
                    self.outcome.timeline.append((self.clock, dict(self._totals)))
        for held in live.values():
            self.free(held)
        if self._syncs:
            self.end_backward()
        else:
            for unit in self.of_unit:
                self.reshard(unit, after_backward=True)

    def pass_mark(self, mark: Mark, in_backward: bool) -> None:
        unit = mark.unit
        if mark.what == "enter":
            self._now = f"all-gather of {self.names[unit] or '(root)'}"
            self.unshard(unit, backward=in_backward)
            if not in_backward:
                self.prefetch(unit, backward=False)
        elif mark.what == "input" and not in_backward:
            self._inputs[unit] += 1
        elif mark.what == "leave" and not in_backward:
            self.reshard(unit, after_backward=False)
            if self._needs_soon(unit):
                self._start_expected(self.trace.order[-2::-1], backward=True)
        elif mark.what == "enter backward":
            self._now = f"all-gather of {self.names[unit] or '(root)'}"
            if unit not in self._in_backward:
                self._in_backward.add(unit)
                self._outstanding[unit] = self._inputs[unit]
            self.unshard(unit, backward=True)
            self.prefetch(unit, backward=True)
        elif mark.what == "leave backward":
            self._outstanding[unit] -= 1
            self.end_unit(unit)

    def end_backward(self) -> None:
        """Start and finish the remaining reductions, and publish ``.grad``."""
        for bucket in dict.fromkeys(self._bucket_of.values()):
            if any(i in self._buffers or i in self._slots for i in bucket):
                self.reduce(bucket)
        for reduction in self._in_flight:
            self.cross(reduction)
        while self._in_flight:
            self.finish_first()
        for unit in self.of_unit:
            self.reshard(unit, after_backward=True)
        self._now = "publishing gradients"
        for index, results in self._results.items():
            self._cast_results(index)
            for held in results:
                self._totals[held.category] -= held.nbytes
                self._totals["gradients"] += held.nbytes
                self.grads.append(held._replace(category="gradients"))

    def _step(self) -> None:
        """Step the optimizer, which reads and writes parameters, gradients and its state."""
        self._now = "the optimizer's step"
        if not self.state:
            for flat in self.flats:
                self.state.append(self.allocate(flat.memory.optimizer_bytes, "optimizer"))
        moved = 2 * sum(f.memory.parameter_bytes + f.memory.optimizer_bytes for f in self.flats)
        moved += sum(flat.memory.gradient_bytes for flat in self.flats)
        # flatshard steps element-wise optimizers with one fused kernel: it needs no other memory.
        seconds = moved / self.machine.device.memory_rate
        self.clock += seconds
        self.outcome.compute_seconds += seconds


def _kept_for_backward(trace: StepTrace) -> set[int]:
    """Blocks that forward allocates and backward frees: the activations."""
    forward: set[int] = set()
    in_backward, kept = False, set()
    for event in trace.events:
        if isinstance(event, Mark) and event.what == "backward":
            in_backward = True
        elif isinstance(event, Alloc) and not in_backward:
            forward.add(event.block)
        elif isinstance(event, Free) and in_backward and event.block in forward:
            kept.add(event.block)
    return kept
