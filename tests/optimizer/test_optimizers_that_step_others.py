"""Optimizers that step another optimizer step and save right; plain ones are left alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatshard import ShardedWrapper, checkpoint
from tests.harness import allow_warnings, naming, on_ranks
from tests.oracle import assert_same, snapshot

pytestmark = pytest.mark.by_turns


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class _Lookahead(torch.optim.Optimizer):
    """Never calls ``super().__init__()``, as in timm: the slow weights are state of the other."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.param_groups[0].setdefault("count", 0)

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        for group in self.base.param_groups:
            group["count"] += 1
            for param in group["params"] if group["count"] % 2 == 0 else ():
                state = self.base.state[param]
                slow = state.setdefault("slow", param.detach().clone())
                slow.add_(param - slow, alpha=0.5)
                param.copy_(slow)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


class _Nested(_Lookahead):
    """Has a state dict of a form of its own, as in pytorch_optimizer."""

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict()}


class _SAM(torch.optim.Optimizer):
    """Moves the parameters before it calls the closure. Its own state is not the other's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = _sgd(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["old"] = param.detach().clone()
                param.add_(param.grad * (group["rho"] / param.grad.norm()))
        self.zero_grad()
        torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                param.copy_(self.state[param]["old"])
        self.base.step()


class _ByRow(torch.optim.Optimizer):
    """Needs full parameters, and steps another optimizer, which has groups of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base = _sgd(params)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                norms = param.grad.reshape(param.shape[0], -1).norm(dim=1)
                param.grad.div_(norms.mean() + 1)
        self.base.step(closure)


KINDS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "lookahead": lambda params: _Lookahead(_sgd(params)),
    "two deep": lambda params: _Lookahead(_Lookahead(_sgd(params))),
    "sam": _SAM,
    "by row": _ByRow,
}


def _train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> dict[str, Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(3, 5, generator=generator, dtype=torch.double)

        def closure(inputs: Tensor = inputs) -> Tensor:
            loss: Tensor = model(inputs).square().mean()
            loss.backward()
            return loss

        closure()
        optimizer.step(*[closure] if isinstance(optimizer, _SAM) else [])
        optimizer.zero_grad()
    return snapshot(model)


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_steps_and_resumes(rank: int, world_size: int, kind: str, tmp_path: Path) -> None:
    make = KINDS[kind]
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        plain = DistributedDataParallel(_model())
        expected = _train(plain, make([*plain.parameters()]), rank, range(4))
        expected = {name.removeprefix("module."): value for name, value in expected.items()}
        with naming(strategy), allow_warnings():
            model = ShardedWrapper(_model(), sharding_strategy=strategy)
            optimizer = make([*model.parameters()])
            _train(model, optimizer, rank, range(2))
            if kind in ("sam", "by row"):
                with pytest.raises(ValueError, match=r"steps SGD, but .*lacks the state \['mom"):
                    checkpoint.save(tmp_path / strategy, model, optimizer)
            else:
                checkpoint.save(tmp_path / strategy, model, optimizer)
                model = ShardedWrapper(_model(seed=1), sharding_strategy=strategy)
                optimizer = make([*model.parameters()])
                checkpoint.load(tmp_path / strategy, model, optimizer)
            assert_same(_train(model, optimizer, rank, range(2, 4)), expected)
        with pytest.raises(ValueError, match=r"expected _Nested.state_dict\(\) with 'state' and"):
            checkpoint.save(tmp_path / "nested", model, _Nested(optimizer))
    # Afterwards, an unwrapped model still trains, and its optimizer is left alone.
    single, other = _model(), _model()
    _train(single, make([*single.parameters()]), 0, range(2))
    optimizer = _sgd(other.parameters())
    optimizer.step(lambda: other(torch.ones(1, 5, dtype=torch.double)).sum())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_state_dict_post_hooks


# ---------------------------------------------------------------- compiled steps


def _average(param: Tensor, grad: Tensor, mean: Tensor) -> None:
    param.add_(mean.lerp_(grad, 0.1), alpha=-0.1)


def _by_rows(param: Tensor, grad: Tensor, mean: Tensor) -> None:
    param.sub_(grad / grad.norm(dim=-1, keepdim=True))


class _Compiling(torch.optim.Optimizer):
    def __init__(self, params: Any, function: Any, backend: Any) -> None:
        super().__init__(params, {})
        self.function = function
        self.backend = backend

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state.setdefault("mean", torch.zeros_like(param))
            compiled = torch.compile(self.function, fullgraph=True, backend=self.backend)
            compiled(param.detach(), param.grad, state["mean"])


def _not_asked(*_: Any) -> Any:
    raise AssertionError("sharded parameters reached a compiler")


@on_ranks(2)
def test_compiled_steps(rank: int, world_size: int) -> None:
    """A compiler's error about its own inner workings, also where every operation is right."""
    inputs = torch.linspace(-1, 1, 12).reshape(4, 3)
    torch.manual_seed(0)
    plain = nn.Linear(3, 4)
    model = ShardedWrapper(nn.Linear(3, 4), sync_module_states=True)
    model.load_state_dict(plain.state_dict())
    optimizer = _Compiling(model.parameters(), _average, _not_asked)
    means = [torch.zeros_like(param) for param in plain.parameters()]
    for _ in range(2):
        for one in (plain, model):
            one.zero_grad()
            one(inputs).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            for param, mean in zip(plain.parameters(), means, strict=True):
                _average(param, param.grad, mean)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    # What needs full parameters gets them, compiled or not.
    _Compiling([model.weight], _by_rows, "eager").step()
    with torch.no_grad():
        _by_rows(plain.weight, plain.weight.grad, means[0])
    torch.testing.assert_close(model.state_dict()["weight"], plain.weight.detach())
    # What failed is over when the next forward begins: models are compiled again.
    model(inputs)
    with pytest.raises(Exception, match="reached a compiler"):
        torch.compile(_average, backend=_not_asked)(*(torch.ones(1) for _ in range(3)))
