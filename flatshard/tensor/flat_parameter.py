"""``FlatParameter``: one rank's shard of a unit's parameters, as one 1-D parameter.

And ``view_of`` and ``part_of``: an original parameter in a flat tensor, and a shard's part of it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import hooks as torch_hooks

from flatshard.plan.layout import FlatLayout, LocalSpan, ParamSpan


def view_of(flat: Tensor, span: ParamSpan) -> Tensor:
    """The part of a whole flat tensor that ``span`` names, in the original's shape and strides.

    Args:
        flat: ``(padded_numel,)``.
        span: the original parameter's place.
    """
    return flat.as_strided(span.shape, span.strides, flat.storage_offset() + span.start)


def part_of(tensor: Tensor, span: ParamSpan, local: LocalSpan) -> Tensor:
    """The range ``local`` of a whole original parameter, ``(local.numel,)``; a view if it can be.

    Args:
        tensor: of the parameter's shape, with any strides.
        span: the parameter's place.
        local: which of its elements, in memory order.
    """
    return tensor.permute(span.order).reshape(-1)[local.offset : local.offset + local.numel]


class FlatParameter(nn.Parameter):
    """What ``parameters()`` yields per segment with ``use_orig_params=False``.

    A plain 1-D tensor, ``(flat_layout.shard_numel,)``. Carries a layout and nothing else.

    Attributes:
        flat_layout: where the original parameters lie in the concatenation of all shards.
        rank: whose shard this is, within the shard group.
        flat: the tensor whose memory it shows.
    """

    flat_layout: FlatLayout
    rank: int
    flat: Tensor
    post_accumulate_hooks: OrderedDict[int, Callable[[Any], None]]
    _aliases: weakref.WeakValueDictionary[int, Tensor]

    def __new__(
        cls, data: Tensor, requires_grad: bool, layout: FlatLayout, rank: int
    ) -> FlatParameter:
        """Count ``data``, ``(flat_layout.shard_numel,)``, as a parameter without copying."""
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.flat_layout = layout
        self.rank = rank
        self.flat = data
        self.post_accumulate_hooks = OrderedDict()
        self._aliases = weakref.WeakValueDictionary()
        return self

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The shard without autograd, sharing the version counter. Assigning copies."""
        alias = self.detach()
        self._aliases[id(alias)] = alias
        return alias

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise RuntimeError(
                f"{self!r}: expected data of shape {tuple(self.shape)}, {self.dtype} on "
                f"{self.device}, got {tuple(value.shape)}, {value.dtype} on {value.device}. "
                "Convert the whole wrapper: model.to(...)."
            )
        with torch.no_grad():
            # What `.data` gave before keeps its values, as it does where data is replaced.
            for alias in list(self._aliases.values()):
                torch._C.TensorBase.data.__set__(alias, alias.clone())  # type: ignore[attr-defined]
            self._aliases.clear()
            self.copy_(value)

    def point_at(self, shard: Tensor) -> None:
        """Show other memory, of any dtype and device, keeping this object's identity."""
        torch._C.TensorBase.data.__set__(self, shard)  # type: ignore[attr-defined]
        self.flat = shard

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> NoReturn:  # type: ignore[override]
        """Not available: a flat parameter takes no part in autograd, its originals do.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{self!r} never meets autograd, so the hook would not be called. Hook the original "
            "parameters: wrap with use_orig_params=True."
        )

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Call ``hook`` with this parameter once its reduced gradient is in ``.grad``."""
        handle = torch_hooks.RemovableHandle(self.post_accumulate_hooks)
        self.post_accumulate_hooks[handle.id] = hook
        return handle

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
