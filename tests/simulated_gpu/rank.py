"""Ranks on a simulated GPU train as `scripts/gpu_check.py` does, and say how far they are off.

    python -m tests.simulated_gpu.rank

reads requests, a line of JSON each: the ``cases``, the number of ranks (``world_size``), a
``folder`` and more of the ``environment``. The ranks are forked, with everything imported. Rank 0
writes a line of JSON for each case to FOLDER/out-0, all write what they say to FOLDER/err-RANK; the
answer is a line with their exit statuses.

A request with ``programs`` starts ranks for each of them at the same time, in FOLDER/NUMBER. They
run functions of `programs.py`, which return what the ranks write to ``out-RANK``. The answer is a
line with the exit statuses, program by program.

A case is a strategy, a precision and a variant, with commas between. With
SIMULATED_WITHOUT_WAIT=FUNCTION in the environment no stream or host waits for another stream where
that function of flatshard's says so (``Class.method``); nowhere with ``every``.
"""

import atexit
import dataclasses
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
from gpu_checks import equality

from flatshard.engine import forward_edits, reduce_queue
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


def train(rank: int, world_size: int, store: str, cases: list[str]) -> None:
    torch.set_num_threads(1)
    leave_out(os.environ.get("SIMULATED_WITHOUT_WAIT", ""))
    # It waits for the device in the first forwards, which would hide waits that lack.
    vars(forward_edits)["checksum"] = lambda buffer: (0, 0)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    equality.STEPS = 3
    start = dict(equality.make_model(cpu).state_dict())
    for text in cases:
        case = equality.Case(*text.split(","))
        with Kernels():
            trained = equality.train_sharded(case, rank, gpu)
            if rank == 0:
                expected = equality.train_plain(case, world_size, cpu)
                off = equality.compare(trained, expected, start)
                print(json.dumps(dataclasses.asdict(off)), flush=True)
            # When a tensor of a state dict is freed, flatshard compares it with the shard: run
            # this comparison under `Kernels()`.
            del trained
    with Kernels():  # which would not take the kernel that torch's barrier launches
        dist.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()


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
    with Kernels(loads_lazily=True):
        result = getattr(programs, name)(rank, *arguments)
    print(json.dumps(result), flush=True)
    return 1 if result["error"] else 0


def fork(rank: int, request: dict[str, Any]) -> int:
    """The id of a process that is a rank."""
    child = os.fork()
    if child:
        return child
    try:
        folder = Path(request["folder"])
        for descriptor, name in ((1, f"out-{rank}"), (2, f"err-{rank}")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
        faulthandler.register(signal.SIGUSR1)  # shows where each thread of this rank is
        os.environ.update(request["environment"])
        if "program" in request:
            status = run(rank, request["world_size"], str(folder), request["program"])
            atexit._run_exitfuncs()  # what the end of a script would call
            os._exit(status)
        train(rank, request["world_size"], str(folder / "store"), request["cases"])
        os._exit(0)  # what belongs to the device ends with the process
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
        if "programs" in request:
            started = []
            for number, program in enumerate(request["programs"]):
                folder = Path(request["folder"], str(number))
                folder.mkdir()
                started.append(start({**request, "folder": str(folder), "program": program}))
            print(json.dumps([wait(ranks) for ranks in started]), flush=True)
        else:
            print(json.dumps(wait(start(request))), flush=True)


def start(request: dict[str, Any]) -> list[int]:
    return [fork(rank, request) for rank in range(request["world_size"])]


def wait(ranks: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]


if __name__ == "__main__":
    serve()
