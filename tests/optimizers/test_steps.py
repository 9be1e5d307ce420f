"""Optimizers of several packages step a sharded model as they step the unwrapped model.

Each takes five steps. All ranks have the same rows, so the averaged gradients equal the unwrapped
model's bit for bit, and every difference comes from the optimizer. By default a sample runs, with
one optimizer for each way to step. `scripts/evidence.py optimizers` runs all, also with other
wrappers, and `optimizers_by_strategy` with all strategies on 1 to 4 ranks.
"""

import contextlib
import csv
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatshard.optimizer.adapter import adapter_of, is_elementwise
from tests.combinations import THOROUGH
from tests.harness import ROOT, allow_warnings, run_ranks
from tests.idioms.side import Side
from tests.oracle import step_with
from tests.outcomes import Cell

STEPS = 5
EXACT, RIGHT = 0.0, 1e-6
Make = Callable[[Sequence[nn.Parameter]], list[torch.optim.Optimizer]]


def _of(module: str, name: str, **options: Any) -> Make:
    """Makes one optimizer for all parameters."""

    def make(params: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
        kind = getattr(importlib.import_module(module), name)
        return [kind(params, **{"lr": 0.01, **options})]

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
            **{name: {} for name in ("AdEMAMix", "Conda", "Amos")},
            "Alice": {"leading_basis": 256},  # otherwise it draws random numbers
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
    rank: int, world_size: int, package: str, name: str, side: str, in_float64: bool = False
) -> tuple[float, str]:
    """The largest difference from the unwrapped model, and how flatshard ran the step."""
    dtype = torch.float64 if in_float64 else torch.float32
    states, where = list[dict[str, Tensor]](), Side(side)
    for is_wrapped in (False, True):
        torch.manual_seed(7)
        model: Any = Model().to(dtype)
        if is_wrapped:
            model = where.wrap(model, nn.Linear, nn.Conv1d)
        with allow_warnings():
            optimizers = OPTIMIZERS[package, name](list(model.parameters()))
            with _in_training(optimizers):
                for number in range(STEPS):
                    _step(model, optimizers, number)
            states.append(where.state(model) if is_wrapped else model.state_dict())
    plain, wrapped = states
    largest = max(float((wrapped[key] - value).abs().max()) for key, value in plain.items())
    return largest, _step_mode(optimizers[0]) if side.startswith("flatshard") else ""


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
    step_with(optimizers, lambda: (model(x.to(dtype)) - y.to(dtype)).square().mean())


def _step_mode(optimizer: torch.optim.Optimizer) -> str:
    if is_elementwise(optimizer):
        return "shards"
    # On one rank, a shard is the whole parameter, so any optimizer steps shards.
    mode: Any = getattr(adapter_of(optimizer), "mode", None)
    if mode is None:
        return "shards"
    return {"ON_SHARDS": "sharded tensors", "ON_EVERY_RANK": "every rank"}.get(mode.name, "owners")


def judge(found: Sequence[tuple[float, str]]) -> Cell:
    """Verdict over all ranks, and how flatshard ran the step."""
    largest = max(difference for difference, _ in found)
    if not largest <= RIGHT:
        return Cell("wrong", f"differs by {largest:.1e}")
    return Cell("right, to the bit" if largest == EXACT else "right", found[0][1])


SAMPLE = {
    ("torch", "Muon"): "owners",
    ("torch", "LBFGS"): "every rank",
    ("torch", "RAdam"): "shards",
    ("transformers", "Adafactor"): "owners",
    ("pytorch-optimizer", "SOAP"): "owners",
    ("pytorch-optimizer", "Lamb"): "sharded tensors",
    ("schedulefree", "AdamWScheduleFree"): "sharded tensors",
}


@pytest.mark.parametrize(("package", "name"), OPTIMIZERS if THOROUGH else SAMPLE)
def test_optimizer(package: str, name: str) -> None:
    if package == "transformers" and not THOROUGH:
        pytest.skip("its import takes seconds, and tests of the integration have Adafactor")
    if (package, name) not in OPTIMIZERS:
        pytest.skip(f"{package} is not installed")
    # Muon rounds gradients to bfloat16, where an error of float32 can become one of 1e-3.
    in_float64 = name == "Muon"
    verdict, how = judge(run_ranks(train, 2, package, name, "flatshard FULL_SHARD", in_float64))
    assert verdict.startswith("right"), how
    assert how == SAMPLE.get((package, name), how)


def test_the_file_has_all() -> None:
    """Every optimizer that can be tried, and none that flatshard steps wrongly."""
    with (ROOT / "docs" / "evidence" / "optimizers.csv").open(newline="") as file:
        found = [one for one in csv.DictReader(file) if one["implementation"] == "flatshard"]
    rows = {("torch", "Muon"), *((p, n) for p, (_, kinds) in PACKAGES.items() for n in kinds)}
    assert rows <= {(one["package"], one["optimizer"]) for one in found}
    assert all(one["verdict"].startswith("right") and one["stepped on"] for one in found)
