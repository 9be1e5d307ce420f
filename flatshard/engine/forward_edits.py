"""``ForwardEdits``: raises if a module's forward writes to its unsharded parameters.

Resharding the unit would lose the edit. Autograd's version counter shows edits in place, and a
changed address shows an assignment to ``p.data``. But a forward may also write the values that were
there before (registering a parametrization does), so only other values count as an edit ([Note:
changed versions]). A write into ``p.data`` (``p.data.mul_(0.9)``) changes neither version nor
address. So after some forwards, the parameters are compared with their earlier values.

[Note: which forwards]
A comparison of all values reads the unsharded buffer twice, which takes some percent of a step. So
all values of most units are compared only in the 1st, 2nd, 10th, 100th, ... forward, counted
separately with and without gradients (2nd: the first update of a momentum encoder may change
nothing). After the first edit is found, all values of every unit are compared in every forward.
Frozen parameters that the program writes after the unit's first forward are compared in every
forward, too: they are probably a momentum encoder's, which the program may update inside of any
forward.

In the other forwards of a unit, 32 values of each frozen flat parameter are compared, which shows
updates of all values. This takes 10 to 30 microseconds, 2 % of a step with many small units, so
trainable flat parameters are compared only in every 8th forward. On accelerators, a read would wait
for the device, so the extra ``device_checks`` compares there.

[Note: changed versions]
If a forward changes the version, the values are compared. A program that writes to parameters
usually does so from the first forward on, and before the first forward all values were read. If
only some values were read, each rank compares the range of its own shard, and together the ranks
compare everything: a program that edits a parameter does so on all ranks. Only the ranks that hold
the edited elements see the edit, so all ranks raise together, at the end of backward. From the next
forward on, all values of the flat parameter are compared in every forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flatshard.engine.handle import FlatParamHandle, Place
from flatshard.engine.unit import Unit
from flatshard.memory import checksum, sample
from flatshard.units.layout import as_bytes, view_of
from flatshard.units.module_tree import unit_text

# The forwards (counted from 1) after which all values are compared ([Note: which forwards]).
_COMPARED = {2, *(10**power for power in range(12))}

# A function that reads values of an unsharded buffer: `checksum` reads all values, `sample` reads a
# few values, and `type` reads no values.
Look = Callable[[Tensor], object]


class ForwardEdits:
    """Records parameters before each forward of a unit, and looks for edits after the forward."""

    def __init__(self) -> None:
        # For each flat parameter, the function that read the buffer at the beginning of the unit's
        # latest forward, and its result.
        self._before: dict[FlatParamHandle, tuple[Look, object]] = {}
        # Number of forwards so far, by unit and by whether gradients were enabled.
        self._forwards: dict[tuple[Unit, bool], int] = {}
        # For each frozen flat parameter, the version of the shard at the unit's first forward. If
        # the version has changed, the program writes the parameters ([Note: which forwards]).
        self._frozen: dict[FlatParamHandle, int] = {}
        # Flat parameters whose version a forward has changed ([Note: changed versions]).
        self._rewritten: set[FlatParamHandle] = set()
        # Edited flat parameters about which all ranks raise at the end of backward, because other
        # ranks may not have seen the edit.
        self.found: set[FlatParamHandle] = set()
        self._was_edited = False

    def begin(self, unit: Unit) -> None:
        """Record the state of the unsharded parameters before a unit's forward."""
        kind = unit, torch.is_grad_enabled()
        number = self._forwards[kind] = self._forwards.get(kind, 0) + 1
        for handle in unit.handles:
            # If the shard is the unsharded buffer, an edit changes the shard and is not lost.
            if handle.is_aliased:
                continue
            is_close = handle in self._rewritten or not handle.num_trainable
            look = self._look_closely(handle) if is_close else sample if number % 8 == 0 else type
            if self._was_edited or number in _COMPARED:
                look = checksum
            self._before[handle] = look, look(handle.buffer)

    def _look_closely(self, handle: FlatParamHandle) -> Look:
        is_written = self._frozen.setdefault(handle, handle.version) != handle.version
        return checksum if is_written or handle in self._rewritten else sample

    def check(self, unit: Unit, module: nn.Module) -> None:
        """Raise RuntimeError if the finished forward of ``module`` edited the unit's parameters."""
        for handle, places in unit.places_in[module]:
            if handle not in self._before or handle.is_aliased:
                continue
            look, before = self._before[handle]
            if handle.buffer._version != handle.clean_version or look(handle.buffer) != before:
                self.check_values(handle)
            _check_installed(handle, places)

    def check_values(self, handle: FlatParamHandle) -> None:
        """Raise RuntimeError if a forward has changed values of ``handle``, not only the version.

        Called when the version has changed: at the end of the forward, and when autograd saves a
        parameter, because a forward may also edit parameters and undo the edit.
        """
        self._rewritten.add(handle)
        if not self._has_kept_values(handle):
            self._was_edited = True
            raise edited(handle)
        handle.clean_version = handle.buffer._version

    def _has_kept_values(self, handle: FlatParamHandle) -> bool:
        look, before = self._before.get(handle, (type, Tensor))
        is_same = look(handle.buffer) == before
        if not is_same or look is checksum or not handle.is_edited_here():
            return is_same
        if torch.is_grad_enabled():
            self.found.add(handle)
        return torch.is_grad_enabled()

    def error_of(self, unit: Unit) -> RuntimeError | None:
        """Return the error about ``unit`` that all ranks raise after a rank has found an edit."""
        suspects = [handle for handle in unit.handles if handle in self._rewritten]
        self.found.clear()
        self._was_edited |= bool(suspects)
        return edited(suspects[0]) if suspects else None


def _check_installed(handle: FlatParamHandle, places: list[Place]) -> None:
    """Raise if a forward replaced a parameter, or assigned another tensor to a ``p.data``.

    ``places``: the modules and attributes that held the parameters of ``handle`` in the forward.
    """
    held, fulls, spans = handle.held or handle.fulls, handle.fulls, handle.layout.spans
    address, itemsize = handle.buffer.data_ptr(), handle.buffer.element_size()
    # Compare all addresses at once, which is faster. With several modules, this function would
    # compare the addresses of all modules for each of them.
    are_in_place = len(handle.unit.modules) == 1 and (
        [*map(Tensor.data_ptr, fulls)] == [address + itemsize * span.start for span in spans]
    )
    for module, attribute, param in places:
        if module._parameters.get(attribute) is not held[param.index]:
            raise RuntimeError(
                f"{param.where} was replaced in forward, but the next forward would use the "
                "original parameter. Compute with the new value, but do not assign the value to "
                "the module."
            )
        # Modules may hold a DTensor around the full parameter. A DTensor has no address of its own,
        # so compare the address of the full parameter.
        if are_in_place:
            continue
        full, span = param.full, param.span
        if span.numel and full.data_ptr() != address + span.start * itemsize:
            written, full.data = full.data, view_of(handle.buffer, span)
            if not torch.equal(as_bytes(written.contiguous()), as_bytes(full.data.contiguous())):
                raise edited(handle)


def edited(handle: FlatParamHandle) -> RuntimeError:
    """Return the error to raise after a forward has edited parameters of ``handle``."""
    params = handle.params
    names = ", ".join(repr(param.name) for param in params[:3])
    return RuntimeError(
        f"{unit_text(handle.unit_name)}: its forward edited parameters in place ({names}"
        f"{', or others' if len(params) > 3 else ''}). In forward, parameters are unsharded "
        "copies, so the edit would be lost. nn.Embedding(max_norm=...) edits its weight, too. "
        "Compute with the changed value instead (w = self.weight.clamp(...)), or use NO_SHARD. "
        "Update a momentum encoder (MoCo, BYOL) between steps: under torch.no_grad(), "
        "k.mul_(m).add_(q, alpha=1 - m) for each pair of parameters, or any code under "
        "ShardedWrapper.summon_full_params(model). [FS-EDIT]"
    )
