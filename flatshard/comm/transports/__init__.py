"""One class for each way of moving bytes between ranks, with one interface."""

from flatshard.comm.transports.base import Members, Transport
from flatshard.comm.transports.local import LocalTransport
from flatshard.comm.transports.native import NativeTransport
from flatshard.comm.transports.shared_memory import SharedMemoryTransport
from flatshard.comm.transports.sockets import SocketTransport

TRANSPORTS: tuple[type[Transport], ...] = (
    SharedMemoryTransport,
    SocketTransport,
    NativeTransport,
)
"""In order of preference: the first one that a group has and that accepts a tensor moves it."""

__all__ = ["TRANSPORTS", "LocalTransport", "Members", "Transport"]
