"""Records the collectives that a rank starts; see ``flatshard.comm.communicator``."""

from flatshard.comm.communicator import Event, record

__all__ = ["Event", "record"]
