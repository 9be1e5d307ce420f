"""Other systems than the one that runs the tests: what is missing there, and what is different."""

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
