"""What is known of plain tensors, which are torch's or the user's; a note ends with its tensor."""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flatshard.memory.disk import DiskMemory

# Gradients that are not reduced, or lack what is not: the name of their unit.
UNREDUCED: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
# Parameters that are no `FlatShardTensor`: where optimizers keep state of their shape, if on disk.
STATE_DISKS: MutableMapping[Tensor, DiskMemory] = WeakIdKeyDictionary()
