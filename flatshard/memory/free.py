"""``free_bytes``: how much memory of a device or of the host is free."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_HOST = Path("/proc/meminfo")
# What a container may use, and uses; "max" where it has no limit.
_LIMIT, _USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on the device now; None where that cannot be known."""
    if device.type == "cuda":
        # What torch's allocator keeps for reuse is free as well.
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    if device.type != "cpu":
        return None
    found = re.search(r"^MemAvailable: +(\d+) kB", _read(_HOST), re.MULTILINE)
    if found is None:
        return None
    free, limit = int(found[1]) * 1024, _read(_LIMIT).strip()
    return min(free, int(limit) - int(_read(_USED))) if limit.isdecimal() else free


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no Linux, or no container
        return ""
