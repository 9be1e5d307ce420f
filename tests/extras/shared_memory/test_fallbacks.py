"""What one rank cannot have, no rank uses: all of them fall back together, and say why."""

import os
import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from flatshard.extras import mapped_files
from flatshard.extras.shared_memory import peer_memory
from tests.harness import on_ranks
from tests.models import CASES
from tests.oracle import assert_identical, sgd, snapshot, train_steps

pytestmark = pytest.mark.skipif(peer_memory._readv is None, reason="no process_vm_readv here")
MLP = CASES["mlp"]


def trained(rank: int, world_size: int, **keywords: Any) -> tuple[Any, str]:
    """Losses and weights after three steps; the report of the model."""
    model = MLP.wrap(**keywords)
    losses = train_steps(model, sgd(model), MLP, rank, world_size, steps=3)
    return (losses, snapshot(model)), model.unit_report()


class Yama:
    """``kernel.yama.ptrace_scope=1``: a process is read by whom it has named, and by no others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.readers: list[int] = []

    def set_reader(self, reader: int) -> None:
        self.readers.append(reader)
        (self.folder / str(os.getpid())).write_text(str(reader))

    def read(self, process: peer_memory.PeerProcess, *args: int) -> None:
        named = self.folder / str(process.pid)
        if not named.exists() or int(named.read_text()) not in (os.getppid(), peer_memory._ANY):
            raise RuntimeError(f"reading of {process.name} failed: Operation not permitted")
        READ(process, *args)


READ = peer_memory._read


LAUNCHER = -1
# Whether ranks have one launcher, whether rank 1 fails to read, to whom each rank gives permission,
# and what the report says.
PERMISSIONS = {
    "one launcher": (True, False, [LAUNCHER], "shared memory: all ranks are on one host"),
    "several launchers": (False, False, [peer_memory._ANY], "shared memory: "),
    # Taken back: nobody reads.
    "a rank fails": (True, True, [LAUNCHER, 0], "sockets: rank 1: Operation not permitted; "),
}


@pytest.mark.parametrize("case", PERMISSIONS)
@on_ranks(2, fresh=True)
def test_permission_to_read(rank: int, world_size: int, case: str, tmp_path: Path) -> None:
    """A rank lets others read before anybody reads, so late ranks make nobody fall back to sockets.

    It lets processes of the ranks' launcher read, or, with several launchers, any of the user's.
    """
    has_one_launcher, fails, readers, way = PERMISSIONS[case]
    expected, report = trained(rank, world_size, collectives="sockets")
    assert "\nsockets: collectives= or wire_dtype= asks for it" in report
    yama = Yama(tmp_path)
    refuses = mock.Mock(side_effect=RuntimeError("Operation not permitted"))
    parent = os.getppid() if has_one_launcher else 100 + rank

    def late(reader: int) -> None:
        time.sleep(0.5 * rank)  # the others would read before it
        yama.set_reader(reader)

    with (
        mock.patch.object(os, "getppid", return_value=parent),
        mock.patch.object(peer_memory, "_set_reader", late),
        mock.patch.object(peer_memory, "_read", refuses if fails and rank == 1 else yama.read),
    ):
        actual, report = trained(rank, world_size)
    assert f"\n{way}" in report
    assert yama.readers == [parent if one == LAUNCHER else one for one in readers]
    assert_identical(actual, expected)


def test_permission_lasts_while_some_group_reads() -> None:
    told = []
    patched = mock.patch.object(peer_memory, "_set_reader", told.append)
    with patched, mock.patch.object(peer_memory, "_readers", []) as readers:
        for change, reader in (
            *((readers.append, 7), (readers.append, peer_memory._ANY)),
            *((readers.remove, peer_memory._ANY), (readers.append, 7)),
            *((readers.remove, 7), (readers.remove, 7)),
        ):
            change(reader)
            peer_memory._tell_kernel()
    assert told == [7, peer_memory._ANY, 7, 7, 7, 0]


NO_MEMORY = OSError(12, "Cannot allocate memory")
MASKED = FileNotFoundError(2, "No such file or directory", "/proc/sys/kernel/random/boot_id")
DENIED = PermissionError(13, "denied")
NO_MAILBOX = "rank 1: no mailbox in shared"
NO_ADDRESSES = f"{NO_MAILBOX} memory: .* Cannot allocate memory"
# What raises or lacks on rank 1, and words of the report.
LACKS: dict[str, tuple[Any, str, Any, str]] = {
    "proc": (peer_memory, "_host", MASKED, "rank 1: no mailbox .*boot_id"),
    "addresses": (mapped_files.mmap, "mmap", NO_MEMORY, NO_ADDRESSES),
    "files": (mapped_files, "create", NO_MEMORY, NO_MAILBOX),
    "mailbox": (peer_memory, "open_of", DENIED, "rank 1: .*denied; check kernel.yama.ptrace_scope"),
    "host": (peer_memory, "_host", lambda: f"host {os.environ['RANK']}", "on several hosts"),
    "system": (peer_memory, "_readv", None, "rank 1: the system has no process_vm_readv"),
}


@pytest.mark.parametrize("what", LACKS)
@on_ranks(2, fresh=True, group_timeout=10)
def test_what_one_rank_lacks(rank: int, world_size: int, what: str) -> None:
    """What one rank lacks makes all ranks use sockets, and all ranks give the same reason."""
    module, name, replacement, reason = LACKS[what]
    if isinstance(replacement, OSError):
        replacement = mock.Mock(side_effect=replacement)
    expected, _ = trained(rank, world_size, collectives="sockets")
    with mock.patch.object(module, name, replacement if rank == 1 else getattr(module, name)):
        actual, report = trained(rank, world_size)
    assert_identical(actual, expected)
    last_lines: list[Any] = [None, None]
    dist.all_gather_object(last_lines, report.splitlines()[-1])
    assert last_lines[0] == last_lines[1]
    assert re.match(rf"sockets: .*{reason}", last_lines[0]), last_lines
