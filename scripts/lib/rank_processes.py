"""Starts ranks on this machine: `launch` for notebooks, `Ranks` for tests with a time limit.

`Ranks` are processes that run functions on gloo ranks, one after another, with a hard time limit.
If a process hangs or dies, `run` returns this as an outcome and raises no error. The next call gets
new processes. The processes are forked from a server that has imported torch and the given modules.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch(function: Callable[..., Any], *args: Any, ranks: int = 2) -> dict[int, Any]:
    """Run ``function(*args)`` on ranks of this machine; returns each rank's result, by rank.

    torch's own launcher, which is also behind ``torchrun``, forks the ranks. So the function may be
    defined in a notebook, and may use whatever the notebook's earlier cells define. The notebook's
    process must not use CUDA, nor compute with torch on several threads: neither survives a fork.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="notebook",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
        monitor_interval=0.1,
    )
    all_forked = multiprocessing.get_context("fork").Barrier(ranks)
    return elastic_launch(config, _once_all_are_forked)(all_forked, function, *args)


def _once_all_are_forked(
    all_forked: threading.Barrier, function: Callable[..., Any], *args: Any
) -> Any:
    # When a rank connects, a thread of the launcher calls getnameinfo(). A rank that is forked
    # meanwhile inherits the locked resolver of glibc, and would hang in getaddrinfo().
    all_forked.wait(60)
    return function(*args)


CALLS_PER_PROCESS = 200
THREADS_PER_PROCESS = 60
"""A process with more threads is replaced. A process group that is still referenced keeps its
threads, which wake up all the time."""
OTHERS_SECONDS = 12.0
"""Seconds after the first failure until ranks that have raised are killed, as if their programs had
ended. After the same time again, `run` stops waiting for the other ranks."""


class Said(NamedTuple):
    """Outcome of one rank.

    `what` is the value for "returned", a `Raised` for "raised", the exit code for "died" and the
    stack for "hangs".
    """

    outcome: str
    what: Any


class Raised(NamedTuple):
    """An exception, as text."""

    kind: str
    message: str
    trace: str


class Ranks:
    """Processes that serve as ranks in one call after another; at least ``number`` processes."""

    def __init__(self, number: int, preload: Sequence[str] = ()) -> None:
        self._number = number
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch._dynamo", "flatshard.wrap", *preload])
        self._folder = tempfile.TemporaryDirectory(prefix="flatshard-ranks-")
        self._ranks: list[tuple[Any, Any]] = []
        self._num_calls = 0
        self._is_over = False

    def run(
        self, function: Callable[..., Any], world: int, *arguments: Any, seconds: float
    ) -> list[Said]:
        """Call ``function(*arguments)`` on each rank in a new process group; returns the outcomes.

        The function must be at the top level of a module that can be imported, because the ranks
        get the function's name.
        """
        if self._num_calls % CALLS_PER_PROCESS == 0 or any(map(_has_many_threads, self._ranks)):
            self.stop()
        self._num_calls += 1
        while len(self._ranks) < max(world, self._number):
            self._start()
        store = f"{self._folder.name}/store-{self._num_calls}"
        ranks = self._ranks[:world]
        module = function.__module__
        if module == "__main__":
            module = Path(sys.modules[module].__file__ or "").stem
        name = (module, function.__qualname__)
        for rank, (_, pipe) in enumerate(ranks):
            pipe.send((name, arguments, rank, world, store, seconds))
        said = self._collect(ranks, time.monotonic() + seconds)
        with contextlib.suppress(OSError):
            os.remove(store)
        # After a failure, end all ranks, so that no leftover state disturbs the next call.
        if any(one.outcome != "returned" for one in said):
            self.stop()
        return said

    def _collect(self, ranks: list[tuple[Any, Any]], end: float) -> list[Said]:
        said: dict[int, Said] = {}
        last = end
        while len(said) < len(ranks):
            if time.monotonic() >= end:
                if end == last:
                    break
                end = last
                for rank, one in said.items():
                    if one.outcome == "raised":
                        ranks[rank][0].kill()
            pipes = {pipe: rank for rank, (_, pipe) in enumerate(ranks) if rank not in said}
            for pipe in wait(list(pipes), timeout=1.0):
                rank = pipes[pipe]  # type: ignore[index]
                try:
                    said[rank] = Said(*pipe.recv())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    ranks[rank][0].join(5)
                    said[rank] = Said("died", ranks[rank][0].exitcode)
                if said[rank].outcome != "returned":
                    end = min(end, time.monotonic() + OTHERS_SECONDS)
                    last = min(last, end + OTHERS_SECONDS)
        for rank in set(range(len(ranks))) - set(said):
            said[rank] = Said("hangs", self._stack_of(rank))
        return [said[rank] for rank in range(len(ranks))]

    def _start(self) -> None:
        if self._is_over:  # another thread was interrupted
            raise RuntimeError("these ranks have ended")
        ours, theirs = self._context.Pipe()
        stacks = f"{self._folder.name}/stack-{len(self._ranks)}"
        process = self._context.Process(target=_serve, args=(theirs, stacks), daemon=True)
        # In Python 3.11, the fork server preloads modules before it takes over sys.path. So pass
        # sys.path as PYTHONPATH.
        path = os.pathsep.join(filter(None, sys.path))
        # On Ctrl-C, the script ends its ranks. Block SIGINT here, because the fork server and the
        # ranks inherit this mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with mock.patch.dict(os.environ, PYTHONPATH=path):
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._ranks.append((process, ours))

    def _stack_of(self, rank: int) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._ranks[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return Path(f"{self._folder.name}/stack-{rank}").read_text()[-2000:]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_over = True
        if kind is KeyboardInterrupt:  # other threads may be waiting for the fork server
            _end_server()
        self.stop()
        self._folder.cleanup()

    def stop(self) -> None:
        """End all ranks. The next call starts new ranks."""
        for process, _ in self._ranks:
            process.kill()
        for process, pipe in self._ranks:
            process.join()
            pipe.close()
        self._ranks.clear()


@atexit.register
def _end_server() -> None:
    """Kill the fork server: otherwise it would first finish its imports, and then end."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()  # waits for the end of the process


def _has_many_threads(rank: tuple[Any, Any]) -> bool:
    tasks = Path(f"/proc/{rank[0].pid}/task")
    return tasks.is_dir() and len(list(tasks.iterdir())) > THREADS_PER_PROCESS


# ---------------------------------------------------------------- the rank's side


def _serve(pipe: Any, stacks: str) -> None:
    import torch

    torch.set_num_threads(1)
    # The parent removes this folder. A rank is killed, and cannot remove its temporary files.
    tempfile.tempdir = os.path.dirname(stacks)
    silent = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(silent, descriptor)
    # Ignore warnings about checkpoints without gradients, and about slow settings.
    warnings.simplefilter("ignore")
    with open(stacks, "w") as file, contextlib.suppress(EOFError, ConnectionError):
        faulthandler.register(signal.SIGUSR1, file)
        faulthandler.enable(file)
        while True:
            gc.freeze()  # garbage collections in the call skip older objects, and take less time
            pipe.send(_call(*pipe.recv()))


def _call(
    name: tuple[str, str], arguments: Any, rank: int, world: int, store: str, seconds: float
) -> Said:
    import torch.distributed as dist

    from flatshard.comm.ranks import forget_destroyed

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    # The group's timeout is longer than `seconds`, so that the caller sees a rank that hangs.
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=2 * seconds),
    )
    try:
        function = getattr(importlib.import_module(name[0]), name[1])
        return Said("returned", function(*arguments))
    except Exception as error:
        lines = traceback.format_exception(error)
        return Said("raised", Raised(type(error).__name__, str(error), "".join(lines[-12:])))
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
            forget_destroyed()
        gc.collect()
