"""Prediction of a model's memory, under the public name ``flatshard.memory_plan``.

The code is in the extra ``flatshard.extras.plan``. Without the extra, importing this module raises.
"""

from flatshard.options.extras import extra

extra("plan", "flatshard.memory_plan")

from flatshard.extras.plan import *  # noqa: E402, F403
from flatshard.extras.plan import __all__ as __all__  # noqa: E402
