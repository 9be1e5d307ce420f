"""Starts the ranks of one run, waits for them, and reads their records."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from flatshard.extras.trial_run.rank import run_script
from flatshard.extras.trial_run.recorder import Record
from flatshard.extras.trial_run.user_line import line_in

# Seconds in which other ranks may end after one has failed. flatshard ends deadlocks within ten.
_GRACE = {"ddp": 3.0, "noise": 3.0, "sharded": 15.0}


def run(options: argparse.Namespace, name: str) -> dict[int, Record]:
    """Run the script once, and return the records of all ranks. ``name``: ddp, sharded, noise."""
    print(f"[{name}] ", end="", file=sys.stderr, flush=True)
    outside = "RANK" in os.environ  # torchrun has started this process for one rank
    ranks = [int(os.environ["RANK"])] if outside else list(range(options.nproc_per_node))
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    pids: dict[int, int] = {}
    statuses: dict[int, int] = {}
    began, failed_at, late = time.monotonic(), 0.0, ""
    try:
        for rank in ranks:
            if not (pid := os.fork()):  # torch is loaded already, which a new process would repeat
                _become_rank(options, name, rank, "" if outside else port)
            pids[rank] = pid
        while len(statuses) < len(pids) and not late:
            for rank in pids.keys() - statuses:
                pid, status = os.waitpid(pids[rank], os.WNOHANG)
                if pid:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
            now = time.monotonic()
            failed_at = failed_at or now * any(statuses.values())
            if failed_at and now > failed_at + _GRACE[name]:
                break
            if now > began + options.timeout:
                late = f"no end within {options.timeout:.0f} seconds (--timeout)"
                _signal(pids, signal.SIGUSR1)  # writes the stacks
                time.sleep(1.0)
            time.sleep(0.02)
    finally:
        _signal(pids, signal.SIGKILL)  # also DataLoaders' workers
        for rank in pids.keys() - statuses:
            statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
        print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)
    return {rank: _read(options, name, rank, statuses.get(rank), late) for rank in _all(options)}


def failure_of(records: dict[int, Record]) -> Record | None:
    """Return the record with the cause of a failed run, or None."""
    failed = [one for one in records.values() if one.failure]
    return min(failed, key=lambda one: one.order, default=None)


def _all(options: argparse.Namespace) -> range:
    return range(int(os.environ.get("WORLD_SIZE", options.nproc_per_node)))


def _become_rank(options: argparse.Namespace, name: str, rank: int, port: str) -> NoReturn:
    """Run the script in this process, which was forked for one rank."""
    os.setsid()
    log = os.open(options.folder / f"{name}-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    size = str(options.nproc_per_node)
    if port:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size}
        os.environ |= {"LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    else:
        # Each run needs a store of its own. torchrun's store has the addresses of the last run.
        port = str(int(os.environ["MASTER_PORT"]) + 1 + list(_GRACE).index(name))
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": port}
    run_script(options, name, rank)


def _signal(pids: dict[int, int], number: signal.Signals) -> None:
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def _read(options: Any, name: str, rank: int, status: int | None, late: str) -> Record:
    file: Path = options.folder / f"{name}-{rank}.pt"
    until = time.monotonic() + 30.0 * (status is None)  # another process of torchrun writes it
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.1)
    if file.exists():
        return torch.load(file, weights_only=False)  # type: ignore[no-any-return]
    log, stack = (file.with_suffix(end) for end in (".log", ".stack"))
    said = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    found = re.findall(r'File "(.*)", line (\d+)', stack.read_text() if stack.exists() else "")
    line = line_in((path, int(number)) for path, number in found)
    ended = late or f"the process of rank {rank} ended with status {status}"
    is_killed = status == -signal.SIGKILL and not late
    if is_killed:
        ended = f"rank {rank} did not end after another rank had failed"
    text = f"{ended}; last line of its output: {(said or ['none'])[-1]}"
    return Record(failure=text, line=line, order=(3 if is_killed else 1, 0.0))
