"""A proxy stands for its module: what is assigned to it reaches the module's forward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatshard.units.module_proxy import ModuleProxy, put_in_place


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
    put_in_place(proxy, _Recurrent())
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
    assert "forward" not in vars(proxy.module)
    del proxy.forward
    proxy.head = nn.Linear(2, 2)
    assert [*proxy._modules] == ["module"]
    assert "head" in proxy.module._modules


def test_what_is_registered_belongs_to_the_module() -> None:
    proxy = _proxy()
    proxy.register_buffer("late", torch.ones(2))
    proxy.register_buffer("hidden", torch.ones(2), persistent=False)
    proxy.register_parameter("weight", nn.Parameter(torch.zeros(2)))
    proxy.add_module("head", nn.Linear(2, 2))
    assert [*proxy.module.state_dict()] == ["weight", "mean", "late", "head.weight", "head.bias"]
    assert [name for name, _ in proxy.named_parameters()] == ["weight", "head.weight", "head.bias"]
    assert [name for name, _ in proxy.named_buffers()] == ["mean", "late", "hidden"]
    proxy.late = torch.full((2,), 7.0)
    assert torch.equal(proxy(torch.zeros(2)), torch.full((2,), 7.0))


def test_each_module_is_listed_once() -> None:
    """Also if a wrapper is directly inside a wrapper, or two parents share a wrapper."""
    inner = put_in_place(ModuleProxy(), nn.Linear(2, 2))
    outer = put_in_place(ModuleProxy(), inner)
    model = nn.ModuleDict({"a": outer, "b": outer, "c": nn.Sequential(nn.ReLU())})
    expected = ["", "a", "c", "c.0"]
    assert [name for name, _ in model.named_modules()] == expected
    assert all(type(module) is not ModuleProxy for module in model.modules())
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    assert names == ["", "a", "b", "c", "c.0"]
    assert [*outer.modules()] == [inner.module]
    with pytest.raises(ValueError, match=r"module = ReLU.* would not be averaged"):
        outer.module = nn.ReLU()
