"""Finds the NCCL collective that a thread waits for on the GPU, and ends such waits.

[Note: waits on the GPU]
The host does not wait inside an NCCL collective: the GPU does. The host waits later, in a line that
needs a result of the GPU, such as ``loss.item()``, ``torch.cuda.synchronize()`` or
``tensor.cpu()``. The host also waits in a line that launches a kernel for the first time: CUDA then
loads the kernel, and may first wait until all running kernels have ended.

A thread counts as waiting for a collective on the GPU if three facts last for some seconds:
- this rank begins no NCCL collective, so the sequence numbers of all NCCL groups stay the same;
- the thread stays at one instruction, and the instruction can wait for the GPU (``_can_wait``);
- torch has counted fewer complete NCCL collectives than this rank has begun.

Another thread reads these facts about once a second. Training steps run no code for them: no event,
no kernel, no exchange.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import json
import sys
import threading
import time
import weakref
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from flatshard.comm.work import CollectiveError

# Instructions that may wait for the GPU: calls of torch's functions, and operators and tests that
# may have a tensor as an operand. A call of another library may have the same name, but is then
# quick, except for the names that are taken out.
_WAITING_CALLS = {*dir(torch.Tensor), *dir(torch), *dir(torch._C), "synchronize", "wait"}
_WAITING_CALLS |= {"float", "int", "bool"}
_WAITING_CALLS -= {"select", "poll", "sleep", "acquire", "join", "get", "put", "read", "recv"}
_ABORT_SECONDS = 10.0  # longest time that `abort` waits for each group; a second is usual
_WAITING_OPCODES = ("BINARY_", "COMPARE_OP", "POP_JUMP", "STORE_SUBSCR", "TO_BOOL", "UNARY_")

# Groups whose NCCL backend this module has aborted. To abort a backend twice would end the process
# with SIGSEGV.
_aborted: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


class GpuCollective(NamedTuple):
    """An NCCL collective that this rank has begun, and that is not complete."""

    name: str
    group: str  # name of the process group
    number: int  # number of the collective in its group, the same on all ranks
    others: tuple[int, ...]  # the other ranks of the group, as ranks in the default group
    thread: int  # identifier of the thread that waits for the GPU


class GpuWaits:
    """Looks for a thread that waits for an NCCL collective on the GPU."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # of begun collectives, at the last look
        # Where the thread was at the last look, and the time since which it has been there.
        self._place: tuple[int, int, int] | None = None
        self._since = 0.0
        self._found: GpuCollective | None = None

    def look(self, thread: int, after_seconds: float) -> tuple[GpuCollective, float] | None:
        """Return the collective that ``thread``, or a thread of autograd, waits for on the GPU.

        Returns None if the threads do not wait for the GPU, or wait for less than
        ``after_seconds``. The second element is the time at which the wait began.
        """
        # Read the numbers first: in a training that goes on, they change between two looks, and the
        # instruction of the thread, which takes longer to read, does not matter.
        numbers = begun()
        if numbers != self._numbers or not numbers:
            self._numbers, self._place, self._found = numbers, None, None
            return None
        place = _place_of(thread)
        if place is None or place != self._place:
            self._place, self._since, self._found = place, time.monotonic(), None
        elif time.monotonic() - self._since >= after_seconds:
            self._found = self._found or _oldest_incomplete(place[0])
        return None if self._found is None else (self._found, self._since)


def begun() -> dict[str, int]:
    """Return how many NCCL collectives this rank has begun in each process group, by name."""
    return {
        group.group_name: int(backend._get_sequence_number_for_group())
        for group, backend in _backends().items()
    }


def end_waits(thread: int, text: str) -> None:
    """End the waits of this rank for NCCL collectives on the GPU.

    If an NCCL collective of this rank is not complete, ``thread`` raises ``CollectiveError(text)``
    as soon as its present instruction ends. Otherwise does nothing.
    """
    if _incomplete():
        # First prepare the error: once a collective is aborted, the thread goes on, with a result
        # that the collective has not written.
        _raise_in_thread(thread, text)
        abort()


def _raise_in_thread(thread: int, text: str) -> None:
    class Raised(CollectiveError):
        def __init__(self) -> None:  # Python makes the error in the thread, without arguments
            super().__init__(text)

    Raised.__name__ = Raised.__qualname__ = CollectiveError.__name__
    Raised.__module__ = CollectiveError.__module__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Raised))


def abort() -> None:
    """Abort the NCCL groups in which a collective of this rank is not complete.

    Otherwise every later wait for the GPU would last for ever, and torch's thread for NCCL could
    end the process with SIGABRT.
    """
    backends = _backends()
    groups = [*_incomplete()]
    _aborted.update(groups)
    # Abort all groups at the same time. NCCL waits in an abort until the group's kernels have
    # ended, and a kernel may be queued behind a kernel of another group.
    threads = [
        threading.Thread(
            target=_abort, args=(backends[group],), name="flatshard-abort", daemon=True
        )
        for group in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_ABORT_SECONDS)


def _abort(backend: Any) -> None:
    with contextlib.suppress(RuntimeError):  # NCCL has already failed
        backend.abort()


def settle(seconds: float) -> None:
    """Wait until this rank's NCCL collectives are complete, at most ``seconds``. Then abort."""
    deadline = time.monotonic() + seconds
    while _incomplete() and time.monotonic() < deadline:
        time.sleep(0.05)
    abort()


def _backends() -> dict[dist.ProcessGroup, Any]:
    """Return the NCCL backend of each process group that has one."""
    found = {}
    for group in tuple(distributed_c10d._world.pg_names):
        with contextlib.suppress(RuntimeError):  # if the group has no backend for CUDA tensors
            backend: Any = group._get_backend(torch.device("cuda"))
            if backend.name() == "nccl":
                found[group] = backend
    return found


def _incomplete() -> dict[dist.ProcessGroup, int]:
    """Return the groups with NCCL collectives that are not complete, and the oldest one's number.

    Torch's thread for NCCL counts completed collectives every 0.1 seconds.
    """
    backends = _backends()
    if not backends:
        return {}
    with contextlib.suppress(AttributeError, IndexError, RuntimeError, ValueError):
        dump: Any = _distributed_c10d._dump_nccl_trace_json  # type: ignore[attr-defined]
        status = json.loads(dump(False, False))["pg_status"]
        # The keys number the NCCL groups of this process, in the order in which they were made. If
        # a group was destroyed, the numbers do not fit the groups that are left.
        groups, found = [*backends], {}
        for key, counts in status.items():
            group = groups[int(key)]
            begun_here = backends[group]._get_sequence_number_for_group()
            if int(counts["last_enqueued_collective"]) > begun_here:
                return {}
            complete = max(0, int(counts["last_completed_collective"]))  # -1: none is complete
            if begun_here > complete and group not in _aborted:
                found[group] = complete + 1
        return found
    return {}


def _oldest_incomplete(thread: int) -> GpuCollective | None:
    for group, number in _incomplete().items():
        name = group.group_name
        ranks = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
        text = f"collective {number} of NCCL's process group {name} ({group.group_desc})"
        return GpuCollective(text, name, number, tuple(sorted(ranks)), thread)
    return None


def _place_of(thread: int) -> tuple[int, int, int] | None:
    """Return thread, frame and instruction of a wait for the GPU; None if no thread may wait.

    Looks at ``thread``, and at the threads of autograd: while ``thread`` is in ``backward()``, a
    thread of autograd runs the program's hooks.
    """
    of_python = {
        one.ident for one in threading.enumerate() if not isinstance(one, threading._DummyThread)
    }
    for other, frame in sys._current_frames().items():
        if other == thread or other not in of_python:
            if _in_collective(frame) or _can_wait(frame.f_code, frame.f_lasti):
                return other, id(frame), frame.f_lasti
    return None


def _in_collective(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != distributed_c10d.__file__:
        frame = frame.f_back
    return frame is not None


def _can_wait(code: CodeType, offset: int) -> bool:
    """Whether the instruction at ``offset`` may wait for the GPU."""
    loaded = ""  # name of the function that the present call calls
    before = list(dis.get_instructions(code))
    now = next((one for one in before if one.offset == offset), None)
    if now is None or now.positions is None:
        return False
    if not now.opname.startswith("CALL"):
        return now.opname.startswith(_WAITING_OPCODES)
    start = now.positions[0], now.positions[2]
    for one in before:
        if one.offset >= offset:
            break
        # A call, and the instructions that load the called function, begin at the same column.
        begins = one.positions is not None and (one.positions[0], one.positions[2]) == start
        if begins and one.opname.startswith("LOAD_") and isinstance(one.argval, str):
            loaded = one.argval
    return loaded in _WAITING_CALLS
