"""A list of the collectives that this rank starts, under the public name ``flatshard.collectives``.

The code is in the extra ``flatshard.extras.recording``. Without the extra, importing this module
raises.
"""

from flatshard.options.extras import extra

extra("recording", "flatshard.collectives")

from flatshard.extras.recording import Event, record  # noqa: E402

__all__ = ["Event", "record"]
