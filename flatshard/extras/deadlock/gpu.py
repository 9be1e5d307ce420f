"""Finds threads that wait for an NCCL collective on the GPU, and ends such waits.

[Note: waits on the GPU]
An NCCL call only queues a kernel, and returns. The thread waits later, in a line that needs a
result from the GPU (``loss.item()``, ``torch.cuda.synchronize()``, ``tensor.cpu()``), or in a line
that launches a kernel for the first time: to load the kernel, CUDA may wait for all running
kernels.

A thread is considered to wait for a collective on the GPU if for some seconds:
- this rank begins no NCCL collective: each process group's sequence number stays the same;
- the thread stays at the same bytecode instruction, which can wait for the GPU (``_can_wait``), or
  in a function of flatshard that polls the GPU (``_POLLS``);
- by torch's counts, at least one NCCL collective that this rank has begun is not complete.

The watchdog thread checks these conditions about once a second. A training step runs no extra code.
"""

import contextlib
import ctypes
import dis
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Hashable, Set
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from flatshard.comm.process_groups import backend_for
from flatshard.comm.work import CollectiveError, WaitCondition
from flatshard.extras.deadlock.program import BlockedWait, others, python_threads

ON_GPU = "on the GPU"  # kind of all NCCL collectives, of the user's program and of flatshard

# Names of functions that may wait for the GPU: all functions of torch, and conversions such as
# `float(tensor)`. Names that other libraries use for other waits (`sleep`, `recv`) are removed.
_WAITING_CALLS = {*dir(torch.Tensor), *dir(torch), *dir(torch._C), "synchronize", "wait"}
_WAITING_CALLS |= {"float", "int", "bool"}
_WAITING_CALLS -= {"select", "poll", "sleep", "acquire", "join", "get", "put", "read", "recv"}
# Maximum number of seconds that `abort` waits for each group. An abort usually takes a second.
_ABORT_SECONDS = 10.0
# Other bytecode instructions that may wait: an operator may launch a kernel, and `if tensor:` reads
# a value.
_WAITING_OPCODES = ("BINARY_", "COMPARE_OP", "POP_JUMP", "STORE_SUBSCR", "TO_BOOL", "UNARY_")

# Name of flatshard's function that polls, in backward, until the GPU has reduced gradients. The
# function also waits for all-gathers that were queued on the GPU before the reduction.
_POLLS = "wait_until_reduced"
_IN_POLLS = -1  # stands for any bytecode instruction of `_POLLS`

# Environment variables by which users choose the file of torch's flight recorder.
_TRACE_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")

# Process groups that this module has aborted: a second abort would end the process with SIGSEGV.
_aborted: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()

# For each thread: the time of its last ``CollectiveError``, and the text of an error that
# `end_waits` has set and the thread has not raised yet. The lock `_raising` guards both.
_raised: dict[int, float] = {}
_to_raise: dict[int, str] = {}
_raising = threading.Lock()


# Where a thread waits: the thread's id, the frame's id, and the offset of the instruction.
Place = tuple[int, int, int]


class GpuWaits:
    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # result of `begun` at the last call of `look`
        # Result of `_place_of` at the last call of `look`, and when `look` first found this place.
        self._place: Place | None = None
        self._since = 0.0
        self._found: BlockedWait | None = None

    def look(self, thread: int, after_seconds: float, gathers: Set[Hashable]) -> BlockedWait | None:
        """Return the wait of ``thread``, or of autograd's threads, for an NCCL collective.

        Returns None if the thread does not wait, or has waited for less than ``after_seconds``.
        ``gathers``: names of the process groups on which flatshard all-gathers.
        """
        # First compare the numbers of begun collectives, which are fast to read. While a thread
        # trains, the numbers grow.
        numbers = begun()
        if numbers != self._numbers or not numbers:
            self._numbers, self._place, self._found = numbers, None, None
            return None
        place = _place_of(thread)
        if place is None or place != self._place:
            self._place, self._since, self._found = place, time.monotonic(), None
        elif time.monotonic() - self._since >= after_seconds:
            self._found = self._found or _wait_at(place, self._since, gathers)
        return self._found


def begun() -> dict[str, int]:
    """Return how many NCCL collectives this rank has begun, keyed by the process group's name."""
    backends = _backends().items()
    return {group.group_name: int(one._get_sequence_number_for_group()) for group, one in backends}


def end_waits(thread: int, text: str, since: float) -> None:
    """Abort this rank's incomplete NCCL collectives, and raise an error in ``thread``.

    The thread raises ``CollectiveError(text)`` when its present bytecode instruction ends, unless
    it has raised a CollectiveError after the time ``since``. If all NCCL collectives of this rank
    are complete, nothing happens.
    """
    if _incomplete():
        # Set the error before the abort. The abort ends the thread's wait, although the collective
        # has not written its result. So the thread must raise before it uses the result.
        _raise_in_thread(thread, text, since)
        abort()


def take_back_error() -> str | None:
    """Cancel an error that ``end_waits`` has set in this thread, and return its text or None.

    Called when this thread is about to raise a ``CollectiveError`` for an aborted collective.
    Without the call, the program would get a second error in the ``except`` clause of the first.
    """
    # If this is a thread of autograd, cancel the error that waits for the main thread: the main
    # thread also raises the errors of autograd's threads.
    thread = threading.current_thread()
    if isinstance(thread, threading._DummyThread):
        thread = threading.main_thread()
    with _raising:
        _raised[thread.ident or 0] = time.monotonic()
        text = _to_raise.pop(thread.ident or 0, None)
        if text is not None:
            _cancel_error(thread.ident or 0)
        return text


def _cancel_error(thread: int) -> None:
    set_error: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
    this = threading.get_ident()
    if thread != this:
        set_error(ctypes.c_ulong(thread), None)
    # Cancel a pending error of this thread by setting another error, and catching it here. (Setting
    # None should cancel it, too. But if a debugger or a coverage tool traces the thread, Python
    # 3.11 tries forever to raise the None.)
    with contextlib.suppress(_Cancelled):
        set_error(ctypes.c_ulong(this), ctypes.py_object(_Cancelled))
        time.sleep(0)  # Python raises the error after a call


class _Cancelled(BaseException):
    """Replaces an error that is cancelled."""


def own_error(text: str) -> CollectiveError:
    take_back_error()
    return CollectiveError(text)


def _raise_in_thread(thread: int, text: str, since: float) -> None:
    # Python calls the class without arguments in the thread, so the class contains the text.
    class Raised(CollectiveError):
        def __init__(self) -> None:
            _to_raise.pop(thread, None)
            super().__init__(text)

        def __reduce__(self) -> Any:
            return CollectiveError, (text,)

    Raised.__name__ = Raised.__qualname__ = CollectiveError.__name__
    Raised.__module__ = CollectiveError.__module__
    error = ctypes.py_object(Raised)
    with _raising:
        if _raised.get(thread, 0.0) < since:
            _to_raise[thread] = text
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


def with_trace(text: str) -> str:
    """Write torch's flight recorder to a file, if the user has set the file's name.

    Returns ``text`` with the file's name. Torch itself writes the file only when a collective times
    out, but deadlock detection aborts the collective earlier.
    """
    prefix = next(filter(None, map(os.environ.get, _TRACE_PREFIXES)), "")
    if prefix and _incomplete():
        with contextlib.suppress(AttributeError, OSError, RuntimeError):
            path = Path(f"{prefix}{dist.get_rank()}")
            dump: Any = _distributed_c10d._dump_nccl_trace  # type: ignore[attr-defined]
            path.write_bytes(dump())
            return f"{text} The trace of torch's flight recorder is in {path}."
    return text


def abort() -> None:
    """Abort the NCCL backends of all process groups with incomplete collectives of this rank.

    Without an abort, every later wait for the GPU would last forever, and torch's own watchdog
    could end the process with SIGABRT. No collective is possible in an aborted group.
    """
    backends = _backends()
    groups = [*_incomplete()]
    _aborted.update(groups)
    # An abort waits until the group's kernels have ended, and a kernel may be queued behind a
    # kernel of another group. So abort all groups at the same time, each in its own thread.
    thread_of = partial(threading.Thread, target=_abort, name="flatshard-abort", daemon=True)
    threads = [thread_of(args=[backends[group]]) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_ABORT_SECONDS)


def _abort(backend: Any) -> None:
    # Suppress the error that torch raises if NCCL has already failed.
    with contextlib.suppress(RuntimeError):
        backend.abort()


def settle(seconds: float) -> None:
    """Wait up to ``seconds`` for this rank's NCCL collectives, then abort the incomplete ones."""
    deadline = time.monotonic() + seconds
    while _incomplete() and time.monotonic() < deadline:
        time.sleep(0.05)
    abort()


def _backends() -> dict[dist.ProcessGroup, Any]:
    """Return the NCCL backends, keyed by process group. Groups without NCCL are left out."""
    known = tuple(distributed_c10d._world.pg_names)
    groups = (group for group in known if backend_for(group, "cuda") == "nccl")
    return {group: group._get_backend(torch.device("cuda")) for group in groups}


def _incomplete() -> dict[dist.ProcessGroup, int]:
    """Return the number of the oldest incomplete NCCL collective in each process group.

    A collective is incomplete if this rank has begun it, and the GPU has not finished it. Torch's
    watchdog looks only every 0.1 seconds, so a finished collective may count as incomplete for that
    long. Groups that this module has aborted are left out.
    """
    backends = _backends()
    if not backends:
        return {}
    with contextlib.suppress(AttributeError, IndexError, KeyError, RuntimeError, ValueError):
        dump: Any = _distributed_c10d._dump_nccl_trace_json  # type: ignore[attr-defined]
        dumped = json.loads(dump(True, True))
        # The keys of "pg_status" number the NCCL groups in the order of their creation, including
        # destroyed groups. The entries (incomplete operations) have the key and the group's name.
        name_of = {str(one["pg_id"]): one["process_group"][0] for one in dumped.get("entries", ())}
        # Without entries (all collectives are complete, or the recorder is off), use the keys as
        # indices into `groups`. The indices are wrong if a group was destroyed.
        groups, found = [*backends], {}
        group_of = {group.group_name: group for group in groups}
        for key, counts in dumped["pg_status"].items():
            if name_of and name_of.get(key) not in group_of:
                continue
            group = group_of[name_of[key]] if name_of else groups[int(key)]
            begun_here = backends[group]._get_sequence_number_for_group()
            # The count exceeds the group's sequence number only if a group was destroyed.
            if int(counts["last_enqueued_collective"]) > begun_here:
                return {}
            # -1: no collective is complete
            complete = max(0, int(counts["last_completed_collective"]))
            if begun_here > complete and group not in _aborted:
                found[group] = complete + 1
        return found
    return {}


def _wait_at(place: Place, since: float, gathers: Set[Hashable]) -> BlockedWait | None:
    """Return a wait for the oldest incomplete NCCL collective of any group, or None."""
    thread, _, instruction = place
    for group, number in _incomplete().items():
        name = group.group_name
        # In `_POLLS`, a wait for a reduction ends after a second. So look only for all-gathers.
        if instruction != _IN_POLLS or name in gathers:
            text = f"collective {number} of NCCL's process group {name} ({group.group_desc})"
            need = WaitCondition(name, ON_GPU, number, others(group))
            return BlockedWait(partial(str, text), need, thread=thread, began=since)
    return None


def _place_of(thread: int) -> Place | None:
    """Return where ``thread`` or a thread of autograd may be waiting for the GPU.

    Returns None if neither is waiting. Autograd's threads run hooks, which may wait, too. Every
    thread that Python did not start counts as a thread of autograd.
    """
    of_python = python_threads()
    # Do not keep a frame while the slow `_can_wait` runs: a frame keeps the function's variables
    # alive, for example a view of a parameter that is about to be resharded. The dict in each entry
    # maps the code of each function in the stack to the id of its frame.
    stacks = [
        (
            *(other, id(frame), frame.f_code, frame.f_lasti),
            {one.f_code: id(one) for one, _ in traceback.walk_stack(frame)},
        )
        for other, frame in sys._current_frames().items()
        if other == thread or other not in of_python
    ]
    for other, frame_id, code, offset, frames in stacks:
        for one, polling_id in frames.items():
            if one.co_name == _POLLS:
                return other, polling_id, _IN_POLLS
        in_collective = any(one.co_filename == distributed_c10d.__file__ for one in frames)
        if in_collective or _can_wait(code, offset):
            return other, frame_id, offset
    return None


def _can_wait(code: CodeType, offset: int) -> bool:
    """Whether the bytecode instruction of ``code`` at ``offset`` may wait for the GPU."""
    # Name of the function or method that is loaded at each line and column. A CALL instruction has
    # the line and column of the instruction that loads the function.
    loaded: dict[Any, str] = {}
    for one in dis.get_instructions(code):
        start = one.positions and (one.positions.lineno, one.positions.col_offset)
        if one.offset == offset and one.opname.startswith("CALL"):
            return loaded.get(start) in _WAITING_CALLS
        if one.offset == offset:
            return one.opname.startswith(_WAITING_OPCODES)
        if one.opname.startswith("LOAD_") and isinstance(one.argval, str):
            loaded[start] = one.argval
    return False
