"""Programs for ranks on a simulated GPU: each takes its rank, and returns its error, if any."""

import time
from typing import Any

import torch
import torch.distributed as dist
from gpu_checks import divergence

from flatshard.extras.deadlock import gpu

GPU = torch.device("cuda", 0)


def diverge(rank: int, case: str) -> dict[str, Any]:
    return divergence.run_program(case, rank, GPU)


def diverge_unseen(rank: int, case: str) -> dict[str, Any]:
    """The same where nobody looks at waits for the GPU."""
    vars(gpu)["_place_of"] = lambda thread: None
    vars(gpu)["end_waits"] = vars(gpu)["abort"] = lambda *_: None
    return divergence.run_program(case, rank, GPU)


def wait_in_own(rank: int) -> dict[str, Any]:
    """Rank 0 waits on the GPU in a collective of the program, the others in one of the model."""
    program, begin, error = divergence.Program(rank, GPU), time.monotonic(), ""
    program.step()
    try:
        with torch.no_grad():
            if rank == 0:
                value = torch.ones(1).cuda()
                dist.all_reduce(value)
            else:
                value = program.model(program.batch).sum()
            value.item()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "seconds": time.monotonic() - begin}


def are_slow(rank: int, *seconds: str) -> dict[str, Any]:
    """Steps before which a rank sleeps, while the other waits for it on the GPU."""
    program = divergence.Program(rank, GPU)
    for step, one in enumerate(seconds):
        if step % 2 == rank:
            time.sleep(float(one))
        program.backward()
        norm = program.model.clip_grad_norm_(1.0)
        if step % 3 == 0:
            norm.item()
        program.optimizer.step()
        program.optimizer.zero_grad()
    with torch.no_grad():
        for step in range(2):
            if step == rank:
                time.sleep(float(seconds[0]))
            program.model(program.batch).sum().item()
    return {"error": "", "seconds": 0.0}
