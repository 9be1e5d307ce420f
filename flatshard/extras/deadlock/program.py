"""Finds the user's program in a wait: the program's line, its collectives and its other threads.

[Note: collectives of the program]
A thread in ``dist.barrier()`` waits in a Python frame of ``torch.distributed``. The frame's local
variables hold the group and the work, so torch needs no patch. torch's flight recorder numbers the
collectives of each gloo group in the same way on all ranks. The backend's sequence number of a
group differs between ranks, because sends and receives also raise the number. The detector ignores
a wait in a collective without a record. For a group without records, a rank publishes the sequence
number, which is never smaller than the recorder's number. The rank then seems to have begun at
least as many collectives as it really has. So the detector may miss a deadlock, but never takes a
wait that will end for a deadlock.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

OUR_THREADS = "flatshard"  # prefix of the names of flatshard's own threads

_C10D = distributed_c10d.__file__
_TORCH = str(Path(torch.__file__).parent) + os.sep
# Code of torch that begins no collective, because it reads data or compiles.
_HARMLESS = tuple(_TORCH + part + os.sep for part in ("utils/data", "_inductor"))
_LIBRARIES = (
    f"{Path(__file__).parents[2]}{os.sep}",
    f"{sysconfig.get_path('stdlib')}{os.sep}",
    _TORCH,
    "<frozen",
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_LINE_LENGTH = 80  # quoted characters of a source line


class OwnCollective(NamedTuple):
    """A collective that the program called, without ``async_op``, and in which a thread waits."""

    name: str
    work: Any
    group: dist.ProcessGroup

    def number(self) -> int | None:
        """The collective's number in its group, the same on all ranks; None if unknown."""
        last = _last_of(_recorded(), self.group.group_name)
        with contextlib.suppress(RuntimeError):  # the group has no backend for host memory
            # A receive also raises the sequence number, but is not a collective.
            if last is not None and last["op_id"] == _sequence_number(self.group):
                return int(last["collective_seq_id"])
        return None


def own_collective(thread: int) -> OwnCollective | None:
    """The collective of ``torch.distributed`` that a thread waits in; None without a collective."""
    frame = sys._current_frames().get(thread)
    if frame is None or frame.f_code.co_filename != _C10D:
        return None
    local_variables = frame.f_locals
    work = local_variables.get("work")
    group = local_variables.get("group") or dist.group.WORLD
    if work is None or not isinstance(group, dist.ProcessGroup):
        return None
    # Collectives of objects call collectives of tensors. The user called the outermost function, so
    # the message gives the name of the outermost function.
    in_torch = takewhile(lambda one: one.f_code.co_filename.startswith(_TORCH), _outwards(frame))
    names = [one.f_code.co_name for one in in_torch if one.f_code.co_filename == _C10D]
    return OwnCollective(f"torch.distributed.{names[-1]}()", work, group)


def begun(thread: int) -> dict[str, int]:
    """Number of collectives that this rank's program has begun, keyed by process group name.

    {} if a thread other than ``thread`` may begin a collective.
    """
    records = _recorded()
    found: dict[str, int] = {}
    if not _is_alone(thread, records):
        return {}
    for group, name in tuple(distributed_c10d._world.pg_names.items()):
        with contextlib.suppress(RuntimeError):  # the group has no backend for host memory
            at_most, last = _sequence_number(group), _last_of(records, name)
            found[name] = at_most if last is None else int(last["collective_seq_id"])
    return found


def is_member(rank: int, group: str) -> bool:
    """Whether a rank is in a process group; False if this rank does not know the group."""
    with contextlib.suppress(RuntimeError, ValueError, KeyError):
        resolve: Any = _distributed_c10d._resolve_process_group
        dist.get_group_rank(resolve(group), rank)
        return True
    return False


def line_of(thread: int) -> str:
    """Innermost line of the program in a thread's stack: file, line number and source text.

    "" if neither the thread nor the main thread runs code of the program.
    """
    # On an accelerator, backward runs in a thread of autograd, whose stack has no line of the
    # program. The main thread waits in `backward()` meanwhile, and its stack has the line.
    for one in (thread, threading.main_thread().ident):
        for frame in _outwards(sys._current_frames().get(one or 0)):
            path, number = frame.f_code.co_filename, frame.f_lineno
            if _is_program(path):
                with contextlib.suppress(ValueError):
                    path = str(Path(path).relative_to(Path.cwd()))
                line = linecache.getline(frame.f_code.co_filename, number).strip()
                return f"{path}:{number}" + (f": {line[:_LINE_LENGTH]}" if line else "")
    return ""


def _is_alone(thread: int, records: list[dict[str, Any]]) -> bool:
    """Whether ``thread`` is the only thread that can begin a collective.

    True if no other thread has begun a collective so far, and no other thread runs code of the
    program or of torch, except ``_HARMLESS`` code.
    """
    began = {int(one.get("thread_id", thread)) for one in records}
    ours = {one.ident for one in threading.enumerate() if one.name.startswith(OUR_THREADS)}
    for other, frame in sys._current_frames().items():
        if other == thread or other in ours:
            continue
        # Look at every frame. A thread of the program that is now in a DataLoader may begin a
        # collective later, in the function that called the DataLoader.
        paths = (one.f_code.co_filename for one in _outwards(frame))
        if other in began or any(map(_may_begin, paths)):
            return False
    return True


def _may_begin(path: str) -> bool:
    """Whether code in a file may begin a collective."""
    return _is_program(path) or (path.startswith(_TORCH) and not path.startswith(_HARMLESS))


def _is_program(path: str) -> bool:
    return not path.startswith(_LIBRARIES) and not any(part in path for part in _PACKAGES)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _sequence_number(group: dist.ProcessGroup) -> int:
    backend: Any = group._get_backend(torch.device("cpu"))
    return int(backend._get_sequence_number_for_group())


def _recorded() -> list[dict[str, Any]]:
    """The flight recorder's gloo collectives, oldest first. Reading them takes about 70 ms."""
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):
        dump: Any = _distributed_c10d._dump_fr_trace_json  # type: ignore[attr-defined]
        records: list[dict[str, Any]] = json.loads(dump(True, False)).get("entries", [])
        return records
    return []


def _last_of(records: list[dict[str, Any]], group: str) -> dict[str, Any] | None:
    return next((one for one in reversed(records) if one["process_group"][0] == group), None)
