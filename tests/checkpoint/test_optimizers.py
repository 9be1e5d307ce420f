"""Optimizers as other people write them: a checkpoint restores all of their state, or is refused.

Each is trained, saved, loaded into a fresh model and optimizer and trained on, beside a run without
a break.
"""

import enum
import tarfile
from collections import deque
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from flatshard import ShardedWrapper, checkpoint, declare_elementwise
from flatshard.checkpoint import full_optim_state_dict, full_state_dict, saving
from flatshard.optimizer import state_dicts
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import allow_warnings, naming, on_ranks, run_ranks
from tests.oracle import assert_same, snapshot

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Net(nn.Module):
    """A square matrix, a head with as many rows as there are ranks, and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.square = nn.Linear(5, 4), nn.Linear(4, 4)
        self.head, self.scale = nn.Linear(4, 2, bias=False), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(torch.tanh(self.square(torch.tanh(self.body(x)))))


def built(make: Make, seed: int) -> tuple[ShardedWrapper, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = ShardedWrapper(Net().double())
    return model, make(list(model.parameters()))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int
) -> dict[str, Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class Own(torch.optim.Optimizer):
    """Base of optimizers whose ``update`` steps one parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param])


class OneElement(Own):
    """A count of one element, which the 0-d parameter has, too."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        if not state:
            state.update(count=torch.zeros(1), momentum=torch.zeros_like(param))
        state["count"] += 1
        state["momentum"].mul_(0.9).add_(grad)
        param.sub_(0.05 * state["momentum"] / state["count"].item())


class Elementwise(OneElement):
    """The same, declared element-wise."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


declare_elementwise(Elementwise)


class Rows(Own):
    """Means of rows and columns. Some are as long as a rank's part of the parameter."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        if param.dim() < 2:
            param.sub_(0.05 * grad)
            return
        for dim in range(2):
            rows = state.setdefault(
                f"mean{dim}", torch.zeros_like(param[0] if dim else param[:, 0])
            )
            rows.mul_(0.9).add_(grad.square().mean(1 - dim))
        scale = state["mean0"].unsqueeze(1) * state["mean1"] / state["mean0"].mean()
        param.sub_(0.05 * grad / (scale.sqrt() + 1e-3))


class Nested(Own):
    """State of the parameter's shape in a list, a tuple, a dict and a deque; steps full tensors."""

    whole = True

    def update(self, param: Tensor, grad: Tensor, state: dict[Any, Any]) -> None:
        if not state:
            state["list"] = [torch.zeros_like(param), 3, {"a.b": torch.zeros_like(param)}]
            state["tuple"] = (torch.zeros_like(param), 1.5, None, ())
            state["deque"] = deque([torch.zeros_like(param)])
            state["dict"] = {0.5: torch.zeros_like(param), 2: {}, "a": (1, 2), (1, "b"): [[]]}
        if self.whole:
            grad = grad / (1 + grad.reshape(len(grad) if grad.dim() else 1, -1).norm(dim=1).mean())
        momenta = [state["list"][0], state["list"][2]["a.b"], state["tuple"][0]]
        for momentum in (*momenta, state["dict"][0.5], state["deque"][-1]):
            momentum.mul_(0.9).add_(grad)
            param.sub_(0.01 * momentum)
        state["deque"].append(state["deque"].popleft())


class NestedOnShards(Nested):
    """The same, but steps sharded tensors."""

    whole = False


class OwnEntries(torch.optim.SGD):
    """Adds entries to its state dict, and keeps state of the whole optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.steps, self.loads = 0, torch.zeros(3)

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        self.loads += self.steps
        count = self.state.setdefault("count", torch.zeros(1, dtype=torch.int64))
        count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / (self.steps + int(count) + float(self.loads[0]))
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps, "loads": {"all": (self.loads, 1)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.steps, self.loads = state.pop("steps"), state.pop("loads")["all"][0].clone()
        super().load_state_dict(state)


RESUMED: dict[str, Make] = {
    one.__name__: one for one in (OneElement, Elementwise, Rows, Nested, NestedOnShards, OwnEntries)
}
ONLY_FULL = {"Nested", "NestedOnShards", "OwnEntries"}
"""DCP's own functions do not restore them without a wrapper either."""
WAYS = ("checkpoint", "full", "dcp")


def test_state_of_any_shape(tmp_path: Path) -> None:
    """The number of elements says nothing: only what the optimizer made of the state."""
    run_ranks(_save, 2, tmp_path)
    for loading in (1, 2, 3):
        run_ranks(_resume, loading, tmp_path)


def _save(rank: int, world_size: int, folder: Path) -> None:
    for name in RESUMED:
        model, optimizer = built(RESUMED[name], 0)
        train(model, optimizer, range(3), 0)
        checkpoint.save(folder / name, model, optimizer)
        full = full_state_dict(model), full_optim_state_dict(model, optimizer)
        with allow_warnings():
            if name not in ONLY_FULL:
                states = get_state_dict(model, optimizer)
                dcp.save(dict(enumerate(states)), checkpoint_id=folder / f"{name}-dcp")
        expected = train(model, optimizer, range(3, 6), 0)
        if rank == 0:
            torch.save((expected, *full), folder / f"{name}.pt")


def _resume(rank: int, world_size: int, folder: Path) -> None:
    for name, way in product(RESUMED, WAYS):
        if way == "dcp" and name in ONLY_FULL:
            continue
        expected, weights, state = torch.load(folder / f"{name}.pt", weights_only=False)
        model, optimizer = built(RESUMED[name], 5)
        if way == "checkpoint":
            checkpoint.load(folder / name, model, optimizer)
        elif way == "full":
            model.load_state_dict(weights)
            ShardedWrapper.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
        else:
            with allow_warnings():
                states = dict(enumerate(get_state_dict(model, optimizer)))
                dcp.load(states, checkpoint_id=folder / f"{name}-dcp")
            set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
        with naming((name, way)):
            found = train(model, optimizer, range(3, 6), 0)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_state_of_several_optimizers(rank: int, world_size: int, tmp_path: Path) -> None:
    """Each optimizer gets its containers and numbers back; state of no parameter is refused."""

    def several(seed: int, kind: Make = Rows) -> tuple[ShardedWrapper, list[Any]]:
        model, _ = built(Nested, seed)
        params = list(model.parameters())
        return model, [Nested(params[:3]), kind(params[3:])]

    def train_both(model: nn.Module, optimizers: list[Any], steps: range) -> dict[str, Tensor]:
        for step in steps:
            model(torch.full((2, 5), step + 1.0, dtype=torch.float64)).square().mean().backward()
            for one in optimizers:
                one.step()
                one.zero_grad()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    model, optimizers = several(0)
    train_both(model, optimizers, range(3))
    checkpoint.save(tmp_path / "both", model, optimizers)
    expected = train_both(model, optimizers, range(3, 6))
    model, optimizers = several(5)
    checkpoint.load(tmp_path / "both", model, optimizers)
    found = train_both(model, optimizers, range(3, 6))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

    model, optimizers = several(0, OwnEntries)
    train_both(model, optimizers, range(1))
    with pytest.raises(ValueError, match=r"optimizer '1' has state .* belongs to no parameter"):
        checkpoint.save(tmp_path / "refused", model, optimizers)


# ---------------------------------------------------------------- numbers of numpy


def _numpy(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=np.float64(0.05), betas=(np.float64(0.5), 0.9))


@on_ranks(2)
def test_numbers_of_numpy(rank: int, world_size: int, tmp_path: Path) -> None:
    """They load as numbers of Python, also from files that contain numbers of numpy."""
    extra = {"step": np.int64(3), "on": [np.bool_(True)], "half": np.float16(0.5)}
    expected = train(*built(_numpy, 0), range(6), rank)
    model, optimizer = built(_numpy, 0)
    train(model, optimizer, range(3), rank)
    checkpoint.save(tmp_path / "new", model, optimizer, extra=extra)
    with (  # as earlier releases saved them
        mock.patch.object(state_dicts, "python_number", lambda value: value),
        mock.patch.object(saving, "python_number", lambda value: value),
        mock.patch.object(saving, "_check_loads"),
    ):
        checkpoint.save(tmp_path / "old", model, optimizer, extra=extra)
    full = ShardedWrapper.optim_state_dict(model, optimizer)
    assert type(full["param_groups"][0]["lr"]) is float
    for name in ("new", "old"):
        model, optimizer = built(lambda params: torch.optim.AdamW(params, lr=1.0), 5)
        found = checkpoint.load(tmp_path / name, model, optimizer)
        assert repr(found) == repr({"step": 3, "on": [True], "half": 0.5})
        group = optimizer.param_groups[0]
        assert repr([group["lr"], group["betas"]]) == "[0.05, (0.5, 0.9)]"
        torch.testing.assert_close(
            train(model, optimizer, range(3, 6), rank), expected, rtol=0.0, atol=0.0
        )


class Kind(enum.IntEnum):
    ONE = 1


@on_ranks(2)
def test_options_that_cannot_be_loaded(rank: int, world_size: int, tmp_path: Path) -> None:
    """An object in a group is named while the checkpoint is saved, on all ranks."""
    model, optimizer = built(lambda params: torch.optim.AdamW(params), 0)
    train(model, optimizer, range(1), rank)
    for value in (Kind.ONE, torch.tanh, [object()], np.zeros(2)):
        optimizer.param_groups[0]["kind"] = value
        with pytest.raises(TypeError, match=r"the optimizer's param_groups\.0\.kind.* holds"):
            checkpoint.save(tmp_path / "a", model, optimizer)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- several optimizers


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def _optimizers(model: nn.Module, container: str) -> Any:
    params = list(model.parameters())
    muon = torch.optim.Muon([one for one in params if one.dim() == 2], lr=0.02)
    # Two groups: an optimizer's groups stay together.
    biases = [{"params": [one], "lr": 0.01 / n} for n, one in enumerate(params[1::2], 1)]
    adamw = torch.optim.AdamW(biases)
    if container in ("list", "tuple"):
        return [muon, adamw] if container == "list" else (muon, adamw)
    named = {"matrices": muon, "rest": adamw}
    return named if container == "dict" else dict(reversed(named.items()))


def _train(model: nn.Module, optimizers: Any, steps: range, rank: int, world_size: int) -> None:
    each = list(optimizers.values()) if isinstance(optimizers, dict) else optimizers
    for step in steps:
        inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step)).double()
        model(inputs.chunk(world_size)[rank]).square().mean().backward()
        for optimizer in each:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_full_state_and_errors(rank: int, world_size: int, tmp_path: Path) -> None:
    model = ShardedWrapper(_model())
    optimizers = _optimizers(model, "dict")
    with allow_warnings():
        _train(model, optimizers, range(2), rank, world_size)
    checkpoint.save(tmp_path / "both", model, optimizers)
    weights = model.state_dict()
    sent = [checkpoint.full_optim_state_dict(model, optimizers)]
    checkpoint.load(tmp_path / "both", model, optimizers)
    again = checkpoint.full_optim_state_dict(model, optimizers)  # without a step before
    for name in optimizers if rank == 0 else ():
        torch.testing.assert_close(again[name]["state"], sent[0][name]["state"], rtol=0, atol=0)
    dist.broadcast_object_list(sent)
    other = ShardedWrapper(_model(seed=1))
    other.load_state_dict(weights)
    others = _optimizers(other, "dict")
    for name, one in others.items():
        one.load_state_dict(ShardedWrapper.optim_state_dict_to_load(other, one, sent[0][name]))
    for one, its in ((model, optimizers), (other, others)):
        with allow_warnings():
            _train(one, its, range(2, 4), rank, world_size)
    assert_same(other, model)

    muon, adamw = optimizers.values()
    twice = torch.optim.SGD([next(model.parameters())], lr=0.1)
    with pytest.raises(ValueError, match=r"'0.weight' belongs to optimizers '0' and '1'"):
        checkpoint.save(tmp_path / "twice", model, [muon, twice])
    other_class = {"matrices": muon, "rest": torch.optim.Adam(adamw.param_groups)}
    for wrong in ([muon, adamw], muon, other_class, {"matrices": adamw, "rest": muon}):
        before = snapshot(model)
        with pytest.raises(ValueError, match=r"saved with other optimizers: expected 'matrices'"):
            checkpoint.load(tmp_path / "both", model, wrong)
        assert_same(before, model)
    assert checkpoint.load(tmp_path / "both", model) == {}  # without an optimizer
    checkpoint.save(tmp_path / "one", model, muon)
    with pytest.raises(ValueError, match=r"expected '0': Muon of 2 parameters; got '0': Muon of"):
        checkpoint.load(tmp_path / "one", model, [muon, adamw])
    swapped = [muon, adamw] if rank else [adamw, muon]
    with pytest.raises(ValueError, match=r"the list of optimizers is .*Muon.* on rank 1"):
        checkpoint.save(tmp_path / "swapped", model, swapped)


# ---------------------------------------------------------------- checkpoints of version 0.2.0


SAVED = Path(__file__).with_name("flat_parameters.tar.xz")


def test_checkpoints_of_flat_parameters(tmp_path: Path) -> None:
    with tarfile.open(SAVED) as archive:
        archive.extractall(tmp_path, filter="data")
    for world_size in (1, 3):
        run_ranks(_load, world_size, tmp_path)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def _load(rank: int, world_size: int, folder: Path) -> None:
    full = torch.load(folder / "full.pt", weights_only=True)
    ends = []
    for form in ("unwrapped", "full", "folder"):
        model = _net()
        if form != "unwrapped":
            model = ShardedWrapper(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
        if form == "folder":
            assert checkpoint.load(folder / "checkpoint", model, optimizer) == {"step": 2}
        else:
            model.load_state_dict(full["model"])
            state = ShardedWrapper.optim_state_dict_to_load(model, optimizer, full["optim"])
            optimizer.load_state_dict(state)
        with naming(form):
            torch.testing.assert_close(snapshot(model), full["model"], rtol=0.0, atol=0.0)
            saved = ShardedWrapper.optim_state_dict(model, optimizer)
            torch.testing.assert_close(saved["state"], full["optim"]["state"], rtol=0.0, atol=0.0)
            assert saved["param_groups"] == full["optim"]["param_groups"]
        model(torch.linspace(-1.0, 1.0, 12).view(4, 3)).square().mean().backward()
        optimizer.step()
        ends.append(snapshot(model))
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0.0, atol=1e-6)

    # The parts of one rank have no names: an error, also before flatshard knows the optimizer.
    for name in ("one_rank_optimizer.pt", "optimizer_of_rank_0.pt"):
        state = torch.load(folder / name, weights_only=True)
        fresh = torch.optim.AdamW(model.parameters())
        with naming(name):
            with pytest.raises(
                ValueError, match="of a sharded model contains only the parts of one rank"
            ):
                ShardedWrapper.optim_state_dict_to_load(model, optimizer, state)
            with pytest.raises(RuntimeError, match=r"only that rank's parts.*full_optim"):
                optimizer.load_state_dict(state)
            with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
                fresh.load_state_dict(state)
