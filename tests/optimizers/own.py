"""A model, how it is trained, and optimizers with state of unusual forms."""

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from flatshard import declare_elementwise
from tests.oracle import snapshot, step_with

STEPS = 3


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


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> dict[str, Tensor]:
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 6, generator=generator, dtype=torch.float64)
        torch.manual_seed(step)
        step_with([optimizer], lambda x=x: model(x).square().mean())
    return snapshot(model)


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
            zeros = torch.zeros_like(param[0] if dim else param[:, 0])
            rows = state.setdefault(f"mean{dim}", zeros)
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


_KINDS = (OneElement, Elementwise, Rows, Nested, NestedOnShards, OwnEntries)
KINDS: dict[str, type[torch.optim.Optimizer]] = {one.__name__: one for one in _KINDS}
ONLY_FULL = {"Nested", "NestedOnShards", "OwnEntries"}
"""DCP's own functions do not restore them without a wrapper either."""
