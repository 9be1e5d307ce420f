"""What shared memory takes while ranks train, and what is left of it when they are killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatshard import ShardedWrapper
from flatshard.extras.shared_memory import peer_memory
from tests.harness import ROOT, run_ranks

MIB = 1 << 20

pytestmark = pytest.mark.skipif(peer_memory._readv is None, reason="no process_vm_readv here")

TRAINS_FOR_EVER = """
import os, sys
import torch, torch.distributed as dist
from flatshard import ShardedWrapper

rank = int(os.environ["RANK"])
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
model = ShardedWrapper(torch.nn.Linear(1024, 1024))
assert "shared memory" in model.unit_report()
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    print("a step", flush=True)
"""


def in_session(session: int) -> list[str]:
    """The processes of a session, zombies too."""
    found = []
    for process in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = process.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[3]) == session:
            found.append(f"{process.parent.name} {fields[0]}")
    return found


@pytest.mark.parametrize("killed", [[0, 1], [1]], ids=["all", "one"])
def test_nothing_is_left_after_sigkill(killed: list[int], tmp_path: Path) -> None:
    before = {*os.listdir("/dev/shm")}
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    files = [(tmp_path / f"out-{rank}", tmp_path / f"err-{rank}") for rank in range(2)]
    ranks: list[subprocess.Popen[str]] = []
    command = [sys.executable, "-c", TRAINS_FOR_EVER, str(temporary / "store")]
    common = {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    for rank, (out, err) in enumerate(files):
        where: Any = {"cwd": temporary, "env": {**os.environ, **common, "RANK": str(rank)}}
        with out.open("w") as stdout, err.open("w") as stderr:
            where |= {"stdout": stdout, "stderr": stderr, "start_new_session": True}
            ranks.append(subprocess.Popen(command, **where))
    try:
        deadline = time.monotonic() + 200
        for out, err in files:
            while "a step\n" not in out.read_text():
                assert time.monotonic() < deadline, err.read_text()
                time.sleep(0.01)
        for rank in killed:
            ranks[rank].kill()
        codes = [process.wait(60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, (code, (_, err)) in enumerate(zip(codes, files, strict=True)):
        # A rank that is not killed ends in Python, not by a signal.
        assert code == (-signal.SIGKILL if rank in killed else 1)
        assert rank in killed or "CollectiveError" in err.read_text()
    assert not [left for process in ranks for left in in_session(process.pid)]
    left = {path.name for path in temporary.iterdir()} - {"store"}
    assert not {name for name in left if "torchinductor" not in name}
    # Other tests' workers may have theirs.
    assert not {name for name in {*os.listdir("/dev/shm")} - before if "sem." not in name}


def _memory_of_mapped_shards(rank: int, world_size: int) -> int:
    """How much this process's share of all memory grew, to the middle of a forward."""

    def share() -> int:
        """Of shared files this process's part; libraries are shared with others, and left out."""
        mapped, of_ours = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first, *rest = line.split()
            if "-" in first:
                of_ours = rest[-1].endswith("(deleted)") and "memfd:flatshard" in line
            elif first == "Pss:" and of_ours:
                mapped += int(rest[0]) << 10
        status = Path("/proc/self/status").read_text()
        return mapped + (int(status.partition("RssAnon:")[2].split()[0]) << 10)

    inside = []

    def touch(module: nn.Module, _: Any) -> None:
        module.weight.sum()
        torch.distributed.barrier()
        inside.append(share())
        torch.distributed.barrier()

    linear = nn.Linear(4096, 4096, bias=False)  # 64 MiB
    linear.register_forward_pre_hook(touch)
    before = share()
    model = ShardedWrapper(linear)
    assert "shared memory" in model.unit_report()
    with torch.no_grad():
        model(torch.zeros(1, 4096))
        model(torch.zeros(1, 4096))
    return inside[-1] - before


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no smaps here")
def test_resident_memory_of_mapped_shards() -> None:
    """All ranks together hold a model once while it is gathered, not once each and the shards."""
    grown = run_ranks(_memory_of_mapped_shards, 2, fresh=True)
    # `before` has the plain model of 64 MiB on each rank, which is freed: 128 less, and 64 more.
    assert -2 * 64 * MIB <= sum(grown) <= (24 - 64) * MIB, [one / MIB for one in grown]
