"""Full weights of a sharded model, under the public name ``flatshard.weights``.

The code is in the extra ``flatshard.extras.weights``. Without the extra, importing this module
raises.
"""

from flatshard.options.extras import extra

extra("weights", "flatshard.full_tensors()")

from flatshard.extras.weights import TensorName, full_tensors  # noqa: E402

__all__ = ["TensorName", "full_tensors"]
