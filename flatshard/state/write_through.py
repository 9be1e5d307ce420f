"""``WriteThrough``: copies values that users write into tensors of a state dict to the shards.

The tensors of an unwrapped model's state dict share memory with the parameters, and some classes
for moving averages (timm's) write into these tensors. In a sharded model's state dict, the tensors
are full copies of the parameters. So ``WriteThrough`` copies written values to the shards, when the
model is used next or when the tensor is freed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatshard.engine.handle import FlatParamHandle
from flatshard.memory import sample
from flatshard.tensor.flat_parameter import OriginalParam


@dataclass(eq=False)
class WatchedCopy:
    """A full copy of an original parameter that ``state_dict()`` returned to a user."""

    user: weakref.ref[Tensor]
    copy: Tensor  # shares memory and version counter with the user's tensor

    # Version and some values of `copy` (see `_state`), when `copy` and the shard last had equal
    # values. None: the extra `device_checks` has found a write since.
    state: tuple[int, list[int]] | None
    handle: FlatParamHandle
    param: OriginalParam
    shard: tuple[Any, ...]  # identity and version of the shard when `state` was read


class WriteThrough:
    """Watches tensors that ``state_dict()`` returned, and copies users' writes to the shards.

    A tensor is watched until the user drops the tensor.
    """

    def __init__(self) -> None:
        # Keyed by the id of the weak reference to the tensor.
        self.given: dict[int, WatchedCopy] = {}

        # Name of a parameter whose copy was written after the shard had changed, or "".
        self.lost = ""

    def __deepcopy__(self, memo: object) -> WriteThrough:
        return WriteThrough()  # no user has a state dict of the copied model yet

    def watch(self, handle: FlatParamHandle, param: OriginalParam, full: Tensor) -> None:
        """Start to watch ``full``: values that the user writes into ``full`` go to the shard.

        ``full`` is a full copy of ``param``, which ``state_dict()`` is about to return.
        """
        ref = weakref.ref(full, self._died)
        with torch.inference_mode(False):
            copy = full.detach()
        self.given[id(ref)] = WatchedCopy(ref, copy, _state(copy), handle, param, identity(handle))

    def _died(self, user: weakref.ref[Tensor]) -> None:
        # When the program ends, torch's functions may already be gone.
        if (given := self.given.pop(id(user), None)) and not sys.is_finalizing():
            self.take_over([given])

    def check(self) -> None:
        """Copy written values to the shards; raise RuntimeError if written values are lost."""
        self.take_over([*self.given.values()])
        self.raise_lost()

    def raise_lost(self) -> None:
        """Raise RuntimeError if values that the user wrote to a state_dict() tensor are lost."""
        lost, self.lost = self.lost, ""
        if lost:
            raise RuntimeError(
                f"parameter {lost!r}: a tensor of a state_dict() was written, but the parameter "
                "had changed after the state_dict() was taken, so the written values are lost. "
                "Write to the parameter, or to a new state_dict(). To change a tensor without the "
                "parameter, clone the tensor first."
            )

    def take_over(self, some: Sequence[WatchedCopy]) -> None:
        """Copy to the shards the values that users wrote into ``some`` tensors of state dicts."""
        for given in some:
            state, given.state = given.state, _state(given.copy)
            if state == given.state:
                continue
            handle, param, before = given.handle, given.param, given.shard
            if before != identity(handle):
                self.lost = param.name
                continue
            with torch.inference_mode(False), torch.no_grad():
                param.sharded.copy_(param.spec.split(given.copy))
            handle.page_out()
            handle.unit.count_load(f"parameter {param.name!r}")
            given.shard = after = identity(handle)
            for other in self.given.values():
                if other.handle is handle and other.shard == before:
                    other.shard = after


def _state(copy: Tensor) -> tuple[int, list[int]]:
    """Return the version counter of ``copy`` and, if ``copy`` is on the CPU, some values.

    On an accelerator, ``flatshard/extras/device_checks`` finds writes that change only values.
    """
    # Most writes increase the version, also under no_grad. But the program's own collectives
    # (``dist.all_reduce(value)``) change only the values.
    return copy._version, sample(copy)


def identity(handle: FlatParamHandle) -> tuple[Any, ...]:
    return handle.flat_param.data_ptr(), handle.flat_param.dtype, handle.version
