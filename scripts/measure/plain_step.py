"""Traces one plain training step, and counts the files, functions and lines that it executes.

    torchrun --standalone --nproc-per-node 2 scripts/measure/plain_step.py native|sockets|auto

Four blocks train under FULL_SHARD with AdamW and gradient clipping. The program traces the fourth
step, when all caches are filled, on rank 0 and in all threads. Only functions that `def` defines
count, without lambdas and comprehensions. All files of the package count.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from lib.command_line import Parser
from torch import nn

import flatshard
from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy

TRANSPORTS = ("native", "sockets", "auto")
WIDTH = 512
TRACED_STEP = 3


class Executed(NamedTuple):
    """Numbers of functions and lines of one file that a step executes."""

    functions: int
    lines: int


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tracer:
    """While entered, records functions and lines of the package, in all threads."""

    def __init__(self) -> None:
        self._folder = f"{Path(flatshard.__file__).parent}/"
        # By file.
        self._functions: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        self._lines: defaultdict[str, set[int]] = defaultdict(set)

    def __enter__(self) -> Tracer:
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self._folder):
            return None
        name = code.co_filename.removeprefix(self._folder)
        if event == "call" and not code.co_name.startswith("<"):
            self._functions[name].add((code.co_qualname, code.co_firstlineno))
        elif event == "line":
            self._lines[name].add(frame.f_lineno)
        return self._trace

    def executed(self) -> dict[str, Executed]:
        """Numbers of executed functions and lines, keyed by the file's path in the package."""
        sizes = {name: (len(self._functions[name]), len(self._lines[name])) for name in self._lines}
        return {name: Executed(*sizes[name]) for name in sorted(sizes)}


def executed_in_a_step(transport: str) -> dict[str, Executed]:
    """Train on this process's group of ranks, and trace one step. See `Tracer.executed`."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 10))
    policy = ModuleWrapPolicy({Block})
    # Without coalescing, each block is a unit, as blocks of a usual size would be.
    sharded = ShardedWrapper(
        model, auto_wrap_policy=policy, collectives=transport, coalesce_bytes=0
    )
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    for _ in range(TRACED_STEP):
        _step(sharded, optimizer)
    with Tracer() as tracer:
        _step(sharded, optimizer)
    return tracer.executed()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, WIDTH)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("transport", choices=TRANSPORTS, help="transport of the collectives")
    transport = parser.parse_args().transport
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    executed = executed_in_a_step(transport)
    if dist.get_rank() == 0:
        for name, (functions, lines) in executed.items():
            print(f"{name:44}{functions:4} functions {lines:5} lines")
        functions, lines = map(sum, zip(*executed.values(), strict=True))
        print(f"{transport}: {lines} lines in {functions} functions of {len(executed)} files")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
