"""What shared memory takes while ranks train, and what is left of it when they are killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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


def shared_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _wait_for_a_step(out: Path, err: Path) -> None:
    deadline = time.monotonic() + 200
    while "a step\n" not in out.read_text():
        assert time.monotonic() < deadline, err.read_text()
        time.sleep(0.01)


@pytest.mark.parametrize("killed", [[0, 1], [1]], ids=["all", "one"])
def test_nothing_is_left_after_sigkill(killed: list[int], tmp_path: Path) -> None:
    before = shared_files()
    temporary, logs = tmp_path / "temporary", tmp_path / "logs"
    temporary.mkdir()
    logs.mkdir()
    files = [(logs / f"out-{rank}", logs / f"err-{rank}") for rank in range(2)]
    ranks: list[subprocess.Popen[str]] = []
    for rank, (out, err) in enumerate(files):
        ours = {"RANK": str(rank), "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
        with out.open("w") as to_out, err.open("w") as to_err:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-c", TRAINS_FOR_EVER, str(temporary / "store")],
                    cwd=temporary,
                    env={**os.environ, **ours, "PYTHONPATH": str(ROOT)},
                    stdout=to_out,
                    stderr=to_err,
                    start_new_session=True,
                )
            )
    try:
        for out, err in files:
            _wait_for_a_step(out, err)
        for rank in killed:
            ranks[rank].kill()
        codes = [process.wait(60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, code in enumerate(codes):
        if rank in killed:
            assert code == -signal.SIGKILL
        else:
            assert code == 1, "ended in Python, not by a signal"
            assert "CollectiveError" in files[rank][1].read_text()
    assert not [left for process in ranks for left in in_session(process.pid)]
    left = {path.name for path in temporary.iterdir()}
    assert not {name for name in left if name != "store" and "torchinductor" not in name}
    # Other tests' workers may have theirs.
    assert not {name for name in shared_files() - before if "sem." not in name}


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
    linear = nn.Linear(4096, 4096, bias=False)  # 64 MiB
    linear.register_forward_pre_hook(lambda module, _: inside.append(touch(module.weight)))

    def touch(weight: torch.Tensor) -> int:
        weight.sum()
        torch.distributed.barrier()
        taken = share()
        torch.distributed.barrier()
        return taken

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
