"""Reads the state of the user's program during a wait: line, collectives and threads.

[Note: collectives of the program]
If the program calls a collective, such as ``dist.barrier()``, the waiting thread is in a Python
frame of ``torch.distributed``, whose local variables contain the process group and the work. So the
collective can be found without patching torch.

To compare ranks, each collective needs a number that is the same on all ranks. Torch's flight
recorder numbers the collectives of each gloo group. (The group's sequence number also counts sends
and receives, which differ between ranks.) A wait in a collective without a record is ignored.

If a group has no record at all, a rank publishes the sequence number as the number of collectives
that the rank has begun. This is an upper bound, so deadlock detection may miss a deadlock, but
never ends a wait wrongly.
"""

import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from flatshard.comm.process_groups import abort
from flatshard.comm.work import Begun, WaitCondition
from flatshard.engine.backward import BEGUN
from flatshard.extras import is_program, program_line

PROGRAM = "the program's own"  # kind of the collectives called by the user's program
# Value of ``BlockedWait.need`` if flatshard does not know for which collective the thread waits.
UNKNOWN = WaitCondition("", "", 0, ())
OUR_THREADS = "flatshard"  # prefix of the names of flatshard's own threads

_DESCRIBED = 4  # number of the latest collectives of a group that a rank describes to the others
_C10D = distributed_c10d.__file__
_TORCH = str(Path(torch.__file__).parent) + os.sep
# Folders of flatshard: while a thread runs code there, it is in a step, or runs a collective.
_STEPS = tuple(f"{Path(__file__).parents[2] / one}{os.sep}" for one in ("comm", "engine", "tensor"))
# Folders of torch whose threads never begin a collective: data loading and compilation.
_HARMLESS = tuple(_TORCH + part + os.sep for part in ("utils/data", "_inductor"))


@dataclass(eq=False)
class BlockedWait:
    """A wait of a thread of this process for a collective."""

    describe: Callable[[], str]  # returns a text that names the collective, for logs and errors
    need: WaitCondition  # the collective, and the ranks that must begin it to end the wait
    number: int = 0  # identifies the wait to other ranks; 0: not published yet
    thread: int = 0  # id of the waiting thread
    verdict: str | None = None  # why the wait will never end; None if the wait may still end
    is_given_up: bool = False  # whether the waiting thread must stop waiting
    published: str = ""  # text about the wait in the last report that this rank published
    was_logged: bool = False
    began: float = field(default_factory=time.monotonic)

    def text(self) -> str:
        line, words = line_of(self.thread), self.describe()
        return f"{words}, at {line}" if line else words


class OwnWait(BlockedWait):
    """A wait in a collective that the user's program has called without ``async_op``."""

    # flatshard's own wait, if a user's hook called the collective during flatshard's wait.
    outer: BlockedWait | None
    _was_asked = False

    def __init__(self, name: str, work: Any, group: dist.ProcessGroup, thread: int) -> None:
        super().__init__(lambda: name, UNKNOWN, thread=thread)
        # Keep only a weak reference, because a `Work` of torch keeps its tensors alive.
        self.work, self._group = weakref.ref(work), group

    def is_known(self, after_seconds: float) -> bool:
        """Whether ``need`` is known. Reads the collective's number once, after some seconds."""
        if not self._was_asked and time.monotonic() - self.began >= after_seconds:
            self._was_asked, name = True, self._group.group_name
            last = _last_of_groups(_recorded()).get(name)
            # Suppress the error of a group that has no backend for CPU tensors.
            with contextlib.suppress(RuntimeError):
                # Check that the group's last record is about this collective: its `op_id` must be
                # the group's present sequence number, and its state must not be "completed".
                # Otherwise the thread waits in another backend (NCCL), whose collectives are not in
                # this recorder.
                here = _sequence_number(self._group)
                if last is not None and last["op_id"] == here and last["state"] != "completed":
                    number = int(last["collective_seq_id"])
                    self.need = WaitCondition(name, PROGRAM, number, others(self._group), self._end)
        return self.need is not UNKNOWN

    def _end(self) -> None:
        if self.outer is not None:
            self.outer.verdict, self.outer.is_given_up = self.verdict, True
        abort(self._group)


def others(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the other ranks of a process group, as ranks in the default group."""
    return tuple(one for one in dist.get_process_group_ranks(group) if one != dist.get_rank())


def own_wait(thread: int, before: OwnWait | None) -> OwnWait | None:
    """Return the wait of a thread in a collective of ``torch.distributed``, or None.

    ``before``: the last result, which is returned again if the thread is still in the same wait.
    """
    frame = sys._current_frames().get(thread)
    if frame is None or frame.f_code.co_filename != _C10D:
        return None
    local_variables = frame.f_locals
    work = local_variables.get("work")
    group = local_variables.get("group") or dist.group.WORLD
    if work is None or not isinstance(group, dist.ProcessGroup):
        return None
    if before is not None and before.work() is work:
        return before
    # Name the outermost function of torch.distributed: some collectives call other collectives.
    codes = (one.f_code for one, _ in traceback.walk_stack(frame))
    in_torch = takewhile(lambda code: code.co_filename.startswith(_TORCH), codes)
    names = [code.co_name for code in in_torch if code.co_filename == _C10D]
    return OwnWait(f"torch.distributed.{names[-1]}()", work, group, thread)


def failed_collective(trace: TracebackType | None) -> tuple[str, dist.ProcessGroup] | None:
    """Return name and group of the program's collective that raised an error, or None."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    names = [frame.f_code.co_name for frame in frames if frame.f_code.co_filename == _C10D]
    if not names or frames[-1].f_code.co_filename != _C10D:
        return None
    group = frames[-1].f_locals.get("group") or dist.group.WORLD
    line = program_line(frames[-1])
    name = f"torch.distributed.{names[0]}()" + (f", at {line}" if line else "")
    return (name, group) if isinstance(group, dist.ProcessGroup) else None


def begun(thread: int | None) -> dict[str, tuple[int, list[Begun]]]:
    """Return, for each group, how many collectives this rank has begun, and the latest of them.

    Includes flatshard's collectives on the program's groups. ``thread``: the thread of the program
    that begins collectives. None: the program has ended. The result is empty if a second thread
    may begin collectives, because then the numbers may grow while ``thread`` waits.
    """
    at_most: dict[str, int] = {}
    for group, name in tuple(distributed_c10d._world.pg_names.items()):
        with contextlib.suppress(RuntimeError):  # if the group has no backend for CPU tensors
            at_most[name] = _sequence_number(group)
    records = _recorded()
    if thread is not None and not _is_alone(thread, records):
        return {}
    found: dict[str, list[Begun]] = {name: [] for name in at_most}
    for one in records:
        name, what = one["process_group"][0], one["profiling_name"]
        if what == "gloo:all_reduce":  # in other collectives, sizes may differ between ranks
            what += f" of {sum(map(math.prod, one['input_sizes']))} elements"
        if name in found and not one.get("is_p2p"):
            found[name].append((int(one["collective_seq_id"]), what))
    return {
        name: (recent[-1][0], recent[-_DESCRIBED:]) if recent else (at_most[name], [])
        for name, recent in found.items()
    }


def is_member(rank: int, group: str) -> bool:
    """Whether ``rank`` is in a process group; False if this process does not know the group."""
    with contextlib.suppress(RuntimeError, ValueError, KeyError):
        resolve: Any = _distributed_c10d._resolve_process_group
        dist.get_group_rank(resolve(group), rank)
        return True
    return False


def line_of(thread: int) -> str:
    """Return file, number and text of the program's line that a thread runs, or ""."""
    # On an accelerator, backward runs in a thread of autograd, while the main thread waits in the
    # program's line that called `backward()`.
    threads = thread, threading.main_thread().ident or 0
    lines = (program_line(sys._current_frames().get(one)) for one in threads)
    return next(filter(None, lines), "")


def _is_alone(thread: int, records: list[dict[str, Any]]) -> bool:
    """Whether ``thread`` is probably the only thread that begins collectives."""
    began = {int(one.get("thread_id", thread)) for one in records}
    ours = {one.ident for one in threading.enumerate() if one.name.startswith(OUR_THREADS)}
    for other, frame in sys._current_frames().items():
        if other == thread or other in ours or _is_in_backward(frame):
            continue
        # Look at every frame: a function of the program that waits for a DataLoader has a harmless
        # innermost frame, and may begin a collective afterwards.
        paths = [one.f_code.co_filename for one, _ in traceback.walk_stack(frame)]
        in_torch = [path for path in paths if path.startswith(_TORCH)]
        harmless = all(path.startswith(_HARMLESS) for path in in_torch)
        if other in began or not harmless or any(map(is_program, paths)):
            return False
    return True


def python_threads() -> set[int]:
    """Return the ids of the threads that Python has started. Autograd's threads are left out."""
    threads = (one for one in threading.enumerate() if not isinstance(one, threading._DummyThread))
    return {one.ident or 0 for one in threads}


def is_in_step(thread: int) -> bool:
    """Whether a thread is in a forward, backward or collective, and does not wait for a thread."""
    frame = sys._current_frames().get(thread)
    # In `threading.py`, a thread waits for another one: `join()`, `Event.wait()`, `Queue.get()`.
    if frame is None or frame.f_code.co_filename == threading.__file__:
        return False
    frames = [one for one, _ in traceback.walk_stack(frame)]
    is_in_backward = any(one.is_active for one in BEGUN) and any(map(_is_in_backward, frames))
    return is_in_backward or any(one.f_code.co_filename.startswith(_STEPS) for one in frames)


def _is_in_backward(frame: FrameType) -> bool:
    """Whether the thread of ``frame`` only waits for autograd's threads, in ``backward()``."""
    code = frame.f_code
    return code.co_name == "_engine_run_backward" and code.co_filename.startswith(_TORCH)


def _sequence_number(group: dist.ProcessGroup) -> int:
    backend: Any = group._get_backend(torch.device("cpu"))
    return int(backend._get_sequence_number_for_group())


def _recorded() -> list[dict[str, Any]]:
    """Read the gloo collectives in torch's flight recorder, oldest first. Takes about 70 ms.

    Returns an empty list if this torch has no such recorder.
    """
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):
        dump: Any = _distributed_c10d._dump_fr_trace_json  # type: ignore[attr-defined]
        return json.loads(dump(True, False)).get("entries", [])  # type: ignore[no-any-return]
    return []


def _last_of_groups(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each process group's last record."""
    return {one["process_group"][0]: one for one in records}
