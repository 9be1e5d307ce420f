"""What would be lost in silence, or trained apart on each rank, is an error that says so."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import allow_warnings, naming, on_ranks
from tests.models import CASES
from tests.oracle import step_and_zero

pytestmark = pytest.mark.by_turns


class _Renormed(nn.Linear):
    """Edits its weight in every forward."""

    kind = "no_grad"
    first = 1  # how many forwards "later" edits nothing

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "no_grad":
            with torch.no_grad():
                self.weight[0].zero_()
        elif self.kind == "data":
            self.weight.data = self.weight.data * 0.5 + 0.1
        elif self.kind == "into data":
            self.weight.data.mul_(0.5).add_(0.1)
        elif self.kind == "kept":  # a reference to the sharded parameter
            with torch.no_grad():
                self.kept[0].mul_(0.5)
        elif self.kind == "later":  # as a momentum encoder, which starts as a copy
            self.calls = getattr(self, "calls", 0) + 1
            self.weight.data.mul_(0.5 if self.calls > self.first else 1.0)
        else:
            self.weight = nn.Parameter(self.weight.detach().clamp(-0.1, 0.1))
        return super().forward(x)


def _renormed(kind: str, frozen: bool = False) -> Callable[[dict[str, Any]], None]:
    def run(keywords: dict[str, Any]) -> None:
        module = nn.Sequential(_layer(), _Renormed(4, 6), nn.Tanh(), nn.Linear(6, 6))
        module[1].kind = kind
        module[1].requires_grad_(not frozen)
        model = ShardedWrapper(module, **keywords)
        module[1].kept = [module[1].weight]
        for _ in range(2):
            model(torch.randn(2, 4))

    return run


def _embedding(keywords: dict[str, Any]) -> None:
    ShardedWrapper(nn.Embedding(5, 4, max_norm=0.1), **keywords)(torch.tensor([1]))


def _gradient_before(keywords: dict[str, Any]) -> None:
    module = nn.Linear(4, 6)
    module(torch.randn(2, 4)).sum().backward()
    ShardedWrapper(module, **keywords)


def _changed(num_steps: int, change: Callable[[Any], object]) -> Callable[[dict[str, Any]], None]:
    """After some steps, change a wrapped model of two layers, and call it again."""

    def run(keywords: dict[str, Any]) -> None:
        model = ShardedWrapper(nn.Sequential(nn.Sequential(_layer()), _layer()), **keywords)
        for _ in range(num_steps):
            model(torch.randn(2, 4)).sum().backward()
        change(model)
        model(torch.randn(2, 4))

    return run


_layer = partial(nn.Linear, 4, 4)


def _functional(keywords: dict[str, Any]) -> None:
    model = ShardedWrapper(nn.Linear(4, 6), **keywords)
    values = {name: value.detach() * 2 for name, value in model.named_parameters()}
    torch.func.functional_call(model, values, (torch.randn(2, 4),))


def _replaced(change: Callable[..., object]) -> Callable[[dict[str, Any]], None]:
    """Let a function of torch replace a parameter of a wrapped layer, and call the layer."""

    def run(keywords: dict[str, Any]) -> None:
        model = ShardedWrapper(_layer(), **keywords)
        with allow_warnings():
            change(model)
        model(torch.randn(2, 4))

    return run


def _trained_later(keywords: dict[str, Any]) -> None:
    """A frozen parameter may be added after wrapping, but its gradients are not averaged."""
    model = ShardedWrapper(nn.Linear(4, 4), **keywords)
    model.extra = nn.Parameter(torch.zeros(4), requires_grad=False)
    for is_trained in (False, True):
        model.extra.requires_grad_(is_trained)
        (model(torch.randn(2, 4)) + model.extra).sum().backward()


def _frozen(keywords: dict[str, Any]) -> None:
    model = ShardedWrapper(_layer(), **keywords)
    model.module.register_forward_pre_hook(lambda layer, _: layer.requires_grad_(False) and None)
    model(torch.randn(2, 4))


# Each rank compares its range of the unit's parameters. If the edit is in another rank's range, the
# error names the unit's first parameters.
_ONE, _ANY = ".'1.weight'.", "('1.weight'|one of '0.weight', '0.bias', '1.weight', or others)."

MISTAKES: dict[str, Callable[[dict[str, Any]], None]] = {
    f"its forward edited parameters in place .{_ANY}": _renormed("no_grad"),
    f"its forward edited parameters in place {_ONE}": _renormed("data", True),
    f"forward edited parameters in place {_ONE}": _renormed("data"),
    f"edited parameters in place {_ONE}": _renormed("into data", True),
    f"forward edited parameters in place .{_ANY}": _renormed("into data"),
    f"edited parameters in place .{_ANY}": _renormed("kept"),
    "its forward edited parameters in place .'1.weight'": _renormed("kept", True),
    "edited parameters in place .*momentum encoder": _renormed("later", True),
    "parameter '1.weight' .the root unit. was replaced in forward": _renormed("assigned"),
    "edited parameters in place .*max_norm": _embedding,
    "parameter 'weight' .the root unit., rank .: requires_grad was set to False": _frozen,
    "parameter 'weight' has a gradient, which would be lost": _gradient_before,
    "'2.weight' was added after wrapping": _changed(0, lambda model: model.module.append(_layer())),
    "'0.1.weight' was added after wrapping": _changed(1, lambda model: model[0].append(_layer())),
    "'1.weight' was added after": _changed(1, lambda model: setattr(model.module, "1", _layer())),
    "parameter 'extra' was added after": _trained_later,
    "'head.weight' was added after": _changed(0, lambda model: setattr(model, "head", _layer())),
    "parameter '0.weight' was added": _changed(0, lambda model: setattr(model, "0", _layer())),
    "parameter 'weight' .the root unit. was replaced or removed after wrapping": _functional,
    "weight' .* was replaced": _replaced(lambda m: prune.l1_unstructured(m, "weight", 1)),
    "'weight' .* was replaced or removed after": _replaced(nn.utils.weight_norm),
    "'weight' .the root unit. was replaced": _replaced(nn.utils.spectral_norm),
}


@on_ranks(2, group_timeout=5)
def test_named_on_all_ranks(rank: int, world_size: int) -> None:
    kinds = RuntimeError, ValueError
    for message, run in MISTAKES.items():
        for keywords in ({}, {"collectives": "sockets", "sharding_strategy": "SHARD_GRAD_OP"}):
            with naming(message), pytest.raises(kinds, match=message):
                run(keywords)


def _layers(kind: type[_Renormed], name: str, first: int) -> nn.Sequential:
    """The second of three layers edits its weight as ``kind`` and ``name`` say."""
    module = nn.Sequential(nn.Linear(4, 4), kind(4, 6), nn.Tanh(), nn.Linear(6, 6))
    module[1].kind, module[1].first = name, first
    return module


def _wrapped(module: nn.Sequential, **keywords: Any) -> ShardedWrapper:
    policy = ModuleWrapPolicy({type(module[1])})
    return ShardedWrapper(module, auto_wrap_policy=policy, coalesce_bytes=0, **keywords)


@on_ranks(2)
def test_looked_for_in_every_forward(rank: int, world_size: int) -> None:
    """Each forward is checked for edits, also of a module that runs late or seldom."""
    for frozen, was_written, first in (
        (True, True, 3),
        (True, False, 4),
        (False, False, 1),
        (False, False, 4),
    ):
        module = _layers(_Renormed, "later", first)
        module[1].requires_grad_(not frozen)
        model = _wrapped(module)
        found = {}
        for step in range(1, 10):
            if was_written and step == 3:  # a momentum encoder, written between steps
                with torch.no_grad():
                    model[1].weight.mul_(0.9)
            try:
                model(torch.randn(2, 4))
            except RuntimeError as error:
                found[step] = str(error)
        # In forwards 3 to 9, a trainable parameter is looked at only in the 8th.
        late = not frozen and first > 1
        assert found.keys() == set(range(8 if late else first + 1, 10))
        assert all("momentum encoder (MoCo, BYOL) between steps" in m for m in found.values())


@on_ranks(2, group_timeout=5)
def test_a_copy_on_one_rank_alone(rank: int, world_size: int) -> None:
    """A copy that only one rank makes does not change how later models are told apart."""
    case = CASES["mlp"]
    for _ in range(2):
        model = case.wrap(sharding_strategy="NO_SHARD")
        model(case.batch(rank, 2)[0]).sum().backward()
        if rank == 0:
            copy.deepcopy(model)


class _Adapted(_Renormed):
    """Adds to its weight by a parametrization inside of forward, as LoRA on raw weights does."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls <= self.first:
            return nn.functional.linear(x, self.weight, self.bias)
        parametrize.register_parametrization(self, "weight", _Scaled())
        try:
            return nn.functional.linear(x, self.weight, self.bias)
        finally:
            left = self.kind == "left"
            parametrize.remove_parametrizations(self, "weight", leave_parametrized=left)
            if self.kind == "edits" and self.calls == 5:
                with torch.no_grad():
                    self.weight[0] += 1


class _Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight if _Adapted.kind == "right" else weight / 2


_Adapted.kind = "right"


class _Undone(_Renormed):
    """Edits its weight, computes, and undoes the edit: backward would use other values."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        factor = 2.0 if self.calls > self.first else 1.0
        with torch.no_grad():
            self.weight.mul_(factor)
        output = super(_Renormed, self).forward(x)
        with torch.no_grad():
            self.weight.mul_(1 / factor)
        return output


@on_ranks(2)
def test_same_values_written_in_forward(rank: int, world_size: int) -> None:
    """Only other values are an edit, whenever the writes begin; all ranks raise together."""
    for kind, layer, first, at in (
        ("right", _Adapted, 0, None),
        ("right", _Adapted, 3, None),
        ("edits", _Adapted, 3, 5),
        ("edits", _Adapted, 4, 5),
        ("edits", _Adapted, 4 + 9 * rank, 5),  # only on rank 0
        ("undone", _Undone, 0, 1),
        # Autograd raises, as for the unwrapped model: the forward writes to a saved weight.
        ("undone", _Undone, 3, 2),
    ):
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            states = []
            for way in ("plain", "sharded"):
                torch.manual_seed(0)
                model: nn.Module = _layers(layer, kind, first)
                if way == "sharded":
                    model = _wrapped(model, sharding_strategy=strategy)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                torch.manual_seed(1)  # all ranks compute the same, so the plain model is the oracle
                raised = None
                for step in range(1, 8):
                    try:
                        model(torch.randn(3, 4)).square().sum().backward()
                    except RuntimeError as error:
                        raised = step, "edited parameters in place" in str(error)
                        break
                    step_and_zero(optimizer)
                if way == "sharded":
                    is_named = kind != "undone" or first == 0
                    assert raised == (at and (at, is_named)), (kind, first, strategy, raised)
                states.append(model.state_dict())
            if at is None:
                torch.testing.assert_close(states[1], states[0])
