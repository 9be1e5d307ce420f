"""Runs a script once: starts a process for each rank, waits for all, and reads their records."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import multiprocessing
import os
import random
import re
import runpy
import signal
import sys
import time
import traceback
import warnings
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # optimizers import it: load it once, before ranks are forked
import torch.multiprocessing
from torch.distributed.elastic.utils.distributed import get_free_port

from flatshard.extras.trial_run.recorder import Record, Recorder
from flatshard.extras.trial_run.stand_ins import StandIns
from flatshard.extras.trial_run.user_line import OURS, current_line, line_in

# Seconds in which other ranks may end after one has failed. flatshard ends deadlocks within ten.
_GRACE = {"ddp": 2.0, "noise": 2.0, "sharded": 15.0}


def run(options: argparse.Namespace, name: str) -> dict[int, Record]:
    """Run the script once, and return the records of all ranks. ``name``: ddp, sharded, noise."""
    print(f"[{name}] ", end="", file=sys.stderr, flush=True)
    size = options.nproc_per_node
    began, until = time.monotonic(), float("inf")
    ranks = range(size)
    if "RANK" in os.environ:  # torchrun has started this process for one rank
        ranks = range(int(os.environ["RANK"]), int(os.environ["RANK"]) + 1)
        # Each run needs a store of its own. torchrun's store has the addresses of the last run.
        port = int(os.environ["MASTER_PORT"]) + 1 + list(_GRACE).index(name)
        given = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": f"{port}"}
    else:
        given = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), f"{size}")
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{get_free_port()}"}
    fork = multiprocessing.get_context("fork")  # torch is loaded: a new process would repeat that
    processes = [fork.Process(target=_run_rank, args=(options, name, r, given)) for r in ranks]
    try:
        for one in processes:
            one.start()
        while (running := [one for one in processes if one.exitcode is None]) and (
            time.monotonic() < until
        ):
            if any(one.exitcode for one in processes):
                until = min(until, time.monotonic() + _GRACE[name])
            wait([one.sentinel for one in running], timeout=1.0)
    finally:
        for one in [one for one in processes if one.pid]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(one.pid or 0, signal.SIGKILL)  # also DataLoaders' workers
            one.join()
        print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)
    exits = dict(zip(ranks, [one.exitcode for one in processes], strict=True))
    return {rank: _read(options, name, rank, exits.get(rank)) for rank in range(size)}


def failure_of(records: dict[int, Record]) -> Record | None:
    """Return the record with the cause of a failed run, or None."""
    failed = [one for one in records.values() if one.failure]
    return min(failed, key=lambda one: one.failed_at, default=None)


def _read(options: argparse.Namespace, name: str, rank: int, status: int | None) -> Record:
    file: Path = options.folder / f"{name}-{rank}.pt"
    until = time.monotonic() + 30.0 * (status is None)  # another process of torchrun writes it
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.1)
    if file.exists():
        return torch.load(file, weights_only=False)  # type: ignore[no-any-return]
    log, stack = (file.with_suffix(end) for end in (".log", ".stack"))
    said = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    found = re.findall(r'File "(.*)", line (\d+)', stack.read_text() if stack.exists() else "")
    was_killed, ended = (
        status == -signal.SIGKILL,
        f"the process of rank {rank} ended with status {status}",
    )
    if found:
        ended = f"no end within {options.timeout:.0f} seconds (--timeout)"
    elif was_killed:
        ended = f"rank {rank} did not end after another rank had failed"
    return Record(
        failure=f"{ended}; last line of its output: {(said or ['none'])[-1]}",
        line=line_in((path, int(number)) for path, number in found),
        failed_at=float("inf") if was_killed else 0.0,
    )


def _run_rank(
    options: argparse.Namespace, name: str, rank: int, environment: dict[str, str]
) -> NoReturn:
    """Run the script in this process, which was forked for ``rank``, and write the record."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": os.environ.get("LOCAL_RANK", f"{rank}")}
    os.environ |= environment
    file: Path = options.folder / f"{name}-{rank}.pt"
    file.unlink(missing_ok=True)
    log, stack = (file.with_suffix(end).open("w") for end in (".log", ".stack"))
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.dump_traceback_later(options.timeout, file=stack, exit=True)
    # Scripts that set no seed can be compared, too.
    for module in (torch, random, getattr(sys.modules.get("numpy"), "random", random)):
        getattr(module, "manual_seed", module.seed)(1234 + rank)
    if options.exact:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
    record = Record()

    def end() -> NoReturn:
        torch.save(record, file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(bool(record.failure))  # exit handlers may wait for other ranks

    recorder = Recorder(options, record, end, perturbs=name == "noise")
    StandIns(recorder, is_sharded=name == "sharded").install()
    warnings.warn = _recording(warnings.warn, record)
    spawns: Any = torch.multiprocessing
    spawns.spawn = spawns.start_processes = _spawn
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = "" if options.is_module else str(Path(options.script).resolve().parent)
    try:
        if options.is_module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(options.script, run_name="__main__")
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else None  # that of `Enough` is 0
        record.failure = f"exit status {code}" if code else ""
        if not isinstance(error, SystemExit):
            record.failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        stack_here = [*traceback.walk_tb(error.__traceback__)][::-1]
        record.line = line_in((frame.f_code.co_filename, number) for frame, number in stack_here)
        record.failed_at = time.time()
    end()


def _recording(warn: Any, record: Record) -> Any:
    """Return ``warnings.warn``, which records flatshard's warnings."""

    def watched(message: Any, category: Any = None, stacklevel: int = 1, **kwargs: Any) -> None:
        if sys._getframe(1).f_code.co_filename.startswith(OURS):
            record.warned[current_line(), str(message)] = None
        warn(message, category, stacklevel + 1, **kwargs)

    return watched


def _spawn(fn: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
    """Call the function of this rank here, in the place of ``torch.multiprocessing.spawn``."""
    if nprocs != (size := int(os.environ["WORLD_SIZE"])):
        raise ValueError(
            f"the script starts {nprocs} ranks by itself (torch.multiprocessing.spawn), and "
            f"`flatshard try` has {size}. Give --nproc-per-node {nprocs}."
        )
    fn(int(os.environ["RANK"]), *args)
