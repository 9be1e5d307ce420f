"""Extra: finds writes to accelerator tensors that do not change the tensors' versions.

A write through ``p.data``, or a collective of the program, does not change a tensor's version. On
CPUs, the core finds such writes by reading some values. On an accelerator, this extra compares the
values of parameters (``DeviceChecks``) and of state dicts (``StateWrites``) on the device. The host
reads only the results, at a time when the device has usually computed them.

In evaluation, ranks also compare which units they have all-gathered (``_check_order``).

Used by default if this folder is installed. Without this folder, such writes on accelerators are
lost without an error, and in evaluation, a rank may compute with the parameters of another unit.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from flatshard.comm.communicator import Communicator
from flatshard.engine.events import StepExtension
from flatshard.engine.forward_edits import ForwardEdits, Look, edited
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Unit
from flatshard.memory import checksum, sample, words_of
from flatshard.precision import tensors_in
from flatshard.state.model_state import WatchedCopy, WriteThrough, identity
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.tensor.sharded_tensor import local_range

_FEW = 32  # approximate number of words to compare in each tensor


def _few_words(tensor: Tensor) -> Tensor:
    """Return some 8-byte words of a tensor, spread over its memory, as a view."""
    words = words_of(local_range(tensor))
    return words[:: words.numel() // _FEW + 1]


def _copy_differences(of: Sequence[Any], differ: Sequence[Tensor]) -> Callable[[], list[Any]]:
    """Start to copy the bool tensors ``differ``, one for each object in ``of``, to the host.

    Returns a function that waits until the results are on the host, and returns the objects that
    differ.
    """
    results = torch.cat([*differ])
    on_host = torch.empty(results.shape, dtype=torch.bool, pin_memory=results.is_cuda)
    on_host.copy_(results, non_blocking=True)
    is_copied = torch.Event(results.device)
    is_copied.record()
    sizes = [one.numel() for one in differ]

    def written() -> list[Any]:
        is_copied.synchronize()
        return [one for one, part in zip(of, on_host.split(sizes), strict=True) if part.any()]

    return written


# ---------------------------------------------------------------- forwards


class DeviceChecks(ForwardEdits, StepExtension):
    """Raises on all ranks, at the end of the next backward, if a forward has edited parameters.

    If no backward follows, the second forward after the edit raises when it begins.
    """

    name, is_made_anew = "device_checks", True

    def __init__(self, state: RunState) -> None:
        super().__init__()
        self._state = state
        # Flat parameters of which all values are compared, not only some: frozen flat parameters
        # that the program has written since the first forward, and flat parameters whose version a
        # forward has changed.
        self._written: set[FlatParamHandle] = set()
        # For each flat parameter: whether all values are compared, and the values before forward.
        self._values: dict[FlatParamHandle, tuple[bool, Tensor]] = {}
        # Bool tensors: True for each compared value that the current forward has changed.
        self._compared: list[tuple[FlatParamHandle, Tensor]] = []
        # Functions that return the results of earlier forwards, made by `_copy_differences`.
        self._unread: list[Callable[[], list[Any]]] = []
        self._edited: list[FlatParamHandle] = []
        # In evaluation: digests of the collectives that this rank had begun before the forward.
        self._digests: dict[Communicator, int] = {}

    def _look_closely(self, handle: FlatParamHandle) -> Look:
        look = super()._look_closely(handle)
        if handle.buffer.is_cpu or look is sample:
            return look
        # Return `sample` instead of `checksum`, for which the host would wait for the device.
        self._written.add(handle)
        return sample

    def _has_kept_values(self, handle: FlatParamHandle) -> bool:
        look, _ = self._before.get(handle, (type, Tensor))
        if handle.buffer.is_cpu or look is checksum:
            return super()._has_kept_values(handle)
        self._compared.append((handle, handle.is_edited_here()))
        self._compare(handle)
        return True

    def begin(self, unit: Unit) -> None:
        super().begin(unit)
        for handle in unit.handles:
            self._values.pop(handle, None)
            is_sampled = handle in self._before and self._before[handle][0] is sample
            if is_sampled and not handle.buffer.is_cpu:
                reads_all = handle in self._written
                self._values[handle] = reads_all, _read(handle.buffer, reads_all)

    def check(self, unit: Unit, module: nn.Module) -> None:
        super().check(unit, module)
        for handle in unit.handles:
            self._compare(handle)

    def _compare(self, handle: FlatParamHandle) -> None:
        if handle in self._values:
            reads_all, before = self._values[handle]
            self._compared.append((handle, _read(handle.buffer, reads_all) != before))

    def end_forward(self, output: object, failed: bool) -> None:
        if self._compared:
            self._unread.append(_copy_differences(*zip(*self._compared, strict=True)))
            self._compared = []
        for group, digest in self._digests.items() if output is not None else ():
            # Skip the check, which is collective, if this forward has begun no collective: perhaps
            # only this rank runs the forward.
            if group.history.digest != digest:
                assert self._state.device is not None, "digests are only taken on a device"
                _check_order(group, self._state.device, output)

    def begin_forward(self, unit: Unit | None) -> None:
        self._compared, self._digests = [], {}
        self._read_results(but_last=1)
        self._raise()
        if not torch.is_grad_enabled() and (device := self._state.device) is not None:
            for group in self._state.gather_groups:
                transport = group.transport_for(device)
                if transport.is_ordered and transport.stream_waits(device):
                    self._digests[group] = group.history.digest

    def votes(self) -> bytes:
        self._read_results()
        return bytes(handle in self._edited for handle in self._state.handles)

    def tally(self, maxima: bytes) -> None:
        handles = self._state.handles
        self._edited = [one for one, flag in zip(handles, maxima, strict=True) if flag]

    def end_backward(self, has_gradients: bool) -> None:
        if has_gradients:
            self._raise()

    def _read_results(self, but_last: int = 0) -> None:
        while len(self._unread) > but_last:
            self._edited += self._unread.pop(0)()

    def _raise(self) -> None:
        if self._edited:
            found, self._edited, self._was_edited = self._edited[0], [], True
            raise edited(found)


def _read(buffer: Tensor, reads_all: bool) -> Tensor:
    few = _few_words(buffer)
    if not reads_all:
        return few.clone()
    return torch.cat([few.to(torch.int64), words_of(buffer).sum(dtype=torch.int64).view(1)])


def _check_order(group: Communicator, device: torch.device, output: object) -> None:
    """Make ``output`` NaN (-1 for integers) if the ranks have all-gathered different units.

    In training, backward compares the order of all-gathers, but no backward follows an evaluation.
    With a backend that matches all-gathers only by order, such as NCCL, a rank may have received
    parameters of another unit. The comparison runs on the device, and the host does not wait.
    Collective: all ranks of ``group``.
    """
    # Inside `join()`, `announces` is False: ranks without input do not call this function.
    if group.history.announces:
        differs = torch.zeros(1, device=device)
        name = f"order of collectives in evaluation, {group.history.digest}"
        group.reduce_scalars(differs, "MAX", op_name=name)
        for tensor in tensors_in(output):
            _spoil(tensor, differs.isnan())


def _spoil(tensor: Tensor, where: Tensor) -> None:
    """If ``where`` is true, overwrite ``tensor`` with NaN (-1 for integers)."""
    has_memory = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    if not has_memory or tensor.layout is not torch.strided:
        return
    value = math.nan if tensor.is_floating_point() or tensor.is_complex() else -1
    # Write each element of an expanded tensor once: torch refuses to write to the whole tensor.
    once = [slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()]
    # Keep the version counter. The module may have returned its input, and autograd may have saved
    # this input for the backward of another model, which would raise if the version changed.
    is_counted = not tensor.is_inference()
    kept = _unsafe_preserve_version_counter(tensor) if is_counted else contextlib.nullcontext()
    # `inference_mode(False)` enables gradients, so disable them afterwards.
    with torch.inference_mode(not is_counted), torch.no_grad(), kept:
        tensor[tuple(once)].masked_fill_(where.to(tensor.device), value)


# ---------------------------------------------------------------- tensors of state dicts


class StateWrites(WriteThrough):
    """``WriteThrough`` that also finds writes to accelerator tensors that change no version."""

    def __init__(self) -> None:
        super().__init__()
        # Version and some values of each watched tensor, when tensor and shard were last equal.
        self._values: WeakKeyDictionary[WatchedCopy, tuple[int, Tensor]] = WeakKeyDictionary()
        # Comparisons whose results the host has not read yet. In all of them, the shard has changed
        # since tensor and shard were equal, so values that the user writes to the tensor are lost.
        self._unread: list[Callable[[], list[Any]]] = []

    def watch(self, handle: FlatParamHandle, param: OriginalParam, full: Tensor) -> None:
        super().watch(handle, param, full)
        self._keep(next(reversed(self.given.values())))

    def _keep(self, given: WatchedCopy) -> None:
        if not given.copy.is_cpu:
            self._values[given] = given.copy._version, _few_words(given.copy).clone()

    def take_over(self, some: Sequence[WatchedCopy]) -> None:
        """Find the written tensors, and copy their values to the shards.

        The host waits for the device if the values of a tensor can still be copied to the shards,
        or if the user has freed a tensor. Otherwise the written values are lost anyway, and the
        next call of ``take_over`` raises.
        """
        while self._unread:
            self._mark(self._unread.pop(0)())
        watched = [given for given in some if given in self._values]
        for given in watched:
            # If the version has changed, `super().take_over` copies the values to the shard. So the
            # present values are the ones to compare with from now on.
            if given.copy._version != self._values[given][0]:
                self._keep(given)
        # Python may free a tensor in any thread. In a thread of the deadlock detection, do not wait
        # for the device: the device itself may wait for other ranks.
        if watched and not threading.current_thread().name.startswith("flatshard"):
            now = torch.cat([_few_words(given.copy) for given in watched])
            before = [self._values[given][1] for given in watched]
            differ = (now != torch.cat(before)).split([one.numel() for one in before])
            written = _copy_differences(watched, differ)
            if any(one.user() is None or one.shard == identity(one.handle) for one in watched):
                self._mark(written())
            else:
                self._unread.append(written)
        super().take_over(some)

    def _mark(self, written: Sequence[WatchedCopy]) -> None:
        for given in written:
            given.state = None  # unequal to every state, so that the values count as written
            self._keep(given)


# ---------------------------------------------------------------- the checks of a model


def install(context: RunState) -> StateWrites:
    """Check the forwards of ``context``. Returns the object that checks state dicts."""
    context.edits = checks = DeviceChecks(context)
    context.extend(checks)
    return StateWrites()
