"""``Float8Shard``: a shard on its way to the other ranks in float8, with a scale per block.

As in ZeRO++ (arXiv 2306.10209): what a block's largest element decides is lost for that block only.
Scales are powers of two, so that a scaled float8 number is exact in bfloat16 and wider: quantising
rounds once, to the float8 type's own relative precision, and nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_NUMEL = 256
_ALIGNMENT = 16


@dataclass(frozen=True)
class Float8Shard:
    """The form of one rank's part: ``[scales | elements | padding]``, bytes."""

    dtype: torch.dtype  # float8, of the elements; the scales are float32
    numel: int  # elements, ``shard_numel``

    @property
    def num_blocks(self) -> int:
        return -(-self.numel // BLOCK_NUMEL)

    @property
    def nbytes(self) -> int:
        nbytes = self.num_blocks * torch.float32.itemsize + self.numel
        return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def pack(self, shard: Tensor) -> Tensor:
        """Quantise ``(numel,)`` to ``(nbytes,)``, uint8. Blocks that are not finite are NaN."""
        blocks = shard.new_zeros(self.num_blocks * BLOCK_NUMEL, dtype=torch.float32)
        blocks[: self.numel].copy_(shard)
        blocks = blocks.view(self.num_blocks, BLOCK_NUMEL)
        largest = blocks.abs().amax(1) / torch.finfo(self.dtype).max
        scales = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
        scales = torch.where(largest.isfinite(), scales, torch.nan)
        packed = shard.new_zeros(self.nbytes, dtype=torch.uint8)
        own_scales, elements = self._split(packed)
        own_scales.copy_(scales)
        elements.copy_((blocks / scales[:, None]).view(-1)[: self.numel])
        return packed

    def unpack(self, everything: Tensor, out: Tensor) -> None:
        """Undo ``pack`` for all ranks' parts: ``(ranks * nbytes,)`` to ``(ranks * numel,)``."""
        full_blocks = self.numel // BLOCK_NUMEL
        # All ranks' at once: an accelerator takes longer to begin a small kernel than to run it.
        scales, elements = self._split(everything.view(-1, self.nbytes))
        parts = out.view(-1, self.numel)
        parts.copy_(elements)
        scales = scales.to(parts.dtype)
        blocks = parts[:, : full_blocks * BLOCK_NUMEL].unflatten(1, (full_blocks, BLOCK_NUMEL))
        blocks.mul_(scales[:, :full_blocks, None])
        if full_blocks < self.num_blocks:
            parts[:, full_blocks * BLOCK_NUMEL :].mul_(scales[:, full_blocks:])

    def _split(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        first = self.num_blocks * torch.float32.itemsize
        return (
            packed[..., :first].view(torch.float32),
            packed[..., first : first + self.numel].view(self.dtype),
        )
