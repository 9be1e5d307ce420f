"""Runs the scripts in tutorials/, and writes them with their outputs as notebooks.

    python scripts/tables/notebooks.py [NAME...]

Each tutorials/NAME.py is the source of tutorials/NAME.ipynb, in jupytext's percent format. Without
a NAME, the script runs all of them. Needs `pip install -e ".[tutorials]"`.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import jupytext
import nbformat
from lib.command_line import Parser
from nbclient import NotebookClient

# Hide warnings of the tools that run the notebook.
os.environ["PYTHONWARNINGS"] = "ignore:::zmq,ignore:::ipykernel"
FOLDER = Path(__file__).resolve().parents[2] / "tutorials"
TOY = {
    "huggingface": {
        "hidden_size=128": "hidden_size=32",
        "intermediate_size=344": "intermediate_size=88",
        "num_hidden_layers=8": "num_hidden_layers=2",
        "STEPS, ROWS, LENGTH = 100, 16, 96": "STEPS, ROWS, LENGTH = 2, 4, 32",
        "max_new_tokens=160": "max_new_tokens=4",
    },
    "memory": {
        "DEPTH = 80": "DEPTH = 8",
        "ranks = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]": "ranks = [1, 8, 64]",
        'RANKS, NODE, SIZES = 4, 2, {"width": 256, "depth": 8}': (
            'RANKS, NODE, SIZES = 2, 2, {"width": 32, "depth": 3}'
        ),
    },
    "mnist": {
        "load_mnist(ROOT, download=not is_there)": "load_digits()",
        "width=384": "width=32",
        "STEPS, BATCH, TEST = 300, 128, 10_000": "STEPS, BATCH, TEST = 2, 32, 64",
    },
    "transformer": {
        "width=128, depth=4": "width=32, depth=2",
        "STEPS, SAVED, ROWS = 2500, 600, 24": "STEPS, SAVED, ROWS = 4, 2, 12",
        "sample(model, 400)": "sample(model, 8)",
        "OTHER = 3": "OTHER = 1",
        "RANKS = 4": "RANKS = 2",
        "--width 256 --depth 8 --steps 4": "--width 32 --depth 3 --steps 2",
    },
}
"""If TUTORIAL_TOY is set, as in the tests, the cells run with these smaller sizes."""


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def read(name: str) -> Any:
    """Convert a script into a notebook without outputs."""
    notebook = jupytext.read(FOLDER / f"{name}.py")
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell["id"], cell["metadata"] = f"{name}-{number}", {}
    return notebook


def execute(name: str, timeout: float | None = None) -> Any:
    """Run a script as a notebook; returns the notebook with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = read(name)
    sources = [cell.source for cell in notebook.cells]
    for size, small in TOY[name].items() if "TUTORIAL_TOY" in os.environ else ():
        (cell,) = (cell for cell in notebook.cells if size in cell.source)
        cell.source = cell.source.replace(size, small)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        resources={"metadata": {"path": str(FOLDER)}},
        extra_arguments=["--log-level=ERROR"],  # the kernel would warn about TCP
    )
    client.execute()
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.source = source
        cell["metadata"] = {}  # remove the times of the run
        if cell.cell_type == "code":
            cell["outputs"] = joined(cell.outputs)
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def joined(outputs: list[Any]) -> list[Any]:
    """Join consecutive outputs of a stream, because their boundaries depend on timing.

    Drops logs of other libraries.
    """
    found: list[Any] = []
    for output in outputs:
        is_stream = output.output_type == "stream" and found and found[-1].get("name")
        if is_stream and found[-1]["name"] == output["name"]:
            found[-1]["text"] += output["text"]
        else:
            found.append(output)
    # Drop warnings of other libraries, because they depend on the installed packages.
    return [one for one in found if one.get("name") != "stderr" or "flatshard" in one["text"]]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"tutorials, of {', '.join(names())}"
    )
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="folder of the notebooks (default: tutorials/)"
    )
    args = parser.parse_args()
    for name in args.names or names():
        start = time.perf_counter()
        nbformat.write(execute(name), args.out / f"{name}.ipynb")
        print(f"{name}.ipynb: {time.perf_counter() - start:.0f} seconds", flush=True)


if __name__ == "__main__":
    main()
