"""One rank makes a call that all ranks must make, as under ``if rank == 0:``, and all ranks go on.

Each cell is a program on two or three gloo ranks: they train two steps, then the one rank makes the
call, and all ranks the same next call. Either values and weights are the unwrapped model's on every
rank, or every rank ends with a named error within seconds: flatshard's own or, for ranks that wait
in a collective of the program, one that the log explains. All else fails: wrong weights, a longer
wait, an abort.

By default half of a sample runs in which each pair of values occurs; THOROUGH=1 runs all of it, and
`scripts/evidence.py lone_calls` all 864 cells.
"""

import atexit
import copy
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import combinations, product
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard import ShardedWrapper, checkpoint
from flatshard.extras.deadlock import detector
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import every
from tests.harness import forked
from tests.outcomes import QUICK, Cell, logged

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
    def weight(self) -> Any:
        return next(iter(self.model.parameters()))

    def backward(self) -> None:
        self.optimizer.zero_grad()
        for rank in self._ranks:
            (loss_of(self.model, rank, self._step) / len(self._ranks)).backward()
        self._step += 1

    def step(self) -> None:
        self.backward()
        self.optimizer.step()


def _on_sharded(call: Callable[[Run], object]) -> Callable[[Run], object]:
    """A call that the unwrapped model lacks, or need not make."""
    return lambda run: call(run) if isinstance(run.model, ShardedWrapper) else None


def _full_tensor(run: Run) -> Tensor:
    return getattr(run.weight, "full_tensor", run.weight.detach)()


def _summon(run: Run) -> Tensor:
    if not isinstance(run.model, ShardedWrapper):
        return run.weight.norm()
    with run.model.summon_full_params(run.model, writeback=False):
        return run.weight.norm()


@_on_sharded
def _save(run: Run) -> None:
    checkpoint.save(run.folder / "saved", run.model, run.optimizer)


def _clip(run: Run, most: float) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), most)


def _clip_and_step(run: Run) -> None:
    _clip(run, 1.0)
    run.optimizer.step()


CALLS: dict[str, Callable[[Run], object]] = {
    "`p.norm()`": lambda run: run.weight.norm(),
    "`p.grad.norm()`": lambda run: run.weight.grad.norm(),
    "`p.sum()`": lambda run: run.weight.sum(),
    "`full_tensor()`": _full_tensor,
    # The limit changes no gradient: a lone clip must not make other numbers, only an error.
    "`model.clip_grad_norm_`": _on_sharded(lambda run: run.model.clip_grad_norm_(1e9) and None),
    "`nn.utils.clip_grad_norm_`": lambda run: _clip(run, 1e9),
    "`optim_state_dict`": _on_sharded(
        lambda run: ShardedWrapper.optim_state_dict(run.model, run.optimizer) and None
    ),
    "`checkpoint.save`": _save,
    "`summon_full_params`": _summon,
    "`state_dict()`": lambda run: run.model.state_dict()["0.0.weight"],
    "`register_comm_hook`": _on_sharded(
        lambda run: run.model.register_comm_hook(None, lambda state, grad, out=None: None)
    ),
    "`copy.deepcopy(model)`": lambda run: copy.deepcopy(run.model) and None,
}
NEXT: dict[str, Callable[[Run], object]] = {
    "forward": Run.step,
    "clipping": _clip_and_step,
    "step": lambda run: run.optimizer.step(),
    "save": _save,
    "barrier": _on_sharded(lambda run: dist.barrier()),
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


def _be_a_rank(setting: Setting, rank: int, folder: Path, quick: bool) -> None:
    """Run the program in this process, write what happened to ``folder``, and end."""
    if quick:
        vars(detector).update(QUICK)
    file = os.open(folder / f"err-{rank}", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    torch.set_num_threads(1)
    world = str(setting.world)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world)
    os.environ["LOCAL_WORLD_SIZE"] = world
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), setting.world),
        rank=rank,
        world_size=setting.world,
        timeout=timedelta(seconds=GROUP_SECONDS),
    )
    log = logged()
    began, verdict, text = [time.monotonic()], "right", ""
    try:
        if (worst := _trained(setting, rank, folder, began)) > EXACT:
            verdict, text = "wrong", f"{worst:.2g} from the unwrapped model"
    except Exception as error:
        verdict, text = "raises", f"{type(error).__name__}: {error}"
    report = verdict, text, time.monotonic() - began[0], log
    (folder / f"rank-{rank}").write_text(json.dumps(report))
    atexit._run_exitfuncs()
    os._exit(verdict == "raises")


def _trained(setting: Setting, rank: int, folder: Path, began: list[float]) -> float:
    """How far this rank's values are from the unwrapped model's; notes when the call began."""
    has_buffers = BUFFERS[setting.buffers]
    keywords = {"collectives": TRANSPORTS[setting.transport], "coalesce_bytes": 0}
    policy = ModuleWrapPolicy({Block})
    model = ShardedWrapper(build(has_buffers), auto_wrap_policy=policy, **keywords)
    plain = Run(build(has_buffers), range(setting.world), folder)
    run = Run(model, [rank], folder)
    both = plain, run
    for one in both:
        one.step()
        one.step()
        if setting.then in IN_A_STEP:
            one.backward()
    began[0] = time.monotonic()
    worst = 0.0
    if rank == setting.lone_rank:
        found, expected = CALLS[setting.call](run), CALLS[setting.call](plain)
        if isinstance(found, Tensor) and isinstance(expected, Tensor):
            worst = (found - expected).abs().max().item()
    for one in both:
        NEXT[setting.then](one)
    if setting.then == "end":
        return worst
    for one in both:
        one.step()
    weights, others = run.model.state_dict(), plain.model.state_dict()
    return max(worst, *((weights[name] - others[name]).abs().max().item() for name in others))


# ---------------------------------------------------------------- all ranks


class Outcome(NamedTuple):
    """A cell, and the seconds until the last rank's error."""

    cell: Cell
    seconds: float = 0.0


def outcomes(
    settings: Sequence[Setting], at_once: int, quick: bool
) -> Iterator[tuple[Setting, Outcome]]:
    """Each setting with its outcome, as they end; so many run at a time."""
    to_do, running = list(reversed(settings)), dict[Setting, tuple[list[Any], Any, float]]()
    while to_do or running:
        while to_do and len(running) < at_once:
            setting = to_do.pop()
            folder = tempfile.TemporaryDirectory(prefix="lone-")
            arguments = Path(folder.name), quick
            ranks = [forked(_be_a_rank, setting, r, *arguments) for r in range(setting.world)]
            running[setting] = ranks, folder, time.monotonic()
        wait([one.sentinel for ranks, *_ in running.values() for one in ranks if one.is_alive()], 1)
        for setting, (ranks, folder, began) in list(running.items()):
            if time.monotonic() - began > GROUP_SECONDS:
                for rank in ranks:
                    rank.kill()
            elif any(rank.is_alive() for rank in ranks):
                continue
            for rank in ranks:
                rank.join()
            yield setting, _judge(setting, [rank.exitcode for rank in ranks], Path(folder.name))
            folder.cleanup()
            del running[setting]


def _judge(setting: Setting, codes: list[int], folder: Path) -> Outcome:
    reports, slowest = [], 0.0
    for rank, code in enumerate(codes):
        path, where = folder / f"rank-{rank}", f"{setting}, rank {rank}"
        if code not in (0, 1) or not path.exists():
            why = f"{where}, exit code {code}: {(folder / f'err-{rank}').read_text()[-600:]}"
            return Outcome(Cell("hangs" if code == -9 else "crashes", why))
        verdict, text, seconds, log = json.loads(path.read_text())
        if verdict == "wrong":
            return Outcome(Cell("wrong", f"{where}: {text}"))
        if verdict == "raises":
            slowest = max(slowest, seconds)
            said = " ".join([text, *log])
            if not any(words in said for words in ENDS):
                return Outcome(Cell("unnamed", f"{where}: {said}"), slowest)
        reports.append((verdict, text))
    texts = [text for verdict, text in reports if verdict == "raises"]
    if not texts:
        return Outcome(Cell("right"))
    # A program that is over has ended right; who waited for it raises.
    if len(texts) < len(codes) and setting.then != "end":
        return Outcome(Cell("uneven", f"{setting}: {reports}"), slowest)
    if slowest > SECONDS:
        return Outcome(Cell("late", f"{setting}: {slowest:.1f} s: {texts[0]}"), slowest)
    return Outcome(Cell("raises", texts[0]), slowest)


@pytest.mark.distributed
@pytest.mark.by_turns
@pytest.mark.parametrize("call", CALLS)
def test_lone_call(call: str) -> None:
    settings = [one for one in every(2, sample()) if one.call == call]
    found = [outcome.cell for _, outcome in outcomes(settings, at_once=6, quick=True)]
    assert [one for one in found if one.verdict not in ("right", "raises")] == []
