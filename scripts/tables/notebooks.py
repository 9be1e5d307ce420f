"""Runs the scripts in tutorials/ and writes what they show beside them, as notebooks.

    python scripts/tables/notebooks.py [NAME...]

Each tutorials/NAME.py is the source of tutorials/NAME.ipynb, in jupytext's percent format. Without
a name, all are run. It needs `pip install -e ".[tutorials]"`.
"""

import contextlib
import importlib.util
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lib.command_line import Parser
from lib.output import writing

FOLDER = Path(__file__).resolve().parents[2] / "tutorials"
NEEDED = (
    *("ipykernel", "jupytext", "matplotlib", "nbclient", "nbformat", "peft", "rich", "safetensors"),
    *("tqdm", "transformers"),
)


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def read(name: str) -> Any:
    """The notebook of one script, without outputs."""
    import jupytext

    notebook = jupytext.read(FOLDER / f"{name}.py")
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
        notebook,
        timeout=timeout,
        resources={"metadata": {"path": str(FOLDER)}},
        extra_arguments=["--log-level=ERROR"],  # it warns of TCP on this machine
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


def end_kernels() -> None:
    """Ends them at once, with the ranks that they have started."""
    import psutil  # ipykernel has it

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(psutil.Process().children(), timeout=5)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where to write (tutorials/)")
    args = parser.parse_args()
    missing = [one for one in NEEDED if importlib.util.find_spec(one) is None]
    if missing:
        parser.error(f'{missing[0]} is not installed: pip install -e ".[tutorials]"')
    if unknown := sorted(set(args.names) - set(names())):
        parser.error(f"{unknown[0]}: choose from {', '.join(names())}")
    if not args.out.is_dir():
        parser.error(f"--out: there is no folder {args.out}")
    import nbformat

    # Warnings of tools that run the notebook are no part of it.
    os.environ["PYTHONWARNINGS"] = "ignore:::zmq,ignore:::ipykernel"
    # nbclient takes Ctrl-C for itself where it can, which it cannot in a thread.
    thread = ThreadPoolExecutor(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # kernels that are killed leave files
        try:
            for name in args.names or names():
                start = time.perf_counter()
                notebook = thread.submit(execute, name).result()
                with writing(args.out / f"{name}.ipynb") as part:
                    nbformat.write(notebook, part)
                print(f"{name}.ipynb: {time.perf_counter() - start:.0f} seconds", flush=True)
        except KeyboardInterrupt:
            end_kernels()
            raise


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted: no notebook was written that was not complete", file=sys.stderr)
        os._exit(1)  # not for the thread's end, nor with what nbclient does at the end
