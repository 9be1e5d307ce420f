"""``FlatParameter``: the parameters of a unit, flattened, padded, and cut over the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from flatshard.plan.layout import FlatLayout
from flatshard.plan.module_tree import unit_text
from flatshard.tensor.original_param import OriginalParam


class FlatParameter(nn.Parameter):
    """Parameters of one unit as a padded 1-D parameter, of which each rank holds a chunk.

    As a tensor it is this rank's chunk, ``(flat_layout.shard_numel,)``, which optimizers update
    through the original parameters. ``print`` it to see what lies where.

    Attributes:
        flat_layout: where each original parameter lies, how much is padding, and who holds what.
        rank: which chunk this rank holds, of ``flat_layout.world_size``.
    """

    flat_layout: FlatLayout
    rank: int
    _params: Sequence[weakref.ref[OriginalParam]]

    @staticmethod
    def __new__(
        cls, chunk: Tensor, layout: FlatLayout, rank: int, params: Sequence[OriginalParam]
    ) -> FlatParameter:
        """Let ``chunk``, ``(layout.shard_numel,)``, be this rank's chunk, without copying."""
        # Autograd knows the full parameters over the unsharded buffer, and never the chunk.
        self: FlatParameter = Tensor._make_subclass(cls, chunk, False)
        self.flat_layout, self.rank = layout, rank
        # Weakly: they refer to views of the chunk, and Python's collector sees no such cycle.
        self._params = [weakref.ref(param) for param in params]
        return self

    @property
    def params(self) -> list[OriginalParam]:
        """The original parameters, in the order of ``flat_layout.spans``; none without a model."""
        found = (param() for param in self._params)
        return [param for param in found if param is not None]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        layout = self.flat_layout
        chunks = f"{layout.world_size} chunk{'s' if layout.world_size > 1 else ''}"
        unit = unit_text(self.params[0].spec.unit) if self.params else "a model that is gone"
        lines = [
            f"FlatParameter of {unit}: {self.dtype} on {self.device}, "
            f"{layout.numel:,} elements + {layout.padding_numel:,} padding, "
            f"{chunks} of {layout.shard_numel:,}"
        ]
        for rank in range(layout.world_size):
            begin, end = layout.shard_range(rank)
            here = ", on this rank" if rank == self.rank else ""
            lines.append(f"  chunk {rank}: elements {begin:,} to {end:,}{here}")
            for param in self.params:
                local = layout.local_span(param.index, rank)
                if local.numel:
                    part = (
                        ""
                        if local.numel == param.span.numel
                        else (f", its elements {local.offset:,} to {local.offset + local.numel:,}")
                    )
                    shape = tuple(param.span.shape)
                    lines.append(
                        f"    {local.start:,} to {local.end:,}: {param.name!r} {shape}{part}"
                    )
        return "\n".join(lines)
