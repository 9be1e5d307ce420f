"""``CheckpointChunks``: what ``torch.distributed.checkpoint`` (DCP) asks of a sharded tensor.

The protocol is DTensor's (torch.distributed.checkpoint.planner_helpers, in torch 2.11 to 2.15), and
needs no collective: a rank lists the boxes of the full tensor that it holds, which are views of its
range, so that loading writes in place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatshard.plan.boxes import Box, boxes_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from flatshard.tensor.shard_spec import ShardSpec


class CheckpointChunks:
    """A tensor that reports the full shape, and holds elements in memory order, as boxes."""

    local: Tensor
    spec: ShardSpec

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        # Here and below, as the package is slow to load.
        from torch.distributed.checkpoint import metadata, planner

        # Never an empty chunk: DCP keeps the first of those with one name and offset.
        chunks = self._chunks()
        _check_writer(fqn, len(chunks))
        data = metadata.TensorProperties(dtype=self.local.dtype)
        size = self.shape  # type: ignore[attr-defined]
        return [
            planner.WriteItem(
                metadata.MetadataIndex(fqn, chunk.offsets),
                planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, data, size),
            )
            for chunk in chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # DCP asks on all ranks before it loads. A rank that holds nothing of the parameter gets no
        # write, but must unshard again, as those do whose shards are written.
        torch.autograd.graph.increment_version(self.local)
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        box = next(box for box in self._boxes() if box.offsets == tuple(index.offset or ()))
        part = self.local.detach()[box.position : box.position + box.numel]
        # In memory the dimensions may lie in another order.
        order = self.spec.order
        return part.view([box.sizes[d] for d in order]).permute(
            [order.index(d) for d in range(len(order))]
        )

    def _boxes(self) -> Iterator[Box]:
        spec = self.spec
        boxes = boxes_of(spec.shape, spec.offset, spec.offset + spec.numel, spec.order)
        if spec.tensor_parallel is None:
            return boxes
        first = spec.tensor_parallel.offsets()
        return (
            replace(box, offsets=tuple(map(sum, zip(box.offsets, first, strict=True))))
            for box in boxes
        )


def _check_writer(fqn: str, num_boxes: int) -> None:
    """Raise for torch's safetensors writer where it would write wrong values, and say nothing."""
    frame = sys._getframe(2)
    while frame is not None and "storage_writer" not in frame.f_locals:
        frame = frame.f_back  # type: ignore[assignment]
    writer = None if frame is None else frame.f_locals["storage_writer"]
    if "HuggingFaceStorageWriter" not in (base.__name__ for base in type(writer).__mro__):
        return
    # It keeps one box of a tensor from each rank; without `save_distributed` from all together.
    if num_boxes > 1 or not writer.save_distributed:  # type: ignore[union-attr]
        raise RuntimeError(
            f"{fqn!r}: this rank holds {num_boxes} boxes of it. HuggingFaceStorageWriter would "
            "write one from each rank with save_distributed=True, and one in all without it. Call "
            "flatshard.checkpoint.save_safetensors(model, path)."
        )
