"""``DivergentUnits``: units that some ranks skip in a step, or run in another order.

An all-gather needs every rank. Where ranks may differ there must be none, so these units are
all-gathered when the outermost forward begins, where all ranks are, and stay unsharded until its
backward is over. Their gradients are reduced there, by all ranks if any has some.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatshard.engine.events import StepObserver
from flatshard.engine.step_state import StepState
from flatshard.engine.unit import Phase, Unit


class DivergentUnits(StepObserver):
    def __init__(self, state: StepState, units: Sequence[Unit]) -> None:
        self._state, self._units = state, units

    def begin_forward(self) -> None:
        for unit in self._units:
            # What a failed step left is there on some ranks alone.
            unit.reshard(by_policy=True)
            self._unshard(unit, "forward")
            if not unit.is_current:  # else `Forward` would not let its modules hold parameters
                unit.enter(Phase.FORWARD)

    def end_computing(self, failed: bool) -> None:
        stays = self._state.expects_backward and not failed
        for unit in self._units:
            if failed and unit.is_prefetched:
                continue  # `Forward` drops it
            for handle in unit.handles:
                # Now: until this is over, the others wait before they write their shards.
                handle.wait_unshard()
                handle.params.use_sharded_views()
                if stays:
                    handle.snapshot()
            if stays:
                unit.enter(Phase.IDLE)
            else:
                unit.reshard()

    def begin_backward(self) -> None:
        for unit in self._units:
            # Another backward may have resharded it: its own came before, or was the first of two.
            self._unshard(unit, "backward")
            if torch.is_grad_enabled():
                unit.stick()  # on all ranks, whether it runs here or not

    def _unshard(self, unit: Unit, purpose: str) -> None:
        with self._state.observers.starting(purpose, unit):
            unit.unshard(purpose, everything=True)
