"""Code that the example trainers share: options, ranks, and checkpoints with restarts."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard import ShardingStrategy, checkpoint
from lib import output
from lib.command_line import Parser


def make_parser(description: str | None) -> Parser:
    """Returns a parser with the options of strategy, transport, checkpoints and results."""
    parser = Parser(description)
    add = parser.add_argument
    add("--strategy", choices=[one.name for one in ShardingStrategy], default="FULL_SHARD")
    add("--ddp", action="store_true", help="train with DistributedDataParallel instead")
    add("--collectives", choices=["auto", "sockets", "native"], default="auto")
    add("--checkpoint-dir", type=Path, metavar="DIR", help="save here, and on SIGTERM")
    add("--checkpoint-every", type=int, default=100, metavar="STEPS")
    add("--resume", action="store_true", help="from the last checkpoint in DIR, if there is one")
    parser.add_json("the results")
    return parser


def connect() -> torch.device:
    """Joins the process group, with a GPU per local rank if possible; returns the rank's device.

    Without torchrun, the process is the only rank.
    """
    group: dict[str, Any] = {}
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        group = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    elif os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun's store outlives a restart, and still has the addresses of ranks that have ended.
        # A rank that reads such an address before it is overwritten would hang. So use a separate
        # prefix for each restart. (On several hosts each torchrun counts restarts separately; see
        # docs/checkpoints.md.)
        store, rank, world_size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"restart-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        group = {"store": store, "rank": rank, "world_size": world_size}
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **group)
        return device
    dist.init_process_group("gloo", **group)
    return torch.device("cpu")


def say(thing: object) -> None:
    """Prints on rank 0 only, and flushes, so that a pipe gets the line at once."""
    if dist.get_rank() == 0:
        print(thing, flush=True)


def rows_per_rank(batch_size: int, num_micro_batches: int = 1) -> int:
    """Returns the size of this rank's share of a batch, which all ranks share evenly."""
    parts = dist.get_world_size() * num_micro_batches
    if batch_size % parts:
        raise ValueError(f"--batch-size {batch_size} cannot be split into {parts} equal parts")
    return batch_size // dist.get_world_size()


def share_of_rank(count: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the indices of this rank's share of ``count`` rows, and which of them are counted.

    A sharded forward is collective, so every rank must call forward equally often, even if the rows
    do not divide evenly. All ranks take a share of the largest size, in parts of ``size``. Indices
    past the end are not counted, so each row is counted once.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    places = torch.arange(-(-count // world_size)) * world_size + rank
    for part in places.split(size):
        yield part.clamp(max=count - 1), part < count


def mean_over_ranks(value: Tensor) -> float:
    """Returns the mean of the ranks' values. Collective."""
    total = value.double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def write_json(args: argparse.Namespace, **results: Any) -> None:
    """Writes the options and results to the file of `--json`, on rank 0."""
    if dist.get_rank() == 0:
        about = {"settings": vars(args), "torch": torch.__version__}
        output.write_json(args.json, {**about, **results})


class Checkpoints:
    """Saves the training every `--checkpoint-every` steps, and once more when SIGTERM arrives."""

    def __init__(self, args: argparse.Namespace, *training: Any, scheduler: Any = None) -> None:
        self.args, self.training, self.scheduler = args, training, scheduler
        self.is_asked = False
        if args.resume and not args.checkpoint_dir:
            raise ValueError("--resume needs --checkpoint-dir")
        # A machine that is preempted, or torchrun on the machine, sends SIGTERM.
        if args.checkpoint_dir:
            signal.signal(signal.SIGTERM, self.ask_to_stop)

    def ask_to_stop(self, *_: Any) -> None:
        self.is_asked = True

    def resume(self) -> dict[str, Any]:
        """Loads the last checkpoint, if there is one; returns its `extra`. Collective."""
        path = checkpoint.latest(self.args.checkpoint_dir) if self.args.resume else None
        if path is None:
            return {}
        extra = checkpoint.load(path, *self.training, scheduler=self.scheduler)
        say(f"Resumed after step {extra['step']}")
        return extra

    def after_step(self, step: int, extra: dict[str, Any]) -> None:
        """Saves if a checkpoint is due; ends the ranks if one has received SIGTERM. Collective."""
        if not self.args.checkpoint_dir:
            return
        # NCCL reduces only tensors on a GPU.
        must_stop = torch.tensor(self.is_asked, dtype=torch.int32)
        must_stop = must_stop.to("cuda") if dist.get_backend() == "nccl" else must_stop
        dist.all_reduce(must_stop)
        if must_stop or step % self.args.checkpoint_every == 0:
            path, extra = self.args.checkpoint_dir / f"step-{step:08d}", {**extra, "step": step}
            checkpoint.save(path, *self.training, scheduler=self.scheduler, extra=extra, keep=3)
            if must_stop:
                say(f"SIGTERM: saved {path.name}")
                dist.destroy_process_group()
                sys.exit()
