"""Extra: ranks accumulate gradients over different numbers of micro-batches.

Without this folder, ``ShardedWrapper.no_sync(uneven=True)`` raises ``MissingExtraError``.

Inside the context, all ranks keep the unsharded parameters of all units
(``Unit.stays_unsharded``). So a forward or backward needs no all-gather, and no other rank. At the
end of the context, all ranks run the end of a backward together, which reduces the gradients.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatshard.comm.consistency import differing_fact
from flatshard.comm.work import CollectiveError
from flatshard.engine.gradients import GradSync
from flatshard.engine.prefetch import ExecutionOrder
from flatshard.engine.run_state import RunState, temporarily
from flatshard.options.extras import default_extra, extra

_NAME = "no_sync(uneven=True)"
_logger = logging.getLogger("flatshard")
_told: weakref.WeakSet[RunState] = weakref.WeakSet()  # models whose cost was logged


@contextlib.contextmanager
def uneven(state: RunState) -> Iterator[None]:
    """Implement ``ShardedWrapper.no_sync(uneven=True)``. Collective at entry and at exit."""
    if state.extension("join") is not None:
        raise RuntimeError(f"{_NAME} was called inside of join(). Use one of the two.")
    for extension in state.extensions:
        extension.needs_gradients(_NAME)
    # Add the extension on all ranks: a rank without micro-batches does not call `average_over`.
    if state.extension("average_over") is None and (counting := default_extra("average_over")):
        state.extend(counting.AverageOver(state))
    if state.world.rank == 0 and state not in _told:
        _tell_cost(state)
    accumulate = [GradSync.ACCUMULATE] * len(state.units)
    try:
        with (
            temporarily(state.units, stays_unsharded=True),
            temporarily([state], syncs=accumulate, under_no_sync=True),
            # Ranks run different forwards, but must predict the same order of units afterwards.
            temporarily([state.prefetch], order=ExecutionOrder()),
            register_optimizer_step_pre_hook(partial(_refuse_step, state)),
        ):
            outside = state.outside_use or extra("out_of_forward", "no_sync(uneven=True)")
            with torch.no_grad(), outside.unsharded(state.units):
                if state.buffers is not None:  # now: forwards inside must not communicate
                    state.buffers.before_forward(False, under_no_sync=True)
            try:
                yield
            except CollectiveError:  # every rank raises such an error
                raise
            except Exception as error:
                _leave_together(state, error)
                raise
            _leave_together(state, None)
        _reduce(state)
    except BaseException:
        state.forward.recover()
        for unit in state.units:
            unit.forget_calls()
            unit.reshard()
        raise


def _tell_cost(state: RunState) -> None:
    """Log what memory the context takes."""
    _told.add(state)
    buffers = sum(unit.buffer_bytes for unit in state.units) / 2**20
    grads = sum(handle.reduce_plan.full_bytes for handle in state.handles) / 2**20
    _logger.warning(
        f"{_NAME}: inside of the context, each rank holds the unsharded parameters "
        f"({buffers:.0f} MiB) and gradients (about {grads:.0f} MiB) of the whole model. This is "
        "said once."
    )


def _refuse_step(state: RunState, optimizer: Optimizer, *_: Any) -> None:
    """Raise if ``optimizer`` steps parameters of the model. Called before each optimizer's step."""
    own = {id(param) for handle in state.handles for param in handle.sharded}
    if not own.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
        raise RuntimeError(
            f"{_NAME}: {type(optimizer).__name__}.step() was called inside of the context, where "
            "gradients are not reduced. Step after the context, on all ranks."
        )


def _leave_together(state: RunState, error: Exception | None) -> None:
    """Wait until all ranks leave the context. Collective.

    Raises RuntimeError if another rank leaves with an exception, which the message contains, or if
    ranks have converted or frozen different parameters.
    """
    text = None if error is None else f"{type(error).__name__}: {error}"
    facts = {
        param.where: f"{(own := param.sharded).dtype}, requires_grad={own.requires_grad}"
        for handle in state.handles
        if handle.topology.world.size == state.world.size  # else other ranks train other units
        for param in handle.params
    }
    everyone = state.world.host.gather((text, facts), "leaving no_sync with uneven=True")
    for rank, (theirs, _) in zip(state.world.ranks, everyone, strict=True):
        if theirs is not None and error is None:
            raise RuntimeError(f"{_NAME}: rank {rank} left the context by an exception. {theirs}")
    different = differing_fact([theirs for _, theirs in everyone], state.world.ranks)
    if error is None and different is not None:
        _, first = different
        raise RuntimeError(f"{_NAME}: ranks differ: {first}. Convert and freeze on every rank.")


def _reduce(state: RunState) -> None:
    """Reduce the gradients of all ranks, and publish the averages in ``.grad``. Collective."""
    state.forward.recover()  # a backward may have failed, and the program caught the exception
    for unit in state.units:
        unit.sync = GradSync.FULL
        unit.forget_calls()
        unit.wait_unshard()  # a rank without a forward has not seen yet which parameters train
        unit.put_back()
    state.accumulates = False
    if state.buffers is not None:
        state.buffers.is_due = True
    # No rank adopts an order of reductions from this backward, in which no gradient arrives.
    with temporarily([state.backward.queue], is_order_agreed=True):
        state.backward.run_empty()
