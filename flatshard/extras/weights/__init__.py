"""``full_tensors``: iterates over the full tensors of a sharded model, one unit at a time.

``norms``: norms of all parameters, gradients or updates, in one collective. ``WeightChanges``: only
the weights that have changed.
"""

from flatshard.extras.weights.changes import WeightChange, WeightChanges, apply_changes
from flatshard.extras.weights.norms import norms as norms
from flatshard.extras.weights.reading import MergedLora as MergedLora
from flatshard.extras.weights.reading import TensorName, full_tensors

__all__ = ["TensorName", "WeightChange", "WeightChanges", "apply_changes", "full_tensors"]
