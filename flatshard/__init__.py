"""Flat-parameter fully sharded data parallel training for PyTorch."""

from importlib import import_module
from typing import Any

from flatshard.comm.work import CollectiveError
from flatshard.module.construction import leave_empty
from flatshard.optimizer.adapter import declare_elementwise
from flatshard.options import BackwardPrefetch, CPUOffload, OffloadError, ShardingStrategy
from flatshard.options.extras import extra
from flatshard.options.precision import MixedPrecision, ReduceMode
from flatshard.tensor import operators  # noqa: F401  (registers operators)
from flatshard.tensor.flat_parameter import FlatParameter
from flatshard.tensor.sharded_tensor import FlatShardTensor
from flatshard.wrapper import ShardedWrapper, sharded_modules

__version__ = "0.3.0"

__all__ = ["BackwardPrefetch", "CPUOffload", "MixedPrecision", "ReduceMode", "ShardingStrategy"]
__all__ += ["FlatParameter", "FlatShardTensor", "ShardedWrapper", "sharded_modules"]
__all__ += ["CollectiveError", "OffloadError", "declare_elementwise", "leave_empty"]


def __getattr__(name: str) -> Any:
    # Import these modules on demand: `import flatshard` must work even if the folder of an extra
    # was deleted.
    if name == "plan":
        return extra("plan", "flatshard.plan()").plan
    if name in ("WeightChanges", "apply_changes", "full_tensors"):
        return getattr(import_module("flatshard.weights"), name)
    if name in ("checkpoint", "collectives", "weights", "wrap"):
        return import_module(f"flatshard.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
