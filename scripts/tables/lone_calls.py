"""Prints what happens if only one rank makes a call that all ranks must make.

    python scripts/tables/lone_calls.py [--only TEXT...] [--sample]

Each cell is a separate program on two or three gloo ranks. The ranks train two steps, then one rank
makes a call, as under `if rank == 0:`, and all ranks continue with the same next call. A cell is
*right* if values and weights equal those of the unwrapped model on every rank. A cell *raises* if
every rank ends with a named error of flatshard or, for a rank that waits in a collective of the
program, with an error that flatshard's log explains. Everything else (wrong weights, a wait of more
than SECONDS, an abort) is a failure, and the exit status is 1. All 864 cells take about ten minutes
on two cores.

`--sample` runs few cells, such that each pair of values occurs. `--share 3` runs every third of the
chosen cells. `--quick` looks for deadlocks ten times sooner. Ranks run atexit's handlers and skip
the rest of the interpreter's shutdown, which would take a second.
"""

from __future__ import annotations

import atexit
import copy
import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import table_cells  # noqa: F401  (first, because this import may end the script)
import torch
import torch._dynamo  # torch loads it when it makes the first optimizer
import torch.distributed as dist
from lib.command_line import Parser, positive_number
from table_cells import Cell, Notes
from torch import Tensor, nn

from flatshard import ShardedWrapper, checkpoint
from flatshard.extras.deadlock import detector
from flatshard.wrap import ModuleWrapPolicy

SECONDS = 10.0
"""From the first wait to the error, on every rank."""
GROUP_SECONDS = 90.0
"""The process group's timeout, which must end nothing."""
EXACT = 1e-6
ENDS = ("[FS-DEADLOCK]", "different collectives", "ended by")
"""Words of errors, or of the log, that name what ranks wait for."""


class Block(nn.Sequential):
    def __init__(self, has_buffers: bool) -> None:
        super().__init__(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8))
        if has_buffers:
            self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) * getattr(self, "scale", 1.0)


def build(has_buffers: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(has_buffers) for _ in range(3)), nn.Linear(8, 4))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs, targets = (torch.randn(4, size, generator=generator) for size in (8, 4))
    return nn.functional.mse_loss(model(inputs), targets)


class Run:
    """Trains a sharded model, or an unwrapped model on the rows of all ranks."""

    def __init__(self, model: nn.Module, ranks: Sequence[int], folder: Path) -> None:
        self.model: Any = model
        self._ranks, self._step, self.folder = ranks, 0, folder
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @property
    def weight(self) -> nn.Parameter:
        return next(iter(self.model.parameters()))

    def backward(self) -> None:
        self.optimizer.zero_grad()
        for rank in self._ranks:
            (loss_of(self.model, rank, self._step) / len(self._ranks)).backward()
        self._step += 1

    def step(self) -> None:
        self.backward()
        self.optimizer.step()


def _norm_of_gradient(run: Run) -> Tensor:
    gradient = run.weight.grad
    assert gradient is not None
    return gradient.norm()


def _full_tensor(run: Run) -> Tensor:
    weight: Any = run.weight
    return weight.full_tensor() if isinstance(run.model, ShardedWrapper) else weight.detach()


def _summon(run: Run) -> Tensor:
    if not isinstance(run.model, ShardedWrapper):
        return run.weight.norm()
    with run.model.summon_full_params(run.model, writeback=False):
        return run.weight.norm()


def _optim_state(run: Run) -> None:
    if isinstance(run.model, ShardedWrapper):
        ShardedWrapper.optim_state_dict(run.model, run.optimizer)


def _save(run: Run) -> None:
    if isinstance(run.model, ShardedWrapper):
        checkpoint.save(run.folder / "saved", run.model, run.optimizer)


def _register_hook(run: Run) -> None:
    if isinstance(run.model, ShardedWrapper):
        run.model.register_comm_hook(None, lambda state, grad, out=None: None)


def _clip(run: Run) -> None:
    # So that no gradient changes: a lone clip must not make other numbers, only an error.
    if isinstance(run.model, ShardedWrapper):
        run.model.clip_grad_norm_(1e9)


def _clip_and_step(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()


CALLS: dict[str, Callable[[Run], object]] = {
    "`p.norm()`": lambda run: run.weight.norm(),
    "`p.grad.norm()`": _norm_of_gradient,
    "`p.sum()`": lambda run: run.weight.sum(),
    "`full_tensor()`": _full_tensor,
    "`model.clip_grad_norm_`": _clip,
    "`nn.utils.clip_grad_norm_`": lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 1e9),
    "`optim_state_dict`": _optim_state,
    "`checkpoint.save`": _save,
    "`summon_full_params`": _summon,
    "`state_dict()`": lambda run: run.model.state_dict()["0.0.weight"],
    "`register_comm_hook`": _register_hook,
    "`copy.deepcopy(model)`": lambda run: copy.deepcopy(run.model) and None,
}
NEXT: dict[str, Callable[[Run], object]] = {
    "forward": Run.step,
    "clipping": _clip_and_step,
    "step": lambda run: run.optimizer.step(),
    "save": _save,
    "barrier": lambda run: dist.barrier() if isinstance(run.model, ShardedWrapper) else None,
    "end": lambda run: None,
}
IN_A_STEP = {"clipping", "step"}  # comes between a backward and the optimizer's step
BUFFERS = {"buffers": True, "no buffers": False}
TRANSPORTS = {"shared memory": "auto", "sockets": "sockets", "native": "native"}
WORLDS = (2, 3)


class Setting(NamedTuple):
    """The values that a cell combines."""

    call: str
    then: str
    buffers: str
    transport: str
    world: int

    @property
    def lone_rank(self) -> int:
        return self.world - 2


AXES = (list(CALLS), list(NEXT), list(BUFFERS), list(TRANSPORTS), list(WORLDS))


def all_settings() -> list[Setting]:
    return [Setting(*values) for values in product(*AXES)]


def sample() -> list[Setting]:
    """A small set of settings in which each pair of values of two axes occurs."""
    left = {
        (one, two, a, b)
        for one, two in combinations(range(len(AXES)), 2)
        for a, b in product(AXES[one], AXES[two])
    }
    chosen = []
    settings = all_settings()
    while left:
        best = max(settings, key=lambda setting: len(_pairs(setting) & left))
        chosen.append(best)
        left -= _pairs(best)
    return chosen


def _pairs(setting: Setting) -> set[tuple[int, int, Any, Any]]:
    places = combinations(range(len(AXES)), 2)
    return {(one, two, setting[one], setting[two]) for one, two in places}


# ---------------------------------------------------------------- one rank


def program(setting: Setting, rank: int, folder: Path) -> None:
    """Train, make the lone call, go on; write what happened to ``folder``."""
    report: dict[str, Any] = {"outcome": "", "seconds": 0.0, "text": ""}
    log = _Log()
    logging.getLogger("flatshard").addHandler(log)
    began = time.monotonic()
    try:
        began, worst = _trained(setting, rank, folder)
        report["outcome"] = "right" if worst <= EXACT else "wrong"
        report["text"] = "" if worst <= EXACT else f"{worst:.2g} from the unwrapped model"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        report |= {"outcome": "raises", "text": text, "trace": traceback.format_exc()}
        if began_at := getattr(error, "began_at", 0.0):
            began = began_at
        raise
    finally:
        report |= {"seconds": time.monotonic() - began, "log": log.lines}
        (folder / f"rank-{rank}").write_text(json.dumps(report))


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _trained(setting: Setting, rank: int, folder: Path) -> tuple[float, float]:
    """When the lone call began, and how far this rank's values are from the unwrapped model's."""
    has_buffers, world = BUFFERS[setting.buffers], setting.world
    plain = Run(build(has_buffers), range(world), folder)
    mode = TRANSPORTS[setting.transport]
    model = ShardedWrapper(
        build(has_buffers),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        coalesce_bytes=0,
        collectives=mode,
    )
    run = Run(model, [rank], folder)
    for one in (plain, run):
        one.step()
        one.step()
        if setting.then in IN_A_STEP:
            one.backward()
    began = time.monotonic()
    try:
        worst = 0.0
        if rank == setting.lone_rank:
            found = CALLS[setting.call](run)
            expected = CALLS[setting.call](plain)
            if isinstance(found, Tensor) and isinstance(expected, Tensor):
                worst = (found - expected).abs().max().item()
        for one in (plain, run):
            NEXT[setting.then](one)
        if setting.then == "end":
            return began, worst
        for one in (plain, run):
            one.step()
        weights, others = run.model.state_dict(), plain.model.state_dict()
    except Exception as error:
        error.began_at = began  # type: ignore[attr-defined]
        raise
    differences = [(weights[name] - value).abs().max().item() for name, value in others.items()]
    return began, max(worst, *differences)


def start(setting: Setting, rank: int, folder: Path, quick: bool) -> int:
    """Fork this process as a rank; returns its process number, or ends in the child."""
    if process := os.fork():
        return process
    if quick:
        vars(detector).update(FIRST_LOOK_SECONDS=0.3, LOOK_SECONDS=0.1, LONGEST_LOOK_SECONDS=0.4)
    code = 1
    try:
        _be_a_rank(setting, rank, folder)
        code = 0
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    os._exit(code)


def _be_a_rank(setting: Setting, rank: int, folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    file = os.open(folder / f"err-{rank}", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(setting.world), LOCAL_RANK=str(rank))
    os.environ["LOCAL_WORLD_SIZE"] = str(setting.world)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), setting.world),
        rank=rank,
        world_size=setting.world,
        timeout=timedelta(seconds=GROUP_SECONDS),
    )
    program(setting, rank, folder)


# ---------------------------------------------------------------- all ranks


def warm_up() -> None:
    """Do once what each rank, which is forked from this process, would do for itself."""
    torch.overrides.resolve_name(torch.Tensor.norm)  # fills a cache
    # At its end a rank need not remove the operators that torch has registered in Python.
    for finalizer, info in list(weakref.finalize._registry.items()):  # type: ignore[attr-defined]
        if info.func is torch.library._del_library:
            finalizer.atexit = False
    gc.freeze()  # a collection in a rank need not look at what is loaded here


class Outcome(NamedTuple):
    """Outcome of a cell."""

    cell: Cell
    seconds: float


def outcomes(
    settings: Sequence[Setting], at_once: int, quick: bool
) -> Iterator[tuple[Setting, Outcome]]:
    """Each setting with its outcome, as they end; so many run at a time."""
    to_do, running = list(reversed(settings)), dict[Setting, tuple[dict[int, int], Path, float]]()
    while to_do or running:
        while to_do and len(running) < at_once:
            setting = to_do.pop()
            # Not a context manager: a child would leave it, too, and remove the folder.
            folder = Path(tempfile.mkdtemp(prefix="flatshard-lone-"))
            processes = {rank: start(setting, rank, folder, quick) for rank in range(setting.world)}
            running[setting] = processes, folder, time.monotonic()
        for setting, (processes, folder, began) in list(running.items()):
            codes = _ended(processes)
            if codes is None and time.monotonic() - began < GROUP_SECONDS:
                continue
            if codes is None:
                codes = _killed(processes)
            yield setting, _judge(setting, codes, folder)
            shutil.rmtree(folder)
            del running[setting]
        time.sleep(0.02)


_exit_codes: dict[int, int] = {}


def _ended(processes: dict[int, int]) -> dict[int, int] | None:
    """Exit codes of all ranks; None if a rank still runs."""
    for process in processes.values():
        if process not in _exit_codes:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                _exit_codes[process] = os.waitstatus_to_exitcode(status)
    if all(process in _exit_codes for process in processes.values()):
        return {rank: _exit_codes.pop(process) for rank, process in processes.items()}
    return None


def _killed(processes: dict[int, int]) -> dict[int, int]:
    codes = {}
    for rank, process in processes.items():
        if process in _exit_codes:
            codes[rank] = _exit_codes.pop(process)
        else:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            codes[rank] = -signal.SIGKILL
    return codes


def _judge(setting: Setting, codes: dict[int, int], folder: Path) -> Outcome:
    texts, slowest, verdicts = [], 0.0, []
    for rank, code in codes.items():
        path = folder / f"rank-{rank}"
        if code not in (0, 1) or not path.exists():
            verdict = "hangs" if code == -signal.SIGKILL else "crashes"
            why = (folder / f"err-{rank}").read_text()[-600:]
            return Outcome(Cell(verdict, f"{setting}, rank {rank}, exit code {code}: {why}"), 0.0)
        report = json.loads(path.read_text())
        verdicts.append(report["outcome"])
        if report["outcome"] == "wrong":
            return Outcome(Cell("wrong", f"{setting}, rank {rank}: {report['text']}"), 0.0)
        if report["outcome"] == "raises":
            slowest = max(slowest, report["seconds"])
            said = " ".join([report["text"], *report["log"]])
            if not any(words in said for words in ENDS):
                return Outcome(Cell("unnamed", f"{setting}, rank {rank}: {said}"), slowest)
            texts.append(report["text"])
    if not texts:
        return Outcome(Cell("right"), 0.0)
    # A program that is over has ended right; who waited for it raises.
    if "right" in verdicts and setting.then != "end":
        return Outcome(Cell("uneven", f"{setting}: {verdicts}: {texts[0]}"), slowest)
    if slowest > SECONDS:
        return Outcome(Cell("late", f"{setting}: {slowest:.1f} s: {texts[0]}"), slowest)
    return Outcome(Cell("raises", texts[0]), slowest)


GOOD = {"right", "raises"}


def table(found: dict[Setting, Outcome]) -> list[str]:
    """Table with a row per call and a column per next call: verdict, slowest error in seconds."""
    lines = [f"| | {' | '.join(NEXT)} |", f"|---|{'---|' * len(NEXT)}"]
    notes = Notes("programs", longest=600)
    for call in CALLS:
        cells = []
        for then in NEXT:
            some = [one for setting, one in found.items() if setting[:2] == (call, then)]
            bad = [notes.of(one.cell) for one in some if one.cell.verdict not in GOOD]
            counts = {verdict: sum(one.cell.verdict == verdict for one in some) for verdict in GOOD}
            slowest = max((one.seconds for one in some), default=0.0)
            words = [f"{count} {verdict}" for verdict, count in sorted(counts.items()) if count]
            if counts["raises"]:
                words[0 if len(words) == 1 else -2] += f" ({slowest:.1f} s)"
            cells.append(", ".join(words + bad))
        lines.append(f"| {call} | {' | '.join(cells)} |")
    return [*lines, "", *notes.lines()]


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], help="run programs with all of these words"
    )
    parser.add_argument(
        "--sample", action="store_true", help="run a sample in which each pair of values occurs"
    )
    parser.add_argument(
        "--share", type=positive_number, default=1, help="run every SHARE-th program"
    )
    parser.add_argument("--quick", action="store_true", help="look for deadlocks ten times sooner")
    parser.add_argument(
        "--at-once", type=positive_number, default=6, help="programs to run at a time (default: 6)"
    )
    options = parser.parse_args()
    settings = [
        setting
        for setting in (sample() if options.sample else all_settings())
        if all(any(word in str(value) for value in setting) for word in options.only)
    ][:: int(options.share)]
    warm_up()
    found: dict[Setting, Outcome] = {}
    for setting, outcome in outcomes(settings, int(options.at_once), options.quick):
        found[setting] = outcome
        if outcome.cell.verdict not in GOOD:
            print(f"{outcome.cell.verdict}: {outcome.cell.why}", file=sys.stderr, flush=True)
    counts: dict[str, int] = {}
    for one in found.values():
        counts[one.cell.verdict] = counts.get(one.cell.verdict, 0) + 1
    print("\n".join([*table(found), "", f"{len(found)} cells: {counts}"]))
    return int(any(verdict not in GOOD for verdict in counts))


if __name__ == "__main__":
    sys.exit(main())
