"""``RunState``: the state that forward, backward and prefetch of one model share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd import profiler

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


@contextmanager
def temporarily(objects: Iterable[Any], **values: Any) -> Iterator[None]:
    """Set attributes of each object inside the context, and restore the attributes afterwards."""
    with ExitStack() as undo:
        for one in objects:
            for name, value in values.items():
                undo.callback(setattr, one, name, getattr(one, name))
                setattr(one, name, value)
        yield


class RunState:
    """The units of one model, and the state of the model's current step.

    All wrappers of the model share one ``RunState``.
    """

    # The `Forward`, `Backward` and `Prefetch` of the model, set by `connect`.
    forward: Any
    backward: Any
    prefetch: Any
    # Unshards parameters for operations outside of a unit's forward (the extra `out_of_forward`).
    # None: such operations see only sharded parameters.
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

        # The group of all ranks, and all groups in which units all-gather, except groups of one
        # rank.
        groups = [world]
        for topology in (unit.topology for unit in self.units if unit.handles):
            groups += topology.intra_group, topology.inter_group
            groups.append(topology.post_forward_group or world)
        self.gather_groups = [group for group in dict.fromkeys(groups) if group.size > 1]
        self.has_run = False  # whether any forward of the model has begun yet
        self.extensions: tuple[StepExtension, ...] = ()  # in the order of `EXTRAS`
        # The extensions with the flag `watches`, which are called for each forward of each unit.
        self.watchers: tuple[StepExtension, ...] = ()
        # `ComparedSteps`, which compares steps of optimizers between ranks. None: no comparison.
        self.steps: Any = None
        self.buffers: BufferSync | None = None  # None: buffers are not broadcast
        # Finds edits of unsharded parameters in forward. On accelerators, the extra `device_checks`
        # replaces this object by checks that do not wait for the device.
        self.edits = ForwardEdits()
        # Unfinished sends of this rank's shards, which must not be written until the sends are
        # complete. All handles share this object: the end of a forward or backward waits only once.
        self.pending_sends = PendingSends()
        for number, handle in enumerate(self.handles):
            handle.plan.pending_sends, handle.number = self.pending_sends, number
        # Device of the unsharded buffers. None: no unit communicates.
        self.device: torch.device | None = None
        # For each unit, how the backward of the next forward will reduce gradients. `no_sync` sets
        # these values. `plan_syncs` copies them to the units when a forward begins.
        self.syncs = [GradSync.FULL] * len(self.units)
        # `under_no_sync`: whether a forward that begins now is under `no_sync` (of any unit).
        # `accumulates`: whether the last forward with gradients was under `no_sync`.
        self.under_no_sync = self.accumulates = False
        self.lacks_ranks = False  # whether some rank has no more input (`join`)
        self.is_converting = False  # whether modules are being converted (dtype or device)
        self.depth = 0  # number of nested forwards of units that are running
        self.expects_backward = False  # whether the outermost forward began with gradients enabled

        # Whether a second backward (of a reentrant checkpoint) ran inside the present backward.
        self.has_inner_backward = False

    def connect(self, forward: Any, backward: Any, prefetch: Any) -> None:
        """Set the objects that run the model's steps, and that share this state."""
        self.forward, self.backward, self.prefetch = forward, backward, prefetch
        for index, unit in enumerate(self.units):
            unit.index, unit.forward, unit.backward = index, forward, backward
        self.refresh()

    def refresh(self) -> None:
        """Recompute cached sizes and storages, after unsharded buffers were reallocated."""
        # On a single rank, a flat parameter without a separate unsharded buffer never communicates.
        is_alone = self.world.size == 1
        self.device = next((h.device for h in self.handles if h.buffer_bytes or not is_alone), None)
        # `Prefetch` and `ReduceQueue` cache the sizes of buffers. `Forward` caches their storages,
        # to recognise views of buffers among the tensors that autograd saves.
        for part in (self.prefetch, self.backward.queue, self.forward):
            part.refresh()

    @property
    def is_running(self) -> bool:
        """Whether the forward of a unit, or the model's backward, is running."""
        return self.depth > 0 or self.backward.is_running

    def check_between_steps(self, caller: str) -> RunState:
        """Check that ``caller``, a method of the wrapper, may run now, and clean up a failed step.

        Raises RuntimeError inside a forward or backward.
        """
        self.forward.recover()
        if self.is_running:
            raise RuntimeError(
                f"{caller} was called while a forward or backward of "
                f"{unit_text(self.root.name)} is running. Call it between steps."
            )
        return self

    @property
    def is_reducing(self) -> bool:
        """Whether the backward of the latest training forward reduces all gradients over all ranks.

        False after a forward under ``no_sync``. All ranks get the same result.
        """
        return all(unit.sync is GradSync.FULL for unit in self.units)

    def plan_syncs(self) -> None:
        """Set how each unit's gradients will be reduced in the backward of the present forward."""
        for unit, sync in zip(self.units, self.syncs, strict=True):
            unit.sync = sync
            if sync is GradSync.SHARD_ONLY:
                # `SHARD_ONLY` reduces within the intra group (one node), but not across nodes (the
                # second group). If there is only one node, this is the full reduction. If each node
                # has only one rank, there is nothing to reduce.
                if unit.topology.second_group.size == 1:
                    unit.sync = GradSync.FULL
                elif unit.topology.intra_group.size == 1:
                    unit.sync = GradSync.ACCUMULATE
        self.accumulates = self.under_no_sync

    def start_unshard(self, unit: Unit, purpose: str, *, everything: bool = False) -> None:
        """Start to all-gather the flat parameters of a unit that ``purpose`` needs. Collective.

        Args:
            unit: the unit whose flat parameters are all-gathered.
            purpose: "forward" or "backward". Backward does not need embedding tables.
            everything: whether to all-gather all flat parameters, even for backward.
        """
        handles = unit.handles if everything or purpose == "forward" else unit.for_backward
        with self.span(Kind.STARTING, unit, purpose=purpose):
            for handle in handles:
                if handle.unshard(purpose):
                    # Call extensions inside the span, so that reports include the time of messages
                    # that an extension sends here.
                    for extension in self.extensions:
                        extension.gathering(handle, purpose)

    def unshard(self, unit: Unit, purpose: str, *, everything: bool = False) -> None:
        """Start the all-gathers of a unit (see ``start_unshard``), and wait. Collective."""
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
        # Make new tuples: `drop` may be called in a loop over the old tuple, which then continues.
        self.extensions = tuple(extensions)
        self.watchers = tuple(one for one in extensions if one.watches)

    def extension(self, name: str) -> Any:
        """Return the extension with this ``name``, or None if the model does not use it."""
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
        if not (profiler._is_profiler_enabled or self.watchers):
            return NOTHING
        label = "reduce" if purpose == "reduce" else "unshard"
        if purpose is None:
            label = "wait_unshard"
            # The purpose of collectives that may start during the wait. While this rank waits for a
            # unit, only second stages of gradient reductions (across nodes) may start.
            purpose = "other" if unit is None else "reduce"
        # `enter_context` starts the spans now, a little before the caller's `with` begins.
        stack = ExitStack()
        for watcher in self.watchers:
            stack.enter_context(watcher.span(kind, unit, purpose, ends))
        if unit is not None and kind in (Kind.STARTING, Kind.GATHER_WAIT):
            stack.enter_context(profiled(label, unit.name))
        return stack
