"""Records the collectives that a rank starts; see ``flatshard.comm.communicator``."""

from flatshard.comm.event_log import Event, record

__all__ = ["Event", "record"]
