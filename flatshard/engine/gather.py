"""``SecondaryShard``: a larger part of the parameters than the shard, to gather from nearby ranks.

Two strategies keep one. Where forward gathers over all ranks and backward over fewer, it is cut out
of the gathered buffer after forward and dropped after backward (hierarchical partitioning of
ZeRO++, arXiv 2306.10209). Where only optimizer state is split over all nodes, it is put together
from the nodes' shards once after each optimizer step, and every gather stays within the node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.comm.work import AsyncWork, PendingSends


class SecondaryShard:
    """This rank's part of what ``comm`` gathers.

    Attributes:
        comm: the ranks whose parts make up the whole.
        unsettled: what other ranks may still be taking from this one.
    """

    def __init__(self, comm: Communicator, unit_name: str) -> None:
        """Plan; allocates nothing."""
        self.comm = comm
        self.pending_sends = PendingSends()
        self._unit_name = unit_name
        self._tag = comm.new_tag()
        self._part: Tensor | None = None
        self._version = -1
        self._refresh: AsyncWork | None = None

    def is_current(self, version: int) -> bool:
        """Whether it holds, or will hold, the parameters as of ``version``."""
        return self._part is not None and self._version == version

    @property
    def nbytes(self) -> int:
        """Bytes that it takes now."""
        return 0 if self._part is None else self._part.numel() * self._part.element_size()

    def cut(self, buffer: Tensor, version: int) -> None:
        """Keep this rank's part of a gathered buffer, ``(padded_numel,)``."""
        if not self.is_current(version):
            self._part = buffer.chunk(self.comm.size)[self.comm.rank].clone()
            self._version = version

    def begin_refresh(
        self, source: Tensor, version: int, inter_group: Communicator, tag: int
    ) -> None:
        """Begin gathering the part from the shards of ``inter_group``, unless it is current.

        Collective: all ranks of ``inter_group``.

        Args:
            source: this rank's shard in the dtype to keep; not to be written before it is settled.
            version: the shard's.
            inter_group: the ranks whose shards make up the part.
            tag: from ``inter_group.new_tag()``, once.
        """
        if self.is_current(version):
            return
        self.finish_refresh()
        if self._part is None:
            self._part = source.new_empty(source.numel() * inter_group.size)
        self._refresh = inter_group.all_gather(
            source, self._part, unit_fqn=self._unit_name, tag=tag, purpose="this node"
        )
        self._version = version

    def finish_refresh(self) -> None:
        """Wait for what ``begin_refresh`` began.

        Raises:
            CollectiveError: a peer failed.
        """
        refresh, self._refresh = self._refresh, None
        if refresh is not None:
            try:
                refresh.wait(self.pending_sends)
            except Exception:
                self._version = -1
                raise

    def gather(self, out: Tensor, purpose: str) -> AsyncWork:
        """Begin filling ``out``, ``(padded_numel,)``. Collective: all ranks of ``comm``."""
        self.finish_refresh()
        assert self._part is not None, "there is a part to gather from"
        return self.comm.all_gather(
            self._part, out, unit_fqn=self._unit_name, tag=self._tag, purpose=purpose
        )

    def drop(self) -> None:
        """Give the memory back."""
        self.finish_refresh()
        self._part, self._version = None, -1

    def rename(self, unit_name: str) -> None:
        """Take another name for errors."""
        self._unit_name = unit_name


WHOLE = "whole tensors, which all ranks must ask for together (state_dict(), say),"
"""What such a gather is for, in errors."""


def gather_in_two(
    source: Tensor,
    out: Tensor,
    intra_group: Communicator,
    inter_group: Communicator,
    unit_fqn: str,
    tags: tuple[int, int],
) -> AsyncWork:
    """Begin filling ``out`` from all ranks' shards, first across, then within, keeping nothing.

    Collective: all ranks of both groups, at once; waits for the first of the two gathers.

    Args:
        source: this rank's shard, or something of its shape.
        out: what to fill, ``(padded_numel,)``.
        intra_group: the ranks within a node.
        inter_group: the ranks across nodes.
        unit_fqn: names the unit.
        tags: of ``intra_group`` and ``inter_group``.
    """
    with torch.no_grad():
        part = source.new_empty(source.numel() * inter_group.size)
        inter_group.all_gather(
            source, part, unit_fqn=unit_fqn, tag=tags[1], purpose=WHOLE, exact=True
        ).finish()
        return intra_group.all_gather(
            part, out, unit_fqn=unit_fqn, tag=tags[0], purpose=WHOLE, exact=True
        )
