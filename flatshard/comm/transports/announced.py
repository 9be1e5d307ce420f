"""What ranks say on a group before they send anything whose size differs: who they are, what next.

gloo ends the process, with SIGABRT, where ranks that match by order send one another more than was
expected.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch
import torch.distributed as dist

from flatshard.comm.deadlock.history import REMEDY, first_difference
from flatshard.comm.errors import CollectiveError

# Newer names of the same collectives; some versions warn of the older ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_WORDS = 20  # of 8 bytes: a number, and what the ranks are about to do


def announce(what: str, number: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Every rank's ``number``, in rank order, once all are about to do the same.

    Collective: all ranks of ``group``; the backend moves tensors on ``device``.

    Raises:
        CollectiveError: on all ranks, where they are about to do different things.
    """
    text = what.encode()[: 8 * (_WORDS - 1)].ljust(8 * (_WORDS - 1))
    mine = torch.frombuffer(bytearray(number.to_bytes(8, "little") + text), dtype=torch.int64)
    everyone = torch.zeros(group.size() * _WORDS, dtype=torch.int64, device=device)
    all_gather_single(everyone, mine.to(device), group=group)
    rows = everyone.cpu().view(-1, _WORDS)
    texts = [_bytes(row[1:]).decode(errors="replace").rstrip() for row in rows]
    ranks = dist.get_process_group_ranks(group)
    differ = first_difference({r: [(0, text)] for r, text in zip(ranks, texts, strict=True)})
    if differ is not None:
        raise CollectiveError(f"the ranks are in different collectives, {differ}. {REMEDY}")
    return rows[:, 0].tolist()


def gather_objects(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Every rank's ``value`` (picklable), in rank order; the backend moves tensors on ``device``.

    Collective: all ranks of ``group``.
    """
    # Not torch's: that needs numpy. Two collectives: all ranks must send equally many bytes, and do
    # not know the longest.
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    lengths = announce("what ranks compare", data.numel(), group, device)
    longest = max(lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    everything = torch.zeros(group.size() * longest, dtype=torch.uint8, device=device)
    all_gather_single(everything, padded, group=group)
    rows = everything.cpu().view(group.size(), longest)
    return [pickle.loads(_bytes(row[:length])) for row, length in zip(rows, lengths, strict=True)]


def _bytes(row: torch.Tensor) -> bytes:
    return ctypes.string_at(row.data_ptr(), row.nbytes)
