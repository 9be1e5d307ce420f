"""Extra: ranks on one host read one another's memory, and map one another's shards.

Used for ``collectives="auto"`` wherever this folder is installed and the system permits it. Without
this folder, ``collectives="auto"`` uses sockets.
"""

from flatshard.extras.shared_memory.transport import SharedMemoryTransport

__all__ = ["SharedMemoryTransport"]
