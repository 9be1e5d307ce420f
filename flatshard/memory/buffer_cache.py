"""``BufferCache``: reuses the memory of a result once nobody else refers to it.

glibc returns the memory of a tensor of ``GLIBC_LIMIT_BYTES`` or more to the operating system, and
the next one costs a page fault for every few kilobytes. Accelerators' allocators keep memory
themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)

GLIBC_LIMIT_BYTES = 32 << 20
"""From here on glibc maps tensors one by one, and unmaps them when they are freed."""


@functools.cache
def prepare_allocator() -> None:
    """Let the CPU's allocator keep the memory of a step for the next one."""
    # glibc's malloc gives freed memory back above a threshold, which it raises, up to 32 MiB, to
    # the size of what was freed, since more of that size may follow. In training it does, in every
    # step. Where users set the thresholds (MALLOC_TRIM_THRESHOLD_), or use another allocator, this
    # changes nothing.
    torch.empty(GLIBC_LIMIT_BYTES - 4096, dtype=torch.uint8)


class BufferCache:
    """Hands out 1-D tensors of one kind, the same memory again where that is unused.

    Keeps one at most. ``new`` makes tensors; None: on the device asked for.
    """

    def __init__(self, new: Callable[[int, torch.dtype], Tensor] | None = None) -> None:
        self._new = new
        self._kept: Tensor | None = None

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor, ``(numel,)``."""
        kept = self._kept
        if kept is not None:
            fits = kept.numel() == numel and kept.dtype == dtype and kept.device == device
            if fits and _is_unused(kept):
                return kept.detach()  # an alias, which counts as a use
        self.give_back()
        if self._new is not None:
            new, is_worth_it = self._new(numel, dtype), True
        else:
            new = torch.empty(numel, dtype=dtype, device=device)
            # Smaller ones the allocator keeps, and they serve other things meanwhile.
            is_worth_it = new.nbytes >= GLIBC_LIMIT_BYTES and device.type == "cpu"
        if _use_count is None or not is_worth_it or self._kept is not None:
            return new
        self._kept = new
        return new.detach()

    def give_back(self) -> None:
        """Free what is kept, unless somebody else uses it."""
        if self._kept is not None and _is_unused(self._kept):
            self._kept = None


def num_uses(tensor: Tensor) -> int:
    """How many tensors and others have a tensor's storage, with this call; 0: torch cannot tell."""
    return int(_use_count(tensor.untyped_storage()._cdata)) if _use_count is not None else 0


_ALONE = num_uses(torch.empty(1))


def _is_unused(kept: Tensor) -> bool:
    return num_uses(kept) <= _ALONE
