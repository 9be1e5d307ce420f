"""Checks that slow ranks raise no false alarm of a deadlock, and counts the traffic of a wait.

    PYTHONPATH=.:scripts python -m tests.simulated_gpu.slow_ranks [--only TEXT...] [--longest 20]

Runs these programs, all at the same time, and prints how each program ended:

- "pause": training steps in which one rank sleeps up to ``--longest`` seconds, at a random place;
  on simulated GPUs, with two and three ranks, with only NCCL or with both gloo and NCCL.
- "save": rank 0 needs ``--slow`` seconds to write a checkpoint.
- "compile": the first step compiles a block or the whole model, which takes rank 0 ``--slow``
  seconds longer than the other ranks; on gloo.
- "traffic": the last rank sleeps ``--slow`` seconds, and the other ranks wait. Prints how often a
  rank used the process group's store during the wait, and the number of bytes.

A rank ends with status 0 if no check for deadlocks took the other rank's sleep for a deadlock. The
script's exit status is 1 if a rank ended otherwise. With the default options, the script takes
about a quarter of an hour, and mostly sleeps.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lib.command_line import Parser, positive_number
from lib.rank_processes import Ranks

from tests.simulated_gpu import programs
from tests.simulated_gpu.server import Ended, Gpu

BOTH, NCCL = "cpu:gloo,cuda:nccl", "nccl"


class Program(NamedTuple):
    """A function of `programs.py` with its arguments, and the number of ranks."""

    kind: str
    world: int
    backend: str
    function: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}, {self.world} ranks, {self.backend}"


def programs_of(options: argparse.Namespace, folder: str) -> list[Program]:
    longest, slow = str(options.longest), str(options.slow)
    found = [
        Program("pause", world, backend, "pause", (str(seed), str(options.steps), longest))
        for seed, (world, backend) in enumerate([(w, b) for w in (2, 3) for b in (NCCL, BOTH)])
    ]
    for number, backend in enumerate((NCCL, BOTH)):
        saved = f"{folder}/saved-{number}"
        found.append(Program("save", 2, backend, "save_slowly", (saved, slow)))
    for world in (2, 4, 8):
        found += [Program("traffic", world, one, "count_traffic", (slow,)) for one in (NCCL, BOTH)]
    return [one for one in found if all(word in str(one) for word in options.only)]


def compiled(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Compile on two gloo ranks; yields what was compiled, and how the ranks ended."""
    with Ranks(2, ["tests.simulated_gpu.programs"]) as ranks:
        for text in ("a block", "the whole model"):
            name = f"compile, 2 ranks, gloo, {text}"
            if all(word in name for word in options.only):
                begin = time.monotonic()
                whole = text == "the whole model"
                said = ranks.run(programs.compile_slowly, 2, whole, options.slow, seconds=600)
                ends = {f"{one.outcome} {one.what or ''}".strip() for one in said}
                seconds = f"{time.monotonic() - begin:.0f} s"
                yield name, f"{'right' if ends == {'returned'} else ends}, {seconds}"


def run(gpu: Gpu, program: Program) -> list[Ended]:
    call = (program.function, program.backend, *program.arguments)
    patience = {"SIMULATED_PATIENCE": "600"}
    return gpu.run_programs(program.world, call, seconds=3600, **patience)[0]


def end_of(ranks: list[Ended]) -> str:
    """Return "right" if all ranks ended with status 0, or otherwise the first error."""
    wrong = [f"rank {n}: {one.text or one.errors[-2000:]}" for n, one in enumerate(ranks)]
    return next((text for text, one in zip(wrong, ranks, strict=True) if one.status), "right")


def most(ranks: list[Ended]) -> dict[str, int]:
    """Return the largest count of any rank, for each kind of access to the store."""
    counts = [json.loads(ended.text)["traffic"] for ended in ranks]
    return {key: max(one[key] for one in counts) for key in counts[0]}


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], help="run only programs that contain all of these words"
    )
    parser.add_number("--steps", 1000, "steps of each program that pauses")
    parser.add_argument("--longest", type=positive_number, default=20.0, help="longest pause")
    parser.add_argument("--slow", type=positive_number, default=15.0, help="length of other waits")
    options = parser.parse_args()
    is_wrong = False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        chosen = programs_of(options, folder)
        # One server per program, because a server answers only after all its ranks have ended.
        gpus = [Gpu(Path(tempfile.mkdtemp(dir=folder))) for _ in chosen]
        try:
            begin = time.monotonic()
            runs = [pool.submit(run, *one) for one in zip(gpus, chosen, strict=True)]
            for name, end in compiled(options):
                is_wrong |= not end.startswith("right")
                print(f"{name}: {end}", flush=True)
            for program, running in zip(chosen, runs, strict=True):
                end = end_of(ranks := running.result())
                is_wrong |= end != "right"
                if end == "right" and program.kind == "traffic":
                    end += "".join(f", {number} {key}" for key, number in most(ranks).items())
                print(f"{program}: {end}, {time.monotonic() - begin:.0f} s", flush=True)
        finally:
            for gpu in gpus:
                gpu.close()
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
