"""Runs the script in the process of one rank, with names replaced, and writes the record."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import random
import runpy
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # optimizers import it: load it once, before ranks are forked

from flatshard.extras.trial_run.program import OURS, current_line, line_of_error
from flatshard.extras.trial_run.recorder import Enough, Recorder
from flatshard.extras.trial_run.wrappers import Replacement

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def run_script(command: list[str], given: dict[str, Any], rank: int) -> NoReturn:
    """Run the script as this rank, write the record, and end the process."""
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = command
    torch.set_num_threads(1)
    file = Path(given["folder"]) / f"{given['run']}-{rank}"
    stacks = file.with_suffix(".stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    torch.manual_seed(1234 + rank)
    random.seed(1234 + rank)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(1234 + rank)
    if given["exact"]:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
    recorder = Recorder(given["steps"], perturbs=given["run"] == "noise", exact=given["exact"])
    is_sharded = given["run"] == "sharded"
    keywords = given["keywords"]
    replacement = Replacement(recorder, is_sharded, keywords if is_sharded else {}, file.parent)
    replacement.install()
    recorder.install()
    _watch_warnings(recorder)
    _follow_spawn()
    end = _run(given["is_module"])
    record = {
        name: getattr(recorder, name)
        for name in ("events", "lines", "findings", "wrapped", "times", "peak", "baseline", "sent")
    }
    unfinished = file.with_suffix(".part")
    torch.save({**record, "end": end}, unfinished)
    unfinished.rename(file.with_suffix(".pt"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if end["how"] in ("enough", "ended") else 1)  # no other rank waits for the exit


def _run(is_module: bool) -> dict[str, Any]:
    """Run the script of ``sys.argv`` as ``__main__``. Returns how it ended."""
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    except Enough:
        return {"how": "enough"}
    except SystemExit as error:
        if error.code in (None, 0):
            return {"how": "ended"}
        return {"how": "exited", "text": f"exit status {error.code}", "line": "", "is_ours": False}
    except BaseException as error:
        traceback.print_exc()
        line, is_ours = line_of_error(error.__traceback__)
        text = f"{type(error).__name__}: {error}"
        return {"how": "raised", "text": text, "line": line, "is_ours": is_ours}
    return {"how": "ended"}


def _watch_warnings(recorder: Recorder) -> None:
    """Record flatshard's warnings, with the line of the program."""
    warn: Any = warnings.warn

    def watched(message: Any, category: Any = None, stacklevel: int = 1, **kwargs: Any) -> None:
        if sys._getframe(1).f_code.co_filename.startswith(OURS):
            recorder.findings.append((current_line(), str(message), ""))
        warn(message, category, stacklevel + 1, **kwargs)

    warnings.warn = watched  # type: ignore[assignment]


class _OtherRanks(RuntimeError):
    """The script starts another number of ranks than the command."""


def _follow_spawn() -> None:
    """Let ``mp.spawn`` call the function of this rank, in this process."""
    import torch.multiprocessing as mp

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        world_size = int(os.environ["WORLD_SIZE"])
        if nprocs != world_size:
            raise _OtherRanks(
                f"the script starts {nprocs} ranks by itself (torch.multiprocessing.spawn), but "
                f"`flatshard try` has {world_size}. Pass --nproc-per-node {nprocs}."
            )
        fn(int(os.environ["RANK"]), *args)

    mp.spawn = mp.start_processes = spawn
