"""Extra: units that some ranks skip in a step, or run in another order than other ranks.

An all-gather needs every rank. Where ranks may differ there must be none, so these units are
all-gathered when the outermost forward begins, where all ranks are, and stay unsharded until its
backward is over. Their gradients are reduced there, by all ranks if any has some.

Without this folder, ``ShardedWrapper(allow_divergence=...)`` raises an error that names it.
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
"""All units, or what contains them: classes, names in the unwrapped model, modules."""


def find_divergent(root: nn.Module, allowed: Divergence) -> Set[nn.Module]:
    """The modules that ``allow_divergence`` names, with all inside them.

    Raises:
        TypeError: ``allowed`` is none of these.
        ValueError: a class or a name is not in the model.
    """
    expected = "allow_divergence: expected True, or a list of classes, names and modules"
    if isinstance(allowed, bool):
        return set(root.modules()) if allowed else set()
    if isinstance(allowed, str | type) or not isinstance(allowed, Iterable):
        raise TypeError(f"{expected}, got {allowed!r}")
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
            raise TypeError(f"{expected}, got {one!r} in it")
        if not tops:
            what = f"the {type(one).__name__}" if isinstance(one, nn.Module) else repr(one)
            raise ValueError(
                f"allow_divergence: {what} is not in the {type(root).__name__} that is wrapped. "
                "Names are those of named_modules() before wrapping."
            )
        found.update(inner for module in tops for inner in module.modules())
    return found


class DivergentUnits(StepExtension):
    name, is_made_anew = "divergence", True

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
