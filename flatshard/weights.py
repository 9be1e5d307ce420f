"""Full weights of a sharded model, under the public name ``flatshard.weights``.

The code is in the extra ``flatshard.extras.weights``. Without the extra, importing this module
raises.
"""

from flatshard.options.extras import extra

extra("weights", "flatshard.full_tensors()")

from flatshard.extras.weights import (  # noqa: E402
    TensorName,
    WeightChange,
    WeightChanges,
    apply_changes,
    full_tensors,
)

__all__ = ["TensorName", "WeightChange", "WeightChanges", "apply_changes", "full_tensors"]
