"""Starts the ranks of one run, waits for them, and reads their records."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from flatshard.extras.trial_run.program import line_in
from flatshard.extras.trial_run.rank import run_script

_GRACE = 15.0  # seconds in which other ranks may end after one has failed


@dataclass
class Job:
    """What all runs have in common."""

    command: list[str]  # the script or module, and its arguments
    is_module: bool
    world_size: int
    folder: Path
    timeout: float
    settings: dict[str, Any] = field(default_factory=dict)  # for every rank, see ``rank``


@dataclass
class Run:
    """The records of one run, by rank; ``failure``: why it did not end by itself."""

    records: dict[int, dict[str, Any]]
    failure: dict[str, Any] | None = None


def run(job: Job, name: str) -> Run:
    """Run the script once on all ranks. ``name``: ddp, sharded or noise."""
    outside = "RANK" in os.environ  # torchrun has started this process for one rank
    ranks = [int(os.environ["RANK"])] if outside else list(range(job.world_size))
    port = os.environ.get("MASTER_PORT") or str(_free_port())
    settings = {**job.settings, "run": name, "folder": str(job.folder), "is_module": job.is_module}
    settings |= {"MASTER_PORT": port}
    pids: dict[int, int] = {}
    statuses: dict[int, int] = {}
    began, failed_at, late = time.monotonic(), 0.0, ""
    try:
        for rank in ranks:
            if not (pid := os.fork()):  # torch is loaded already, which a new process would repeat
                _become_rank(job, settings, rank, outside=outside)
            pids[rank] = pid
        while len(statuses) < len(pids):
            for rank in pids.keys() - statuses:
                pid, status = os.waitpid(pids[rank], os.WNOHANG)
                if pid:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
            now = time.monotonic()
            failed_at = failed_at or now * any(statuses.values())
            if failed_at and now > failed_at + _GRACE:
                break
            if now > began + job.timeout:
                late = f"no end within {job.timeout:.0f} seconds (--timeout)"
                _signal(pids, signal.SIGUSR1)  # writes the stacks
                time.sleep(1.0)
                break
            time.sleep(0.02)
    finally:
        _signal(pids, signal.SIGKILL)  # also DataLoaders' workers
        for rank in pids.keys() - statuses:
            statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
    return _read(job, name, statuses, late)


def _become_rank(job: Job, settings: dict[str, Any], rank: int, *, outside: bool) -> NoReturn:
    """Run the script in this process, which was forked for one rank."""
    os.setsid()
    log = os.open(job.folder / f"{settings['run']}-{rank}.log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    size = str(job.world_size)
    if outside:  # a prefix of the keys in torchrun's store
        os.environ["TORCHELASTIC_RESTART_COUNT"] = settings["run"]
    else:
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size, "RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = settings["MASTER_PORT"]
    run_script(job.command, settings, rank)


def _signal(pids: dict[int, int], number: signal.Signals) -> None:
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def _read(job: Job, name: str, statuses: dict[int, int], late: str) -> Run:
    """Read the records. The failure is the first one: that of the oldest file."""
    files = {rank: job.folder / f"{name}-{rank}.pt" for rank in range(job.world_size)}
    until = time.monotonic() + _GRACE  # under torchrun: for the records of other processes
    while len(statuses) < job.world_size and time.monotonic() < until:
        if all(path.exists() for path in files.values()):
            break
        time.sleep(0.1)
    there = sorted((path.stat().st_mtime, rank) for rank, path in files.items() if path.exists())
    records = {rank: torch.load(files[rank], weights_only=True) for _, rank in there}
    failures = [
        {**one["end"], "rank": rank}
        for rank, one in records.items()
        if one["end"]["how"] not in ("enough", "ended")
    ]
    # An error of flatshard names the cause; other ranks' errors often follow from a lost peer.
    failures.sort(key=lambda one: not one["is_ours"])
    for rank, path in files.items():
        if not path.exists() and (late or statuses.get(rank, 0) != -signal.SIGKILL):
            stack = path.with_suffix(".stack")
            found = re.findall(
                r'File "(.*)", line (\d+)', stack.read_text() if stack.exists() else ""
            )
            line = line_in((file, int(number)) for file, number in found)
            text = late or f"the process ended with status {statuses.get(rank)}"
            one = {"how": "died", "text": text, "line": line, "is_ours": False, "rank": rank}
            failures.insert(0 if not late else len(failures), one)
    if len(records) < job.world_size and not failures:
        failures = [{"how": "died", "text": "a rank left no record", "line": "", "is_ours": False}]
    return Run(dict(sorted(records.items())), failures[0] if failures else None)


def log_tail(job: Job, name: str, rank: int) -> str:
    """Return the last line that a rank has written."""
    path = job.folder / f"{name}-{rank}.log"
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else ""


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
