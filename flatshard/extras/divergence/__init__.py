"""Extra: lets some ranks skip a unit in a step, or run units in a different order.

Such a unit (a divergent unit) cannot be all-gathered when a rank runs it, because every rank must
take part. Instead, all ranks all-gather all divergent units when the outermost forward begins, and
keep the units unsharded until the outermost backward ends. Then the ranks reduce the gradients of
each divergent unit that has gradients on any rank.

Without this folder, ``ShardedWrapper(allow_divergence=...)`` raises ``MissingExtraError``.
"""

from collections.abc import Iterable, Sequence, Set
from typing import TypeAlias

import torch
from torch import nn

from flatshard.engine.events import StepExtension
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Phase, ReshardPoint, Unit

Divergence: TypeAlias = bool | Iterable[type[nn.Module] | str | nn.Module]
"""Type of ``allow_divergence``, which selects the modules that some ranks may skip.

True selects all modules. A list selects modules by class, by name in the unwrapped model, or by
the module itself.
"""


def find_divergent(root: nn.Module, allowed: Divergence) -> Set[nn.Module]:
    """Return the modules selected by ``allow_divergence``, and all modules inside of them."""
    expected = "allow_divergence: expected True, or a list of classes, names and modules"
    if isinstance(allowed, bool):
        return set(root.modules()) if allowed else set()
    if isinstance(allowed, str | type) or not isinstance(allowed, Iterable):
        raise TypeError(f"{expected}, got {allowed!r}.")
    named = dict(root.named_modules())
    found: set[nn.Module] = set()
    for one in allowed:
        if not isinstance(one, str | type | nn.Module):
            raise TypeError(f"{expected}, got a list that contains {one!r}.")
        kind = one if isinstance(one, type) else ()
        tops = [m for name, m in named.items() if one in (name, m) or isinstance(m, kind)]
        if not tops:
            what = f"the {type(one).__name__}" if isinstance(one, nn.Module) else repr(one)
            raise ValueError(
                f"allow_divergence: {what} is not in the {type(root).__name__} that was passed to "
                "ShardedWrapper. Pass names as listed by named_modules() before wrapping."
            )
        found.update(inner for module in tops for inner in module.modules())
    return found


class DivergentUnits(StepExtension):
    """Keeps divergent units unsharded until the outermost backward ends.

    The units are all-gathered when the outermost forward begins. Divergent units are the units that
    some ranks may skip, or run in a different order.
    """

    name, is_made_anew = "divergence", True

    def __init__(self, state: RunState, units: Sequence[Unit]) -> None:
        self._state, self._units = state, units

    def begin_forward(self, unit: Unit | None) -> None:
        for unit in self._units:
            # Reshard first. After a failed step, the unit may still be unsharded on some ranks, and
            # these ranks would skip the all-gather below.
            unit.reshard(ReshardPoint.AFTER_BACKWARD)
            self._state.start_unshard(unit, "forward", everything=True)
            # `Forward.unshard` puts the full parameters into the modules, but is skipped for a unit
            # that is unsharded and in phase FORWARD. So leave an unsharded unit in another phase.
            if not unit.is_current:
                unit.phase = Phase.FORWARD

    def end_forward(self, output: object, failed: bool) -> None:
        stays = self._state.expects_backward and not failed
        for unit in self._units:
            if failed and unit.is_prefetched:
                continue  # `Forward` drops the prefetched all-gather
            for handle in unit.handles:
                # Wait even if no forward used the unit: other ranks may not write their shards
                # until this rank has received them.
                handle.wait_unshard()
                if not handle.shard_is_buffer:
                    handle.put_back()
                if stays:
                    handle.snapshot()
            if stays:
                unit.phase = Phase.IDLE
            else:
                unit.reshard()

    def begin_backward(self) -> None:
        for unit in self._units:
            # An earlier backward may have resharded the unit.
            self._state.start_unshard(unit, "backward", everything=True)
            if torch.is_grad_enabled():
                # Under create_graph, the second backward needs the unsharded buffers. Keep them on
                # all ranks: a rank without a buffer would begin another all-gather, and deadlock.
                unit.keep_unsharded()
