"""Tensors in what modules are called with and return, however deep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

_OPAQUE = (type(None), bool, int, float, complex, str, bytes, type, nn.Module)


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Tensors of arguments or outputs: in containers, and in the attributes of plain objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item, depth)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth)
    elif depth and not isinstance(value, _OPAQUE):
        leaves = pytree.tree_leaves(value)
        if len(leaves) != 1 or leaves[0] is not value:
            yield from tensors_in(leaves, depth - 1)
        elif hasattr(value, "__dict__"):
            yield from tensors_in(list(vars(value).values()), depth - 1)
