"""Extra: keeps shards, gradients and optimizer state in files (``CPUOffload(path=...)``).

Without this folder, ``path`` raises when a model is wrapped. Offload to host memory needs no extra.
"""

from flatshard.extras.disk import disk_steps as disk_steps
from flatshard.extras.disk.disk import DiskMemory

__all__ = ["DiskMemory"]
