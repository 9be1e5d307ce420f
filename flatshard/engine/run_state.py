"""``RunState``: the state that forward, backward and prefetch of one model share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from flatshard.comm.communicator import Communicator
from flatshard.comm.work import PendingSends
from flatshard.engine.buffer_sync import BufferSync
from flatshard.engine.events import Kind, StepExtension, profiled
from flatshard.engine.forward_edits import ForwardEdits
from flatshard.engine.gradients import GradSync
from flatshard.engine.unit import Unit
from flatshard.memory import NOTHING
from flatshard.options.extras import EXTRAS
from flatshard.units.module_tree import unit_text


@contextlib.contextmanager
def temporarily(objects: Iterable[Any], **values: Any) -> Iterator[None]:
    """Set attributes of each object inside the context, and restore the attributes afterwards."""
    with contextlib.ExitStack() as undo:
        for one in objects:
            for name, value in values.items():
                undo.callback(setattr, one, name, getattr(one, name))
                setattr(one, name, value)
        yield


class RunState:
    """The units of one model, and the state of the model's current step.

    All wrappers of the model share one ``RunState``.
    """

    # `Forward`, `Backward` and `Prefetch` of the model; see `connect`.
    forward: Any
    backward: Any
    prefetch: Any
    # `OutOfForwardUse`. None: operations outside of a unit's forward see only sharded parameters.
    outside_use: Any = None

    def __init__(self, units: Sequence[Unit], world: Communicator, number: int) -> None:
        """Make the state of a model before its first step. The caller must call ``connect`` next.

        Args:
            units: all units. The root comes last.
            world: all ranks that train the model.
            number: identifies the model in exchanges; below 256, and the same on all ranks.
        """
        self.units, self.root = list(units), units[-1]
        self.handles = [handle for unit in self.units for handle in unit.handles]
        self.world, self.number = world, number

        # The group of all ranks, and the groups in which units all-gather. Groups of one rank are
        # left out.
        groups = [world]
        for topology in (unit.topology for unit in self.units if unit.handles):
            groups += (
                topology.intra_group,
                topology.inter_group,
                topology.post_forward_group or world,
            )
        self.gather_groups = [group for group in dict.fromkeys(groups) if group.size > 1]
        self.has_run = False  # whether any forward of the model has begun yet
        self.extensions: tuple[StepExtension, ...] = ()  # in the order of `EXTRAS`
        # The extensions with `watches`, which are also called for each forward of each unit.
        self.watchers: tuple[StepExtension, ...] = ()
        # `ComparedSteps`, which compares steps of optimizers between ranks. None: no comparison.
        self.steps: Any = None
        self.buffers: BufferSync | None = None  # None: buffers are not broadcast
        # On accelerators, the extra `device_checks` replaces `ForwardEdits` by checks that do not
        # wait for the device.
        self.edits = ForwardEdits()
        # This rank's memory that other ranks may still read. One list for all handles: a single
        # wait at the end of a forward or backward covers the model.
        self.pending_sends = PendingSends()
        for number, handle in enumerate(self.handles):
            handle.plan.pending_sends, handle.number = self.pending_sends, number
        # Device of the unsharded buffers. None: nothing is communicated.
        self.device: torch.device | None = None
        # For each unit, how the next forward's backward reduces gradients. Set by `no_sync`;
        # `plan_syncs` copies the values to the units when a forward begins.
        self.syncs = [GradSync.FULL] * len(self.units)
        # `under_no_sync`: whether a forward that begins now is under `no_sync`, which may delay
        # only some reductions. `accumulates`: whether the last forward with gradients was under
        # `no_sync`.
        self.under_no_sync = self.accumulates = False
        self.lacks_ranks = False  # whether a rank computes no gradients (`join`)
        self.is_converting = False  # whether modules are being converted (dtype or device)
        self.depth = 0  # number of nested forwards of units that are running
        self.expects_backward = False  # whether the outermost forward began with gradients enabled

        # Whether another backward (of a reentrant checkpoint) ran inside the present one.
        self.has_inner_backward = False

    def connect(self, forward: Any, backward: Any, prefetch: Any) -> None:
        """Set the objects that run the model's steps, and that share this state."""
        self.forward, self.backward, self.prefetch = forward, backward, prefetch
        for index, unit in enumerate(self.units):
            unit.index, unit.forward, unit.backward = index, forward, backward
        self.refresh()

    def refresh(self) -> None:
        """Recompute sizes and storages cached from the units' buffers, after a reallocation."""
        # On a single rank, units without an unsharded buffer never communicate.
        is_alone = self.world.size == 1
        devices = (h.device for h in self.handles if h.buffer_bytes or not is_alone)
        self.device = next(devices, None)
        # `Prefetch` and `ReduceQueue` cache sizes of buffers. `Forward` caches the storages, to
        # recognise views of a buffer that autograd saves.
        for part in (self.prefetch, self.backward.queue, self.forward):
            part.refresh()

    @property
    def is_running(self) -> bool:
        """Whether the forward of a unit, or the model's backward, is running."""
        return self.depth > 0 or self.backward.is_running

    def check_between_steps(self, caller: str) -> RunState:
        """Clean up after a step that failed. Raises RuntimeError inside a forward or backward."""
        self.forward.recover()
        if self.root.stays_unsharded:
            raise RuntimeError(
                f"{caller} was called inside of no_sync(uneven=True), where ranks do not meet. "
                "Call it outside of the context."
            )
        if self.is_running:
            raise RuntimeError(
                f"{caller} was called while a forward or backward of "
                f"{unit_text(self.root.name)} is running. Call it between steps."
            )
        return self

    @property
    def is_reducing(self) -> bool:
        """Whether the backward of the latest training forward reduces all gradients over all ranks.

        False after a forward under ``no_sync``. The result is the same on all ranks.
        """
        return all(unit.sync is GradSync.FULL for unit in self.units)

    def plan_syncs(self) -> None:
        """Set how the backward of the forward that begins now reduces each unit's gradients."""
        for unit, sync in zip(self.units, self.syncs, strict=True):
            unit.sync = sync
            if sync is GradSync.SHARD_ONLY:
                # `SHARD_ONLY` means `FULL` if there is no second group to reduce over, and
                # `ACCUMULATE` if the intra group has one rank.
                if unit.topology.second_group.size == 1:
                    unit.sync = GradSync.FULL
                elif unit.topology.intra_group.size == 1:
                    unit.sync = GradSync.ACCUMULATE
        self.accumulates = self.under_no_sync

    def start_unshard(self, unit: Unit, purpose: str, *, everything: bool = False) -> None:
        """Start to all-gather the flat parameters of a unit that ``purpose`` needs. Collective.

        Args:
            unit: the unit whose flat parameters are all-gathered.
            purpose: "forward" or "backward". Backward usually does not need all flat parameters.
            everything: whether to all-gather all flat parameters, even for backward.
        """
        needs_all = everything or purpose == "forward"
        handles = unit.handles if needs_all else unit.for_backward
        with self.span(Kind.STARTING, unit, purpose=purpose):
            for handle in handles:
                # Flat parameters that are unsharded already need no all-gather.
                if handle.unshard(purpose):
                    # Inside the span: an extension may send messages about this all-gather, whose
                    # time counts.
                    for extension in self.extensions:
                        extension.gathering(handle, purpose)

    def unshard(self, unit: Unit, purpose: str, *, everything: bool = False) -> None:
        """Start the all-gathers of a unit, and wait for them. Collective."""
        self.start_unshard(unit, purpose, everything=everything)
        with self.span(Kind.GATHER_WAIT, unit):
            unit.wait_unshard()

    def extend(self, extension: StepExtension) -> None:
        """Call ``extension`` in each step from now on."""
        found, places = (*self.extensions, extension), list(EXTRAS)
        self._call(sorted(found, key=lambda one: places.index(one.name)))

    def drop(self, extension: StepExtension) -> None:
        """Stop calling ``extension`` in steps. May be called inside a method of an extension."""
        self._call([one for one in self.extensions if one is not extension])

    def _call(self, extensions: Sequence[StepExtension]) -> None:
        # Replace the tuples and never change them, so that a loop over a tuple is not disturbed.
        self.extensions = tuple(extensions)
        self.watchers = tuple(one for one in extensions if one.watches)

    def extension(self, name: str) -> Any:
        """Return the extension with this ``name``. None: the model does not use the extension."""
        return next((one for one in self.extensions if one.name == name), None)

    def span(
        self, kind: Kind, unit: Unit | None = None, *, purpose: str | None = None, ends: bool = True
    ) -> AbstractContextManager[object]:
        """Return a context manager that marks a range of time, for extensions and torch's profiler.

        Args:
            kind: what the thread does in this range of time.
            unit: the unit whose collectives are started or awaited. None: the collectives belong to
                no single unit.
            purpose: "forward" or "backward" if all-gathers are started, "reduce" if reductions are
                started, None if the range is a wait.
            ends: whether the unit's collectives are finished after the wait. False: the wait may
                end before the collectives.
        """
        profiles = torch._C._autograd._profiler_enabled()
        if not (profiles or self.watchers):
            return NOTHING
        label = "reduce" if purpose == "reduce" else "unshard"
        if purpose is None:
            label = "wait_unshard"
            # While this rank waits for a unit, only one kind of collective may start: the second
            # stage of a reduction (between nodes, for example).
            purpose = "other" if unit is None else "reduce"
        # `enter_context` enters now, a little before the caller's `with`, which only leaves.
        stack = contextlib.ExitStack()
        for watcher in self.watchers:
            stack.enter_context(watcher.span(kind, unit, purpose, ends))
        if profiles and unit is not None and kind in (Kind.STARTING, Kind.GATHER_WAIT):
            stack.enter_context(profiled(label, unit.name))
        return stack
