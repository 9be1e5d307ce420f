"""Records the collectives that a rank starts; see ``flatshard.extras.recording.event_log``."""

from flatshard.options.extras import extra

extra("recording", "flatshard.collectives")

from flatshard.extras.recording.event_log import Event, record  # noqa: E402

__all__ = ["Event", "record"]
