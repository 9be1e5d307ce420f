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
    client = NotebookClient(
        notebook,
        timeout=timeout,
        resources={"metadata": {"path": str(FOLDER)}},
        extra_arguments=["--log-level=ERROR"],  # the kernel would warn about TCP
    )
    client.execute()
    for cell in notebook.cells:
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
