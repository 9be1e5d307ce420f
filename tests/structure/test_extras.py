"""Each extra can be deleted; the core imports none of them."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from flatshard.options.extras import EXTRAS
from tests.combinations import THOROUGH, every
from tests.forked_python import PYTHON
from tests.harness import ROOT
from tests.structure.core_alone import REQUESTS

EXTRAS_FOLDER = ROOT / "flatshard" / "extras"


def test_table_has_all_folders() -> None:
    folders = {path.parent.name for path in EXTRAS_FOLDER.glob("*/__init__.py")}
    assert folders == set(EXTRAS) == set(REQUESTS)


def _link(source: str, copy: str) -> None:
    """A second name of a file, which nobody writes to, takes less time than a copy."""
    try:
        os.link(source, copy)
    except OSError:  # another file system
        shutil.copy2(source, copy)


def _without(folder: Path, extras: Sequence[str]) -> Path:
    """A copy of the project in which the folders of these extras, and their tests, are deleted."""
    unfinished = shutil.ignore_patterns("*.pyc.*")  # byte code that another process writes
    for name in ("flatshard", "tests", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=unfinished, copy_function=_link)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in extras:
        shutil.rmtree(folder / "flatshard" / "extras" / name)
        shutil.rmtree(folder / "tests" / "extras" / name, ignore_errors=True)
    return folder


def _python(folder: Path, *arguments: str) -> str:
    """Run Python with ``arguments`` in ``folder``, and return the output."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [PYTHON, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Loads torch once, and for each folder runs a process that has never loaded flatshard.
FORKED = """
import gc, os, runpy, sys
import torch, torch._dynamo

gc.freeze()  # what is loaded is no garbage, and stays shared

for folder, extras in zip(sys.argv[1::2], sys.argv[2::2]):
    if process := os.fork():
        assert os.waitpid(process, 0)[1] == 0, extras
        continue
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = ["core_alone", *extras.split(",")]
    os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT), 1)
    runpy.run_module("tests.structure.core_alone", run_name="__main__")
    sys.stdout.flush()
    os._exit(0)  # the end of the interpreter would take as long as all the rest
"""

SOME = every(12, EXTRAS)
"""The core without any extra is tested always (`test_core_without_any`)."""
ALL = ",".join(EXTRAS)


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies of the project without some extras, or all, in which `core_alone` has run."""
    makes, names = tmp_path_factory.mktemp, (*SOME, ALL)
    folders = {extras: _without(makes("copy"), extras.split(",")) for extras in names}
    given = [str(value) for extras, folder in folders.items() for value in (folder, extras)]
    _python(tmp_path_factory.mktemp("empty"), "-c", FORKED, *given)
    return folders


@pytest.mark.parametrize("extra", SOME)
def test_core_without_one(extra: str, without: dict[str, Path]) -> None:
    _check_errors(without[extra], [extra])
    if THOROUGH:
        # The extra `recording` lists the collectives that these tests count.
        left_out = ["--ignore=tests/parity/test_costs.py"] if extra == "recording" else []
        _python(without[extra], "-m", "pytest", "-q", "-x", "tests/parity", *left_out)


def _check_errors(folder: Path, extras: Sequence[str]) -> None:
    said = (folder / "said").read_text().splitlines()
    for line, extra in zip(said, [one for one in extras if REQUESTS[one] is not None], strict=True):
        assert line.startswith("MissingExtraError: ")
        assert f"needs the extra {extra!r}, which {EXTRAS[extra]}" in line


@pytest.mark.timeout(400)
def test_core_without_any(without: dict[str, Path]) -> None:
    folder = without[ALL]
    _check_errors(folder, list(EXTRAS))
    if find_spec("sklearn"):  # the demo needs ".[examples]"
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        demo = ["scripts/train_mnist.py", "--data", "digits", "--epochs", "1"]
        assert "Accuracy" in _python(folder, *torchrun, *demo)
    # The core does not need these folders either. The demo does: it saves checkpoints.
    for name in ("checkpoint", "integrations"):
        shutil.rmtree(folder / "flatshard" / name)
    if THOROUGH:
        _python(folder, "-m", "pytest", "-q", "-x", "tests/parity/test_parity.py")


def test_public_modules_need_no_import_of_their_own() -> None:
    program = "import flatshard; print(flatshard.checkpoint.save, flatshard.wrap.ModuleWrapPolicy)"
    assert "save" in _python(ROOT, "-c", program)
