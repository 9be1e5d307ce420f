"""Full weights of a sharded model, under the public name ``flatshard.weights``.

The code is in the folder ``flatshard/extras/weights``. If a distribution of flatshard lacks the
folder, importing this module raises.
"""

from flatshard.options.extras import extra

extra("weights", "flatshard.full_tensors()")

from flatshard.extras.weights import *  # noqa: E402, F403
from flatshard.extras.weights import __all__ as __all__  # noqa: E402
