"""Programs for ranks on a simulated GPU: each takes its rank, and returns its error, if any."""

import os
import random
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gpu_checks import divergence
from lib.watch_cost import cost_of_watching
from torch.distributed import distributed_c10d

from flatshard import checkpoint
from flatshard.extras.deadlock import gpu

GPU = torch.device("cuda", 0)


def diverge(rank: int, case: str, barrier: str = "") -> dict[str, Any]:
    """``barrier``: if not empty, the last rank waits in a barrier of the program."""
    return divergence.run_program(case, rank, GPU, bool(barrier))


def diverge_unseen(rank: int, case: str, timeout: str = "") -> dict[str, Any]:
    """The same where nobody looks at waits for the GPU, and with a ``timeout`` in seconds."""
    if timeout:
        for group in tuple(distributed_c10d._world.pg_names):
            distributed_c10d._set_pg_timeout(timedelta(seconds=float(timeout)), group)
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


def wait_in_different_places(rank: int, seconds: str) -> dict[str, Any]:
    """The last rank is late. Meanwhile rank 0 waits on the GPU, and rank 1 at the end of backward.

    The ranks in between have begun different numbers of collectives, but none waits for another.
    """
    program = divergence.Program(rank, GPU)
    program.step()
    if rank == dist.get_world_size() - 1:
        time.sleep(float(seconds))
    loss = program.model(program.batch).square().sum()
    if rank == 0:
        loss.item()
    loss.backward()
    torch.cuda.synchronize()
    return {"error": "", "seconds": 0.0}


def save_slowly(rank: int, folder: str, seconds: str) -> dict[str, Any]:
    """Rank 0 writes a checkpoint for so long; the others wait, and go on with the next step."""
    program = divergence.Program(rank, GPU)
    program.step()
    if rank == 0:
        really_replace = os.replace

        def replace_slowly(*args: Any) -> None:
            time.sleep(float(seconds))
            really_replace(*args)

        os.replace = replace_slowly
    checkpoint.save(folder, program.model, program.optimizer)
    if rank == 0:
        time.sleep(float(seconds))  # writes a file of its own
    program.step()
    torch.cuda.synchronize()
    return {"error": "", "seconds": 0.0}


def pause(rank: int, seed: str, steps: str, longest: str) -> dict[str, Any]:
    """Steps in which some rank sleeps anywhere, up to ``longest`` seconds in one step of twenty.

    In some steps a rank reads a value that the others do not read, and the program has collectives
    of its own: all-reduces on the GPU and barriers. Some steps only evaluate.
    """
    program, ranks = divergence.Program(rank, GPU), dist.get_world_size()
    common, value = random.Random(seed), torch.ones(1).cuda()
    for _ in range(int(steps)):
        late, reader, place = common.randrange(ranks), common.randrange(2 * ranks), common.random()
        kind = common.choice(("train", "train", "train", "evaluate", "clip", "reduce", "barrier"))
        seconds = common.random() * (float(longest) if common.random() < 0.05 else 0.02)

        def sleep(here: float, late: int = late, place: float = place, s: float = seconds) -> None:
            if rank == late and here <= place < here + 0.25:
                time.sleep(s)

        sleep(0.0)
        with torch.set_grad_enabled(kind != "evaluate"):
            loss = program.model(program.batch).square().mean()
        sleep(0.25)
        if rank == reader:
            loss.item()
        if kind == "evaluate":
            continue
        if kind == "reduce":
            dist.all_reduce(value)
        loss.backward()
        sleep(0.5)
        if kind == "clip":
            program.model.clip_grad_norm_(1.0)
        program.optimizer.step()
        program.optimizer.zero_grad()
        sleep(0.75)
        if kind == "barrier":
            dist.barrier()
    torch.cuda.synchronize()
    return {"error": "", "seconds": 0.0}


def measure_watching(rank: int, blocks: str, steps: str) -> dict[str, Any]:
    """Seconds of a step with and without looks for deadlocks (`scripts/measure/watching.py`)."""
    program = divergence.Program(rank, GPU)
    program.step()
    return {"error": "", **cost_of_watching(program.step, int(blocks), int(steps))._asdict()}
