"""Extra: units that some ranks skip in a step, or run in a different order than other ranks.

Every rank must take part in an all-gather, so a divergent unit cannot be all-gathered when it runs.
Instead, all ranks all-gather all divergent units when the outermost forward begins, and keep them
unsharded until the outermost backward ends. At the end, all ranks reduce a unit's gradients if at
least one rank has gradients of the unit.

Without this folder, ``ShardedWrapper(allow_divergence=...)`` raises an error that names the folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import TypeAlias

import torch
from torch import nn

from flatshard.engine.events import StepExtension
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Moment, Phase, Unit

Divergence: TypeAlias = bool | Iterable[type[nn.Module] | str | nn.Module]
"""The modules that may diverge: True for all, or a list of classes, names and modules.

Names are names in the unwrapped model.
"""


def find_divergent(root: nn.Module, allowed: Divergence) -> Set[nn.Module]:
    """Return the modules that ``allow_divergence`` selects, and all modules inside of them.

    Raises:
        TypeError: ``allowed`` is not a ``Divergence``.
        ValueError: a class, name or module is not in the model.
    """
    expected = "allow_divergence: expected True, or a list of classes, names and modules"
    if isinstance(allowed, bool):
        return set(root.modules()) if allowed else set()
    if isinstance(allowed, str | type) or not isinstance(allowed, Iterable):
        raise TypeError(f"{expected}, got {allowed!r}.")
    named = dict(root.named_modules())
    found: set[nn.Module] = set()
    for one in allowed:
        if isinstance(one, str):
            tops = [named[one]] if one in named else []
        elif isinstance(one, type) and issubclass(one, nn.Module):
            tops = [module for module in named.values() if isinstance(module, one)]
        elif isinstance(one, nn.Module):
            tops = [module for module in named.values() if module is one]
        else:
            raise TypeError(f"{expected}, got a list that contains {one!r}.")
        if not tops:
            what = f"the {type(one).__name__}" if isinstance(one, nn.Module) else repr(one)
            raise ValueError(
                f"allow_divergence: {what} is not in the {type(root).__name__} that was passed to "
                "ShardedWrapper. Pass names as listed by named_modules() before wrapping."
            )
        found.update(inner for module in tops for inner in module.modules())
    return found


class DivergentUnits(StepExtension):
    """Keeps divergent units unsharded from the outermost forward to the end of its backward."""

    name, is_made_anew = "divergence", True

    def __init__(self, state: RunState, units: Sequence[Unit]) -> None:
        self._state, self._units = state, units

    def begin_forward(self, of_root: bool) -> None:
        for unit in self._units:
            # Reshard the unit on all ranks, so that all ranks take part in the all-gather below.
            # After a failed step, the unit may still be unsharded on only some ranks.
            unit.reshard(Moment.AFTER_BACKWARD)
            self._state.start_unshard(unit, "forward", everything=True)
            # Enter phase FORWARD only if the all-gather is still under way. For a unit that is
            # unsharded and in phase FORWARD, `Forward` would skip its unshard, which also lets the
            # modules hold the full parameters.
            if not unit.is_current:
                unit.enter(Phase.FORWARD)

    def end_forward(self, failed: bool) -> None:
        stays = self._state.expects_backward and not failed
        for unit in self._units:
            if failed and unit.is_prefetched:
                continue  # `Forward` drops the prefetched all-gather
            for handle in unit.handles:
                # Finish the all-gather here even if no forward used the unit on this rank. As long
                # as this rank has not read the other ranks' shards, they cannot write the shards.
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
            # All-gather again if an earlier backward has resharded the unit. This happens if two
            # backwards follow one forward, or two forwards come before one backward.
            self._state.start_unshard(unit, "backward", everything=True)
            if torch.is_grad_enabled():
                # Under create_graph, keep the buffers, even on a rank that does not run the unit:
                # all ranks must decide in the same way whether to reshard the unit.
                unit.stick()
