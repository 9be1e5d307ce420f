"""Places and outcomes of the parts of `gpu_check.py`: device, backend, ranks and result."""

import importlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PASS, FAIL, SKIP = "pass", "FAIL", "skip"
NO_GPU = "there is no GPU"
FAKE_RANKS = 8


@dataclass
class Outcome:
    """Result of a part: its line in the table, and its figures in the JSON file."""

    result: str
    text: str
    figures: Any = None


@dataclass(frozen=True)
class Place:
    """Kind of device, backend and number of ranks on which a part runs."""

    device: str
    backend: str
    ranks: int

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def shares_gpu(self) -> bool:
        return self.is_cuda and self.ranks > torch.cuda.device_count()

    def describe(self) -> str:
        shared = " on one GPU" if self.shares_gpu else ""
        return f"{self.ranks} ranks{shared}, {self.backend} on {self.device}"


def join(place: Place, rank: int, store: str) -> torch.device:
    """Make this process a rank; returns its device."""
    device = torch.device(place.device)
    if place.is_cuda:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if "nccl" in place.backend and place.shares_gpu:
            share_gpu(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        place.backend,
        store=dist.FileStore(store, place.ranks),
        rank=rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=60),
    )
    return device


def share_gpu(rank: int) -> None:
    """Let NCCL run this rank on a GPU that other ranks use too.

    NCCL refuses two ranks with the same host and the same GPU ("Duplicate GPU detected"). It reads
    the host from NCCL_HOSTID, so each rank names another host. NCCL then connects the ranks over
    sockets, of which only the loopback interface is sure to work on one machine.
    """
    os.environ["NCCL_HOSTID"] = f"host-{rank}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_IB_DISABLE"] = "1"


def simulate(device: torch.device, world_size: int) -> None:
    """Make this process rank 0 of ``world_size`` simulated ranks. Collectives move nothing."""
    # This import registers torch's backend "fake".
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Use a store that works, because real groups are created beside the fake group.
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)


def group_without_cpu(device: torch.device) -> dist.ProcessGroup:
    """A simulated group without a backend for CPU tensors, like a group of NCCL."""
    group = dist.new_group(backend=f"{device.type}:fake")
    assert isinstance(group, dist.ProcessGroup)
    return group


def in_ranks(run: Callable[..., Any], place: Place, *args: Any) -> list[Any]:
    """Call ``run(rank, device, place, *args)`` on every rank; returns the results, through JSON."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        mp.spawn(_one_rank, (run, place, store, args), nprocs=place.ranks)
        return [json.loads(Path(f"{store}.{r}").read_text()) for r in range(place.ranks)]


def _one_rank(
    rank: int, run: Callable[..., Any], place: Place, store: str, args: tuple[Any, ...]
) -> None:
    device = join(place, rank, store)
    Path(f"{store}.{rank}").write_text(json.dumps(run(rank, device, place, *args)))
    # The first rank that ends removes the store's file, which the other ranks still need.
    dist.barrier()
    dist.destroy_process_group()


def one_line(error: BaseException) -> str:
    """An error in one line. If a rank failed, the last line: the message follows a traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    said = lines[-1] if isinstance(error, mp.ProcessRaisedException) else lines[0]
    return f"{type(error).__name__}: {said.strip()}"[:400]
