"""Each extra can be deleted; the core imports none of them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from flatshard.options.extras import EXTRAS
from tests.combinations import THOROUGH
from tests.harness import ROOT
from tests.structure.core_alone import REQUESTS

EXTRAS_FOLDER = ROOT / "flatshard" / "extras"


def test_table_has_all_folders() -> None:
    folders = {path.parent.name for path in EXTRAS_FOLDER.glob("*/__init__.py")}
    assert folders == set(EXTRAS) == set(REQUESTS)


def _without(folder: Path, extras: Sequence[str]) -> Path:
    """A copy of the project in which the folders of these extras, and their tests, are deleted."""
    for name in ("flatshard", "tests", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in extras:
        shutil.rmtree(folder / "flatshard" / "extras" / name)
        shutil.rmtree(folder / "tests" / "extras" / name, ignore_errors=True)
    return folder


def _python(folder: Path, *arguments: str) -> str:
    """What Python prints on these arguments, in a fresh process in ``folder``."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("extra", EXTRAS)
def test_core_without_one(extra: str, tmp_path: Path) -> None:
    folder = _without(tmp_path, [extra])
    said = _python(folder, "-m", "tests.structure.core_alone", extra).splitlines()
    assert len(said) == (REQUESTS[extra] is not None), said
    for line in said:
        assert line.startswith("MissingExtraError: ")
        assert f"needs the extra {extra!r}, which {EXTRAS[extra]}" in line
    if THOROUGH:
        _python(folder, "-m", "pytest", "-q", "-x", "tests/parity")


@pytest.mark.timeout(400)
def test_core_without_any(tmp_path: Path) -> None:
    folder = _without(tmp_path, list(EXTRAS))
    _python(folder, "-m", "pytest", "-q", "-x", "tests/parity/test_parity.py")
    demo = ["scripts/train_mnist.py", "--world-size", "2", "--data", "digits"]
    assert "Accuracy" in _python(folder, *demo, "--max-steps", "3")
