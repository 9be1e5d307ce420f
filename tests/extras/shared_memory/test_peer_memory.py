"""Ranks on one host read one another's memory: the same numbers as through sockets, bit for bit."""

import copy
import ctypes
import errno
import gc
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatshard import CollectiveError, CPUOffload, ShardedWrapper
from flatshard.comm.transports import sockets
from flatshard.extras import mapped_files, shared_memory
from flatshard.extras.shared_memory import peer_memory
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import every
from tests.harness import assert_raises, naming, on_ranks
from tests.mapping import mapping
from tests.models import CASES, Case, Mlp, vectors
from tests.oracle import assert_identical, assert_same_gradients, change_all, trained
from tests.side import Run

pytestmark = pytest.mark.by_turns

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


NO_MEMORY = OSError(12, "none")
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
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

    in_pieces = mock.patch.object(shared_memory, "_PIECE_NUMEL", 19)
    with in_pieces, mock.patch.object(peer_memory, "_read", counted):
        yield sizes


TRANSPORTS = {"shared memory": {}, "sockets": {"collectives": "sockets"}}


@pytest.mark.parametrize(
    ("world_size", "settings", "names"),
    [
        (2, {"full": {}}, every(3, CASES)),
        (2, SETTINGS, ["mlp", "nested", "unused", "twice"]),
        (3, SETTINGS, ["mlp", "transformer"]),
        (4, ON_NODES, ["mlp", "unused"]),
    ],
    ids=["every-case", "2", "3", "4"],
)
@on_ranks()
def test_same_as_sockets(rank: int, world_size: int, settings: Any, names: list[str]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size // 2 if settings is ON_NODES else world_size)
    # `mapping` also copies gradients as they arrive.
    in_small_pieces = mock.patch.object(sockets, "PIECE_BYTES", 256)
    for number, (what, keywords) in enumerate(settings.items()):
        for name in every(min(2, len(settings)), names, start=number):
            with naming(f"{what}, {name}"):
                case = CASES[name]
                expected = trained(case, rank, world_size, collectives="sockets", **keywords)
                if what == next(iter(settings)):
                    with mapping(), in_small_pieces:
                        actual = trained(case, rank, world_size, collectives="sockets", **keywords)
                    assert_identical(actual, expected)
                with counting_reads() as sizes:
                    assert_identical(trained(case, rank, world_size, **keywords), expected)
                assert sizes, "nothing was read"
                with mapping() as made, counting_reads():
                    assert_identical(trained(case, rank, world_size, **keywords), expected)
                assert made or what in ON_NODES, "nothing was mapped"


# ---------------------------------------------------------------- in time


class Slow(Mlp):
    """Rank 1 is late."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.distributed.get_rank() == 1:
            time.sleep(0.3)
        return super().forward(x)


@pytest.mark.parametrize("way", [*TRANSPORTS, "mapped"])
@on_ranks(2)
def test_parameters_stay_for_late_ranks(rank: int, world_size: int, way: str) -> None:
    case = Case("slow", Slow, vectors, (nn.Linear,))
    x = case.batch(0, 2)[0]
    with torch.no_grad(), mapping() if way == "mapped" else nullcontext():
        expected = case.model()(x)
        with counting_reads():
            model = case.wrap(**TRANSPORTS.get(way, {}))
            actual = model(x)
            change_all(model, lambda param: param.fill_(torch.nan))  # while the late rank computes
    torch.testing.assert_close(actual, expected)


# ---------------------------------------------------------------- mapped shards


class Writing(Mlp):
    """Edits its weights while they are unsharded, which must not reach anybody's shard."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.modules():
            if type(module) is nn.Linear:  # not its wrapper, where edits are meant
                module.register_forward_pre_hook(_halve)
        return super().forward(x)


def _halve(module: nn.Module, _: Any) -> None:
    with torch.no_grad():
        module.weight.mul_(0.5)


def _files() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


@pytest.mark.parametrize("where", ["memory", "disk"])
@on_ranks(2, fresh=True)
def test_more_units_than_open_files(rank: int, world_size: int, where: str, tmp_path: Path) -> None:
    """A model of 1,000 units needs no more open files than `ulimit -n` allows."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(map(int, os.listdir("/proc/self/fd"))) + 24
    offload = CPUOffload(path=tmp_path) if where == "disk" else None

    def layers() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(7, 7) for _ in range(31)))

    with mapping() as made:
        ShardedWrapper(layers())
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        try:
            keywords = {"coalesce_bytes": 0, "cpu_offload": offload}
            policy = ModuleWrapPolicy({nn.Linear})
            model = ShardedWrapper(layers(), auto_wrap_policy=policy, **keywords)
            with torch.no_grad():
                model(torch.ones(3, 7))
            model(torch.ones(3, 7)).sum().backward()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(made) >= 30
    kind = shared_memory.MappedShards
    memories = [one for one in gc.get_objects() if isinstance(one, kind)]
    assert all(len(memory._mapped) == world_size for memory in memories if memory._has_begun)


@on_ranks(2, fresh=True)
def test_mapped_shards(rank: int, world_size: int) -> None:
    case = Case("writing", Writing, vectors, (nn.Linear,))
    with mapping() as made:
        # What a module writes into unsharded parameters is lost when they are resharded: it raises.
        model = case.wrap()
        before = model.state_dict()
        with torch.no_grad(), pytest.raises(RuntimeError, match="edited parameters in place"):
            model(case.batch(rank, world_size)[0])
        assert_identical(model.state_dict(), before)

        # Where files or the others' cannot be had, ranks copy, each for itself.
        case = CASES["mlp"]
        expected = trained(case, rank, world_size)
        for rank_without, module, name in (
            (0, mapped_files, "create"),
            (1, mapped_files, "map_at"),
            (1, peer_memory, "open_of"),
            (1, mapped_files, "reserve_range"),  # `ulimit -v`
        ):
            fails = mock.Mock(side_effect=NO_MEMORY) if rank == rank_without else None
            with mock.patch.object(module, name, fails or getattr(module, name)):
                assert_identical(trained(case, rank, world_size), expected)
            assert fails is None or fails.called

        # Copies and conversions have files of their own; files are closed once all have met.
        model = case.wrap()
        twin = copy.deepcopy(model)
        model.float()
        for one, scale in ((model, 2.0), (twin, 3.0)):
            change_all(one, lambda param, scale=scale: param.fill_(scale))
        for one, scale in ((model, 2.0), (twin, 3.0)):
            assert all((v == scale).all() for v in one.state_dict().values())
            one.double()
            Run(one, case, rank, world_size).train()
        gc.collect()
        open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in _files()]
        assert made
        assert not any("memfd:flatshard" in name for name in open_files)


class Forces(Mlp):
    """Runs a backward inside its forward, in which it still needs parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = super().forward(x + self.shift)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + (force * self.shift).sum(-1, keepdim=True)


@on_ranks(2)
def test_backward_inside_forward(rank: int, world_size: int) -> None:
    case = Case("forces", Forces, vectors, (nn.Linear,))
    expected = trained(case, rank, world_size, collectives="sockets")
    with mapping() as made:
        assert_identical(trained(case, rank, world_size), expected)
    assert made


@pytest.mark.parametrize("way", TRANSPORTS)
@on_ranks(2)
def test_kept_for_a_second_backward(rank: int, world_size: int, way: str) -> None:
    """A differentiable backward keeps what others, or this rank, may then write."""
    case = CASES["mlp"]
    x = case.batch(rank, world_size)[0].requires_grad_()
    with mapping():
        model, plain = case.wrap(**TRANSPORTS[way]), case.model()
        for one in (plain, model):
            (grad,) = torch.autograd.grad(one(x).sum(), x, create_graph=True)
            grad.pow(2).sum().backward()
        for param in plain.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
        assert_same_gradients(model, plain)


@on_ranks(2, expendable=[1])
def test_a_dead_peer_is_a_named_error(rank: int, world_size: int) -> None:
    case = CASES["mlp"]
    with counting_reads():
        model = case.wrap()
        Run(model, case, rank, world_size).train(0, 1)
        if rank == 1:
            os._exit(1)
        with pytest.raises(CollectiveError, match="rank 0: all-gathering parameters for forward"):
            model(case.batch(0, 2)[0]).sum().backward()


def test_what_was_awaited_together_takes_one_timeout() -> None:
    """And what is awaited of the process later, on another try say, takes its own."""

    mailbox = peer_memory.Mailbox()
    process = peer_memory.PeerProcess(mailbox.address, 0.4)
    mailbox.close_file()
    mailbox.publish(7, peer_memory.OFFER, 1)

    def offered(number: int) -> peer_memory.Awaited:
        return peer_memory.Awaited(process, 7, peer_memory.OFFER, number)

    together = [offered(2), offered(3)]
    took = []
    for which in range(3):
        wait = together[which] if which < 2 else offered(4)
        began = time.monotonic()
        assert_raises(RuntimeError, f"process {os.getpid()} sent nothing in 0.4 s", wait.wait)
        took.append(time.monotonic() - began)
    offered(1).wait()
    process.pid = 1 << 22  # no process has this number
    with pytest.raises(RuntimeError, match=f"process {os.getpid()} has ended, .* All ranks must"):
        process.check_alive()
    assert min(took[0], took[2]) >= 0.4 > took[1], took
