"""``SecondaryShard``: a larger part of a flat parameter, from which nearby ranks all-gather.

Two settings use secondary shards, so that most all-gathers need only nearby ranks:

- ``reshard_after_forward=k``: forward all-gathers over all ranks, and backward over k ranks. The
  secondary shard is copied from the unsharded buffer after forward, and dropped after backward
  (hierarchical partitioning of ZeRO++, arXiv 2306.10209).
- ``HYBRID_SHARD_OP``: gradients and optimizer state are split over all nodes. The secondary shard
  is all-gathered across nodes once after each optimizer step; other all-gathers stay in the node.
"""

from torch import Tensor

from flatshard.comm.transports import Gather
from flatshard.comm.work import AsyncWork
from flatshard.tensor.flat_parameter import FlatParamPlan


class SecondaryShard:
    """A part of a flat parameter. The parts of a few nearby ranks make up the flat parameter."""

    def __init__(self, plan: FlatParamPlan) -> None:
        self._plan, topology = plan, plan.topology
        self._inter_group = topology.inter_group
        # Whether the secondary shard is kept only from forward to the end of backward.
        self._is_temporary = topology.post_forward_group is not None
        self._comm = topology.post_forward_group or topology.intra_group
        self._tag = self._comm.new_tag(self)
        self._part: Tensor | None = None
        # Version of the shards in `_part`, once `_refresh` has ended. -1: empty or incomplete.
        self._version = -1
        self._refresh: AsyncWork | None = None

    def is_current(self, version: int) -> bool:
        return self._part is not None and self._version == version

    @property
    def nbytes(self) -> int:
        return 0 if self._part is None else self._part.nbytes

    @property
    def waits_for_backward(self) -> bool:
        return self._is_temporary and self._part is not None

    def cut(self, buffer: Tensor, version: int) -> None:
        """Keep this rank's part of an unsharded buffer, ``(padded_numel,)``, for backward."""
        if self._is_temporary and not self.is_current(version):
            self._part = buffer.chunk(self._comm.size)[self._comm.rank].clone()
            self._version = version

    def end_backward(self) -> None:
        if self._is_temporary:
            self.drop()

    def begin_refresh(self, source: Tensor, version: int, tag: int) -> None:
        """Start the all-gather across nodes that fills the secondary shard from ``source``.

        Nothing may write to ``source``, this rank's shard, until the other ranks have received it.
        Collective: the ranks of the group across nodes (inter group).
        """
        self.finish_refresh()
        if self._part is None:
            self._part = source.new_empty(source.numel() * self._inter_group.size)
        self._refresh = self._inter_group.all_gather(
            Gather(source, self._part, self._plan.unit_name, tag, "this node")
        )
        self._version = version

    def finish_refresh(self) -> None:
        """Wait until the secondary shard is complete.

        Raises CollectiveError if the all-gather across nodes failed.
        """
        refresh, self._refresh = self._refresh, None
        if refresh is not None:
            try:
                refresh.wait(self._plan.pending_sends)
            except Exception:
                # Mark the secondary shard as incomplete, so that it is all-gathered again.
                self._version = -1
                raise

    def gather(self, out: Tensor, purpose: str) -> AsyncWork:
        """Start to all-gather secondary shards into ``out``, ``(padded_numel,)``.

        Collective: the nearby ranks, whose secondary shards together are the flat parameter.
        """
        self.finish_refresh()
        assert self._part is not None, "the secondary shard was filled"
        request = Gather(self._part, out, self._plan.unit_name, self._tag, purpose)
        return self._comm.all_gather(request)

    def drop(self) -> None:
        self.finish_refresh()
        self._part, self._version = None, -1
