"""``OffloadTarget``: device, host or disk, where a shard, its gradient and its state live."""

from __future__ import annotations

import torch
from torch import Tensor

from flatshard.memory import mapped_files
from flatshard.memory.mapped_files import Files


class OffloadTarget:
    """Memory in which tensors live between uses. This target leaves them where they are made.

    Attributes:
        is_device: whether nothing is copied.
        files: makes the file of a shard that an unsharded buffer shows.
    """

    is_device = True
    files: Files = mapped_files

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor in the target, ``(numel,)``; its values are undefined."""
        return torch.empty(numel, dtype=dtype)

    def take_in(self, tensor: Tensor) -> Tensor:
        """A tensor's values in the target; the tensor itself if it is there."""
        return tensor

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, in the target if the tensor is there."""
        return tensor.clone()

    def page_in(self, *tensors: Tensor) -> None:
        """Prepare for writing all of the tensors that are in the target, in one go."""

    def page_out(self, *tensors: Tensor) -> None:
        """Give memory back that tensors do not need until their next use; values stay."""

    def reserve(self, nbytes: int, what: str) -> None:
        """Keep room for tensors to come, which ``what`` names. Raises OffloadError."""

    def keep_state_of(self, param: Tensor) -> None:
        """Keep state per element of a plain parameter; other parameters' specs name the target."""
