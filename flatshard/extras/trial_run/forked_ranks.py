"""Runs a script once: starts a process for each rank, waits for all, and reads their records."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import math
import multiprocessing
import os
import random
import runpy
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # optimizers import it: load it once, before ranks are forked
import torch.multiprocessing
from torch.distributed.elastic.utils.distributed import get_free_port

from flatshard.extras.trial_run.recorder import Record, Recorder
from flatshard.extras.trial_run.stand_ins import install

# Seconds in which other ranks may end after one has failed, and record an earlier failure.
_GRACE = 5.0


def run(options: argparse.Namespace, name: str) -> list[Record]:
    """Run the script, and return the records of all ranks. ``name``: ddp, sharded or noise."""
    print(f"flatshard try: run {name!r}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the ranks, too
    torch.set_num_threads(1)  # ranks are forked, and threads of this process would be missing
    size, until = options.nproc_per_node, math.inf
    if "RANK" in os.environ:  # torchrun has started this process for one rank
        # Each run needs a store of its own. torchrun's store has the addresses of the last run.
        # Rank 0, whose host is MASTER_ADDR, finds a free port and tells it in the shared folder.
        port, new = options.folder / f"{name}.port", options.folder / f"{name}.port.new"
        if os.environ["RANK"] == "0":
            new.write_text(f"{get_free_port()}")
            new.rename(port)
        while not port.exists():
            time.sleep(0.1)
        given = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": port.read_text()}
        ranks = {int(os.environ["RANK"]): given}
    else:
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{get_free_port()}"}
        given |= {"WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}"}
        ranks = {n: {**given, "RANK": f"{n}", "LOCAL_RANK": f"{n}"} for n in range(size)}
    files = [options.folder / f"{name}-{rank}.pt" for rank in range(size)]
    fork = multiprocessing.get_context("fork")  # torch is loaded: a new process would repeat that
    processes: dict[int, Any] = {}
    try:
        for rank, environment in ranks.items():
            arguments = (options, name, files[rank], environment)
            processes[rank] = fork.Process(target=_run_rank, args=arguments)
            processes[rank].start()
        while any(one.is_alive() for one in processes.values()) and time.monotonic() < until:
            time.sleep(0.1)
            if any(one.exitcode for one in processes.values()):
                until = min(until, time.monotonic() + _GRACE)
    finally:
        for one in processes.values():
            with contextlib.suppress(OSError):
                os.killpg(one.pid, signal.SIGKILL)  # also DataLoaders' workers
            one.kill()  # if it has no group of processes yet
            one.join()
    for rank, one in processes.items():
        if not files[rank].exists():
            log = files[rank].with_suffix(".log").read_text(errors="replace").splitlines()
            ended = f"the process of rank {rank} ended with status {one.exitcode}. Last output:"
            failed_at = time.time() if one.exitcode == -signal.SIGKILL else 0.0
            Record("\n".join([ended, *log[-40:]]), failed_at).write(files[rank])
    while not all(one.exists() for one in files):  # other processes of torchrun write theirs
        time.sleep(0.1)
    return [torch.load(file, weights_only=False) for file in files]


def _run_rank(
    options: argparse.Namespace, name: str, file: Path, environment: dict[str, str]
) -> NoReturn:
    """Run the script in this process, which was forked for one rank.

    Writes the ``Record`` of the rank's tensors, costs and errors to ``file``.
    """
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ |= environment
    file.unlink(missing_ok=True)
    with file.with_suffix(".log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # Scripts that set no seed can be compared, too.
    for module in (torch, random, getattr(sys.modules.get("numpy"), "random", random)):
        getattr(module, "manual_seed", module.seed)(1234 + int(os.environ["RANK"]))
    if options.exact:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
    faulthandler.dump_traceback_later(options.timeout, exit=True, file=2)
    recorder = Recorder(options, file, perturbs=name == "noise")
    install(recorder, is_sharded=name == "sharded")
    warnings_: Any = warnings
    warn = warnings_.warn

    def note(message: Any, category: Any = None, stacklevel: int = 1, **kwargs: Any) -> None:
        if sys._getframe(1).f_globals["__name__"].startswith("flatshard."):
            recorder.remark(str(message))
        warn(message, category, stacklevel + 1, **kwargs)

    warnings_.warn = note
    spawns: Any = torch.multiprocessing
    spawns.spawn = spawns.start_processes = _spawn
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = "" if options.is_module else str(Path(options.script).resolve().parent)
    run_module: Any = functools.partial(runpy.run_module, alter_sys=True)
    try:
        (run_module if options.is_module else runpy.run_path)(options.script, run_name="__main__")
    except SystemExit as error:
        recorder.end(f"exit status {error.code}" if error.code else "")
    except BaseException as error:
        traceback.print_exc()
        innermost, _ = [*traceback.walk_tb(error.__traceback__)][-1]
        recorder.end(f"{type(error).__name__}: {error}", innermost)
    recorder.end()


def _spawn(fn: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
    """Call the function of this rank here, in the place of ``torch.multiprocessing.spawn``."""
    if f"{nprocs}" != os.environ["WORLD_SIZE"]:
        raise ValueError(f"the script starts {nprocs} ranks by itself: --nproc-per-node {nprocs}")
    fn(int(os.environ["RANK"]), *args)
