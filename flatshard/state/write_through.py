"""``WriteThrough``: copies values that users write into a state dict's tensors to the shards.

In an unwrapped model, the tensors of a state dict are the parameters' memory, and some classes for
moving averages (timm's) write into them. In a sharded model the tensors are full copies. A written
value is copied to the shards at the next use of the model, or when the tensor is freed.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.tensor.flat_parameter import OriginalParam


@dataclass(eq=False)
class _Given:
    """A full copy of an original parameter that a user got from ``state_dict()``."""

    user: weakref.ref[Tensor]
    copy: Tensor  # shares memory and version counter with the user's tensor
    version: int  # version of the copy when it was equal to the shard
    unit: Unit
    handle: FlatParamHandle
    param: OriginalParam
    shard: tuple[Any, ...]  # the shard's identity and version when it was equal to the copy


class WriteThrough:
    """The tensors of a model's state dicts that are still alive."""

    def __init__(self) -> None:
        self.given: dict[int, _Given] = {}  # keyed by the id of the weak reference
        self.lost = ""  # name of a parameter whose copy was written after the shard had changed

    def __deepcopy__(self, memo: object) -> WriteThrough:
        return WriteThrough()  # users have no state dict of the copied model yet

    def watch(
        self, unit: Unit, handle: FlatParamHandle, param: OriginalParam, full: Tensor
    ) -> None:
        """Copy later writes into ``full``, a copy of ``param``, to the shard."""
        user = weakref.ref(full, self._died)
        with torch.inference_mode(False):
            copy = full.detach()
        self.given[id(user)] = _Given(
            user, copy, copy._version, unit, handle, param, _identity(handle)
        )

    def _died(self, user: weakref.ref[Tensor]) -> None:
        given = self.given.pop(id(user), None)
        if given is not None:
            self._take_over(given)

    def take_over(self) -> None:
        """Copy values that users wrote into the tensors to the shards."""
        for given in list(self.given.values()):
            self._take_over(given)

    def check(self) -> None:
        """Copy written values to the shards; RuntimeError if some values were lost."""
        self.take_over()
        self.raise_lost()

    def raise_lost(self) -> None:
        """Raise RuntimeError if a written value could not be copied to the shard."""
        lost, self.lost = self.lost, ""
        if lost:
            raise RuntimeError(
                f"parameter {lost!r}: a tensor of a state_dict() was written after the model had "
                "changed since, and holds values of before. Write to the parameters, or to a "
                "state_dict() that was taken after the last change; to keep one, clone it."
            )

    def _take_over(self, given: _Given) -> None:
        # The version counter counts all writes, also those without gradients.
        if given.copy._version == given.version:
            return
        given.version = given.copy._version
        handle, param, before = given.handle, given.param, given.shard
        if before != _identity(handle):
            self.lost = param.name
            return
        with torch.inference_mode(False), torch.no_grad():
            param.sharded.copy_(param.spec.split(given.copy))
        handle.page_out()
        given.unit.num_loads += 1  # all ranks must write, or the next backward raises
        given.shard = after = _identity(handle)
        for other in self.given.values():
            if other.handle is handle and other.shard == before:
                other.shard = after


def _identity(handle: FlatParamHandle) -> tuple[Any, ...]:
    return handle.flat_param.data_ptr(), handle.flat_param.dtype, handle.version
