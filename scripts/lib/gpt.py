"""The small GPT that several scripts train."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Preset:
    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int = 2  # sequences per rank
    expansion: int = 4  # width of the hidden layer, as a multiple of `width`
    qkv_bias: bool = True


class Block(nn.Module):
    def __init__(self, preset: Preset) -> None:
        super().__init__()
        width, hidden = preset.width, preset.expansion * preset.width
        self.heads = preset.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=preset.qkv_bias)
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.tokens = nn.Embedding(preset.vocabulary, preset.width)
        self.positions = nn.Embedding(preset.sequence, preset.width)
        self.blocks = nn.ModuleList(Block(preset) for _ in range(preset.layers))
        self.norm = nn.LayerNorm(preset.width)
        self.head = nn.Linear(preset.width, preset.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
