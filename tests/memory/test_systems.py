"""Other systems than x86-64 Linux: what is missing there, and what is different."""

import errno
import os
import subprocess
from unittest import mock

import pytest

from flatshard.extras import mapped_files
from tests.forked_python import PYTHON
from tests.harness import ROOT


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


WITHOUT_LINUX = """
import ctypes, mmap, os, signal, sys, tempfile
import torch, torch.distributed as dist

sys.platform = "win32"
for name in ("PROT_READ", "PROT_WRITE", "MAP_PRIVATE", "MAP_SHARED", "MAP_ANONYMOUS"):
    delattr(mmap, name)
for name in ("memfd_create", "MFD_CLOEXEC", "posix_fallocate", "O_TMPFILE", "O_CLOEXEC", "statvfs"):
    delattr(os, name)
del signal.SIGBUS
load = ctypes.CDLL
def no_default(name, *args, **keywords):
    if name is None:
        raise TypeError("bad argument type for built-in operation")  # as on Windows
    return load(name, *args, **keywords)
ctypes.CDLL = no_default

from flatshard import ShardedWrapper
from flatshard.options.extras import default_extra

store = dist.FileStore(tempfile.mktemp(), 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = ShardedWrapper(torch.nn.Linear(600, 600))
model(torch.ones(3, 600)).sum().backward()
torch.optim.SGD(model.parameters(), 0.1).step()
if default_extra("shared_memory"):
    from flatshard.extras.shared_memory.peer_memory import Mailbox
    assert Mailbox().address.problem == "the system has no process_vm_readv"
"""


def test_import_and_step_where_there_is_no_linux() -> None:
    """`import flatshard` and a step work where `mmap` has no `PROT_READ`, as on Windows."""
    done = run(WITHOUT_LINUX)
    assert done.returncode == 0, done.stderr


LARGE_PAGES = """
import mmap
mmap.PAGESIZE = 65536
import torch
from flatshard.units.layout import PAGED_BYTES, FlatLayout

layout = FlatLayout.build({"weight": torch.empty(1023, 1031)}, world_size=3, itemsize=4)
nbytes = layout.shard_numel * 4
print(nbytes % mmap.PAGESIZE, nbytes >= PAGED_BYTES)
"""


def test_large_pages() -> None:
    """Shards are rounded to pages of the system, which may have 64 KiB (some ARM systems)."""
    done = run(LARGE_PAGES)
    assert done.stdout == "0 True\n", done.stderr


@pytest.mark.skipif(not mapped_files.CAN_MAP, reason="this system maps no files")
@pytest.mark.parametrize("kernel", ["old", "new", "strict"])
def test_files_that_nobody_may_execute(kernel: str) -> None:
    """With ``vm.memfd_noexec=2`` a file must be sealed; before Linux 6.3 the flag is unknown."""
    made = []

    def memfd_create(name: str, flags: int = os.MFD_CLOEXEC) -> int:
        if kernel == "old" and flags & mapped_files._MFD_NOEXEC_SEAL:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if kernel == "strict" and not flags & mapped_files._MFD_NOEXEC_SEAL:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        made.append(flags)
        return real(name, os.MFD_CLOEXEC)

    real = os.memfd_create
    with mock.patch.object(os, "memfd_create", memfd_create):
        number = mapped_files.create(4096, reserve=True)
    assert number is not None
    os.close(number)
    assert made == [os.MFD_CLOEXEC | (0 if kernel == "old" else 8)]
