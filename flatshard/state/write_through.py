"""``WriteThrough``: what is written into a state dict's tensors reaches the shards.

In an unwrapped model these are the parameters' memory, and classes for moving averages (timm's)
write there. Here they are full copies, so what was written is taken over when the tensor dies, or
at the next use of the model.
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
    """A full copy of one original parameter that a user has."""

    user: weakref.ref[Tensor]
    copy: Tensor  # shares memory and version counter with the user's tensor
    version: int  # of the copy, when the shard held the same
    unit: Unit
    handle: FlatParamHandle
    param: OriginalParam
    shard: tuple[Any, ...]  # which one, and its version then


class WriteThrough:
    """The tensors of a model's state dicts that are still alive."""

    def __init__(self) -> None:
        self.given: dict[int, _Given] = {}  # by the id of the weak reference
        self.lost = ""  # a parameter whose copy was written too late

    def __deepcopy__(self, memo: object) -> WriteThrough:
        return WriteThrough()  # users have nothing of a copied model yet

    def watch(
        self, unit: Unit, handle: FlatParamHandle, param: OriginalParam, full: Tensor
    ) -> None:
        """Take over what users write into ``full``, a copy of ``param``."""
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
        """Write into the shards what users wrote into the tensors."""
        for given in list(self.given.values()):
            self._take_over(given)

    def check(self) -> None:
        """Take over what was written; RuntimeError if some of it was lost."""
        self.take_over()
        self.raise_lost()

    def raise_lost(self) -> None:
        """Raise RuntimeError if something that was written could not be taken over."""
        lost, self.lost = self.lost, ""
        if lost:
            raise RuntimeError(
                f"parameter {lost!r}: a tensor of a state_dict() was written after the model had "
                "changed since, and holds values of before. Write to the parameters, or to a "
                "state_dict() that was taken after the last change; to keep one, clone it."
            )

    def _take_over(self, given: _Given) -> None:
        # Autograd counts all that is written, also without gradients.
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
        given.unit.num_loads += 1  # on all ranks, or the next backward raises
        given.shard = after = _identity(handle)
        for other in self.given.values():
            if other.handle is handle and other.shard == before:
                other.shard = after


def _identity(handle: FlatParamHandle) -> tuple[Any, ...]:
    return handle.flat_param.data_ptr(), handle.flat_param.dtype, handle.version
