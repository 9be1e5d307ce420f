"""``FlatParameter``: one rank's shard of a unit's parameters, as one 1-D parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flatshard.layout import FlatLayout


class FlatParameter(nn.Parameter):
    """What ``parameters()`` yields per segment with ``use_orig_params=False``.

    A plain 1-D tensor, ``(flat_layout.shard_numel,)``. Carries a layout and nothing else.

    Attributes:
        flat_layout: where the original parameters lie in the concatenation of all shards.
        rank: whose shard this is, within the shard group.
    """

    flat_layout: FlatLayout
    rank: int

    def __new__(
        cls, data: Tensor, requires_grad: bool, layout: FlatLayout, rank: int
    ) -> FlatParameter:
        """Count ``data``, ``(flat_layout.shard_numel,)``, as a parameter without copying."""
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.flat_layout = layout
        self.rank = rank
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        """A copy with storage of its own and the same layout."""
        if id(self) not in memo:
            data = self.detach().clone()
            memo[id(self)] = type(self)(data, self.requires_grad, self.flat_layout, self.rank)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Names and sizes instead of a million values."""
        names = ", ".join(span.name for span in self.flat_layout.spans)
        return (
            f"FlatParameter(rank {self.rank} of {self.flat_layout.world_size}, {self.numel()} of "
            f"{self.flat_layout.padded_numel} elements, {self.dtype}: {names})"
        )
