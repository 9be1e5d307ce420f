"""Part `diverge`: if rank 0 leaves the program of the other ranks, all ranks must soon raise."""

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from gpu_checks.places import FAIL, NO_GPU, PASS, SKIP, Outcome, Place, join

CASES = (
    "a unit is skipped",
    "an extra forward",
    "state_dict() on one rank",
    "clipping on one rank",
    "the norm of a gradient on one rank",
    "out of data",
    "a rank raises",
    "a barrier on one rank",
)
SOON = 15.0
"""Number of seconds after the divergence by which every rank must have raised."""
WIDTH = 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor, skips: bool = False) -> Tensor:
        for number, layer in enumerate(self.layers):
            if not (skips and number == 2):
                x = layer(x)
        return x


class Program:
    """A training program in which rank 0 does something that the other ranks do not do."""

    def __init__(self, rank: int, device: torch.device, has_barrier: bool = False) -> None:
        """Make the program.

        ``has_barrier``: instead of the next training step, the last rank waits in a barrier of the
        program.
        """
        torch.manual_seed(0)
        self.is_odd = rank == 0  # whether this rank does something that the other ranks do not do
        self.is_in_barrier = has_barrier and rank == dist.get_world_size() - 1
        model = Layers().to(device)
        # Without coalescing, which would make one unit of layers as small as these.
        policy = ModuleWrapPolicy({Layer})
        self.model = ShardedWrapper(model, auto_wrap_policy=policy, coalesce_bytes=0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batch = torch.randn(4, WIDTH).to(device)

    def backward(self, skips: bool = False) -> None:
        self.model(self.batch, skips).square().sum().backward()

    def step(self, skips: bool = False) -> None:
        self.backward(skips)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def diverge(self, case: str) -> None:
        """Run the part of the program in which rank 0 differs, and then two more training steps."""
        if case == "out of data" and self.is_odd:
            return
        is_in_step = case in ("clipping on one rank", "the norm of a gradient on one rank")
        if is_in_step:
            self.backward()
        if self.is_odd and case in ACTIONS:
            ACTIONS[case](self)
        if self.is_in_barrier:
            dist.barrier()
        if case == "a unit is skipped":
            self.step(skips=self.is_odd)
        if is_in_step:
            self.optimizer.step()
        for _ in range(2):
            self.step()
        if self.batch.device.type == "cuda":
            torch.cuda.synchronize()


def _raise(program: Program) -> None:
    raise ValueError("an error of the program")


def _take_norm(program: Program) -> None:
    gradient = next(program.model.parameters()).grad
    assert gradient is not None
    gradient.norm().item()


ACTIONS: dict[str, Callable[[Program], object]] = {
    "an extra forward": lambda program: program.model(program.batch),
    "state_dict() on one rank": lambda program: program.model.state_dict(),
    "clipping on one rank": lambda program: program.model.clip_grad_norm_(1.0),
    "the norm of a gradient on one rank": _take_norm,
    "a rank raises": _raise,
    "a barrier on one rank": lambda program: dist.barrier(),
}
"""Calls of rank 0 that the other ranks do not make."""


class Log(logging.Handler):
    """Keeps the errors that flatshard logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []
        logging.getLogger("flatshard").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run_program(
    case: str, rank: int, device: torch.device, has_barrier: bool = False
) -> dict[str, Any]:
    """Train three steps on all ranks, and then let rank 0 diverge as ``case`` says.

    ``has_barrier``: see ``Program``.

    Returns:
        ``error``: type and text of the error that this rank raised, "" if none; ``log``: the errors
        that flatshard logged; ``seconds``: time from the beginning of the divergence to the error,
        or to the end of the program.
    """
    log = Log()
    program = Program(rank, device, has_barrier)
    for _ in range(3):
        program.step()
    begin, error = time.monotonic(), ""
    try:
        program.diverge(case)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        sys.excepthook(type(raised), raised, raised.__traceback__)  # as if nobody had caught it
    return {"error": error, "log": log.lines, "seconds": time.monotonic() - begin}


def one_rank(rank: int, case: str, place: Place, folder: str) -> None:
    """Run the program of one rank in this process, and write its result to ``folder``.

    Exits with status 1 if the program raised, and otherwise with status 0.
    """
    device = join(place, rank, f"{folder}/store")
    result = run_program(case, rank, device)
    Path(folder, f"result.{rank}").write_text(json.dumps(result))
    sys.exit(1 if result["error"] else 0)


@dataclass
class Started:
    """A case whose ranks were started: one process for each rank."""

    case: str
    folder: str
    processes: list[Any] = field(default_factory=list)

    def problems(self) -> list[str]:
        """Return a text for each rank that did not raise, raised late, or ended with wrong status.

        In the case "out of data", rank 0 ends without an error, and must end with status 0.
        """
        found = []
        for rank, process in enumerate(self.processes):
            path = Path(self.folder, f"result.{rank}")
            result = json.loads(path.read_text()) if path.exists() else None
            where = f"{self.case}, rank {rank}"
            goes_on = self.case == "out of data" and rank == 0
            if result is None:
                found.append(f"{where}: still waits, or was killed ({process.exitcode})")
            elif bool(result["error"]) is goes_on:
                found.append(f"{where}: {result['error'] or 'no error'}")
            elif result["seconds"] > SOON:
                found.append(f"{where}: raised after {result['seconds']:.0f} s")
            elif process.exitcode != (0 if goes_on else 1):
                found.append(f"{where}: ended with exit status {process.exitcode}")
            if result is not None:
                print(f"{where}: {result}", flush=True)
        return found


def part_diverge(place: Place, args: argparse.Namespace) -> Outcome:
    deadline = time.monotonic() + 0.8 * args.limit
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number, case in enumerate(CASES):
            one = Started(case, f"{folder}/{number}")
            Path(one.folder).mkdir()
            ranks = mp.spawn(one_rank, (case, place, one.folder), place.ranks, join=False)
            one.processes = ranks.processes
            started.append(one)
        for one in started:
            for process in one.processes:
                process.join(max(0.1, deadline - time.monotonic()))
        problems = [problem for one in started for problem in one.problems()]
        for one in started:
            for process in one.processes:
                process.kill()
    if problems:
        return Outcome(FAIL, "\n".join([f"{len(problems)} ranks", *problems]), problems)
    text = f"{place.describe()}: {len(CASES)} cases, all ranks raised within {SOON:.0f} s"
    return Outcome(PASS if place.is_cuda else SKIP, text if place.is_cuda else f"{NO_GPU}; {text}")
