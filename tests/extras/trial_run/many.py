"""Judges many runs in one process: `python -m tests.extras.trial_run.many FOLDER WHAT`.

`faults`: the script ``trained`` with each of its faults. `scripts OPTIONS`: scripts of this folder,
whose names and options are in OPTIONS, a text in JSON. A number: this many random models. Prints a
line of JSON for each run: its name, the verdict, the figures and the text.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from flatshard.extras import trial_run
from flatshard.extras.trial_run import NOT_COMPARED, forked_ranks
from tests.extras.trial_run import trained

HERE = Path(__file__).parent
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OP", "NO_SHARD", "HYBRID_SHARD")


def options(folder: Path, *arguments: str) -> argparse.Namespace:
    """The options of a command line, with an empty folder for its records."""
    parser = argparse.ArgumentParser()
    trial_run.add_arguments(parser)
    given = parser.parse_args(arguments)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    given.folder = given.records = folder
    given.num_here = given.nproc_per_node
    return given


def say(name: str, given: argparse.Namespace) -> None:
    report: dict[str, Any] = {"name": name, "verdict": NOT_COMPARED, "lines": [], "costs": {}}
    report["text"] = trial_run.judge(given, report)
    print(json.dumps(report), flush=True)


def main(folder: Path, what: str, scripts: str = "{}") -> None:
    if what == "scripts":
        for name, words in json.loads(scripts).items():
            script = [name] if "-m" in words else [f"{name}.py"]
            say(name, options(folder, "--steps", "4", *words, *script))
        return
    if what != "faults":
        first, _, last = what.rpartition("-")
        for seed in range(int(first or 0), int(last)):
            words = ["--steps", "3", "--strategy", STRATEGIES[seed % len(STRATEGIES)]]
            words += ["--nproc-per-node", "3" if seed % 5 == 4 else "2"]
            say(f"{seed}", options(folder, *words, str(HERE / "random_model.py"), f"{seed}"))
        return
    runs: dict[str, Any] = {}
    run = forked_ranks.run

    def remembered(given: argparse.Namespace, name: str, *lone_calls: Any) -> Any:
        if name == "sharded":
            return run(given, name, *lone_calls)
        if name not in runs:
            runs[name] = run(given, name)
        return runs[name]

    # The runs under DistributedDataParallel are the same for all faults.
    forked_ranks.run = remembered  # type: ignore[assignment]
    for fault in ("", *trained.FAULTS):
        os.environ["FAULT"] = fault
        say(fault, options(folder, "--steps", f"{trained.STEPS}", str(HERE / "trained.py")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
