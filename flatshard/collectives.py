"""A list of the collectives that this rank starts, under the public name ``flatshard.collectives``.

The code is in the folder ``flatshard/extras/recording``. If a distribution of flatshard lacks the
folder, importing this module raises.
"""

from flatshard.options.extras import extra

extra("recording", "flatshard.collectives")

from flatshard.extras.recording import Event, record  # noqa: E402

__all__ = ["Event", "record"]
