"""Prints how ranks end if rank 0 diverges from the other ranks, on simulated GPUs with NCCL.

    PYTHONPATH=.:scripts python -m tests.simulated_gpu.divergences [--only TEXT...] [--at-once 4]

Each cell of the printed table is one program of `scripts/gpu_checks/divergence.py`, on two or four
ranks, with only NCCL or with both gloo and NCCL. In the rows "all in the model", all other ranks
wait in the model. In the rows "one in a barrier", the last rank waits in a barrier of the program.

A cell is right if every rank raises within SOON seconds and ends with exit status 1, and if errors
and logs give the same reason on all ranks. In the case "out of data", rank 0 must end with status
0. A right cell shows after how many seconds the slowest rank raised. The script's exit status is 1
if a cell is wrong.

All 48 cells take about four minutes on two cores.
"""

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from gpu_checks.divergence import CASES, SOON
from lib.command_line import Parser, at_least

from tests.simulated_gpu.server import Ended, Gpu

SIX = [case for case in CASES if "norm" not in case and "barrier" not in case]
BARRIERS = {"all in the model": "", "one in a barrier": "barrier"}
WORLDS = (2, 4)
BACKENDS = ("nccl", "cpu:gloo,cuda:nccl")
# A deadlock error first describes the rank's own wait, and then gives the reason. A reason begins
# with one of these texts.
_REASONS = (
    "the ranks wait for one another",
    "the ranks are in different collectives",
    "ranks began different collectives",
    "ranks all-gathered different units",
    "on NCCL's process group",
    "rank 0 ended by",
)


class Setting(NamedTuple):
    """A program, the place of the other ranks, the number of ranks, and the backend."""

    case: str
    others: str
    world: int
    backend: str

    def program(self) -> tuple[str, ...]:
        return ("diverge", self.backend, self.case, BARRIERS[self.others])


def all_settings() -> list[Setting]:
    return [Setting(*values) for values in product(SIX, BARRIERS, WORLDS, BACKENDS)]


def reason_of(said: dict[str, Any]) -> str:
    """Return the reason of a deadlock from a rank's error, or otherwise from its log.

    Returns "" if neither the error nor the log contains a reason.
    """
    for text in (said["error"], *said["log"]):
        if starts := [text.index(words) for words in _REASONS if words in text]:
            end = text.find("[FS-DEADLOCK]", min(starts))
            return str(text[min(starts) : end if end > 0 else None]).strip()
    return ""


def problems(setting: Setting, ranks: Sequence[Ended]) -> tuple[list[str], float]:
    """Return the differences from the expected end, and after how long the slowest rank raised."""
    found, slowest = [], 0.0
    reasons: defaultdict[str, list[int]] = defaultdict(list)
    for rank, ended in enumerate(ranks):
        goes_on = setting.case == "out of data" and rank == 0
        raises = setting.case == "a rank raises" and rank == 0
        if ended.status != (0 if goes_on else 1):
            found.append(f"rank {rank} ends with status {ended.status}")
        if not ended.text:
            found.append(f"rank {rank} waits forever, or says nothing: {ended.errors[-500:]}")
            continue
        said = json.loads(ended.text)
        slowest = max(slowest, said["seconds"])
        if said["seconds"] > SOON:
            found.append(f"rank {rank} raises after {said['seconds']:.0f} s")
        if bool(said["error"]) is goes_on:
            found.append(f"rank {rank}: {said['error'] or 'no error'}")
        if not goes_on and not raises:
            reasons[reason_of(said) or said["error"]].append(rank)
    if len(reasons) > 1 or any(not reason.startswith(_REASONS) for reason in reasons):
        found += [f"rank {', '.join(map(str, some))}: {text}" for text, some in reasons.items()]
    return found, slowest


def ends(
    gpu: Gpu, settings: Sequence[Setting], at_once: int
) -> Iterator[tuple[Setting, list[Ended]]]:
    """Run each setting, and yield how its ranks ended. At most ``at_once`` ranks run at a time."""
    for world in WORLDS:
        some = [setting for setting in settings if setting.world == world]
        step = max(1, at_once // world)
        for start in range(0, len(some), step):
            now = some[start : start + step]
            run = gpu.run_programs(world, *(setting.program() for setting in now))
            yield from zip(now, run, strict=True)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], help="run only cells that contain all of these words"
    )
    parser.add_argument(
        "--at-once", type=at_least(4), default=12, help="maximum number of ranks at a time"
    )
    parser.add_argument("--texts", action="store_true", help="print what every rank says")
    options = parser.parse_args()
    settings = [
        setting
        for setting in all_settings()
        if all(any(word in str(value) for value in setting) for word in options.only)
    ]
    cells: dict[Setting, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        gpu = Gpu(Path(folder))
        try:
            for setting, ranks in ends(gpu, settings, options.at_once):
                wrong, seconds = problems(setting, ranks)
                cells[setting] = "**wrong**" if wrong else f"{seconds:.1f} s"
                for text in wrong:
                    print(f"{setting}: {text}", file=sys.stderr, flush=True)
                if options.texts:
                    print(setting, *(ended.text for ended in ranks), sep="\n  ", flush=True)
        finally:
            gpu.close()
    columns = list(product(BACKENDS, WORLDS))
    print("| rank 0 | other ranks |", *(f"{b}, {w} ranks |" for b, w in columns))
    print(f"|---|---|{'---|' * len(columns)}")
    for case, others in product(SIX, BARRIERS):
        row = [cells.get(Setting(case, others, w, b), "") for b, w in columns]
        print(f"| {case} | {others} | {' | '.join(row)} |")
    print(f"\n{len(cells)} cells, {sum('wrong' in text for text in cells.values())} wrong")
    return int(any("wrong" in text for text in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
