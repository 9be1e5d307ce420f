"""``DivergentUnits``: units that some ranks skip in a step, or run in another order.

An all-gather needs every rank. Where ranks may differ there must be none, so these units are
all-gathered when the outermost forward begins, where all ranks are, and stay unsharded until its
backward is over. Their gradients are reduced there, by all ranks if any has some.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatshard.engine.extension import StepExtension
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Moment, Phase, Unit


class DivergentUnits(StepExtension):
    name = "divergence"

    def __init__(self, state: RunState, units: Sequence[Unit]) -> None:
        self._state, self._units = state, units

    def begin_forward(self, of_root: bool) -> None:
        for unit in self._units:
            # What a failed step left is there on some ranks alone.
            unit.reshard(Moment.AFTER_BACKWARD)
            self._state.start_unshard(unit, "forward", everything=True)
            if not unit.is_current:  # else `Forward` would not let its modules hold parameters
                unit.enter(Phase.FORWARD)

    def end_forward(self, failed: bool) -> None:
        stays = self._state.expects_backward and not failed
        for unit in self._units:
            if failed and unit.is_prefetched:
                continue  # `Forward` drops it
            for handle in unit.handles:
                # Now: until this is over, the others wait before they write their shards.
                handle.wait_unshard()
                handle.show_sharded()
                if stays:
                    handle.snapshot()
            if stays:
                unit.enter(Phase.IDLE)
            else:
                unit.reshard()

    def begin_backward(self) -> None:
        for unit in self._units:
            # Another backward may have resharded it: its own came before, or was the first of two.
            self._state.start_unshard(unit, "backward", everything=True)
            if torch.is_grad_enabled():
                unit.stick()  # on all ranks, whether it runs here or not
