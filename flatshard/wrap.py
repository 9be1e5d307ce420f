"""Wrap policies, under the public name ``flatshard.wrap``. A policy chooses the units of a model.

The code is in ``flatshard.units.policies``.
"""

from flatshard.units.policies import *  # noqa: F403
from flatshard.units.policies import __all__ as __all__
