"""The notebooks run, and are what their scripts make."""

import importlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.combinations import every
from tests.forked_python import PYTHON
from tests.harness import ROOT

BUILD = ROOT / "scripts" / "tables" / "notebooks.py"
NEEDED = {"huggingface": ("peft", "safetensors", "transformers")}
NAMES = [
    pytest.param(
        path.stem,
        marks=pytest.mark.skipif(
            not all(map(importlib.util.find_spec, NEEDED.get(path.stem, ()))),
            reason='needs pip install ".[tutorials]"',
        ),
    )
    for path in sorted((ROOT / "tutorials").glob("*.py"))
]

EXECUTED = every(4, NAMES, 2)  # the one of MNIST
"""A notebook takes ten seconds; those that run only with THOROUGH=1 call scripts with own tests."""

pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(240)]
# Not imported: that takes each worker of pytest-xdist seconds.
PACKAGES = ("jupytext", "nbclient", "ipykernel", "matplotlib", "sklearn")
if not all(map(importlib.util.find_spec, PACKAGES)):
    pytest.skip('needs pip install ".[tutorials]"', allow_module_level=True)


def committed(name: str) -> Any:
    return json.loads((ROOT / "tutorials" / f"{name}.ipynb").read_text())


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", ())]


def kinds(notebook: Any) -> list[list[str]]:
    """What each cell shows; not what matplotlib says when it is used for the first time."""
    cells = [cell.get("outputs", ()) for cell in notebook["cells"]]
    return [[one["output_type"] for one in of if one.get("name") != "stderr"] for of in cells]


@pytest.mark.parametrize("name", EXECUTED)
def test_runs_at_toy_size(name: str, tmp_path: Path) -> None:
    toy = {"TUTORIAL_TOY": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [PYTHON, str(BUILD), name, "--out", str(tmp_path)]
    # Not a pipe, which a kernel that outlives its parent keeps open.
    messages = tmp_path / "messages"
    with messages.open("w") as stderr:
        streams = {"stdout": subprocess.DEVNULL, "stderr": stderr}
        done = subprocess.run(command, env={**os.environ, **toy}, timeout=200, **streams)
    assert done.returncode == 0, messages.read_text()
    executed = json.loads((tmp_path / f"{name}.ipynb").read_text())
    assert [output for output in outputs(executed) if output["output_type"] == "error"] == []
    # As many outputs of each kind as in the one that is committed, so that no cell says nothing.
    assert kinds(executed) == kinds(committed(name))


@pytest.mark.parametrize("name", NAMES)
def test_committed_notebook_is_of_its_script(name: str) -> None:
    again = "run scripts/tables/notebooks.py"
    source, notebook = importlib.import_module("notebooks").read(name), committed(name)
    for cell, of_script in zip(notebook["cells"], source.cells, strict=True):
        assert "".join(cell["source"]) == of_script.source, again
        assert not re.search(r"sys\.path|TOY|from lib\b", of_script.source)  # readers copy cells
    for output in outputs(notebook):
        text = json.dumps({k: v for k, v in output.items() if k != "data"})
        text += "".join(output.get("data", {}).get("text/plain", ()))
        found = re.search(r"Traceback|Warning|\\u001b|(?<![\w.])/(home|tmp|work|opt|root)/", text)
        assert found is None, text
    plots = 0
    for before, cell in itertools.pairwise(notebook["cells"]):
        if any("image/png" in output.get("data", ()) for output in cell.get("outputs", ())):
            plots += 1
            assert before["cell_type"] == "markdown"  # which says what the plot shows
    assert plots >= 1
