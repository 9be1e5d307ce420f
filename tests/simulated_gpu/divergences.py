"""How ranks must end if rank 0 diverges from the other ranks, on simulated GPUs with NCCL.

A setting is one program of `scripts/gpu_checks/divergence.py`, the place where the other ranks wait
(all in the model, or the last one in a barrier of the program), the number of ranks, and whether
gloo is used beside NCCL.

Within SOON seconds after the divergence, every rank must raise, give the same reason in its error
or its log, and end with exit status 1. Exception: in the program "out of data", rank 0 ends
normally, with status 0.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpu_checks.divergence import CASES, SOON

from tests.simulated_gpu.server import Ended

SIX = [case for case in CASES if "norm" not in case and "barrier" not in case]
BARRIERS = {"all in the model": "", "one in a barrier": "barrier"}
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
