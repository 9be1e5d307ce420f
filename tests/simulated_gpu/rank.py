"""Ranks on a simulated GPU run programs, at the same time.

    python -m tests.simulated_gpu.rank

reads requests, a line of JSON each: ``programs``, the number of ranks of each (``world_size``), a
``folder`` and more of the ``environment``. The ranks are forked, with everything imported. They run
functions of `programs.py`, in FOLDER/NUMBER, and write what these return as JSON to ``out-RANK``,
and what they say to ``err-RANK``. The answer is a line with the exit statuses, program by program.

With SIMULATED_WITHOUT_WAIT=FUNCTION in the environment no stream or host waits for another stream
where that function of flatshard's says so (``Class.method``); nowhere with ``every``.
"""

import atexit
import faulthandler
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch loads it when it makes the first optimizer
import torch.distributed as dist

from flatshard.engine import reduce_queue
from tests.forked_python_server import keep_torchs_operators
from tests.simulated_gpu import programs
from tests.simulated_gpu.kernels import Kernels


def leave_out(site: str) -> None:
    """Leave out the wait of a function, if any."""
    if site:
        _leave_out(torch.cuda.Stream, "wait_stream", site)
        _leave_out(torch.cuda.Event, "synchronize", site)
        _leave_out(dist.Work, "wait", site)


def _leave_out(kind: type, name: str, site: str) -> None:
    wait: Callable[..., Any] = getattr(kind, name)

    def wait_elsewhere(*args: Any) -> Any:
        code = sys._getframe(1).f_code
        is_left_out = site == code.co_qualname or (site == "every" and kind is not dist.Work)
        return True if is_left_out else wait(*args)

    setattr(kind, name, wait_elsewhere)


def run(rank: int, world_size: int, folder: str, program: list[str]) -> int:
    """Run a program; returns the exit status that a script would have."""
    torch.set_num_threads(1)
    name, backend, *arguments = program
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    with Kernels(loads_lazily=name != "train"):
        result = getattr(programs, name)(rank, *arguments)
    print(json.dumps(result), flush=True)
    return 1 if result["error"] else 0


def fork(rank: int, request: dict[str, Any]) -> int:
    """Return the id of a process that is a rank."""
    child = os.fork()
    if child:
        return child
    try:
        folder = Path(request["folder"])
        for descriptor, name in ((1, f"out-{rank}"), (2, f"err-{rank}")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
        faulthandler.register(signal.SIGUSR1)  # shows where each thread of this rank is
        os.environ.update(request["environment"])
        leave_out(os.environ.get("SIMULATED_WITHOUT_WAIT", ""))
        status = run(rank, request["world_size"], str(folder), request["program"])
        atexit._run_exitfuncs()  # what the end of a script would call
        os._exit(status)  # what belongs to the device ends with the process
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def serve() -> None:
    # Many more ranks than cores: those that wait leave the cores to the others.
    vars(reduce_queue)["_POLL_SECONDS"] = 0.005
    keep_torchs_operators()
    gc.collect()
    gc.freeze()  # what is loaded is no garbage, and stays shared with the ranks
    for line in sys.stdin:
        request = json.loads(line)
        started = []
        for number, program in enumerate(request["programs"]):
            folder = Path(request["folder"], str(number))
            folder.mkdir()
            one = {**request, "folder": str(folder), "program": program}
            started.append([fork(rank, one) for rank in range(request["world_size"])])
        statuses = [
            [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks] for ranks in started
        ]
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    serve()
