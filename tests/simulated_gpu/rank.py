"""One rank on a simulated GPU: trains as `scripts/gpu_check.py` does, and prints how far it is off.

    python -m tests.simulated_gpu.rank RANK WORLD_SIZE STORE CASE...

A case is a strategy, a precision and a variant, with commas between. A line of JSON for each. With
SIMULATED_WITHOUT_WAIT=FUNCTION in the environment no stream waits for another one where that
function of flatshard's says so; nowhere with ``every``, for a collective with ``work``.
"""

import dataclasses
import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from gpu_checks import equality

from tests.simulated_gpu.kernels import Kernels


def leave_out(site: str) -> None:
    """Leave out the wait of a function, or those for collectives."""
    if site == "work":
        dist.Work.wait = lambda *_: True
    elif site:
        wait_stream = torch.cuda.Stream.wait_stream

        def wait_elsewhere(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
            if site not in ("every", sys._getframe(1).f_code.co_name):
                wait_stream(stream, other)

        torch.cuda.Stream.wait_stream = wait_elsewhere


def main(rank: int, world_size: int, store: str, cases: list[str]) -> None:
    torch.set_num_threads(1)
    leave_out(os.environ.get("SIMULATED_WITHOUT_WAIT", ""))
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    equality.STEPS = 3
    start = dict(equality.make_model(cpu).state_dict())
    for text in cases:
        case = equality.Case(*text.split(","))
        expected = equality.train_plain(case, world_size, cpu)
        with Kernels():
            trained = equality.train_sharded(case, rank, gpu)
            off = equality.compare(trained, expected, start)
        print(json.dumps(dataclasses.asdict(off)), flush=True)
    dist.barrier()
    os._exit(0)  # what belongs to the device ends with the process


if __name__ == "__main__":
    number, size, place, *wanted = sys.argv[1:]
    main(int(number), int(size), place, wanted)
