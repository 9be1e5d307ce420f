"""Extra: ranks accumulate gradients over different numbers of micro-batches.

Without this folder, ``ShardedWrapper.no_sync(uneven=True)`` raises ``MissingExtraError``.

Inside the context, all ranks keep the unsharded parameters of all units
(``Unit.stays_unsharded``). So a forward or backward needs no all-gather, and waits for no other
rank. When the context ends, all ranks together run the end of a backward, which reduces gradients.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator

import torch

from flatshard.comm.consistency import raise_everywhere
from flatshard.comm.work import CollectiveError
from flatshard.engine.gradients import GradSync
from flatshard.engine.run_state import RunState, temporarily
from flatshard.options.extras import default_extra, extra

_NAME, _LEAVING = "no_sync(uneven=True)", "leaving no_sync(uneven=True)"
_warn_once = functools.cache(logging.getLogger("flatshard").warning)


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
    if state.world.rank == 0:
        nbytes = sum(handle.grads.plan.full_bytes for handle in state.handles)
        nbytes += sum(unit.buffer_bytes for unit in state.units)
        _warn_once(
            f"{_NAME}: inside of the context, each rank holds the unsharded parameters and "
            f"gradients of the whole model (about {nbytes / 2**20:.0f} MiB). This is said once."
        )
    try:
        with (
            temporarily(state.units, stays_unsharded=True),
            # Ranks run different forwards here, but must predict the same order of units
            # afterwards.
            temporarily([state.prefetch], order=[], last_order=[]),
        ):
            outside = state.outside_use or extra("out_of_forward", _NAME)
            with torch.no_grad(), outside.unsharded(state.units):
                # Broadcast buffers now: forwards inside of the context must not communicate.
                if state.buffers is not None:
                    state.buffers.before_forward(False, under_no_sync=True)
            try:
                yield
            except CollectiveError:  # every rank raises a CollectiveError by itself
                raise
            except Exception as error:
                with contextlib.suppress(Exception):
                    raise_everywhere(error, state.world, op_name=_LEAVING)
                raise
            raise_everywhere(None, state.world, op_name=_LEAVING)
        _reduce(state)
    except BaseException:
        state.forward.recover()
        for unit in state.units:
            unit.forget_calls()
            unit.reshard()
        raise


def _reduce(state: RunState) -> None:
    """Reduce the gradients of all ranks, and publish the averages in ``.grad``. Collective."""
    state.forward.recover()  # a backward may have failed, and the program caught the exception
    for unit in state.units:
        unit.sync = GradSync.FULL
        unit.forget_calls()
        unit.wait_unshard()  # on a rank without a forward, this counts the trainable parameters
        unit.put_back()
    state.accumulates = False
    if state.buffers is not None:
        state.buffers.is_due = True
    # Let no rank adopt an order of reductions now: no gradient arrives in this backward.
    with temporarily([state.backward.queue], is_order_agreed=True):
        state.backward.run_empty()
