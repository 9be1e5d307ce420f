"""``RunContext``: one per tree of units; the order of a step, prefetch, and the end of backward.

[Note: the end of backward]
A callback that autograd runs after the last node. By then ranks may differ: one used a parameter
that another did not. Every rank tells the others which parameters it used; units that any rank
used are reduced by all, in the one order, and parameters that none used keep their ``.grad``.
Only then may a rank wait for a reduction without a limit: before, a peer might be unable to start
it until its own backward is over.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from flatshard import optim
from flatshard.collectives import Communicator
from flatshard.config import BackwardPrefetch
from flatshard.profiling import profiled
from flatshard.saved_tensors import SavedTensors
from flatshard.schedule import ExecutionOrder, ReduceOrder
from flatshard.unit import Phase, Unit

_STALL_SECONDS = 1.0
"""How long a reduction may hold up backward; past this the peers may be waiting for us."""

_POLL_SECONDS = 1e-4


class RunContext:
    """What the units of one model share during training.

    Attributes:
        units: every unit, the root last.
        sync_gradients: False inside ``no_sync``; read when a forward begins.
        expects_backward: whether the outermost forward began with gradients enabled.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        world: Communicator,
        *,
        buffers: Callable[[], Iterable[Tensor]],
        forward_prefetch: bool,
        backward_prefetch: BackwardPrefetch | None,
    ) -> None:
        """Take the units over; ``buffers`` lists what rank 0 gives to all before a forward."""
        self.units = list(units)
        self.root = self.units[-1]
        self.sync_gradients = True
        self._world = world
        self._buffers = buffers
        self._forward_prefetch = forward_prefetch
        self._backward_prefetch = backward_prefetch
        self._order = ExecutionOrder()
        self._reduce_order = ReduceOrder(len(self.units))
        self._reduce_order_agreed = False
        self._depth = 0
        self.expects_backward = False
        self._active = False
        self._end_callback: Callable[[], object] = lambda: None
        self._reducing = True
        self._in_flight: list[tuple[Unit, int]] = []
        self._budget = 0
        self._had_accumulated = False
        self._published: list[list[list[bool]]] = []
        for index, unit in enumerate(self.units):
            unit.context = self
            unit.index = index
        self.refresh()

    def refresh(self) -> None:
        """Look at the units' and the modules' buffers again, after they were made anew."""
        # The objects of now, as DistributedDataParallel does: a buffer that some forward replaces
        # may then have another size on each rank.
        self._synced = list(self._buffers())
        self._saved = SavedTensors((unit, unit.handles) for unit in self.units)
        sizes = [
            2 * handle.layout.padded_numel * handle.reduce_dtype.itemsize
            for unit in self.units
            for handle in unit.handles
        ]
        self._budget = max(sizes, default=0)

    # ------------------------------------------------------------ forward

    def enter(self, unit: Unit) -> None:
        """A unit's forward begins; the outermost one prepares the step."""
        if self._depth == 0 and not self.in_backward and not self._begins_recomputation():
            self.recover()
            self._order.begin_forward()
            self.expects_backward = torch.is_grad_enabled()
            if self.expects_backward:
                self._reducing = self.sync_gradients
            if unit is self.root and self._reducing:
                self._broadcast_buffers()
        self._saved.push()
        self._depth += 1
        if not self.in_backward:
            self._order.record(unit.index)

    def _begins_recomputation(self) -> bool:
        """Whether a reentrant checkpoint around the whole model computes it again.

        Then nothing of the model's backward has run yet, and its own forward had no gradients.
        """
        if not torch.is_grad_enabled() or not self.begin_backward():
            return False
        self._reducing = self.sync_gradients
        return True

    def leave(self, unit: Unit) -> None:
        """A unit's forward is over; the outermost one drops prefetches that were not used."""
        if self._depth == 0:
            return
        self._depth -= 1
        self._saved.pop()
        if self._depth == 0 and not self.in_backward:
            self._drop_prefetched()

    @property
    def is_running_forward(self) -> bool:
        """Whether some unit's forward has begun and not ended."""
        return self._depth > 0

    def views_parameters(self, tensor: Tensor) -> bool:
        """Whether a tensor looks into a buffer that will be freed."""
        return self._saved.owner(tensor) is not None

    def keeps_after_forward(self, unit: Unit) -> bool:
        """The root's backward begins at once, so freeing it would only cost a gather."""
        return unit is self.root

    def prefetch_forward(self) -> None:
        """Begin the gather of the unit expected next."""
        if self._forward_prefetch:
            self._prefetch(self._order.next_forward())

    def prefetch_backward(self, unit: Unit) -> None:
        """Begin the gather of the unit whose backward is expected after this one's."""
        if self._backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._prefetch(self._order.next_backward(unit.index))

    def freed_in_backward(self, unit: Unit) -> None:
        """A unit's backward is over."""
        if self._backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._prefetch(self._order.next_backward(unit.index))

    def _prefetch(self, index: int | None) -> None:
        if index is not None:
            self.units[index].begin_gather()

    def _drop_prefetched(self) -> None:
        for unit in self.units:
            if unit.is_prefetched:
                unit.release()

    def _broadcast_buffers(self) -> None:
        """Give every rank rank 0's buffers, one collective per dtype and device."""
        if self._world.size == 1:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for buffer in self._synced:
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        with torch.no_grad():
            for buffers in kinds.values():
                flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
                self._world.broadcast(flat, label=f"{self.root.name or 'the model'}'s buffers")
                if self._world.rank == 0:
                    continue
                pieces = flat.split([buffer.numel() for buffer in buffers])
                for buffer, piece in zip(buffers, pieces, strict=True):
                    # Not an edit for autograd: rank 0's graph sees none either.
                    with _unsafe_preserve_version_counter(buffer):
                        buffer.copy_(piece.view(buffer.shape))

    # ------------------------------------------------------------ backward

    @property
    def in_backward(self) -> bool:
        """Whether this model's backward is running now, on this thread."""
        return (
            self._active
            and torch._C._current_graph_task_id() != -1
            and self._end_callback() is not None
        )

    def begin_backward(self) -> bool:
        """Prepare the end of the backward that runs now, once; False outside of a backward."""
        if torch._C._current_graph_task_id() == -1:
            return False
        if self._active and self._end_callback() is None:
            # Autograd dropped the callback with the backward that failed; this is another one.
            self._reset()
        if not self._active:
            self._active = True
            callback = partial(self._end_backward)
            self._end_callback = weakref.ref(callback)
            torch.autograd.Variable._execution_engine.queue_callback(callback)
            self._reduce_order.begin_backward()
            self._had_accumulated = False
            for unit in self.units:
                unit.begin_backward()
                self._had_accumulated |= any(h.gradients.filled for h in unit.handles)
                if not unit.num_trainable:
                    # Never complete, so it must not hold up the others.
                    self._reduce_order.ready(unit.index)
        return True

    def gradients_complete(self, unit: Unit) -> None:
        """Start every reduction whose turn has come."""
        if not self._reducing:
            return
        for index in self._reduce_order.ready(unit.index):
            self._start_reduce(self.units[index])
        self._bound_in_flight()

    def _start_reduce(self, unit: Unit) -> None:
        with profiled("reduce", unit.name):
            held = sum(handle.gradients.start_reduce() for handle in unit.trainable_handles())
        if held:
            self._in_flight.append((unit, held))

    def _bound_in_flight(self) -> None:
        """Finish old reductions while more bytes are under way than the budget allows."""
        while self._in_flight:
            unit, _ = self._in_flight[0]
            over = sum(held for _, held in self._in_flight) > self._budget
            if not _reduced(unit) and not (over and _wait_until_reduced(unit)):
                return
            del self._in_flight[0]
            for handle in unit.handles:
                handle.gradients.finish_reduce()

    def _end_backward(self) -> None:
        if not self._active:
            return
        try:
            if self._reducing:
                self._settle()
        finally:
            self._active = False
            for unit in self.units:
                # A forward that runs a backward inside, for forces say, goes on afterwards.
                if unit.phase is not Phase.FORWARD and (
                    unit.phase is not Phase.IDLE or unit.is_gathered
                ):
                    unit.release()
        if self._reducing:
            self._run_hooks()
        else:
            for unit in self.units:
                for handle in unit.handles:
                    handle.show_unreduced()

    def _settle(self) -> None:
        """Agree with the other ranks on what was used, reduce the rest, publish gradients."""
        used = self._agree_on_used()
        for index in self._reduce_order.rest():
            unit = self.units[index]
            if any(any(flags) for flags in used.parameters[index]):
                self._start_reduce(unit)
        for index in used.delivered_again:
            self._start_reduce(self.units[index])
        for unit, _ in self._in_flight:
            for handle in unit.handles:
                handle.gradients.finish_reduce()
        self._in_flight.clear()
        for unit, flags in zip(self.units, used.parameters, strict=True):
            for handle, handle_flags in zip(unit.handles, flags, strict=True):
                handle.gradients.finish_reduce()
                handle.publish(handle_flags)
        self._published = used.parameters
        if not self._reduce_order_agreed:
            self._agree_on_order()

    def _agree_on_used(self) -> _Used:
        """Which parameters any rank used. Collective."""
        rest = set(self._reduce_order.rest())
        flags: list[int] = []
        for unit in self.units:
            again = unit.index not in rest and any(
                handle.gradients.filled for handle in unit.handles
            )
            flags.append(again)
            for handle in unit.handles:
                flags.extend(i in handle.gradients.used for i in range(len(handle.full)))
        combined = torch.tensor(flags, dtype=torch.uint8, device=self._world.control_device)
        self._world.reduce_scalars(combined, "MAX", label="used parameters")
        answers = iter(combined.tolist())
        again_everywhere, parameters = [], []
        for unit in self.units:
            if next(answers):
                again_everywhere.append(unit.index)
            parameters.append([[bool(next(answers)) for _ in h.full] for h in unit.handles])
        return _Used(parameters, again_everywhere)

    def _agree_on_order(self) -> None:
        """Take the order in which rank 0's units became ready. Collective, once."""
        order = torch.tensor(self._reduce_order.suggested(), device=self._world.control_device)
        self._world.broadcast(order, label="order of reductions")
        self._reduce_order.adopt(order.tolist())
        self._reduce_order_agreed = True

    def _run_hooks(self) -> None:
        published, self._published = self._published, []
        try:
            for unit, flags in zip(self.units, published, strict=True):
                for handle, handle_flags in zip(unit.handles, flags, strict=True):
                    handle.run_post_accumulate_hooks(handle_flags)
        finally:
            for unit in self.units:
                for handle in unit.handles:
                    handle.give_hooks_back()

    def recover(self) -> None:
        """Return to a state to start from, after a step that was left by an exception."""
        optim.restore_all()
        if self._active and torch._C._current_graph_task_id() == -1:
            self._reset()

    def _reset(self) -> None:
        """Drop the backward that failed."""
        self._active = False
        if self._had_accumulated:
            warnings.warn(
                "a backward failed, and gradients accumulated under no_sync before it are lost "
                "with it. Accumulate them again.",
                stacklevel=4,
            )
        self._in_flight.clear()
        for unit in self.units:
            unit.reset()


class _Used:
    """What the ranks used in a backward, together."""

    def __init__(self, parameters: list[list[list[bool]]], delivered_again: list[int]) -> None:
        self.parameters = parameters
        """Per unit, flat parameter and original parameter: whether any rank used it."""
        self.delivered_again = delivered_again
        """Units that got more gradients after their turn to be reduced."""


def _reduced(unit: Unit) -> bool:
    return all(handle.gradients.reduce_done() for handle in unit.handles)


def _wait_until_reduced(unit: Unit) -> bool:
    """Wait a while; False when a peer seems unable to take part yet."""
    if any(handle.shard.device.type != "cpu" for handle in unit.handles):
        return True  # the stream waits, not the host
    deadline = time.monotonic() + _STALL_SECONDS
    while not _reduced(unit):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
