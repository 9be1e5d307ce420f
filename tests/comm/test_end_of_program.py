"""How Python ends while threads wait for other ranks: with the program's own exit status."""

import contextlib
import ctypes
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import forked


class _EndsSlowly:
    """A global whose end, in that of Python, lets other threads run: they are unwound there."""

    def __init__(self, then: Path) -> None:
        self.then = then

    def __del__(self) -> None:
        self.then.touch()  # now the other rank may end
        time.sleep(0.5)


def _raise_in_backward(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
    output.register_hook(_raise)


def _raise(_: torch.Tensor) -> None:
    raise ValueError("the cause")


def _program(rank: int, folder: Path) -> int:
    """Rank 0 leaves while an average is under way, and rank 1 when that ends."""
    # Nothing is gathered, and awaited, in backward.
    keywords = {"sharding_strategy": "SHARD_GRAD_OP", "collectives": "sockets", "coalesce_bytes": 0}
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = ShardedWrapper(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **keywords)
    model(torch.ones(1, 64)).sum().backward()
    if rank == 0:
        model.module[1].register_forward_hook(_raise_in_backward)
        loss = model(torch.ones(1, 64)).sum()
        with contextlib.suppress(ValueError):
            loss.backward()
        sys.modules[__name__]._kept = _EndsSlowly(folder / "ending")  # type: ignore[attr-defined]
        return 1
    model(torch.ones(1, 64))
    deadline = time.monotonic() + 3
    while not (folder / "ending").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os._exit(7)


def _main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ctypes.pythonapi.Py_Exit(_program(rank, folder))  # with all of Python's own end


def test_exit_status(tmp_path: Path) -> None:
    """A program ends with its own exit status, whatever threads still do."""
    ranks = [forked(_main, rank, tmp_path) for rank in range(2)]
    try:
        for rank in ranks:
            rank.join(60)
        status = [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert status == [1, 7]
