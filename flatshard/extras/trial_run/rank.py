"""Runs the script in the process of one rank, with names replaced, and writes the record."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import os
import random
import runpy
import signal
import sys
import time
import traceback
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # optimizers import it: load it once, before ranks are forked
import torch.multiprocessing

from flatshard.extras.trial_run.recorder import Enough, Recorder
from flatshard.extras.trial_run.stand_ins import Replacement
from flatshard.extras.trial_run.user_line import OURS, current_line, line_in

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def run_script(options: argparse.Namespace, name: str, rank: int) -> NoReturn:
    """Run the script as this rank of the run ``name``, write the record, and end the process."""
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    file = options.folder / f"{name}-{rank}"
    faulthandler.register(signal.SIGUSR1, file=file.with_suffix(".stack").open("w"))
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, random.seed, _seed_numpy):
        seed(1234 + rank)  # scripts that set no seed can be compared, too
    if options.exact:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
    recorder = Recorder(options.steps, perturbs=name == "noise", exact=options.exact)
    recorder.end = partial(_end, file, recorder)
    Replacement(recorder, options, is_sharded=name == "sharded").install()
    warnings.warn = _recording(warnings.warn, recorder)  # type: ignore[assignment]
    spawns: Any = torch.multiprocessing
    spawns.spawn = spawns.start_processes = _spawn
    _run(options, recorder)
    _end(file, recorder)


def _end(file: Path, recorder: Recorder) -> NoReturn:
    """Write the record, and end the process."""
    unfinished = file.with_suffix(".part")
    torch.save(recorder.record, unfinished)
    unfinished.rename(file.with_suffix(".pt"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if recorder.record.failure else 0)  # exit handlers may wait for other ranks


def _seed_numpy(seed: int) -> None:
    with contextlib.suppress(ImportError):
        import_module("numpy").random.seed(seed)


def _run(options: argparse.Namespace, recorder: Recorder) -> None:
    sys.argv = [options.script, *options.arguments]
    record = recorder.record
    try:
        if options.is_module:
            sys.path[0] = ""
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(options.script).resolve().parent)
            runpy.run_path(options.script, run_name="__main__")
    except Enough:
        pass
    except SystemExit as error:
        record.failure = f"exit status {error.code}" if error.code else ""
        record.order = 2, time.time()
    except BaseException as error:
        traceback.print_exc()
        trace = traceback.walk_tb(error.__traceback__)
        frames = [(frame.f_code.co_filename, number) for frame, number in trace][::-1]
        record.failure, record.line = f"{type(error).__name__}: {error}", line_in(frames)
        record.order = 0 if frames[0][0].startswith(OURS) else 2, time.time()


def _recording(warn: Any, recorder: Recorder) -> Any:
    """Return ``warnings.warn``, which records flatshard's warnings."""

    def watched(message: Any, category: Any = None, stacklevel: int = 1, **kwargs: Any) -> None:
        if sys._getframe(1).f_code.co_filename.startswith(OURS):
            recorder.record.findings[current_line(), str(message)] = ""
        warn(message, category, stacklevel + 1, **kwargs)

    return watched


def _spawn(fn: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
    """Call the function of this rank here, in the place of ``torch.multiprocessing.spawn``."""
    world_size = int(os.environ["WORLD_SIZE"])
    if nprocs != world_size:
        raise ValueError(
            f"the script starts {nprocs} ranks by itself (torch.multiprocessing.spawn), and "
            f"`flatshard try` has {world_size}. Give --nproc-per-node {nprocs}."
        )
    fn(int(os.environ["RANK"]), *args)
