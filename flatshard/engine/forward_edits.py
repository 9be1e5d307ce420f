"""``ForwardEdits``: raises if a module's forward writes to unsharded parameters.

Resharding the unit would lose the edit. There are four ways to find edits:

- A changed version of the shard shows a write to a sharded parameter, kept from before the forward.
- A changed version counter (autograd's) shows a write in place. But a forward may also write the
  same values again (registering a parametrization does). So after a changed version, values are
  compared ([Note: changed versions]).
- A changed address shows an assignment to ``p.data``.
- A write into ``p.data`` (``p.data.mul_(0.9)``) changes neither version nor address. So after some
  forwards, the values are compared with the values before the forward.

[Note: which forwards]
A comparison of all values reads the unsharded buffer twice, which takes some percent of a step. So
all values are compared only in the 1st, 2nd, 10th, 100th, ... forward of a unit, counted separately
with and without gradients. (The first update of a momentum encoder may change nothing, so the 2nd
is compared, too.) After the first edit is found, all values of every unit are compared in every
forward. Frozen parameters to which the program writes after the first forward are also compared in
every forward: they may belong to a momentum encoder, which may be updated inside of any forward.

The other forwards compare only 32 values, which still finds an edit that changes all values. This
takes 10 to 30 microseconds, 2 % of a step with many small units. So frozen flat parameters are
compared in every forward, but trainable flat parameters only in every 8th. On accelerators, a read
would wait for the device, so the extra ``device_checks`` compares values there.

[Note: changed versions]
If a forward changes the version counter, and all values were read before the forward, all values
are compared. If only some values were read, each rank compares its range of the buffer with its
shard. Then only the ranks that hold the edited elements find the edit. So the ranks tell each other
at the end of backward, where all ranks raise. From the next forward on, all values of the flat
parameter are compared in every forward.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from flatshard.engine.handle import FlatParamHandle, Place
from flatshard.engine.unit import Unit
from flatshard.memory import checksum, sample
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.units.layout import as_bytes, view_of
from flatshard.units.module_tree import unit_text

# Numbers of the forwards in which all values are compared ([Note: which forwards]).
_COMPARED = {2, *(10**power for power in range(12))}

# A function that reads an unsharded buffer. If two results differ, the buffer was edited between
# the reads. `checksum` reads all values, `sample` reads 32 values, and `type` reads none.
Look = Callable[[Tensor], object]


class ForwardEdits:
    """Reads parameters before each forward of a unit, and looks for edits after the forward."""

    def __init__(self) -> None:
        # For each flat parameter: the function that has read the buffer at the beginning of the
        # unit's latest forward, and the result.
        self._before: dict[FlatParamHandle, tuple[Look, object]] = {}
        # Number of forwards so far, by unit and by whether gradients were enabled.
        self._forwards: dict[tuple[Unit, bool], int] = {}
        # For each frozen flat parameter, the version of the shard at the unit's first forward. If
        # the version has changed, the program writes to the frozen parameters.
        self._frozen: dict[FlatParamHandle, int] = {}
        # Flat parameters whose version a forward has changed ([Note: changed versions]).
        self._rewritten: set[FlatParamHandle] = set()
        # Flat parameters in which this rank, but perhaps not every rank, has found an edit. All
        # ranks raise at the end of backward.
        self.found: set[FlatParamHandle] = set()
        self._was_edited = False  # whether an edit was ever found

    def begin(self, unit: Unit) -> None:
        """Read values of the unsharded parameters before a unit's forward."""
        kind = unit, torch.is_grad_enabled()
        number = self._forwards[kind] = self._forwards.get(kind, 0) + 1
        for handle in unit.handles:
            # If the shard serves as the unsharded buffer, an edit changes the shard and is not
            # lost.
            if handle.shard_is_buffer:
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
            if handle not in self._before or handle.shard_is_buffer:
                continue
            look, before = self._before[handle]
            # The forward has written to a sharded parameter, by a reference from before the forward
            # (`self.kept = [self.weight]`). But it reads an unsharded copy, without the write.
            if handle.version != handle.gathered_version:
                raise edited(handle, handle.edited_params())
            if handle.buffer._version != handle.clean_version or look(handle.buffer) != before:
                self.check_values(handle)
            _check_installed(handle, places)

    def check_values(self, handle: FlatParamHandle) -> None:
        """Raise RuntimeError if a forward has changed values of ``handle``, not only the version.

        Called when the version has changed: at the end of the forward, and whenever autograd saves
        a parameter, because the forward may undo an edit before its end.
        """
        self._rewritten.add(handle)
        if not self._has_kept_values(handle):
            self._was_edited = True
            raise edited(handle, handle.edited_params())
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
        """Return the error about an edit in ``unit`` that a rank has found, for all ranks to raise.

        None: no forward has changed a version in this unit.
        """
        suspects = [handle for handle in unit.handles if handle in self._rewritten]
        self.found.clear()
        self._was_edited |= bool(suspects)
        return edited(suspects[0]) if suspects else None


def _check_installed(handle: FlatParamHandle, places: list[Place]) -> None:
    """Raise if a forward has replaced or frozen a parameter, or has assigned to ``p.data``.

    ``places``: the modules and attributes at which the parameters of ``handle`` were.
    """
    installed, fulls, spans = handle.installed or handle.fulls, handle.fulls, handle.layout.spans
    address, itemsize = handle.buffer.data_ptr(), handle.buffer.element_size()
    # Usually, compare the addresses of all parameters at once, which is faster. In a unit of
    # several modules, compare only `places`, because this function is called for each module.
    are_in_place = len(handle.unit.modules) == 1 and (
        [*map(Tensor.data_ptr, fulls)] == [address + itemsize * span.start for span in spans]
    )
    for module, attribute, param in places:
        if module._parameters.get(attribute) is not installed[param.index]:
            raise RuntimeError(
                f"{param.where} was replaced in forward, but the next forward would use the "
                "original parameter. Compute with the new value, but do not assign the value to "
                "the module."
            )
        if (flag := param.full.requires_grad) is not handle.trained[param.index]:
            for one in handle.params:
                one.full.requires_grad_(handle.trained[one.index])
            raise RuntimeError(
                f"{param.where}, rank {handle.topology.world.global_rank}: requires_grad was set "
                f"to {flag} in forward, where parameters are unsharded copies, so the change would "
                "be lost. Set requires_grad of the parameters in model.parameters() before or "
                "after forward, or restore it at the end of forward."
            )
        # Compare the address of the full parameter, not of the module's attribute, which may be a
        # DTensor around the full parameter, without an address.
        if are_in_place:
            continue
        full, span = param.full, param.span
        if span.numel and full.data_ptr() != address + span.start * itemsize:
            written, full.data = full.data, view_of(handle.buffer, span)
            if not torch.equal(as_bytes(written.contiguous()), as_bytes(full.data.contiguous())):
                raise edited(handle, [param])


def edited(handle: FlatParamHandle, found: Sequence[OriginalParam] = ()) -> RuntimeError:
    """Return the error to raise after a forward has edited parameters of ``handle``.

    ``found``: the edited parameters, if this rank has found which.
    """
    params = found or handle.params
    names = ", ".join(repr(param.name) for param in params[:3])
    return RuntimeError(
        f"{unit_text(handle.unit.name)}: its forward edited parameters in place "
        f"({'' if found else 'one of '}{names}"
        f"{', or others' if len(params) > 3 else ''}). In forward, parameters are unsharded "
        "copies, so the edit would be lost. nn.Embedding(max_norm=...) edits its weight, too. "
        "Compute with the changed value instead (w = self.weight.clamp(...)), or use NO_SHARD. "
        "Update a momentum encoder (MoCo, BYOL) between steps: under torch.no_grad(), "
        "k.mul_(m).add_(q, alpha=1 - m) for each pair of parameters, or any code under "
        "ShardedWrapper.summon_full_params(model). [FS-EDIT]"
    )
