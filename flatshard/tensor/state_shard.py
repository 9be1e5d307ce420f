"""``StateShard``: this rank's part of a parameter, or of state of its shape, in a state dict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import FlatShardTensor, Origin


class StateShard(FlatShardTensor):
    """A sharded tensor that ``torch.distributed.checkpoint.async_save`` can copy to host memory.

    What has no storage, it makes anew by ``new_empty``, and copies the attributes of.
    """

    @staticmethod
    def __new__(cls, local: Tensor, spec: ShardSpec, *_: Any) -> StateShard:  # type: ignore[override]
        """Wrap ``local``, ``(spec.numel,)``; shows the shape without tensor parallelism."""
        split = spec.tensor_parallel
        if split is None:
            return FlatShardTensor.__new__(cls, local, spec)  # type: ignore[return-value]
        self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, split.shape, strides=split.stride, dtype=local.dtype, device=local.device
        )
        self.local, self.spec, self.flat = local, spec, None
        self.origin = Origin()
        return self  # type: ignore[no-any-return]

    def of_local_shape(self) -> FlatShardTensor:
        """The same with the shape that the parameter has on this rank."""
        return FlatShardTensor(self.local, self.spec).with_role(self.role)

    def data_ptr(self) -> int:
        """None: the range that it holds is an attribute."""
        return 0

    def new_empty(self, size: Sequence[int], **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Unwritten memory: sharded alike if ``size`` is the full tensor's."""
        if tuple(size) != tuple(self.shape):
            return self.local.new_empty(size, **kwargs)
        local = self.local.new_empty(self.local.shape, **kwargs)
        return type(self)(local, self.spec).with_role(self.role)


def state_shard(local: Tensor, spec: ShardSpec, role: str) -> Tensor:
    """Entry of a state dict that shares the memory of ``local``, ``(spec.numel,)``.

    ``role``: relation of ``local`` to the parameter, as in ``FlatShardTensor``.
    """
    if not math.prod(spec.shape):  # no rank has a chunk of it to write
        return local.new_empty(spec.shape)
    return StateShard(local.detach(), spec.detached()).with_role(role)
