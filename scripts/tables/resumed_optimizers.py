"""Shows which optimizers resume from a checkpoint, beside a run without a break.

    python scripts/tables/resumed_optimizers.py --csv resumed.csv
    python scripts/tables/resumed_optimizers.py --package timm --only kron soap --csv resumed.csv
    python scripts/tables/resumed_optimizers.py --cells resumed.csv --page docs/evidence.md

On two gloo ranks an optimizer takes three steps, and its state is saved in four ways: by
checkpoint.save, by torch's get_state_dict and DCP, as full state dicts, and as safetensors with a
full optimizer state. Then one, two and three ranks load each into a fresh model and optimizer, and
take three more steps. All ranks have the same rows, in float64. A cell is *right*, *wrong* (other
numbers, and no error), *refused* (save raises an error), *raises*, *crashes* or *hangs*. It is
*fails unwrapped* if the same optimizer, on an unwrapped model, does not resume either. The
optimizers are all of torch, timm, pytorch_optimizer, schedulefree and transformers, as far as these
packages are installed.
"""

import contextlib
import csv
import importlib.util
import itertools
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import table_cells  # noqa: F401  (first, because this import may end the script)
import torch
import torch.distributed.checkpoint as dcp
from lib.command_line import Parser
from lib.output import output_file
from lib.rank_processes import Ranks
from table_cells import Cell, Notes, failure, folded, page_file, write_table
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

STEPS = 3
RIGHT = 1e-8
WAYS = ("checkpoint", "dcp", "full", "safetensors")
WORLDS = (1, 2, 3)
LR = {"lr": 0.01}
OPTIONS: tuple[dict[str, Any], ...] = (
    LR,
    {},
    {**LR, "momentum": 0.9},
    {**LR, "num_data": 6},
    {**LR, "num_iterations": 100},
    {"num_iterations": 9},
)
"""Options to try, in this order, until the optimizer can be made."""


class Model(nn.Module):
    """A square matrix, a matrix of two rows, a convolution, a 0-d parameter and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.conv = nn.Linear(6, 6), nn.Conv1d(2, 2, 3, padding=1)
        self.tied, self.head = nn.Linear(6, 6), nn.Linear(6, 2, bias=False)
        self.tied.weight, self.scale = self.square.weight, nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(torch.tanh(self.square(x)).unflatten(1, (2, 3))).flatten(1)
        return self.scale * self.head(torch.tanh(self.tied(x)))


def _all_of(package: str) -> dict[str, Callable[..., Any]]:
    """The optimizers of a package, by name."""
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
    from flatshard import ShardedWrapper

    torch.manual_seed(seed)
    model: nn.Module = Model().double()
    if wrap:
        model = ShardedWrapper(model)
    optimizer = _make(package, name, list(model.parameters()))
    getattr(optimizer, "train", lambda: None)()
    torch.manual_seed(11)  # some optimizers draw random numbers
    return model, optimizer


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> dict[str, Tensor]:
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 6, generator=generator, dtype=torch.float64)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss

        torch.manual_seed(step)
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _text(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _difference(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    differences = [(found[name] - value).abs().max() for name, value in expected.items()]
    return float(torch.stack(differences).max().nan_to_num(torch.inf))


def _verdict(expected: dict[str, Tensor], found: dict[str, Tensor]) -> Cell:
    largest = _difference(expected, found)
    return Cell("right") if largest <= RIGHT else Cell("wrong", f"differs by {largest:.1e}")


def unwrapped(package: str, name: str, folder: str) -> dict[str, Cell]:
    """Cells of the unwrapped model: state dicts in a file of torch.save, and DCP."""
    warnings.simplefilter("ignore")
    try:
        expected = _train(*_trained(package, name, wrap=False), STEPS)
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
            cells[way] = _verdict(expected, _train(model, optimizer, STEPS))
        except (Exception, CheckpointException) as error:
            cells[way] = Cell("raises", _text(error))
    return {way: cells["dcp" if way == "dcp" else "full"] for way in WAYS}


def _trained(package: str, name: str, *, wrap: bool) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = _built(package, name, 0, wrap)
    _train(model, optimizer, 0)
    return model, optimizer


def _load_dcp(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    states = dict(enumerate(get_state_dict(model, optimizer)))
    dcp.load(states, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])


def save(package: str, name: str, folder: str) -> dict[str, Cell]:
    """Save in all ways on two ranks; returns a cell for each way that failed."""
    from flatshard import checkpoint

    warnings.simplefilter("ignore")
    model, optimizer = _trained(package, name, wrap=True)
    expected = _train(model, optimizer, STEPS)
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
                if torch.distributed.get_rank() == 0:
                    torch.save((weights, state), f"{path}.pt")
        except (Exception, CheckpointException) as error:
            cells[way] = Cell("refused", _text(error))
    if torch.distributed.get_rank() == 0:
        torch.save(expected, Path(folder, "expected.pt"))
    return cells


def resume(package: str, name: str, way: str, folder: str) -> tuple[str, str]:
    """Load what `save` saved in one way, and train on."""
    from flatshard import ShardedWrapper, checkpoint

    warnings.simplefilter("ignore")
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
    return _verdict(expected, _train(model, optimizer, STEPS))


class Row(NamedTuple):
    """A cell, as the CSV has it."""

    package: str
    optimizer: str
    way: str
    ranks: str  # the number of ranks that load
    verdict: str
    reason: str


def rows_of(ranks: Ranks, package: str, name: str, seconds: float) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        plain = unwrapped(package, name, folder)
        if all(cell.verdict == "raises" for cell in plain.values()):
            saved = plain
        else:
            said = ranks.run(save, 2, package, name, folder, seconds=seconds)
            failed = failure(said)
            saved = dict.fromkeys(WAYS, failed) if failed else said[0].what
        for way in WAYS:
            for world in WORLDS:
                if plain[way].verdict != "right":
                    cell = Cell("fails unwrapped", ": ".join(plain[way]))
                elif way in saved:
                    cell = saved[way]
                else:
                    arguments = package, name, way, folder
                    said = ranks.run(resume, world, *arguments, seconds=seconds)
                    cells = [Cell(*one.what) for one in said if one.outcome == "returned"]
                    wrong = [one for one in cells if one.verdict != "right"]
                    cell = failure(said) or (wrong or cells)[0]
                yield Row(package, name, way, str(world), *cell)


def table_of(rows: Sequence[Row]) -> str:
    """Table of the number of cells by package, and the optimizers that are not right everywhere."""
    verdicts = ("right", "refused", "fails unwrapped", "wrong", "raises", "crashes", "hangs")
    lines = [f"| package | optimizers | cells | {' | '.join(verdicts)} |", "|---" * 10 + "|"]
    for package in dict.fromkeys(row.package for row in rows):
        own = [row for row in rows if row.package == package]
        counts = Counter(row.verdict for row in own)
        numbers = [len({row.optimizer for row in own}), len(own), *(counts[v] for v in verdicts)]
        lines.append(f"| {package} | {' | '.join(map(str, numbers))} |")
    notes = Notes("resumed optimizers", longest=240)
    cells: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row.verdict != "right":
            key = f"`{row.optimizer}`", row.package, notes.of(Cell(row.verdict, row.reason))
            cells.setdefault(key, []).append(f"{row.way} {row.ranks}")
    every = len(WAYS) * len(WORLDS)
    listed = [
        f"| {' | '.join(key)} | {'all' if len(where) == every else ', '.join(where)} |"
        for key, where in cells.items()
    ]
    head = [
        "| optimizer | package | verdict | way, and number of ranks that resume |",
        "|---" * 4 + "|",
    ]
    lines += ["", *folded("Optimizers that are not right everywhere", [*head, *listed])]
    return "\n".join([*lines, *notes.lines()])


def main() -> None:
    parser = Parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--package", nargs="+", choices=PACKAGES, default=[*PACKAGES], help="packages to try")
    add("--only", nargs="+", metavar="NAME", help="optimizers to try (default: all)")
    add("--csv", type=output_file, help="write all cells into this file")
    add("--cells", nargs="+", type=Path, metavar="CSV", help="show these cells, and try nothing")
    add("--page", type=page_file, help="page to write the table into (default: print the table)")
    parser.add_timeout(60.0, "each save and each resumed training")
    args = parser.parse_args()
    rows = [row for file in args.cells or () for row in _read(file)]
    names = [
        (package, name)
        for package in args.package
        if not args.cells and importlib.util.find_spec(package)
        for name in _all_of(package)
        if not args.only or name in args.only
    ]
    with Ranks(max(WORLDS)) if names else contextlib.nullcontext() as ranks:
        for package, name in names:
            own = list(rows_of(ranks, package, name, args.timeout))
            rows += own
            said = Counter(row.verdict for row in own)
            print(package, name, dict(said), file=sys.stderr, flush=True)
            for row in own:
                if row.verdict not in ("right", "fails unwrapped"):
                    print("   ", *row[2:], file=sys.stderr, flush=True)
            if args.csv:
                _write(args.csv, rows)
    if args.cells and args.csv:
        _write(args.csv, rows)
    write_table(args.page, "resumed optimizers", table_of(rows))


def _read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [Row(*one) for one in csv.reader(file)][1:]  # without the names of the columns


def _write(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([Row._fields, *rows])


if __name__ == "__main__":
    main()
