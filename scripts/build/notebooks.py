"""Runs the scripts in tutorials/ and writes what they show beside them, as notebooks.

    python scripts/build/notebooks.py [NAME...]

Each tutorials/NAME.py is the source of tutorials/NAME.ipynb, in jupytext's percent format. Without
a name, all are run. It needs `pip install -e ".[tutorials]"`.
"""

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from output_files import writing

FOLDER = Path(__file__).resolve().parents[2] / "tutorials"
NEEDED = (
    *("ipykernel", "jupytext", "matplotlib", "nbclient", "nbformat", "peft", "rich", "safetensors"),
    *("tqdm", "transformers"),
)
REPOSITORY = "flatshard/flatshard"  # on GitHub
BADGE = """\
[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]\
(https://colab.research.google.com/github/{repository}/blob/main/tutorials/{name}.ipynb)

"""
SETUP = """\
# In Colab, which opens this file alone, fetch and install the rest.
import os
import sys

if "google.colab" in sys.modules:
    get_ipython().system("git clone --quiet https://github.com/{repository}.git")
    get_ipython().system("pip install --quiet './flatshard[tutorials]'")
    os.chdir("flatshard/tutorials")"""


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def read(name: str) -> Any:
    """The notebook that a script is the source of, without outputs; it opens in Colab, too."""
    import jupytext
    from nbformat.v4 import new_code_cell

    notebook = jupytext.read(FOLDER / f"{name}.py")
    first = notebook.cells[0]
    first["source"] = BADGE.format(repository=REPOSITORY, name=name) + first.source
    notebook.cells.insert(1, new_code_cell(SETUP.format(repository=REPOSITORY)))
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell["id"], cell["metadata"] = f"{name}-{number}", {}
    return notebook


def execute(name: str, timeout: float | None = None) -> Any:
    """The notebook with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    from nbclient import NotebookClient

    notebook = read(name)
    client = NotebookClient(
        notebook, timeout=timeout, resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()
    for cell in notebook.cells:
        cell["metadata"] = {}  # when it ran
        if cell.cell_type == "code":
            cell["outputs"] = joined(cell.outputs)
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def joined(outputs: list[Any]) -> list[Any]:
    """Outputs with pieces of one stream put together: where it is cut is a matter of time.

    Left out is what other libraries log.
    """
    found: list[Any] = []
    for output in outputs:
        is_stream = output.output_type == "stream" and found and found[-1].get("name")
        if is_stream and found[-1]["name"] == output["name"]:
            found[-1]["text"] += output["text"]
        else:
            found.append(output)
    # What other libraries warn of depends on what is installed beside them.
    return [one for one in found if one.get("name") != "stderr" or "flatshard" in one["text"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where to write (tutorials/)")
    args = parser.parse_args()
    missing = [one for one in NEEDED if importlib.util.find_spec(one) is None]
    if missing:
        print(
            f'error: {missing[0]} is not installed: pip install -e ".[tutorials]"', file=sys.stderr
        )
        sys.exit(2)
    if unknown := sorted(set(args.names) - set(names())):
        print(f"error: {unknown[0]}: choose from {', '.join(names())}", file=sys.stderr)
        sys.exit(2)
    if not args.out.is_dir():
        print(f"error: --out: there is no folder {args.out}", file=sys.stderr)
        sys.exit(2)
    import nbformat

    # Warnings of tools that run the notebook are no part of it.
    os.environ["PYTHONWARNINGS"] = "ignore:::zmq,ignore:::ipykernel"
    for name in args.names or names():
        start = time.perf_counter()
        notebook = execute(name)
        with writing(args.out / f"{name}.ipynb") as part:
            nbformat.write(notebook, part)
        print(f"{name}.ipynb: {time.perf_counter() - start:.0f} seconds")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: no notebook was written that was not complete")
