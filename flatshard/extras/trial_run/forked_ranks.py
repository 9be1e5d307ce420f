"""Runs a script once: starts a process for each rank, waits for all, and reads their records."""

import argparse
import contextlib
import faulthandler
import os
import random
import runpy
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # optimizers import this module: load it once, before ranks are forked
import torch.multiprocessing
from torch.distributed.elastic.utils.distributed import get_free_port

from flatshard.extras import program_line
from flatshard.extras.trial_run.recorder import Record, Recorder, read, write
from flatshard.extras.trial_run.stand_ins import install

multiprocessing: Any = torch.multiprocessing

# After a rank has failed, the other ranks have this number of seconds to end. One of them may
# record an earlier failure.
_GRACE = 5.0


def run(options: argparse.Namespace, name: str) -> list[Record]:
    """Run the script, and return the records of all ranks.

    ``name``: `ddp`; `sharded`; `noise` or `again`, which repeat `ddp` with and without noise.
    """
    print(f"flatshard try: run {name!r}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # then SIGTERM ends the ranks, too
    torch.set_num_threads(1)  # start no threads, which the forked ranks would lack
    # Under torchrun, the first process of each host starts all ranks of its host.
    first = int(os.environ.get("RANK", 0))
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", options.nproc_per_node))
    files = [options.folder / f"{name}-{rank}.pt" for rank in range(options.nproc_per_node)]
    port = options.folder / f"{name}.port"
    if first == 0:
        write(port, get_free_port())
    options.run, options.port, options.files = name, read(port), files
    # Fork the ranks, because forked processes need not import torch again.
    arguments = (_run_rank, (first, options), num_ranks)
    context = multiprocessing.start_processes(*arguments, join=False, start_method="fork")
    try:
        # Ignore how processes ended: the records say why ranks have failed.
        with contextlib.suppress(multiprocessing.ProcessExitedException):
            while not context.join(grace_period=_GRACE):
                pass
    finally:
        for one in context.processes:
            with contextlib.suppress(OSError):
                os.killpg(one.pid, signal.SIGKILL)  # kill the rank and its DataLoaders' workers
            one.kill()  # the rank has no group of processes yet
            one.join()
    for file, one in zip(files[first:], context.processes, strict=False):
        if not file.exists():
            log = file.with_suffix(".log").read_text(errors="replace")[-4000:]
            text = f"{file.stem}: the process ended with status {one.exitcode}. Last output:\n{log}"
            was_ended = one.exitcode in (-signal.SIGTERM, -signal.SIGKILL)
            write(file, Record(text, failed_at=time.time() if was_ended else 0.0))
    return [read(file) for file in files]  # other hosts write the files of their ranks


def _run_rank(local_rank: int, first: int, options: argparse.Namespace) -> NoReturn:
    """Run the script in this process, which was forked for one rank.

    Writes the ``Record`` of the rank's tensors, costs and errors to the rank's file.
    """
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank, size = first + local_rank, f"{options.nproc_per_node}"
    local = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    own = {"MASTER_PORT": f"{options.port}", "RANK": f"{rank}", "LOCAL_RANK": f"{local_rank}"}
    # torchrun's store has the addresses of the last run: use another port, and another store.
    os.environ |= {**local, **os.environ, **own, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    file = options.files[rank]
    file.unlink(missing_ok=True)
    with file.with_suffix(".log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # Set seeds, so that scripts that set no seed can be compared, too.
    for module in (torch, random, getattr(sys.modules.get("numpy"), "random", random)):
        getattr(module, "manual_seed", module.seed)(1234 + rank)
    torch.set_default_dtype(torch.float64 if options.exact else torch.float32)
    torch.use_deterministic_algorithms(options.exact, warn_only=True)
    faulthandler.dump_traceback_later(options.timeout, exit=True, file=2)
    recorder = Recorder(options, file)
    install(recorder)
    warn: Any = warnings.warn

    def note(message: Any, category: Any = None, stacklevel: int = 1, **kwargs: Any) -> None:
        if sys._getframe(1).f_globals["__name__"].startswith("flatshard."):
            recorder.remark(str(message))
        warn(message, category, stacklevel + 1, **kwargs)

    warnings.warn = note  # type: ignore
    multiprocessing.spawn = multiprocessing.start_processes = _spawn
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = "" if options.is_module else str(Path(options.script).resolve().parent)
    try:
        if options.is_module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(options.script, run_name="__main__")
    except SystemExit as error:
        recorder.end(f"exit status {error.code}" if error.code else "")
    except BaseException as error:
        traceback.print_exc()
        innermost, _ = [*traceback.walk_tb(error.__traceback__)][-1]
        recorder.end(f"{type(error).__name__}: {error}\n  at {program_line(innermost)}")
    recorder.end()


def _spawn(fn: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
    """Call the function of this rank here, in the place of ``torch.multiprocessing.spawn``."""
    if f"{nprocs}" != os.environ["WORLD_SIZE"]:
        raise ValueError(f"the script starts {nprocs} ranks by itself: --nproc-per-node {nprocs}")
    fn(int(os.environ["RANK"]), *args)
