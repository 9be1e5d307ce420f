"""``Fsdp2Replay``: replays a trace as torch's FSDP would run the step."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from flatshard.extras.plan.allocator import Held, Pool
from flatshard.extras.plan.replay import Replay
from flatshard.extras.plan.shards import FlatMemory
from flatshard.extras.plan.trace import Mark, Op, StepTrace
from published.layers import held_by_collectives
from published.rows import Run

# Seconds of the host per DTensor in a step of AdamW that is not fused. A CPU needs 65 ms for the
# 291 parameters of Llama 3 8B (measured with torch 2.14).
HOST_SECONDS = 65e-3 / 291

# Speed of small matrix products in float8 with one scale per row, divided by the speed in bfloat16
# (pytorch/torchtitan#1319: "approx ~40% slowdown").
SMALL_ROWS = 0.6

# Memory traffic of context parallelism per ring step, in sizes of a rank's keys in bfloat16, from
# torch's `_attention.py`. Each step concatenates keys and values (4), casts the result to float32
# (3), and merges it with the earlier results (5 in one compiled kernel). Backward concatenates (4),
# adds the gradients of keys, values (10) and queries (5) in float32, and concatenates again (8).
RING_FORWARD, RING_BACKWARD = 12, 27

# Number of kernels by which the GPU is behind the host, at most: CUDA queues 1024 launches, and
# events for other streams take about half of them (an estimate). FSDP1 limits the distance to two
# all-gathers.
LAUNCHES_AHEAD = 512

# How many additional times torch's CUDA kernels read their input. The vocabulary is too large for a
# block's shared memory, so the kernels find the maximum and the sum in separate passes.
SOFTMAX_READS = {"aten._log_softmax": 2, "aten._log_softmax_backward_data": 1}

# Without expandable segments, a segment for small blocks has 2 MiB. A segment for large blocks has
# 20 MiB, or the size of the block if the block has at least 10 MiB. The allocator splits a large
# block only if more than 1 MiB would remain.
SMALL_SEGMENT, LARGE_SEGMENT, MOST_REST = 2 << 20, 20 << 20, 1 << 20


class SegmentPool(Pool):
    """The blocks of one stream in segments that do not expand."""

    def __init__(self, page: int) -> None:
        super().__init__(page)
        self._is_large = page > SMALL_SEGMENT
        self.min_rest = MOST_REST + 1 if self._is_large else 1
        self._end = 0  # first address that no segment has used

    def grow(self, nbytes: int) -> tuple[int, int]:
        size = LARGE_SEGMENT if self._is_large else SMALL_SEGMENT
        if self._is_large and nbytes >= LARGE_SEGMENT // 2:
            size = -(-nbytes // SMALL_SEGMENT) * SMALL_SEGMENT
        start = self._end
        self._end += size + 1  # leave a gap: `free` must not join blocks of two segments
        self.reserved_bytes += size
        return start, size


class Fsdp2Replay(Replay):
    """Replays a trace under torch's FSDP2 (``torch.distributed.fsdp.fully_shard``).

    FSDP2 all-gathers a unit into one buffer on another stream, and copies the parameters out of the
    buffer. When all gradients of a unit are complete, FSDP2 copies the gradients into a buffer for
    the reduce-scatter. At most one reduce-scatter runs at a time. The root unit owns the parameters
    that no other unit owns, and stays unsharded from forward to backward.
    """

    def __init__(self, run: Run, trace: StepTrace, *args: Any, **keywords: Any) -> None:
        self.run_of = run
        if run.records_streams and not run.is_fsdp1:
            trace = held_by_collectives(trace, LAUNCHES_AHEAD)
        self._results: dict[FlatMemory, list[Held]] = defaultdict(list)
        # The running reduce-scatter: its buffer, and the time of its end.
        self._reducing: tuple[Held, float] | None = None
        # FSDP1: flat parameters that are resharded, but whose memory is not free yet.
        self._resharded: list[Held] = []
        self.pool = Pool if run.expandable_segments else SegmentPool
        super().__init__(trace, *args, **keywords)
        self._root = len(self.trace.names) - 1
        self._last = [one for one in self.order if one != self._root][-1:]
        # Whether the threads of forward and of backward have allocated their cuBLAS workspace.
        self._has_workspace = [False, False]

    def play(self) -> None:
        self._gathering: dict[int, tuple[Held, float]] = {}
        # unit -> end of an all-gather that the host has started in advance
        self._early: dict[int, float] = {}
        self._held: dict[int, list[Held]] = {}
        # The buffer of the latest all-gather; freed before the next unit is copied out.
        self._last_gathered: Held | None = None
        self._grads: dict[int, list[Held]] = defaultdict(list)
        self.arithmetic_seconds = 0.0
        # Async tensor parallelism: communication that the next matrix products hide, and the time
        # of the latest matrix product, which can hide a reduce-scatter.
        self._sending = self._computed = 0.0
        super().play()

    def op_seconds(self, op: Op) -> float:
        if op.name in ("published.gather", "published.scatter"):
            return self._tensor_parallel_seconds(op)
        if op.name.startswith("published.ring"):
            # Backward gathers again, and passes the gradients in float32 from rank to rank.
            is_back = op.name.endswith("back")
            ranks = self.run_of.form.context_ranks
            nbytes = max(nbytes for _, nbytes in (*op.reads, *op.writes))
            seconds = self.machine.collective_seconds(nbytes, ranks, self._in_node)
            # There is one operator for the keys, and one for the values.
            traffic = (RING_BACKWARD if is_back else RING_FORWARD) / 2 * nbytes
            return (3 if is_back else 1) * seconds + traffic / self.machine.device.memory_rate
        if op.kind == "matmul" and not self._has_workspace[self.in_backward]:
            # The workspace is never freed, so it lies between the tensors that are allocated now.
            self.allocate(self.run_of.workspace_bytes, "workspace")
            self._has_workspace[self.in_backward] = True
        device, seconds = self.machine.device, super().op_seconds(op)
        if op.flops:
            rate = device.flops
            if op.kind == "attention":
                is_backward = "backward" in op.name
                rate = device.attention_flops * self.run_of.attention_speeds[is_backward]
            if op.name == "published.float8_mm":
                if not self._is_small(op):
                    rate = self.run_of.float8_rate
                elif self.run_of.scales_rows:
                    rate *= SMALL_ROWS
            written = sum(nbytes for _, nbytes in op.writes) * (op.kind == "matmul")
            arithmetic = op.flops / rate
            # A matrix product writes its tiles after it has computed them.
            slowed = device.slowed(arithmetic, self._link_free - self.clock)
            seconds = max(slowed, op.nbytes / device.memory_rate)
            seconds += written / device.memory_rate
            hidden = min(seconds, self._sending)
            self._sending -= hidden
            self._computed, seconds = seconds, seconds - hidden
            self.arithmetic_seconds += arithmetic
        else:
            if op.name != "aten.cat":
                self._computed = 0.0
            again = SOFTMAX_READS.get(op.name, 0) * op.reads[0][1] if op.reads else 0
            seconds += again / device.memory_rate
        return seconds

    def _is_small(self, op: Op) -> bool:
        """Whether a weight is so small that a matrix product is not faster in float8.

        The limits are torchao's (``torchao.float8.float8_linear_utils``), for H100.
        """
        (_, left), (_, right) = op.reads
        inner = math.sqrt(2 * left * right / op.writes[0][1])
        small, large, _ = sorted((inner, left / inner, right / inner))
        return small <= 2048 if self.run_of.scales_rows else small <= 1024 and large <= 4096

    def _tensor_parallel_seconds(self, op: Op) -> float:
        """Return the time in which the GPU waits for a collective over the sequence.

        Async tensor parallelism splits a collective into one part for each rank, and the matrix
        products after an all-gather, or directly before a reduce-scatter, in the same way. The
        first part of the communication is exposed. The other parts run together with the matrix
        products.
        """
        sizes = [nbytes for _, nbytes in (*op.reads, *op.writes)]
        ranks = round(max(sizes) / min(sizes))
        seconds = self.machine.collective_seconds(max(sizes), ranks, ranks)
        if not self.run_of.hides_tensor_parallel:
            return seconds
        hidden = seconds * (ranks - 1) / ranks
        if op.name == "published.gather":
            self._sending = hidden
            return seconds
        return seconds - min(hidden, self._computed)

    def _params(self, unit: int) -> list[Any]:
        return [one for flat in self.of_unit[unit] for one in flat.params]

    def _itemsize(self, unit: int, param: Any) -> float:
        is_float8 = self.run_of.gathers_float8 and self.trace.names[unit].startswith("blocks")
        return 1 if is_float8 and param.dim() > 1 else 2

    def _gathered(self, unit: int) -> int:
        return int(sum(one.numel() * self._itemsize(unit, one) for one in self._params(unit)))

    @property
    def _in_node(self) -> int:
        return max(1, self.machine.per_node // self.run_of.form.tensor_ranks)

    def _gather(self, unit: int) -> None:
        if unit in self._gathering or unit in self._held or not self._params(unit):
            return
        flat = self.of_unit[unit][0]
        nbytes = self._gathered(unit)
        cast = self.allocate(nbytes // flat.gather_size, "unsharded", "gather")
        buffer = self.allocate(nbytes, "unsharded", "gather")
        self.free(cast)
        ends = self._early.pop(unit, 0.0) or self._start(unit)
        self._gathering[unit] = buffer, ends

    def _start(self, unit: int) -> float:
        flat = self.of_unit[unit][0]
        parts = [self._gathered(unit)]
        if not self.run_of.overlaps:
            parts = [int(one.numel() * self._itemsize(unit, one)) for one in self._params(unit)]
        return max(self.send(part, flat.gather_size, self._in_node) for part in parts)

    def unshard(self, unit: int) -> None:
        self._gather(unit)
        if unit not in self._gathering:
            return
        buffer, ends = self._gathering.pop(unit)
        self.wait(ends)
        if self._last_gathered is not None:
            self.free(self._last_gathered)
            self._last_gathered = None
        if self.run_of.is_fsdp1:
            self._held[unit] = [buffer]
            return
        self._held[unit] = [
            self.allocate(int(one.numel() * self._itemsize(unit, one)), "unsharded")
            for one in self._params(unit)
        ]
        self.clock += 2 * buffer.nbytes / self.machine.device.memory_rate
        if self.in_backward:
            self.free(buffer)
        else:
            self._last_gathered = buffer

    def prefetch(self, unit: int) -> None:
        if not self.run_of.overlaps:
            return
        order = [one for one in self.order if one != self._root]
        if self.in_backward:
            order = [self._root, *reversed(order)]
        for after in order[order.index(unit) + 1 :][:1] if unit in order else ():
            if self.in_backward:
                self._gather(after)
            elif after not in self._early:
                # The host is ahead of the GPU, so the all-gather starts early. But its buffer is
                # allocated only when the host reaches the unit.
                self._early[after] = self._start(after)

    def reshard(self, unit: int) -> None:
        stays = not self.trace.names[unit] or self.run_of.keeps_all
        if self.run_of.keeps_last:
            stays = stays or unit in self._last
        if self.in_backward or not stays:
            freed = self._held.pop(unit, [])
            if self.run_of.is_fsdp1:
                # FSDP1 calls `record_stream` on unsharded parameters, so a reshard does not free
                # their memory at once. FSDP1 waits for this memory only just before the second
                # all-gather after the reshard (`_FreeEventQueue` in torch's _limiter_utils.py).
                self._resharded += freed
                freed = self._resharded[:-2]
                del self._resharded[:-2]
            for held in freed:
                self.free(held)

    def pass_mark(self, mark: Mark) -> None:
        super().pass_mark(mark)
        if mark.what == "leave" and mark.unit == self._root and self._last_gathered is not None:
            self.free(self._last_gathered)
            self._last_gathered = None

    def end_unit(self, unit: int) -> None:
        pass  # `receive` reshards a unit when all its gradients are complete

    def receive(self, index: int, block: Held) -> None:
        unit = self.flats[index].unit
        self._grads[unit].append(block)
        if len(self._grads[unit]) == len(self._params(unit)):
            self.reshard(unit)
            self._reduce(unit)

    def _reduce(self, unit: int) -> None:
        self._finish()
        flat = self.of_unit[unit][0]
        whole = sum(one.whole_gradient_bytes for one in self.of_unit[unit])
        stream = "reduce" if self.run_of.copies_on_reduce_stream else "compute"
        buffer = self.allocate(whole, "reduction", stream)
        for held in self._grads.pop(unit):
            self.free(held)
        self.clock += 1.5 * whole / self.machine.device.memory_rate
        size = flat.gather_size
        result = self.allocate(whole // size, "reduction", "reduce")
        ends = self.send(whole, size, self._in_node)
        if flat.replicas > 1:
            ends = self.send(2 * whole // size, flat.replicas, max(1, self._in_node // size))
        self._results[flat].append(result)
        self._reducing = buffer, ends
        if not self.run_of.overlaps:
            self._finish()

    def _finish(self) -> None:
        if self._reducing is not None:
            buffer, ends = self._reducing
            self.wait(ends)
            self.free(buffer)
            self._reducing = None

    def end_backward(self) -> None:
        # The root is reduced here if some of its parameters have no gradient.
        for unit in list(self._grads):
            if self._grads[unit]:
                self._reduce(unit)
        self._finish()
        for flat, results in self._results.items():
            for held in results:
                if held.nbytes != flat.gradient_bytes:  # cast to the dtype of `.grad`
                    held = self.copy(held, flat.gradient_bytes, "gradients")
                self.grads.append(self.move(held, "gradients"))
        self._results.clear()
        for held, _ in self._gathering.values():
            self.free(held)
        self.free(*self._resharded)
        self._resharded = []
        for unit in list(self._held):
            self.free(*self._held.pop(unit))

    def step(self) -> None:
        each = [one for unit in self.of_unit for one in self._params(unit)]
        total = sum(one.numel() for one in each)
        shards = [one.numel() // self.flats[0].gather_size for one in each]
        itemsize = self.run_of.stored.itemsize
        if not self.state:
            for numel in shards:
                nbytes = int(numel * self.run_of.state_bytes / 2)
                self.state += [self.allocate(nbytes, "optimizer") for _ in range(2)]
        if self.run_of.is_foreach:  # temporary square roots of the second moments
            for held in [self.allocate(numel * itemsize, "temporary") for numel in shards]:
                self.free(held)
        # Reads and writes of AdamW's kernels, and 3 of gradient clipping.
        passes = 3 + (20 if self.run_of.is_foreach else 7)
        moved = total // self.flats[0].gather_size * itemsize * passes
        is_slow = self.run_of.is_foreach and not self.run_of.is_fsdp1  # FSDP1 has no DTensors
        launches = len(each) * HOST_SECONDS if is_slow else 0.0
        self.step_seconds = max(moved / self.machine.device.memory_rate, launches)
        self.compute(self.step_seconds)
