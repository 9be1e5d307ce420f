"""``ForwardEdits``: raises if a module's forward writes to its unsharded parameters.

The edit would be lost when the unit reshards. Autograd's version counter shows it; writes to
``p.data`` do not count there, and go undetected.
"""

from __future__ import annotations

from torch import nn

from flatshard.engine.events import StepObserver
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit


class ForwardEdits(StepObserver):
    """Watches the forwards of one model."""

    def __init__(self) -> None:
        # Version counters of unsharded buffers when a forward of their unit began.
        self._versions: dict[FlatParamHandle, int] = {}

    def unsharded(self, unit: Unit) -> None:
        for handle in unit.handles:
            # The memory of parameters that are always full is the shard: edits of it stay.
            if not handle.params.are_full:
                self._versions[handle] = handle.buffer._version

    def check_forward(self, unit: Unit, module: nn.Module) -> None:
        for handle in unit.handles:
            version = self._versions.get(handle)
            if version is None or handle.params.are_full:
                continue
            if handle.buffer._version != version:
                raise _edited(handle)
            handle.params.check_installed(module)


def _edited(handle: FlatParamHandle) -> RuntimeError:
    specs = handle.params.specs
    names = ", ".join(repr(spec.name) for spec in specs[:3])
    return RuntimeError(
        f"unit {handle.unit_name!r}: its forward edited parameters in place ({names}"
        f"{', or others' if len(specs) > 3 else ''}), which are "
        "unsharded copies there: the edit would be lost. nn.Embedding(max_norm=...) does "
        "that, too. Compute with the changed value instead (w = self.weight.clamp(...)), "
        "edit parameters between steps, or use NO_SHARD."
    )
