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
        # Of a handle's places, those inside of a module.
        self._places: dict[tuple[FlatParamHandle, nn.Module], list[tuple[nn.Module, str, int]]] = {}

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
            self._check_installed(handle, module)

    def _check_installed(self, handle: FlatParamHandle, outer: nn.Module) -> None:
        """See that the modules in ``outer`` still hold the full parameters."""
        if (handle, outer) not in self._places:
            inside = set(outer.modules())
            self._places[handle, outer] = [one for one in handle.params.places if one[0] in inside]
        for module, attribute, index in self._places[handle, outer]:
            if module._parameters.get(attribute) is not handle.params.full[index]:
                raise RuntimeError(
                    f"parameter {handle.params.specs[index].name!r} (unit {handle.unit_name!r}) "
                    "was replaced in forward: the model would go on with the one before. Compute "
                    "with the changed value instead, without assigning it to the module."
                )


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
