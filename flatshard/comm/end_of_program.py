"""Has what runs in the background at rest before Python ends.

Once Python is ending, a thread that asks for the interpreter is unwound (from 3.14 on it stops for
ever). Unwound in the middle of a backend's C++ code, it ends the process with SIGABRT, whatever the
program's own end was. Two kinds of threads do: ours, when what they wait for from other ranks ends,
and gloo's own, which free the tensors of a collective after its end has been reported.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from flatshard.comm.process_groups import abort

OUR_THREADS = "flatshard "  # how the names begin of those that wait for other ranks
_GLOO_THREADS = "Name:\tpt_gloo"
_SWITCHES = "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"

_REST_SECONDS = 0.01  # twice as long as a thread waits for the interpreter before it asks again
_END_SECONDS = 5.0  # all of it, at most


def come_to_rest(groups: Iterable[dist.ProcessGroup]) -> None:
    """Have all that is under way in these groups fail, and wait for the threads that see it.

    The other ranks see it, too: this one begins nothing any more.
    """
    for group in groups:
        abort(group)
    deadline = time.monotonic() + _END_SECONDS
    before: list[list[str]] | None = None
    # Whoever wants the interpreter, or a processor, is seen to: while this thread sleeps, it has
    # neither. So what did nothing meanwhile waits for something else.
    while time.monotonic() < deadline:
        now = _what_threads_did()
        if not now or (now == before and all("State:\tS (sleeping)" in one for one in now)):
            return
        before = now
        time.sleep(_REST_SECONDS)


def _what_threads_did() -> list[list[str]]:
    """Of each thread its state, and how often it began to run."""
    ours = {one.native_id for one in threading.enumerate() if one.name.startswith(OUR_THREADS)}
    found = []
    for path in Path("/proc/self/task").glob("*/status"):  # none where the system is not Linux
        try:
            text = path.read_text()
        except OSError:  # it has ended
            continue
        if text.startswith(_GLOO_THREADS) or int(path.parent.name) in ours:
            lines = text.splitlines()
            found.append([line for line in lines if line.startswith(("State:", *_SWITCHES))])
    return found
