"""Optimizers of several packages resume from a checkpoint, beside a run without a break.

On two ranks an optimizer takes three steps, and its state is saved in four ways: by
checkpoint.save, by torch's get_state_dict and DCP, as full state dicts, and as safetensors with a
full optimizer state. Then one, two and three ranks load each into a fresh model and optimizer, and
take three more steps. All ranks have the same rows, in float64. A cell is "fails unwrapped" if the
same optimizer does not resume on an unwrapped model either, and "refused" if the save raises.

By default three optimizers of torch resume, each on another number of ranks; THOROUGH=1 tries all
of torch. `scripts/evidence.py resumed_optimizers` tries all of the installed packages.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from flatshard import ShardedWrapper, checkpoint
from tests.combinations import THOROUGH
from tests.harness import allow_warnings, naming, run_ranks
from tests.optimizers import own
from tests.optimizers.own import STEPS, Model, train
from tests.outcomes import Cell, try_ranks

RIGHT = 1e-8
WAYS = ("checkpoint", "dcp", "full", "safetensors")
WORLDS = (1, 2, 3)
LR = {"lr": 0.01}
UNWRAPPED = ("LBFGS", "SparseAdam")
"""Optimizers of torch that do not resume on an unwrapped model, in some way."""
OPTIONS: tuple[dict[str, Any], ...] = (
    LR,
    {},
    {**LR, "momentum": 0.9},
    {**LR, "num_data": 6},
    {**LR, "num_iterations": 100},
    {"num_iterations": 9},
)
"""Options to try, in this order, until the optimizer can be made."""


def _all_of(package: str) -> dict[str, Callable[..., Any]]:
    """The optimizers of a package, by name."""
    if package == "own":
        return own.KINDS
    if package == "torch":
        found = vars(torch.optim).items()
        return {n: k for n, k in found if isinstance(k, type) and k is not torch.optim.Optimizer}
    if package == "timm":
        from timm import optim

        names = [n for n in optim.list_optimizers() if not n.startswith(("bnb", "fused"))]  # CUDA
        return {name: optim.get_optimizer_class(name) for name in names}
    if package == "pytorch_optimizer":
        import pytorch_optimizer

        names = pytorch_optimizer.get_supported_optimizers()
        return {name: pytorch_optimizer.load_optimizer(name) for name in names}
    if package == "schedulefree":
        import schedulefree

        names = ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree")
        return {name: getattr(schedulefree, name) for name in names}
    from transformers.optimization import Adafactor

    return {"Adafactor": Adafactor}


PACKAGES = ("torch", "timm", "pytorch_optimizer", "schedulefree", "transformers")


def _make(package: str, name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    kind, error = _all_of(package)[name], None
    matrices = [param for param in params if param.dim() == 2]  # torch's Muon takes nothing else
    others = [param for param in params if param.dim() != 2]
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    for some, options in itertools.product((params, matrices, groups), OPTIONS):
        try:
            return kind(some, **options)
        except Exception as raised:
            error = error or raised
    raise RuntimeError(f"cannot be made: {type(error).__name__}: {error}")


def _built(package: str, name: str, seed: int, wrap: bool) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = Model().double()
    if wrap:
        model = ShardedWrapper(model)
    optimizer = _make(package, name, list(model.parameters()))
    getattr(optimizer, "train", lambda: None)()
    torch.manual_seed(11)  # some optimizers draw random numbers
    return model, optimizer


def _text(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _difference(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    differences = [(found[name] - value).abs().max() for name, value in expected.items()]
    return float(torch.stack(differences).max().nan_to_num(torch.inf))


def _verdict(largest: float) -> Cell:
    return Cell("right") if largest <= RIGHT else Cell("wrong", f"differs by {largest:.1e}")


def unwrapped(package: str, name: str, folder: str) -> dict[str, Cell]:
    """Cells of the unwrapped model: state dicts in a file of torch.save, and DCP."""
    try:
        expected = train(*_trained(package, name, wrap=False), STEPS)
    except Exception as error:
        return dict.fromkeys(WAYS, Cell("raises", _text(error)))
    cells = {}
    for way in ("full", "dcp"):
        try:
            model, optimizer = _trained(package, name, wrap=False)
            path = Path(folder, f"plain-{way}")
            if way == "full":
                torch.save((model.state_dict(), optimizer.state_dict()), path)
                model, optimizer = _built(package, name, 5, wrap=False)
                weights, state = torch.load(path, weights_only=False)
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            else:
                dcp.save(dict(enumerate(get_state_dict(model, optimizer))), checkpoint_id=path)
                model, optimizer = _built(package, name, 5, wrap=False)
                _load_dcp(path, model, optimizer)
            cells[way] = _verdict(_difference(expected, train(model, optimizer, STEPS)))
        except (Exception, CheckpointException) as error:
            cells[way] = Cell("raises", _text(error))
    return {way: cells["dcp" if way == "dcp" else "full"] for way in WAYS}


def _trained(package: str, name: str, *, wrap: bool) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = _built(package, name, 0, wrap)
    train(model, optimizer, 0)
    return model, optimizer


def _load_dcp(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    states = dict(enumerate(get_state_dict(model, optimizer)))
    dcp.load(states, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])


def save(rank: int, world_size: int, *arguments: str) -> dict[str, Cell]:
    """Save in all ways on two ranks; returns a cell for each way that failed."""
    with allow_warnings():
        return _save(rank, *arguments)


def _save(rank: int, package: str, name: str, folder: str) -> dict[str, Cell]:
    model, optimizer = _trained(package, name, wrap=True)
    expected = train(model, optimizer, STEPS)
    cells = {}
    for way in WAYS:
        path = Path(folder, way)
        try:
            model, optimizer = _trained(package, name, wrap=True)
            if way == "checkpoint":
                checkpoint.save(path, model, optimizer)
            elif way == "dcp":
                dcp.save(dict(enumerate(get_state_dict(model, optimizer))), checkpoint_id=path)
            else:
                state = checkpoint.full_optim_state_dict(model, optimizer)
                weights = checkpoint.full_state_dict(model) if way == "full" else None
                if way == "safetensors":
                    checkpoint.save_safetensors(model, path)
                if rank == 0:
                    torch.save((weights, state), f"{path}.pt")
        except (Exception, CheckpointException) as error:
            cells[way] = Cell("refused", _text(error))
    if rank == 0:
        torch.save(expected, Path(folder, "expected.pt"))
    return cells


def resume(rank: int, world_size: int, *arguments: str) -> Cell:
    """Load what `save` saved in one way, and train on."""
    with allow_warnings():
        return _verdict(_resume(*arguments))


def _resume(package: str, name: str, way: str, folder: str) -> float:
    model, optimizer = _built(package, name, 5, wrap=True)
    path = Path(folder, way)
    if way == "checkpoint":
        checkpoint.load(path, model, optimizer)
    elif way == "dcp":
        _load_dcp(path, model, optimizer)
    else:
        weights, state = torch.load(f"{path}.pt", weights_only=False)
        if way == "full":
            model.load_state_dict(weights)
        else:
            checkpoint.load_safetensors(model, path)
        ShardedWrapper.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
    expected = torch.load(Path(folder, "expected.pt"))
    return _difference(expected, train(model, optimizer, STEPS))


class Row(NamedTuple):
    """A cell."""

    package: str
    optimizer: str
    way: str
    ranks: int  # the number of ranks that load
    verdict: str
    reason: str


def rows_of(
    package: str, name: str, folder: str, worlds: tuple[int, ...] = WORLDS, timeout: float = 60.0
) -> Iterator[Row]:
    with allow_warnings():
        plain = unwrapped(package, name, folder)
    saved: Any = plain
    if any(cell.verdict != "raises" for cell in plain.values()):

        def first(found: list[dict[str, Cell]]) -> Any:
            return found[0]

        saved = try_ranks(first, save, 2, package, name, folder, timeout=timeout)
        if isinstance(saved, Cell):
            saved = dict.fromkeys(WAYS, saved)
    for way, world in itertools.product(WAYS, worlds):
        if plain[way].verdict != "right":
            cell = Cell("fails unwrapped", ": ".join(plain[way]))
        elif way in saved:
            cell = saved[way]
        else:
            cell = try_ranks(worst, resume, world, package, name, way, folder, timeout=timeout)
        yield Row(package, name, way, world, *cell)


def worst(found: list[Cell]) -> Cell:
    return next((cell for cell in found if cell.verdict != "right"), found[0])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("number", "name"),
    list(enumerate(_all_of("torch") if THOROUGH else ("AdamW", "Adafactor", "ASGD"))),
)
def test_resumed(number: int, name: str, tmp_path: Path) -> None:
    worlds = WORLDS if THOROUGH else (WORLDS[number % 3],)
    rows = list(rows_of("torch", name, str(tmp_path), worlds))
    assert {row.verdict for row in rows} <= {"right", "fails unwrapped"}, rows
    assert name in UNWRAPPED or {row.verdict for row in rows} == {"right"}, rows


@pytest.mark.distributed
def test_state_of_any_form(tmp_path: Path) -> None:
    """The number of elements says nothing: only what the optimizer made of the state."""
    run_ranks(_save_own, 2, tmp_path)
    for loading in WORLDS:
        run_ranks(_resume_own, loading, tmp_path)


def _save_own(rank: int, world_size: int, folder: Path) -> None:
    for name in own.KINDS:
        (folder / name).mkdir(exist_ok=True)
        failed = save(rank, world_size, "own", name, str(folder / name))
        assert failed.keys() <= ({"dcp"} if name in own.ONLY_FULL else set()), failed


def _resume_own(rank: int, world_size: int, folder: Path) -> None:
    for name, way in itertools.product(own.KINDS, WAYS):
        if way != "dcp" or name not in own.ONLY_FULL:
            with naming((name, way)), allow_warnings():
                assert _resume("own", name, way, str(folder / name)) <= 1e-12
