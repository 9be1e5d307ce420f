"""Compares optimizers of several packages on a sharded model with the unwrapped model.

    python scripts/tables/optimizers.py --page docs/evidence.md
    python scripts/tables/optimizers.py --only Muon SOAP --impl flatshard fsdp2 --world-size 4
    python scripts/tables/optimizers.py --strategies --page docs/evidence.md

Each optimizer takes five steps on gloo ranks, in separate processes. All ranks have the same rows,
so the averaged gradients equal the unwrapped model's gradients bit by bit, and every difference
comes from the optimizer. A cell is *right*, *raises*, *wrong* (other numbers, and no error),
*crashes* or *hangs*. With `--strategies`, the table has only flatshard, by strategy and number of
ranks. On three ranks it trains in float64, because a mean of three equal numbers is rounded.
Optimizers whose package is not installed are skipped. The page was made with
`pip install ".[models,optimizers]" bitsandbytes torchao`.
"""

import contextlib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import table_cells  # noqa: F401  (first, because this import may end the script)
import torch
from lib.command_line import Parser, at_least
from lib.rank_processes import Ranks, Said
from table_cells import Cell, Notes, failure, folded, page_file, write_table
from torch import Tensor, nn

from flatshard.options import transport_options
from tests.idioms.side import STRATEGIES, Side

STEPS = 5
EXACT, RIGHT = 0.0, 1e-6
IMPLEMENTATIONS = {"flatshard": "flatshard FULL_SHARD", "fsdp1": "fsdp1", "fsdp2": "fsdp2"}
IMPLEMENTATIONS["ddp"] = "ddp"
TITLES = {"flatshard": "flatshard", "fsdp1": "FSDP1", "fsdp2": "FSDP2", "ddp": "DDP"}
DEFAULT = {"lr": 0.01}
WORLDS = (1, 2, 3, 4)

Cells = dict[tuple[str, str], dict[str, Cell]]
"""Cells, keyed by optimizer and implementation."""

Make = Callable[[Sequence[nn.Parameter]], list[torch.optim.Optimizer]]


def _of(module: str, name: str, **options: Any) -> Make:
    """Makes one optimizer for all parameters."""

    def make(params: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
        kind = getattr(importlib.import_module(module), name)
        return [kind(params, **{**DEFAULT, **options})]

    return make


def _muon(params: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices = [param for param in params if param.dim() == 2]
    rest = [param for param in params if param.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


PACKAGES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "torch": (
        "torch.optim",
        {
            **{name: {} for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax")},
            **{name: {} for name in ("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")},
            "Adafactor": {},
            "LBFGS": {"max_iter": 3},
        },
    ),
    "transformers": ("transformers.optimization", {"Adafactor": {"relative_step": False}}),
    "pytorch-optimizer": (
        "pytorch_optimizer",
        {
            **{name: {} for name in ("SOAP", "Shampoo", "ScalableShampoo", "Kron", "CAME")},
            **{name: {} for name in ("Lamb", "LARS", "Lion", "Adan", "AdaBelief", "Ranger")},
            **{name: {} for name in ("Prodigy", "DAdaptAdam", "SCION", "SM3", "AdamP", "Nero")},
            **{name: {} for name in ("Fromage", "NovoGrad", "ADOPT", "MARS", "StableAdamW")},
            **{name: {} for name in ("AdEMAMix", "Alice", "Conda", "Amos")},
        },
    ),
    "schedulefree": (
        "schedulefree",
        {"AdamWScheduleFree": {}, "SGDScheduleFree": {}, "RAdamScheduleFree": {}},
    ),
    "torchao": ("torchao.optim", {"AdamW8bit": {}, "AdamW4bit": {}, "AdamWFp8": {}}),
    "bitsandbytes": ("bitsandbytes.optim", {"AdamW8bit": {}, "Lion8bit": {}, "Lion": {}}),
}

OPTIMIZERS: dict[tuple[str, str], Make] = {("torch", "Muon"): _muon} | {
    (package, name): _of(module, name, **options)
    for package, (module, kinds) in PACKAGES.items()
    for name, options in kinds.items()
    if importlib.util.find_spec(module.partition(".")[0])
}


class Model(nn.Module):
    """A model with matrices, vectors and a convolution, some large enough for 8-bit states."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(24, 72), nn.LayerNorm(72)
        self.mix = nn.Conv1d(8, 6, 3)
        self.down, self.head = nn.Linear(42, 128, bias=False), nn.Linear(128, 5)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(torch.relu(self.up(x))).unflatten(1, (8, 9))
        return self.head(torch.tanh(self.down(self.mix(rows).flatten(1))))


def train(
    package: str, name: str, implementation: str, dtype: torch.dtype = torch.float32
) -> tuple[float, str]:
    """The largest difference from the unwrapped model, and how flatshard ran the step."""
    warnings.simplefilter("ignore")
    transport_options.COALESCE_BYTES = 0  # the toy model would be one unit
    states: list[dict[str, Tensor]] = []
    side = Side(implementation)
    for is_wrapped in (False, True):
        torch.manual_seed(7)
        model = Model().to(dtype)
        if is_wrapped:
            model = side.wrap(model, nn.Linear, nn.Conv1d)
        optimizers = OPTIMIZERS[package, name](list(model.parameters()))
        with _in_training(optimizers):
            for number in range(STEPS):
                _step(model, optimizers, number)
        states.append(side.state(model) if is_wrapped else model.state_dict())
    plain, wrapped = states
    largest = max(float((wrapped[key] - value).abs().max()) for key, value in plain.items())
    return largest, _step_mode(optimizers[0]) if "flatshard" in implementation else ""


@contextlib.contextmanager
def _in_training(optimizers: Sequence[Any]) -> Iterator[None]:
    """Switches optimizers that average weights between training and evaluation."""
    for mode in ("train", "eval"):
        for optimizer in optimizers:
            getattr(optimizer, mode, lambda: None)()
        if mode == "train":
            yield


def _step(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    x, y = (torch.randn(16, size, generator=generator) for size in (24, 5))
    dtype = next(model.parameters()).dtype
    x, y = x.to(dtype), y.to(dtype)

    def closure() -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    if isinstance(optimizers[0], torch.optim.LBFGS):
        optimizers[0].step(closure)
        return
    closure()
    for optimizer in optimizers:
        optimizer.step()


def _step_mode(optimizer: torch.optim.Optimizer) -> str:
    from flatshard.optimizer.adapter import adapter_of, is_elementwise

    if is_elementwise(optimizer):
        return "shards"
    mode: Any = adapter_of(optimizer).mode  # type: ignore[attr-defined]
    return {"ON_SHARDS": "sharded tensors", "ON_EVERY_RANK": "every rank"}.get(mode.name, "owners")


def judge(said: Sequence[Said]) -> Cell:
    """Verdict over all ranks, and how flatshard ran the step, or the error."""
    if failed := failure(said):
        return failed
    largest = max(one.what[0] for one in said)
    verdict = "right, to the bit" if largest == EXACT else "right" if largest <= RIGHT else "wrong"
    return Cell(verdict, said[0].what[1] if verdict != "wrong" else f"differs by {largest:.1e}")


def table(
    names: Sequence[tuple[str, str]], implementations: Sequence[str], world: int, seconds: float
) -> Cells:
    cells: Cells = {}
    with Ranks(world, preload=("tests.idioms", "torch.distributed.fsdp")) as ranks:
        for package, name in names:
            row = cells[package, name] = {}
            for one in implementations:
                way = IMPLEMENTATIONS[one]
                row[one] = judge(ranks.run(train, world, package, name, way, seconds=seconds))
                print(f"{package} {name}, {one}: {' '.join(row[one])}", file=sys.stderr)
    return cells


def markdown(cells: Cells, about: str) -> str:
    """The table with its title line and the reasons of its cells.

    Below the rows is a list of the optimizers that are exact in all columns.
    """
    implementations = list(next(iter(cells.values())))
    header = ["optimizer", "package", "flatshard steps it on", *map(TITLES.get, implementations)]
    lines = ["| " + " | ".join(map(str, header)) + " |", "|---" * len(header) + "|"]
    notes = Notes("optimizers", longest=90)
    exact: dict[str, list[str]] = {}
    for (package, name), row in cells.items():
        verdict, mode = row.get("flatshard", Cell(""))
        shown = [f"`{name}`", package, mode if verdict.startswith("right") else ""]
        for cell in row.values():
            is_right = cell.verdict.startswith("right")
            text = cell.verdict if is_right else notes.of(cell)
            shown.append("exact" if text == "right, to the bit" else text)
        if mode and set(shown[3:]) == {"exact"}:
            exact.setdefault(mode, []).append(f"`{name}` ({package})")
        else:
            lines.append("| " + " | ".join(shown) + " |")
    lines += [""] if exact else []
    for mode, some in exact.items():
        lines.append(f"Exact in all columns, stepped on {mode}: {', '.join(some)}.")
    return "\n".join([about, "", *folded(f"{len(cells)} optimizers", lines), *notes.lines()])


def by_strategy(names: Sequence[tuple[str, str]], seconds: float) -> str:
    """Table of the number of optimizers that are right, by strategy and number of ranks."""
    rows: dict[str, list[str]] = {strategy: [] for strategy in STRATEGIES}
    others: dict[str, list[str]] = {}
    for world in WORLDS:
        with Ranks(world, preload=("tests.idioms",)) as ranks:
            for strategy in STRATEGIES:
                verdicts = []
                for package, name in names:
                    way, dtype = f"flatshard {strategy}", torch.float64 if world == 3 else None
                    arguments = (package, name, way, dtype or torch.float32)
                    verdict, why = judge(ranks.run(train, world, *arguments, seconds=seconds))
                    verdicts.append(verdict)
                    if not verdict.startswith("right"):
                        what = f"`{name}` ({package}) on {world} ranks: {why}"
                        others.setdefault(what, []).append(strategy)
                right = sum(verdict.startswith("right") for verdict in verdicts)
                rows[strategy].append(f"{right} ({verdicts.count('right, to the bit')})")
                print(f"{world} {strategy}: {rows[strategy][-1]} of {len(names)}", file=sys.stderr)
    about = (
        f"How many of {len(names)} optimizers are right, and in brackets how many of them to the "
        "bit, as in the table above; on 3 ranks in float64, as a mean of three is rounded."
    )
    lines = ["| strategy | " + " | ".join(f"{n} ranks" for n in WORLDS) + " |"]
    lines[0] = lines[0].replace("1 ranks", "1 rank")
    lines.append("|---" * (len(WORLDS) + 1) + "|")
    lines += [f"| {strategy} | {' | '.join(cells)} |" for strategy, cells in rows.items()]
    text = [about, "", *lines, ""]
    notes = [f"- {what}, with {', '.join(some)}" for what, some in others.items()]
    return "\n".join([*text, *(["The others:", "", *notes] if notes else [])])


def main() -> None:
    parser = Parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="optimizers to try (default: all)"
    )
    parser.add_argument(
        "--impl",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=[*IMPLEMENTATIONS],
        help="implementations to try (default: all)",
    )
    parser.add_argument(
        "--world-size", type=at_least(1), default=2, help="number of ranks (default: 2)"
    )
    parser.add_timeout(60.0, "each training")
    parser.add_argument(
        "--strategies", action="store_true", help="table of flatshard's strategies on 1 to 4 ranks"
    )
    parser.add_argument(
        "--page", type=page_file, help="write the table into this page instead of printing it"
    )
    args = parser.parse_args()
    names = [key for key in OPTIMIZERS if not args.only or key[1] in args.only]
    if not names:
        parser.error(f"--only: expected some of {sorted({name for _, name in OPTIMIZERS})}")
    if args.strategies:
        text, title = by_strategy(names, args.timeout), "optimizers by strategy"
    else:
        about = (
            f"Five steps of a small model on {args.world_size} gloo ranks with equal rows, torch "
            f"{torch.__version__.partition('+')[0]}; *right*: no value differs from the unwrapped "
            f"model's by more than {RIGHT:g}; *exact*: none differs."
        )
        cells = table(names, args.impl, args.world_size, args.timeout)
        text, title = markdown(cells, about), "optimizers"
    write_table(args.page, title, text)


if __name__ == "__main__":
    main()
