"""Flat-parameter fully sharded data parallel training for PyTorch."""

from flatshard import elementwise, reductions  # noqa: F401  (they enter their operations)
from flatshard.config import BackwardPrefetch, ShardingStrategy
from flatshard.flat_param import FlatParameter
from flatshard.materialise import leave_empty
from flatshard.offload import CPUOffload
from flatshard.optim import declare_elementwise
from flatshard.pending import CollectiveError
from flatshard.precision import MixedPrecision
from flatshard.shard_tensor import FlatShardTensor
from flatshard.wrapper import ShardedWrapper, sharded_modules

__version__ = "0.1.0"

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CollectiveError",
    "FlatParameter",
    "FlatShardTensor",
    "MixedPrecision",
    "ShardedWrapper",
    "ShardingStrategy",
    "declare_elementwise",
    "leave_empty",
    "sharded_modules",
]
