"""``Replay``: replays a trace under a sharding strategy, and finds the peak memory and the time.

A trace contains the computation of one rank. ``Replay`` plays the trace, and adds the work of
flatshard's engine, in the engine's order (``flatshard/engine/forward.py``, ``backward.py``):
all-gathers and prefetches, resharding, gradient buffers, reductions, ``.grad`` and the optimizer's
state. ``Replay`` keeps two clocks: one clock for the device's computation, and one clock for the
link. Collectives use the link one after another.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flatshard.extras.plan.hardware import Machine
from flatshard.extras.plan.shards import FlatMemory, Held, plan_flats
from flatshard.extras.plan.trace import Build, Checkpointing, Mark, Op, Step, StepTrace, trace

# Gradients of at least this size are copied into the buffer immediately. Smaller gradients are
# copied when the flat parameter has all gradients. ``engine.gradients`` has the same threshold.
_COPIED_BYTES = 1 << 20
# Categories of memory that are added up as "gradients" in ``Outcome.highest``.
_GRADIENTS = "gradients", "reduction", "temporary"


@dataclass
class Outcome:
    """Memory, communication and time that a replay predicts for one step.

    Attributes:
        peak: bytes at the moment of the peak, keyed by category.
        peak_at: operator or action at the moment of the peak, and the unit that was running.
        highest: largest number of bytes of each category at any moment. "gradients" includes the
            buffers of reductions, and temporary tensors.
        persistent: bytes of parameters, gradients and optimizer state between steps.
        seconds: duration of one step.
        compute_seconds: duration of the step's operators and of the optimizer.
        sent_bytes: two numbers: bytes that this rank sends in a step to ranks of its node, and
            bytes that this rank sends to other nodes.
    """

    peak: dict[str, int] = field(default_factory=dict)
    peak_at: str = ""
    highest: dict[str, int] = field(default_factory=dict)
    persistent: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    compute_seconds: float = 0.0
    sent_bytes: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())


class Replay:
    """Replays the steps of one rank as flatshard runs them."""

    def __init__(
        self, trace: StepTrace, flats: Sequence[FlatMemory], machine: Machine, accumulate: int = 1
    ) -> None:
        self.trace, self.flats, self.machine, self.accumulate = trace, flats, machine, accumulate
        self.outcome = Outcome()
        self.totals: dict[str, int] = defaultdict(int)  # current bytes of each category
        self._now, self._place = "start", ""  # what the rank does, for `Outcome.peak_at`
        self.clock = self._link_free = 0.0
        self.syncs = True  # whether this backward reduces gradients
        self.in_backward = False
        self.grads: list[Held] = []
        # Blocks of memory that are freed at a known time: pairs of the time and the block.
        self._brief: list[tuple[float, Held]] = []
        self._on_gpu = machine.device.is_gpu
        self.of_unit: dict[int, list[FlatMemory]] = defaultdict(list)
        for flat in flats:
            self.of_unit[flat.unit].append(flat)
            self.allocate(flat.parameter_bytes, "parameters")
            if flat.placement.over_all:
                self.allocate(flat.secondary_bytes, "unsharded")
        self.allocate(trace.buffer_bytes, "buffers")
        marks = [event for event in trace.events if isinstance(event, Mark)]
        begin = marks.index(Mark("backward"))
        made = {mark.block for mark in marks[:begin] if mark.what == "allocate"}
        self._saved = made & {mark.block for mark in marks[begin:] if mark.what == "free"}
        entered, inputs = ([m.unit for m in marks if m.what == one] for one in ("enter", "input"))
        self.order = list(dict.fromkeys(entered))  # units in the order of forward
        self._inputs = Counter(inputs)  # for each unit: number of inputs that need a gradient
        # The memory limit of ``engine.reduce_queue``. On a CPU, the engine counts a reduction twice
        # (memory to send and to receive). Here, half the limit has the same effect.
        at_once = [[flat] for flat in flats] if self._on_gpu else self.of_unit.values()
        self._max_in_flight = (1 + self._on_gpu) * max(map(_gradient_bytes, at_once), default=0)
        self._reducing: list[FlatMemory] = []  # flat parameters whose reduction runs

    # ------------------------------------------------------------ memory and clocks

    def allocate(self, nbytes: int, category: str) -> Held:
        while self._brief and self._brief[0][0] <= self.clock:
            self.free(self._brief.pop(0)[1])
        self.totals[category] += nbytes
        if sum(self.totals.values()) > self.outcome.peak_bytes:
            self.outcome.peak = dict(self.totals)
            self.outcome.peak_at = f"{self._now}, {self._place}"
        gradients = sum(self.totals[kind] for kind in _GRADIENTS)
        for kind, total in ((category, self.totals[category]), ("gradients", gradients)):
            self.outcome.highest[kind] = max(self.outcome.highest.get(kind, 0), total)
        return Held(category, nbytes)

    def free(self, *blocks: Held | None) -> None:
        for held in filter(None, blocks):
            self.totals[held.category] -= held.nbytes

    def send(self, nbytes: float, size: int, in_node: int) -> float:
        """Start a collective, and return the time at which the collective ends."""
        seconds = self.machine.collective_seconds(nbytes, size, in_node)
        self._link_free = max(self._link_free, self.clock) + seconds
        self.outcome.sent_bytes[size > in_node] += nbytes * (size - 1) / size
        return self._link_free

    def wait(self, ends: float) -> None:
        self.clock = max(self.clock, ends)

    def compute(self, seconds: float) -> None:
        self.clock += seconds
        self.outcome.compute_seconds += seconds

    def name(self, unit: int) -> str:
        return self.trace.names[unit] or "(root)"

    # ------------------------------------------------------------ a step

    def run(self) -> Outcome:
        """Replay three steps. Returns the peak of all three, and time and traffic of the last."""
        for _ in range(3):
            self.outcome.compute_seconds, self.outcome.sent_bytes = 0.0, [0.0, 0.0]
            self.clock = self._link_free = 0.0
            self.free(*self.grads)
            self.grads = []
            for remaining in reversed(range(self.accumulate)):
                self.syncs = not remaining
                self.play()
            self._now = "the optimizer's step"
            self.step()
            self.outcome.seconds = self.clock
        for kind in ("parameters", "gradients", "optimizer"):
            self.outcome.persistent[kind] = self.totals[kind]
        return self.outcome

    def play(self) -> None:
        """Play one forward and backward."""
        # For each unit whose backward has begun: number of inputs whose gradient has not been
        # computed yet.
        self._outstanding: dict[int, int] = {}
        self.in_backward = False
        for flat in self.flats:
            flat.arrived = 0
        live: dict[int, Held] = {}
        for event in self.trace.events:
            if isinstance(event, Op):
                self.compute(self.machine.device.seconds(event, self._link_free - self.clock))
            elif event.what == "allocate":
                self._now = self.trace.makers[event.block]
                category = "activations" if event.block in self._saved else "temporary"
                live[event.block] = self.allocate(self.trace.sizes[event.block], category)
            elif event.what == "free":
                # The mark "gradient" has already removed a parameter's gradient from `live`.
                self.free(live.pop(event.block, None))
            elif event.what == "gradient":
                self.receive(event.unit, live.pop(event.block))
            else:
                self.pass_mark(event)
                direction = "backward" if self.in_backward else "forward"
                self._place = f"{direction} of {self.name(event.unit)}"
        self.free(*live.values())
        self.end_backward()

    def pass_mark(self, mark: Mark) -> None:
        unit = mark.unit
        if mark.what == "backward":
            self.in_backward = True
        elif mark.what in ("enter", "enter backward"):
            if mark.what == "enter backward":
                self._outstanding.setdefault(unit, self._inputs[unit])
            self._now = f"all-gather of {self.name(unit)}"
            self.unshard(unit)
            if mark.what == "enter backward" or not self.in_backward:
                order = self.order[::-1] if self.in_backward else self.order
                self._start_next(order[order.index(unit) + 1 :] if unit in order else [])
        elif mark.what == "leave" and not self.in_backward:
            self.reshard(unit)
        elif mark.what == "leave backward" and unit in self._outstanding:
            self._outstanding[unit] -= 1
            self.end_unit(unit)

    # ------------------------------------------------------------ all-gathers

    def _needed(self, unit: int) -> list[FlatMemory]:
        return [flat for flat in self.of_unit[unit] if not (self.in_backward and flat.is_lookup)]

    def _start_gather(self, unit: int) -> None:
        for flat in self._needed(unit):
            has_all = not flat.gathered_bytes or (flat.unsharded and not flat.is_stale)
            if flat.ends is not None or has_all:
                continue
            flat.is_stale = False
            if flat.unsharded is None:
                flat.unsharded = self.allocate(flat.gathered_bytes, "unsharded")
            if flat.is_cast and flat.gather_size > 1 and flat.secondary is None:
                flat.source = self.allocate(flat.gathered_bytes // flat.gather_size, "temporary")
            size = flat.regather_size if self.in_backward else flat.gather_size
            flat.ends = self.send(flat.gathered_bytes, size, self.machine.per_node)
            if size > 1 and not self._on_gpu:  # gloo copies all bytes before sending
                self._brief.append((flat.ends, self.allocate(flat.gathered_bytes, "temporary")))

    def unshard(self, unit: int) -> None:
        """All-gather a unit, and wait for the end of the all-gather."""
        self._start_gather(unit)
        for flat in self.of_unit[unit]:
            if flat.ends is not None:
                self.wait(flat.ends)
                self.free(flat.source)
                flat.ends = flat.source = None

    def _start_next(self, expected: Sequence[int]) -> None:
        """Start the all-gather of the next unit, as ``engine.prefetch`` does."""
        unit = next(filter(self._needed, expected), None)
        if unit is not None and not (self.in_backward and unit in self._outstanding):
            self._start_gather(unit)

    def reshard(self, unit: int) -> None:
        """Free the unsharded parameters of a unit, if the strategy says so."""
        for flat in self.of_unit[unit]:
            frees = flat.is_freed_after
            if self.in_backward:
                self.free(flat.secondary)
                flat.secondary = None
            else:
                # The root stays unsharded, except for embeddings, which backward does not read.
                is_spare = flat.is_lookup and self.syncs
                frees = flat.placement.reshard_after_forward and (is_spare or flat.name != "")
            if not frees or flat.unsharded is None or flat.ends is not None:
                continue
            if not self.in_backward and flat.secondary_bytes and not flat.placement.over_all:
                flat.secondary = self.allocate(flat.secondary_bytes, "unsharded")
            self.free(flat.unsharded)
            flat.unsharded = None

    # ------------------------------------------------------------ gradients

    def receive(self, index: int, block: Held) -> None:
        """Take the complete gradient of one parameter of the flat parameter ``index``."""
        flat = self.flats[index]
        # False under gradient accumulation, if an earlier backward has already filled the slot.
        is_new = flat.arrived == len(flat.slots)
        is_kept = is_new and (flat.is_single or block.nbytes < _COPIED_BYTES)
        flat.arrived += 1
        if is_new:
            flat.slots.append(block if is_kept else None)
            if not is_kept and flat.buffer is None:
                self._now = "copying gradients"
                flat.buffer = self.allocate(flat.whole_gradient_bytes, "reduction")
        if flat.is_complete:
            if self.syncs:
                self._reduce(flat)
            self.end_unit(flat.unit)
        if not is_kept:  # free late: `Backward.receive` keeps the gradient until reduction begins
            self.free(block)

    def end_unit(self, unit: int) -> None:
        """Reshard a unit if its backward is over."""
        flats = self.of_unit[unit]
        has_all = all(flat.is_complete for flat in flats if flat.is_trained)
        sees_end = self._inputs[unit] or all(flat.is_trained for flat in flats)
        if has_all and sees_end and self._outstanding.get(unit) == 0:
            self.reshard(unit)

    def _fill(self, flat: FlatMemory) -> Held:
        """Return the memory from which the transport sends the gradients of a flat parameter."""
        slots, buffer = flat.slots, flat.buffer
        flat.slots, flat.buffer = [], None
        if flat.is_single and slots and slots[0] and slots[0].nbytes == flat.whole_gradient_bytes:
            return slots[0]
        buffer = buffer or self.allocate(flat.whole_gradient_bytes, "reduction")
        self.free(*slots)
        if not self._on_gpu:  # on GPUs, computation hides the time of copies
            self.compute(2 * flat.whole_gradient_bytes / self.machine.device.memory_rate)
        return buffer

    def _reduce(self, flat: FlatMemory) -> None:
        """Start to reduce a flat parameter, and free the buffers of reductions that have ended."""
        self._now = f"reduction of {self.name(flat.unit)}"
        flat.crosses, flat.reduced_at, flat.sent = flat.replicas > 1, self.clock, []
        sent = self._fill(flat)
        if flat.gather_size == 1:
            flat.result = sent
        else:
            flat.result = self.allocate(flat.crossing_bytes, "reduction")
            flat.sent = [sent, self._copy_to_send(flat.whole_gradient_bytes)]
            size, per_node = flat.gather_size, self.machine.per_node
            flat.reduced_at = self.send(flat.whole_gradient_bytes, size, per_node)
        self._reducing.append(flat)
        if self._on_gpu or not flat.sent:
            self._cross(flat)
        # Finish reductions that have ended, and wait if reductions hold too much memory.
        while self._reducing:
            first = self._reducing[0]
            # With gloo, only a wait finds out that a reduce-scatter has ended.
            reports_end = self._on_gpu or first.gather_size == 1
            if reports_end and first.reduced_at <= self.clock:
                self._cross(first)
            over = _gradient_bytes(self._reducing) > self._max_in_flight
            if not reports_end or (first.reduced_at > self.clock and not over):
                return
            self._finish_first()

    def _copy_to_send(self, nbytes: int) -> Held:
        """Allocate the copy that gloo makes of gradients before sending. NCCL needs no copy."""
        return self.allocate(nbytes * (not self._on_gpu), "reduction")

    def _cross(self, flat: FlatMemory) -> None:
        """Begin the second stage of a reduction: over the replicas, or over the other nodes."""
        if not flat.crosses:
            return
        flat.crosses = False
        if not self._on_gpu:
            self.wait(flat.reduced_at)
            self.free(*flat.sent)
            flat.sent = []
        # The second stage is an all-reduce: a reduce-scatter and an all-gather. If each rank keeps
        # only a part of the result, the second stage is only a reduce-scatter.
        steps = 1 if flat.reduced_bytes < flat.crossing_bytes else 2
        if steps == 1:
            flat.sent += [flat.result, self._copy_to_send(flat.crossing_bytes)]
            flat.result = self.allocate(flat.reduced_bytes, "reduction")
        in_node = max(1, self.machine.per_node // flat.gather_size)
        flat.reduced_at = self.send(steps * flat.crossing_bytes, flat.replicas, in_node)

    def _finish_first(self) -> None:
        flat = self._reducing.pop(0)
        self._cross(flat)
        self.wait(flat.reduced_at)
        self.free(*flat.sent)
        if (held := flat.result) and held.nbytes != flat.gradient_bytes:
            # Cast to the dtype of `.grad`.
            flat.result = self.allocate(flat.gradient_bytes, "gradients")
            self.free(held)

    def end_backward(self) -> None:
        """Finish all reductions, and move the reduced gradients to ``grads``."""
        if self.syncs:
            for flat in self.flats:
                if flat.is_trained and (flat.slots or flat.buffer):
                    self._reduce(flat)
            for flat in self._reducing:
                self._cross(flat)
            while self._reducing:
                self._finish_first()
        for unit in self.of_unit:
            self.reshard(unit)
        for flat in self.flats:
            if (held := flat.result) is not None:
                self.free(held)
                self.grads.append(self.allocate(held.nbytes, "gradients"))
                flat.result = None

    def step(self) -> None:
        """Step the optimizer."""
        if "optimizer" not in self.totals:
            for flat in self.flats:
                self.allocate(flat.optimizer_bytes, "optimizer")
        # flatshard steps element-wise optimizers with one fused kernel, without temporary memory.
        # But a parameter that one rank holds completely stays a plain parameter. On CPUs, torch's
        # Adam steps plain parameters with several operators, so memory traffic grows by 13 times
        # the size of the gradient.
        moved = 0
        for flat in self.flats:
            is_plain = not (flat.gathered_bytes or self._on_gpu)
            is_adam = flat.optimizer_bytes >= 2 * flat.parameter_bytes
            moved += 2 * (flat.parameter_bytes + flat.optimizer_bytes)
            moved += flat.gradient_bytes * (14 if is_plain and is_adam else 1)
        self.compute(moved / self.machine.device.memory_rate)
        for flat in self.flats:
            # Frozen parameters are not stale, because the optimizer does not change them.
            flat.is_stale = flat.is_trained and flat.unsharded is not None


def _gradient_bytes(flats: Sequence[FlatMemory]) -> int:
    return sum(flat.whole_gradient_bytes for flat in flats)


class TracedModel:
    """A model on the meta device, and the trace of one of its steps, ``trace``."""

    def __init__(
        self, build: Build, step: Step, *, checkpoint: Checkpointing, on_gpu: bool, **keywords: Any
    ) -> None:
        """Build a model on the meta device, and trace one step.

        ``keywords``: keywords of ``plan_flats`` that do not depend on the number of ranks.
        """
        with torch.device("meta"):
            made = build()
        self._model, step = made if isinstance(made, tuple) else (made, step)
        self._keywords = keywords
        plan, flats = plan_flats(self._model, world_size=1, **keywords)
        self.trace = trace(plan, flats, step, on_gpu=on_gpu, checkpoint=checkpoint)

    def replay(self, machine: Machine, num_ranks: int, accumulate: int = 1, **more: Any) -> Outcome:
        """Predict a step on ``num_ranks`` ranks. ``more``: more keywords of ``plan_flats``."""
        _, flats = plan_flats(self._model, world_size=num_ranks, **self._keywords, **more)
        return Replay(self.trace, flats, machine, accumulate).run()
