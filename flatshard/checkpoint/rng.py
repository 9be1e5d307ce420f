"""Random number generators of a rank: torch's, the GPU's, Python's and numpy's."""

from __future__ import annotations

import random
import sys
import zlib
from typing import Any

import torch

Streams = dict[str, Any]


def streams(device: torch.device) -> Streams:
    """The states of this process's generators, in what ``weights_only`` loads."""
    found: Streams = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy.random")  # nobody drew from it if nobody imported it
    if numpy is not None:
        kind, key, *rest = numpy.get_state()
        found["numpy"] = (kind, key.tolist(), *rest)
    return found


def restore(found: Streams, device: torch.device) -> None:
    """Continue these streams; what this process lacks (a GPU, numpy) is left out."""
    torch.set_rng_state(found["torch"])
    random.setstate(found["python"])
    if "cuda" in found and device.type == "cuda":
        torch.cuda.set_rng_state(found["cuda"], device)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and "numpy" in found:
        numpy.set_state(found["numpy"])


def begin(rank: int, found: Streams) -> None:
    """Seed the generators of a rank that the checkpoint does not know, by rank 0's and its own."""
    seed = zlib.crc32(bytes(found["torch"].tolist())) + rank
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed % 2**32)
