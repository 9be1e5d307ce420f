"""The README's program does what the README says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

README = Path(__file__).resolve().parents[2] / "README.md"
pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(120)]


def test_quickstart(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(# quickstart\.py.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "quickstart.py").write_text(program)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", "quickstart.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(README.parent)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    plain = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    plain.load_state_dict(torch.load(tmp_path / "model.pt"))
