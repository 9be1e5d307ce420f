"""Optimizers that compile a function of their own, as torchao's and timm's kron do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatshard import ShardedWrapper
from tests.harness import on_ranks


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
