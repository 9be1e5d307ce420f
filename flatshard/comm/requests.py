"""What units ask a ``Communicator`` for, and it a ``Transport``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flatshard.comm.flat_chunks import FlatChunks
from flatshard.memory.buffers import BufferMemory
from flatshard.memory.mapped_files import Files


class Gather(NamedTuple):
    """An all-gather of parameters, or of what a ``ReduceScatter`` gave."""

    shard: Tensor  # (shard_numel,); must not be written before it is sent
    out: Tensor  # (shard_numel * size,), same dtype and device
    unit_fqn: str
    tag: int  # the flat parameter's, from ``Communicator.new_tag``
    purpose: str  # what for, in errors
    memory: BufferMemory | None = None  # of ``allocate_unsharded``, if ``out`` is its buffer
    exact: bool = False  # do not round, whatever the wire dtype
    reduced: bool = False  # the second half of an all-reduce; in the order of reductions

    @property
    def what(self) -> str:
        """Which one it is, alike on all ranks; "": they may begin it in another order."""
        # Without the purpose: what ranks gather for different ones is the same.
        if self.reduced:
            return ""
        return f"all-gather of {self.unit_fqn or 'the root unit'!r}, flat parameter {self.tag}"


class ReduceScatter(NamedTuple):
    """An average over the ranks, of which each gets its part."""

    # ``shard_numel * size`` elements, in one chunk unless ``min_chunk_bytes`` allows more. A single
    # chunk is undefined afterwards; of several none is written.
    chunks: FlatChunks
    # (shard_numel,), in the dtype to add in. What no range of ``chunks`` covers is left as it is.
    out: Tensor
    unit_fqn: str
    tag: int
    fixed_order: bool = False  # add in rank order also where the backend would add
    kind: str = "reduce"  # "all_reduce": a ``reduced`` all-gather follows


class BufferRequest(NamedTuple):
    """Memory that an unsharded buffer needs."""

    numel: int  # over all ranks
    dtype: torch.dtype  # also while it is all-gathered
    device: torch.device
    tag: int  # the flat parameter's
    # What makes files, if this rank's shard may live in the memory too, so that all-gathers need
    # not copy it.
    shard_files: Files | None = None
