"""One class for each way of moving bytes between ranks, with one interface."""

from flatshard.comm.transports.base import (
    BufferRequest,
    Gather,
    LocalTransport,
    Members,
    ReduceScatter,
    Transport,
)
from flatshard.comm.transports.native import NativeTransport
from flatshard.comm.transports.sockets import SocketTransport
from flatshard.options.extras import default_extra


def transport_kinds() -> list[type[Transport]]:
    """In order of preference: the first one that a group has and that accepts a tensor moves it."""
    shared_memory = default_extra("shared_memory")
    first = [] if shared_memory is None else [shared_memory.SharedMemoryTransport]
    return [*first, SocketTransport, NativeTransport]


__all__ = [
    "BufferRequest",
    "Gather",
    "LocalTransport",
    "Members",
    "ReduceScatter",
    "Transport",
    "transport_kinds",
]
