"""Ranks on one host read one another's memory: the same numbers as through sockets, bit for bit."""

import ctypes
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from flatshard import CollectiveError, collectives, peer_memory
from tests.harness import naming, run_ranks
from tests.models import CASES, Case, Mlp, vectors
from tests.oracle import OPTIMIZERS, snapshot, train_steps, trainable

_TELL_ADDRESS = (
    "import ctypes; b = ctypes.c_int64(1); print(ctypes.addressof(b), flush=True); input()"
)


@pytest.fixture(autouse=True, scope="module")
def _may_read() -> None:
    """Skip where the system forbids to read even a child's memory; other failures are failures."""
    if peer_memory._readv is None:
        pytest.skip("this system has no process_vm_readv")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-S", "-c", _TELL_ADDRESS], **pipes) as child:
        word = ctypes.c_int64()
        here = peer_memory._Range(ctypes.addressof(word), 8)
        there = peer_memory._Range(int(child.stdout.readline()), 8)
        got = peer_memory._readv(child.pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        number = ctypes.get_errno() if got < 0 else 0
        child.communicate(b"\n")
    if number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        pytest.skip(f"a process may not read another one's memory here: {os.strerror(number)}")


SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "flat": {"use_orig_params": False},
    "zero2": {"sharding_strategy": "SHARD_GRAD_OP"},
    "zero1": {"sharding_strategy": "SHARD_OP"},
    "no backward prefetch": {"backward_prefetch": None},
}
ON_NODES: dict[str, dict[str, Any]] = {
    "hybrid": {"sharding_strategy": "HYBRID_SHARD"},
    "hybrid, optimizer over all": {"sharding_strategy": "HYBRID_SHARD_OP"},
    "regathered": {"reshard_after_forward": 2},
}


@contextmanager
def counting_reads() -> Iterator[list[int]]:
    """In small pieces; yields the sizes of what was read, in bytes."""
    read = peer_memory._read
    sizes: list[int] = []

    def counted(pid: int, source: int, destination: int, nbytes: int) -> None:
        sizes.append(nbytes)
        read(pid, source, destination, nbytes)

    with (
        mock.patch.object(collectives, "_PIECE_NUMEL", 7),
        mock.patch.object(peer_memory, "_read", counted),
    ):
        yield sizes


def trained(case: Case, rank: int, world_size: int, **keywords: Any) -> Any:
    model = case.wrap(case.model(), **keywords)
    optimizer = OPTIMIZERS["sgd"](trainable(model))
    losses = train_steps(model, optimizer, case, rank, world_size, steps=3)
    return losses, snapshot(model)


def same_as_sockets(rank: int, world_size: int, settings: dict[str, Any], names: list[str]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size // 2 if settings is ON_NODES else world_size)
    for what, keywords in settings.items():
        for name in names:
            with naming(f"{what}, {name}"):
                case = CASES[name]
                expected = trained(case, rank, world_size, collectives="sockets", **keywords)
                with counting_reads() as sizes:
                    actual = trained(case, rank, world_size, **keywords)
                assert sizes, "nothing was read"
                torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("world_size", "settings", "names"),
    [
        (2, {"full": {}}, list(CASES)),
        (2, SETTINGS, ["mlp", "nested", "unused", "twice"]),
        (3, SETTINGS, ["mlp", "transformer"]),
        (4, ON_NODES, ["mlp", "unused"]),
    ],
    ids=["every-case", "2", "3", "4"],
)
def test_same_as_sockets(world_size: int, settings: dict[str, Any], names: list[str]) -> None:
    run_ranks(same_as_sockets, world_size, settings, names)


# ---------------------------------------------------------------- who reads


def nobody_reads(rank: int, world_size: int) -> None:
    # Rank 1 may not.
    readv = None if rank == 1 else peer_memory._readv
    with counting_reads() as sizes, mock.patch.object(peer_memory, "_readv", readv):
        trained(CASES["mlp"], rank, world_size)
    assert not sizes


def test_all_or_none() -> None:
    run_ranks(nobody_reads, 2)


# ---------------------------------------------------------------- in time


class Slow(Mlp):
    """Rank 1 is late."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.distributed.get_rank() == 1:
            time.sleep(0.3)
        return super().forward(x)


def edited_after_forward(rank: int, world_size: int) -> None:
    case = Case("slow", Slow, vectors, (nn.Linear,))
    x = case.batch(0, 2)[0]
    with torch.no_grad():
        expected = case.model()(x)
        with counting_reads():
            model = case.wrap(case.model())
            actual = model(x)
            for param in model.parameters():
                param.fill_(float("nan"))  # while the late rank computes
    torch.testing.assert_close(actual, expected)


def test_parameters_stay_until_all_have_them() -> None:
    run_ranks(edited_after_forward, 2)


def dies(rank: int, world_size: int) -> str:
    case = CASES["mlp"]
    with counting_reads():
        model = case.wrap(case.model())
        train_steps(model, OPTIMIZERS["sgd"](trainable(model)), case, rank, world_size, steps=1)
        if rank == 1:
            os._exit(1)
        with pytest.raises(CollectiveError) as error:
            model(case.batch(0, 2)[0]).sum().backward()
    return str(error.value)


def test_a_dead_peer_is_a_named_error() -> None:
    told = run_ranks(dies, 2, expendable=[1])[0]
    assert "rank 0: gathering parameters for forward" in told, told
