"""A proxy stands for its module: what is assigned to it reaches the module's forward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatshard.units.module_proxy import ModuleProxy


class _Recurrent(nn.Module):
    scale = 2.0  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None
        self.register_buffer("mean", torch.zeros(2))
        self._limit = 1.0

    @property
    def limit(self) -> float:
        return self._limit

    @limit.setter
    def limit(self, value: float) -> None:
        self._limit = value

    def forward(self, x: Tensor) -> Tensor:
        self.state = x if self.state is None else self.state + x
        late = getattr(self, "late", 0.0)
        dropped = 0.0 if self.training else 100.0
        return (self.state * self.scale + self.mean).clamp(max=self.limit) + late + dropped


def _proxy() -> Any:
    proxy = ModuleProxy()
    proxy.module = _Recurrent()
    return proxy


def test_assignments_reach_the_module() -> None:
    plain, proxy = _Recurrent(), _proxy()
    x = torch.tensor([0.1, 0.2])
    for one in (plain, proxy):
        one(x)
        one.state = None
        one.scale = 3.0
        one.mean = torch.full((2,), 0.05)
        one.limit = 0.5
        one.late = 7.0
        one.training = False
    assert torch.equal(proxy(x), plain(x))
    assert set(proxy.module.__dict__) == set(plain.__dict__)
    assert not hasattr(proxy.module, "module")
    for one in (plain, proxy):
        one.late += 1
        one.train()
        del one.scale  # that of the class is back
    assert torch.equal(proxy(x), plain(x))
    del proxy.late
    assert not hasattr(proxy.module, "late")
    with pytest.raises(AttributeError):
        del proxy.late


def test_its_own_stays_its_own() -> None:
    proxy = _proxy()
    proxy.forward = proxy.forward
    proxy.register_buffer("count", torch.zeros(1))
    proxy.count = torch.ones(1)
    assert "forward" not in vars(proxy.module)
    assert not hasattr(proxy.module, "count")
    assert proxy.count == 1
    del proxy.forward, proxy.count
    for value in (nn.Linear(2, 2), nn.Parameter(torch.zeros(2))):
        with pytest.raises(RuntimeError, match="assigned to 'mean' of a sharded"):
            proxy.mean = value


def test_a_tensor_in_the_place_of_a_parameter_raises() -> None:
    proxy: Any = ModuleProxy()
    proxy.module = nn.Linear(2, 2)
    values = {"0.weight": torch.ones(2, 2)}
    with pytest.raises(RuntimeError, match=r"'weight' of a unit \(Linear\).*functional_call"):
        torch.func.functional_call(nn.Sequential(proxy), values, torch.ones(2))
