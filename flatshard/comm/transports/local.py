"""``LocalTransport``: of a rank that is alone, which sends nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from flatshard.comm.requests import Gather, ReduceScatter
from flatshard.comm.transports.base import Members, Transport
from flatshard.comm.work import AsyncWork


class LocalTransport(Transport):
    """Copies, on the current stream."""

    name = "nothing"

    @classmethod
    def connect(cls, members: Members) -> LocalTransport:
        return cls()

    def accepts(self, device: torch.device, tag: int) -> bool:
        return True

    def stream_waits(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def sum_dtype(self, dtype: torch.dtype, *, fixed_order: bool) -> torch.dtype:
        return dtype  # nothing is added

    def gather(self, request: Gather, op_name: str) -> AsyncWork:
        request.out.copy_(request.shard)
        return AsyncWork([], op_name)

    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
        raise NotImplementedError("one rank's gradients are their average")

    def all_reduce(self, buffer: Tensor, op_name: str) -> AsyncWork:
        return AsyncWork([], op_name, [buffer])
