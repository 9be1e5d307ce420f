"""``RunContext``: one per tree of units; the order of a step, prefetch, and the end of backward.

[Note: the end of backward]
A callback that autograd runs after the last node. By then ranks may differ: one used a parameter
that another did not. Every rank tells the others which parameters it used; units that any rank
used are reduced by all, in the one order, and parameters that none used keep their ``.grad``.
Only then may a rank wait for a reduction without a limit: before, a peer might be unable to start
it until its own backward is over.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import loaded_on_some_ranks
from flatshard.comm.work import CollectiveError, PendingSends
from flatshard.diagnostics.non_finite import NonFiniteWatch
from flatshard.diagnostics.recorder import SILENT, Recorder
from flatshard.diagnostics.state_dict_writes import StateDictWrites
from flatshard.diagnostics.step_report import Kind, StepReport
from flatshard.diagnostics.unused_params import UnusedParams
from flatshard.engine import grad_publish
from flatshard.engine.buffer_sync import SyncedBuffers
from flatshard.engine.capture import check_not_captured
from flatshard.engine.comm_hook_order import HookTurns
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.prefetch import Prefetch
from flatshard.engine.profiling import profiled
from flatshard.engine.saved_tensors import SavedTensors
from flatshard.engine.unit import Phase, ReduceBucket, Unit
from flatshard.memory.buffer_cache import prepare_allocator
from flatshard.memory.page_pool import POOL
from flatshard.optimizer import step as optimizer_step
from flatshard.optimizer.in_backward import SteppedInBackward
from flatshard.options.strategy import BackwardPrefetch
from flatshard.plan.schedule import ReduceOrder, UnevenUnits

_in_backward: weakref.WeakSet[RunContext] = weakref.WeakSet()


class RunContext:
    """What the units of one model share during training.

    Attributes:
        units: every unit, the root last.
        root: the outermost unit.
        syncs: per unit, what backward does with its gradients; read when a forward begins.
        under_no_sync: whether forwards that begin now only accumulate, wherever that is.
        stepping: the optimizers that step in backward.
        has_run: whether a forward has begun.
        expects_backward: whether the outermost forward began with gradients enabled.
        is_converting: whether modules are under way to another dtype or device.
        recorder: hears what the run does.
        non_finite: looks for gradients that are not finite, or None.
        given_copies: what state dicts gave.
        num_loads: how often state dicts were loaded into units; alike on all ranks.
        number: tells models apart; alike on all ranks.
        last_report: of the last step that was recorded, once its recording is over; or None.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        world: Communicator,
        *,
        buffers: Callable[[], Iterable[Tensor]],
        check: Callable[[], object],
        number: int,
        forward_prefetch: bool,
        backward_prefetch: BackwardPrefetch | None,
    ) -> None:
        """Take the units over.

        Args:
            units: every unit, the root last.
            world: the ranks that train the model.
            buffers: lists what rank 0 gives to all before a forward.
            check: called when a forward begins; may raise, on all ranks.
            number: below 256, to tell models apart; alike on all ranks.
            forward_prefetch: whether to gather early in forward.
            backward_prefetch: when to gather in backward.
        """
        self.units = list(units)
        self.root = self.units[-1]
        self.syncs = [Sync.ALL] * len(self.units)
        self.under_no_sync = False
        self.has_run = False
        self.is_converting = False
        self.recorder: Recorder = SILENT
        self.non_finite: NonFiniteWatch | None = None
        self.state_dict_writes = StateDictWrites()
        self.num_loads = 0
        self.last_report: StepReport | None = None
        self._world = world
        self._buffers = SyncedBuffers(buffers)
        self._check = check
        self._prefetch = Prefetch(self.units, forward=forward_prefetch, backward=backward_prefetch)
        self._portions = [bucket for unit in self.units for bucket in unit.buckets]
        for index, bucket in enumerate(self._portions):
            bucket.index = index
        self._to_reduce: Counter[Unit] = Counter()  # of each, portions in this backward
        self._reduce_order = ReduceOrder(len(self._portions))
        self._reduce_order_agreed = False
        self._uneven = UnevenUnits()
        self._hook_turns = HookTurns(self._portions, self._reduce_order)
        self._depth = 0
        self.expects_backward = False
        self._active = False
        self._end_callback: Callable[[], object] = lambda: None
        self._in_flight: list[tuple[ReduceBucket, int]] = []
        self._budget = 0
        self._unsettled = PendingSends()
        self.stepping = SteppedInBackward(self.units, self._unsettled)
        self._graph_task = -1
        self._had_accumulated = False
        self._published: list[list[list[bool]]] = []
        self._left_out = UnusedParams()
        self.number = number
        self._must_wait = False  # with reductions, for the end of backward
        for index, unit in enumerate(self.units):
            unit.context = self
            unit.index = index
            for handle in unit.handles:
                handle.share_pending_sends(self._unsettled)
        self.refresh()

    def refresh(self) -> None:
        """Look at the units' and the modules' buffers again, after they were made anew."""
        self._buffers.refresh()
        self._saved = SavedTensors((unit, unit.handles) for unit in self.units)
        # An accelerator's host is far ahead of it: reductions fill whatever they may.
        on_accelerator = any(h.device.type != "cpu" for unit in self.units for h in unit.handles)
        sizes = [
            sum(2 * h.layout.padded_numel * h.reduce_dtype.itemsize for h in one.handles)
            for one in (self._portions if on_accelerator else self.units)
        ]
        self._budget = max(sizes, default=0)
        self._prefetch.refresh()
        self._of_several = [unit for unit in self.units if len(unit.modules) > 1]
        # Where nothing is gathered or reduced, a forward is only kernels.
        self._device = next(
            (h.device for u in self.units for h in u.handles if not h.is_local), None
        )
        self._kept_from_afar = [
            handle
            for unit in self.units
            for handle in unit.handles
            if unit.topology.inter_group.size > 1
        ]

    # ------------------------------------------------------------ forward

    def enter(self, unit: Unit) -> None:
        """A unit's forward begins; the outermost one prepares the step."""
        if self._depth == 0 and not self.in_backward:
            self._prefetch.recomputes_whole = self._begins_recomputation()
            if not self._prefetch.recomputes_whole:
                self.recorder.begin_forward()
                self._begin_forward(unit)
        self.recorder.enter(unit, self.in_backward)
        self._saved.push()
        self._depth += 1
        if not self.in_backward and not unit.is_open:
            self._prefetch.order.record(unit.index)

    def _begins_recomputation(self) -> bool:
        """Whether a reentrant checkpoint around the whole model computes it again.

        Then nothing of the model's backward has run yet, and its own forward had no gradients.
        """
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
            return False
        self._plan_syncs()
        return self.begin_backward()

    def _begin_forward(self, outermost: Unit) -> None:
        if self._device is not None:
            check_not_captured(self._device)
        self.recover()
        self.state_dict_writes.check()
        self._check()
        if not self.has_run and any(
            h.shard.device.type == "cpu" for u in self.units for h in u.handles
        ):
            prepare_allocator()
        self.has_run = True
        for unit in self.units:
            unit.begin_run()
        self._prefetch.order.begin_forward()
        self.expects_backward = torch.is_grad_enabled()
        if self.expects_backward:
            self._plan_syncs()
        else:
            self.give_back()
        if outermost is self.root and not self.is_accumulating:
            with self.recorder.waiting(Kind.RANKS_WAIT):
                self._buffers.broadcast(self._world, f"{self.root.name or 'the model'}'s buffers")
        with self.recorder.starting("forward", None):
            for handle in self._kept_from_afar:
                handle.begin_refresh()

    def give_back(self) -> None:
        """Free memory that is kept for the next step."""
        for unit in self.units:
            for handle in unit.handles:
                handle.grad_publish.spare.give_back()
        POOL.give_back()

    def _plan_syncs(self) -> None:
        for unit, sync in zip(self.units, self.syncs, strict=True):
            unit.plan_sync(sync)
        self.stepping.accumulates = self.under_no_sync

    @property
    def is_accumulating(self) -> bool:
        """Whether forwards that begin now are under ``no_sync``."""
        return any(sync is not Sync.ALL for sync in self.syncs)

    def plan_accumulation(self, max_bytes: int | None, replicas_only: bool) -> list[Sync]:
        """What ``no_sync`` means for each unit; see ``ShardedWrapper.no_sync``."""
        rest = Sync.INTRA if replicas_only else Sync.ALL
        if max_bytes is None:
            return [Sync.INTRA if replicas_only else Sync.NONE] * len(self.units)
        syncs = [rest] * len(self.units)
        # Small ones first: of as many bytes kept whole, they save the most collectives.
        for unit in sorted(self.units, key=lambda unit: (unit.gradient_bytes, unit.index)):
            if unit.gradient_bytes <= max_bytes:
                max_bytes -= unit.gradient_bytes
                syncs[unit.index] = Sync.NONE
        return syncs

    def leave(self, unit: Unit, *, failed: bool) -> None:
        """A unit's forward is over; the outermost one drops prefetches that were not used."""
        if self._depth == 0:
            return
        self._depth -= 1
        self._saved.pop()
        self.recorder.leave(unit)
        if self.in_backward:
            self._prefetch.recomputes_whole &= self._depth > 0
            return
        if self.expects_backward and not failed:
            self._prefetch.after_forward()
        if self._depth == 0:
            for one in self._of_several:
                one.end_forward()
            if failed or not self._prefetch.order.is_complete:
                self._drop_prefetched(failed=failed)
            with self.recorder.waiting(Kind.RANKS_WAIT):
                for handle in self._kept_from_afar:
                    handle.finish_refresh()
                if not failed:  # else the error on its way is the one to see
                    self._unsettled.wait_sends()
            self.recorder.end_forward()

    @property
    def is_running_forward(self) -> bool:
        """Whether some unit's forward has begun and not ended."""
        return self._depth > 0

    def views_parameters(self, tensor: Tensor) -> bool:
        """Whether a tensor looks into a buffer that will be freed."""
        return self._saved.owner(tensor) is not None

    def keeps_after_forward(self, unit: Unit) -> bool:
        """Its backward begins at once, so freeing it would only cost a gather."""
        if unit is self.root:
            return True
        return self.expects_backward and self._prefetch.keeps_for_backward(unit)

    def prefetch_forward(self) -> None:
        """Begin the gathers of the units expected next."""
        self._prefetch.in_forward()

    def prefetch_recomputed(self, unit: Unit) -> None:
        """The same where the whole model is computed again, after this one."""
        self._prefetch.in_recomputation(unit)

    def prefetch_backward(self, unit: Unit) -> None:
        """Begin the gathers of the units whose backward is expected after this one's."""
        self._prefetch.before_backward(unit)

    def freed_in_backward(self, unit: Unit) -> None:
        """A unit's backward is over."""
        self.recorder.leave_backward(unit)
        self.stepping.advance()
        self._prefetch.after_backward(unit)

    def _drop_prefetched(self, *, failed: bool) -> None:
        for unit in self.units:
            while unit.is_prefetched:
                try:
                    with self.recorder.waiting(Kind.GATHER_WAIT, unit):
                        unit.free()
                except CollectiveError:
                    if not failed:  # else the error on its way is the one to see
                        raise

    # ------------------------------------------------------------ backward

    @property
    def in_backward(self) -> bool:
        """Whether this model's backward is running now, on this thread."""
        return (
            self._active
            and torch._C._current_graph_task_id() != -1
            and self._end_callback() is not None
        )

    @property
    def is_reducing(self) -> bool:
        """Whether the last training forward began outside of ``no_sync``; alike on all ranks."""
        return all(unit.sync is Sync.ALL for unit in self.units)

    def begin_backward(self) -> bool:
        """Prepare the end of the backward that runs now, once; False outside of a backward."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task == -1:
            return False
        if self._active and graph_task == self._graph_task:  # asked for every gradient
            return True
        if self._active and self._end_callback() is None:
            # Autograd dropped the callback with the backward that failed; this is another one.
            self._reset()
        if self._active:
            self.stepping.wait_for_end()
        if not self._active:
            self.stepping.begin_backward()
            if self.non_finite is not None:
                self.non_finite.begin_backward()
            self._active, self._graph_task = True, graph_task
            self._must_wait = not self._may_reduce_early()
            _in_backward.add(self)
            self.recorder.begin_backward()
            callback = partial(self._end_backward)
            self._end_callback = weakref.ref(callback)
            torch.autograd.Variable._execution_engine.queue_callback(callback)
            self._reduce_order.begin_backward()
            self._to_reduce.clear()
            self._hook_turns.begin_backward()
            self._had_accumulated = False
            for unit in self.units:
                unit.begin_backward()
                self._had_accumulated |= any(
                    handle.grad_publish.holds_gradients for handle in unit.handles
                )
                for bucket in unit.buckets:
                    if unit.sync is Sync.NONE or not bucket.trainable_handles():
                        # Never reduced, so it must not hold up the others.
                        self._reduce_order.ready(bucket.index)
                    else:
                        self._to_reduce[unit] += 1
        return True

    def _may_reduce_early(self) -> bool:
        """Whether reductions that begin now meet this model's on all ranks.

        Where they meet by order, they must not come between those of another model, which some
        ranks begin at the end of this backward. This model's end is after that one's.
        """
        return all(not other.in_backward for other in _in_backward if other is not self) or all(
            handle.reduce_plan.is_unordered for unit in self.units for handle in unit.handles
        )

    def gradients_complete(self, bucket: ReduceBucket) -> None:
        """Start every reduction whose turn has come."""
        if bucket.unit.sync is Sync.NONE:
            return
        self._reduce_order.ready(bucket.index)
        self._take_turns()
        self._bound_in_flight()
        self.stepping.advance()

    def will_gather_in_backward(self) -> None:
        """A unit is about to be gathered for backward: let hooks reduce what all ranks have."""
        if self.begin_backward():
            self._hook_turns.agree()
            self._take_turns()

    def _take_turns(self) -> None:
        if self._must_wait:
            return
        for index in self._reduce_order.turns(self._hook_turns.allows):
            self._start_reduce(self._portions[index])

    def _start_reduce(self, bucket: ReduceBucket) -> None:
        unit = bucket.unit
        if unit.sync is Sync.NONE:
            return
        with self.recorder.starting("reduce", unit), profiled("reduce", unit.name):
            held = sum(h.start_reduce(unit.sync) for h in bucket.trainable_handles())
        if any(handle.is_reducing for handle in bucket.handles):
            self._in_flight.append((bucket, held))
        else:
            self._reduced(unit)

    def _reduced(self, unit: Unit) -> None:
        """A portion of a unit is reduced; perhaps it was the last."""
        self._to_reduce[unit] -= 1
        if self._to_reduce[unit] == 0:
            self.stepping.reduced(unit)

    def _bound_in_flight(self) -> None:
        """Finish old reductions while more bytes are under way than the budget allows."""
        self._unsettled.drop_sent()
        with self.recorder.starting("reduce", None):
            for bucket, _ in self._in_flight:
                if not bucket.advance():  # second stages begin in the order of the first
                    break
        while self._in_flight:
            bucket, _ = self._in_flight[0]
            over = sum(held for _, held in self._in_flight) > self._budget
            if not bucket.is_reduced() and not (over and self._wait_until_reduced(bucket)):
                return
            del self._in_flight[0]
            self._finish(bucket)
            self._reduced(bucket.unit)

    def _wait_until_reduced(self, bucket: ReduceBucket) -> bool:
        if bucket.index in self._uneven:
            return False
        with self.recorder.waiting(Kind.REDUCE_WAIT, bucket.unit, ends=False):
            return bucket.wait_until_reduced()

    def _finish(self, bucket: ReduceBucket) -> None:
        with self.recorder.waiting(Kind.REDUCE_WAIT, bucket.unit):
            for handle in bucket.handles:
                handle.finish_reduce()

    def _drain(self) -> None:
        """Finish all reductions under way, in order."""
        for bucket, _ in self._in_flight:
            with self.recorder.waiting(Kind.REDUCE_WAIT, bucket.unit, ends=False):
                bucket.cross()
        for bucket, _ in self._in_flight:
            self._finish(bucket)
        self._in_flight.clear()

    def _end_backward(self) -> None:
        if not self._active:
            return
        failed = True
        try:
            if any(unit.sync is not Sync.NONE for unit in self.units):
                self._settle()
            failed = False
        finally:
            self._active = failed  # what is left of it is dropped before the next one
            for unit in self.units:
                # A forward that runs a backward inside, for forces say, goes on afterwards.
                if unit.phase is not Phase.FORWARD and not unit.is_at_rest:
                    unit.release()
        # After the release: other ranks wait for that likewise. What a forward around this backward
        # still needs is released at its end.
        if not self.is_running_forward:
            with self.recorder.waiting(Kind.RANKS_WAIT):
                self._unsettled.wait_sends()
        used = self._published
        has_gradients = any(any(flags) for of_unit in used for flags in of_unit)
        self._run_hooks()
        if not self.is_running_forward:
            for unit in self.units:
                unit.end_run()
            self.stepping.end_backward(has_gradients=has_gradients)
        for unit in self.units:
            if unit.sync is not Sync.ALL:
                for handle in unit.handles:
                    handle.grad_publish.show_unreduced()
        self.recorder.end_backward()
        # Last: where warnings are errors, the other ranks have nothing to wait for.
        if self.non_finite is not None:
            watch, self.non_finite = self.non_finite, None
            if not watch.end_backward():
                self.non_finite = watch
        self._left_out.end_backward(self.units, used)

    def _settle(self) -> None:
        """Agree with the other ranks on what was used, reduce the rest, publish gradients."""
        self._hook_turns.agree(at_end=True)
        used = self._agree_on_used()
        for index in self._reduce_order.rest():
            bucket = self._portions[index]
            flags_of = dict(
                zip(bucket.unit.handles, used.parameters[bucket.unit.index], strict=True)
            )
            if any(any(flags_of[handle]) for handle in bucket.handles):
                self._start_reduce(bucket)
        self._drain()
        for unit, handle in used.left_over:
            with self.recorder.starting("reduce", unit):
                held = handle.start_reduce(unit.sync)
                self._in_flight.append((unit.bucket_of(handle), held))
        self._drain()
        if used.edited:  # raised where nothing is under way that a rank would wait for
            raise grad_publish.edited(used.edited[0])
        for unit, flags in zip(self.units, used.parameters, strict=True):
            for handle, handle_flags in zip(unit.handles, flags, strict=True):
                if unit.sync is Sync.ALL:
                    handle.publish(handle_flags)
                elif unit.sync is Sync.INTRA:
                    handle.grad_buffer.mark_used(handle_flags)
        self._published = used.parameters
        if not self._reduce_order_agreed and all(u.sync is Sync.ALL for u in self.units):
            self._agree_on_order()
        # Now that nothing is under way that a rank would wait for.
        self.stepping.check_not_late(used.stepped, [unit for unit, _ in used.left_over])

    def _agree_on_used(self) -> _Used:
        """Which parameters any rank used. Collective."""
        rest = set(self._reduce_order.rest())
        in_order = 0 if self._device is None else self._world.num_in_order(self._device)
        flags = []
        for number in (self.number, in_order % 256, self.num_loads % 256):
            flags += [number, 255 - number]
        for unit in self.units:
            to_come: set[FlatParamHandle] = set()
            for bucket in unit.buckets:
                flags.extend((bucket.index in rest, bucket.index not in rest))
                if bucket.index in rest:
                    to_come.update(bucket.trainable_handles())
            flags.append(any(handle.grad_publish.was_edited for handle in unit.handles))
            for handle in unit.handles:
                is_due = unit.sync is not Sync.NONE and handle not in to_come
                flags.append(is_due and handle.grad_buffer.waits_for(unit.sync))
                used = handle.grad_buffer.used_by_rank
                flags.extend([i in used for i in range(len(handle.full))])
        flags.extend(self.stepping.flags())
        combined = torch.tensor(flags, dtype=torch.uint8, device=self._world.control_device)
        with self.recorder.waiting(Kind.RANKS_WAIT):
            op_name = "used parameters of all units, backward"
            self._world.reduce_scalars(combined, "MAX", op_name=op_name)
        answers = iter(combined.tolist())
        if next(answers) + next(answers) != 255:
            raise RuntimeError(
                f"backward of {self.root.name or 'the model'!r}: another rank is at the end of the "
                "backward of another model. Where one backward() has gradients of several "
                "ShardedWrappers, it must reach them in the same order on all ranks: call "
                "backward() once for each."
            )
        if next(answers) + next(answers) != 255:
            raise RuntimeError(
                f"backward of {self.root.name or 'the model'!r}: some ranks have gathered, or "
                "asked for a norm or a sum, more often than others, and what they got may be of "
                "other parameters. With this backend all ranks must run the same units, forwards "
                "and backwards, and call state_dict(), summon_full_params() and the like "
                "together, not under `if rank == 0:`. Start again from a checkpoint."
            )
        if next(answers) + next(answers) != 255:
            raise loaded_on_some_ranks(self.root.name)
        left_over: list[tuple[Unit, FlatParamHandle]] = []
        parameters: list[list[list[bool]]] = []
        uneven: list[int] = []
        edited: list[str] = []
        for unit in self.units:
            for bucket in unit.buckets:
                if all([next(answers), next(answers)]):
                    uneven.append(bucket.index)
            if next(answers):
                edited.append(unit.name)
            parameters.append([])
            for handle in unit.handles:
                if next(answers):
                    left_over.append((unit, handle))
                parameters[-1].append([bool(next(answers)) for _ in handle.full])
        self._uneven.note(uneven)
        stepped = [bool(answer) for answer in answers]
        return _Used(parameters, left_over, stepped=stepped, edited=edited)

    def _agree_on_order(self) -> None:
        """Take the order in which rank 0's units became ready. Collective, once."""
        order = torch.tensor(self._reduce_order.suggested(), device=self._world.control_device)
        with self.recorder.waiting(Kind.RANKS_WAIT):
            self._world.broadcast(order, op_name="order of reductions")
        self._reduce_order.adopt(order.tolist())
        self._reduce_order_agreed = True

    def _run_hooks(self) -> None:
        published, self._published = self._published, []
        try:
            for unit, flags in zip(self.units, published, strict=False):
                if unit.sync is not Sync.ALL:
                    continue
                for handle, handle_flags in zip(unit.handles, flags, strict=True):
                    handle.grad_publish.run_post_accumulate_hooks(handle_flags)
        finally:
            for unit in self.units:
                for handle in unit.handles:
                    handle.grad_publish.give_hooks_back()

    def recover(self) -> None:
        """Return to a state to start from, after a step that was left by an exception."""
        optimizer_step.restore_all()
        self.stepping.drop_consumed()
        if self._active and torch._C._current_graph_task_id() == -1:
            self._reset()

    def _reset(self) -> None:
        """Drop the backward that failed."""
        self._active = False
        self.stepping.give_up()
        if self._had_accumulated:
            warnings.warn(
                "a backward failed, and gradients accumulated before it are lost with it. "
                "Accumulate them again.",
                stacklevel=4,
            )
        try:
            # All ranks began these; where one left out a second stage, the next would meet it.
            self._drain()
        finally:
            self._in_flight.clear()
            for unit in self.units:
                unit.reset()


class _Used:
    """What the ranks used in a backward, together."""

    def __init__(
        self,
        parameters: list[list[list[bool]]],
        left_over: list[tuple[Unit, FlatParamHandle]],
        stepped: list[bool],
        edited: list[str],
    ) -> None:
        self.parameters = parameters
        """Per unit, flat parameter and original parameter: whether any rank used it."""
        self.left_over = left_over
        """Flat parameters with gradients that no unit's turn takes along: they came after it, or
        were accumulated before the parameters were frozen."""
        self.stepped = stepped
        """Per unit, whether any rank stepped it before this; empty where none steps in backward."""
        self.edited = edited
        """Units of which some rank found accumulated gradients edited."""
