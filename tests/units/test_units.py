"""Units chosen by "auto", by torch's policies and by hand train alike; what is said about them."""

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as torch_wrap
from torch import Tensor, nn
from torch.distributed import fsdp

from flatshard import ShardedWrapper, sharded_modules
from flatshard.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap, wrap
from tests.harness import on_ranks
from tests.models import CASES, Case, Mlp, Residual, vectors
from tests.oracle import assert_trains_alike

pytestmark = pytest.mark.by_turns

LINEARS = ModuleWrapPolicy({nn.Linear})


class Wide(nn.Module):
    """Just large enough for several units."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 256)
        self.layers = nn.ModuleList([Residual(256, 768), Residual(256, 768)])
        self.layers[1].up.requires_grad_(False)
        self.head = nn.Linear(256, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def table(model: ShardedWrapper) -> dict[str, list[str]]:
    """The cells of a report, by the unit's name."""
    lines = [line.split("  ") for line in model.unit_report().splitlines()]
    lines = [line for line in lines if len(line) > 1]  # without the reasons of transports
    cells = [[cell.strip() for cell in line if cell] for line in lines]
    return {line[0]: line[1:] for line in cells}


# ---------------------------------------------------------------- the report


@on_ranks(2)
def test_report(rank: int, world_size: int) -> None:
    precision = fsdp.MixedPrecision(param_dtype=torch.bfloat16)
    keywords = {"mixed_precision": precision, "collectives": "sockets"}
    model = ShardedWrapper(Wide(), auto_wrap_policy="auto", **keywords)
    reason = "policy 'auto': one of 2 repeated Residual"
    layer = 2 * 256 * 768 + 256 + 768
    # 2 bytes each: the gathered parameters are bfloat16
    size = f"{2 * layer / 1024:.1f} KiB"
    frozen = 256 * 768 + 768
    kinds = f"float32 frozen {frozen:,} + float32 {layer - frozen:,}"
    rest = 7 * 256 + 256 + 256 * 3 + 3
    ways = ["FULL_SHARD", "2", "sockets"]
    padding, all_of_it = f"5 ({5 / rest:.1%})", f"{2 * (rest + 5) / 1024:.1f} KiB"
    assert table(model) == {
        "unit": [
            *("class", "elements", "padding", "flat parameters", "unsharded"),
            *("strategy", "ranks", "transport", "why"),
        ],
        "(root)": [
            *("Wide", f"{rest:,}", padding, "float32", all_of_it, *ways, "root: what is left")
        ],
        "layers.0": ["Residual", f"{layer:,}", "0 (0.0%)", "float32", size, *ways, reason],
        "layers.1": ["Residual", f"{layer:,}", "0 (0.0%)", kinds, size, *ways, reason],
        "total": ["3 units", f"{2 * layer + rest:,}", "5 (0.0%)", "1.5 MiB"],
    }
    assert "repeated" not in repr(model)  # `print(model)` stays as short as the model


# ---------------------------------------------------------------- the judgement


def _large() -> nn.Module:
    return nn.Sequential(*(Residual(1600, 800) for _ in range(4)))


@pytest.mark.uncoalesced  # names units one by one
@on_ranks(2)
def test_a_large_model_in_one_unit_is_warned_of(rank: int, world_size: int) -> None:
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        with warnings.catch_warnings(record=True, action="always") as caught:
            ShardedWrapper(_large(), sharding_strategy=strategy)
        messages = [str(one.message) for one in caught]
        if rank == 0 and strategy == "FULL_SHARD":
            assert len(messages) == 1, messages
            assert "are one unit" in messages[0]
            assert 'auto_wrap_policy="auto"' in messages[0]
            assert caught[0].filename == __file__
        else:
            assert not messages  # nothing is gathered, or it is said by another rank
    # The remedy is one.
    ShardedWrapper(_large(), auto_wrap_policy="auto")


# ---------------------------------------------------------------- by hand


class HandMade(Mlp):
    """Says itself what is a unit."""

    def __init__(self, wrapped: Any = wrap) -> None:
        super().__init__()
        self.fc1 = wrapped(self.fc1.double())
        self.fc2 = wrapped(self.fc2.double(), sharding_strategy="NO_SHARD")
        self.fc3.double()


HAND_MADE = Case("hand-made", HandMade, vectors)


@pytest.mark.parametrize("source", ["ours", "torch"])
@on_ranks(2)
def test_enable_wrap(rank: int, world_size: int, source: str) -> None:
    own = source == "ours"
    build = HandMade if own else functools.partial(HandMade, torch_wrap.wrap)
    enable = enable_wrap if own else torch_wrap.enable_wrap
    torch.manual_seed(3)
    with enable(wrapper_cls=ShardedWrapper, sharding_strategy="SHARD_GRAD_OP"):
        inner = build()
    model = ShardedWrapper(inner)
    chosen = [(w._sharded_unit.name, w.sharding_strategy.name) for w in sharded_modules(model)]
    assert chosen == [("", "FULL_SHARD"), ("fc1", "SHARD_GRAD_OP"), ("fc2", "NO_SHARD")]
    assert not sharded_modules(HandMade())
    assert_trains_alike(HAND_MADE, rank, world_size, model)
    for converted in (model.float(), copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match=r"parameter 'fc1\.weight'"):
            converted.fc1.module.weight.share_memory_()


def test_enable_wrap_ends_and_nests() -> None:
    made = []

    def record(module: nn.Module, **keywords: Any) -> nn.Module:
        made.append(keywords)
        return module

    linear = nn.Linear(1, 1)

    def build() -> None:
        with enable_wrap(wrapper_cls=record, a=1, b=2):
            assert wrap(linear, b=3) is linear
            with enable_wrap(wrapper_cls=record, c=4):
                wrap(linear)
            wrap(linear)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build()
    assert made == [{"a": 1, "b": 3}, {"c": 4}, {"a": 1, "b": 2}]
    assert wrap(linear, a=5) is linear
    assert len(made) == 3


# ---------------------------------------------------------------- torch's own


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


@pytest.mark.parametrize("kind", [CustomPolicy, torch_wrap.CustomPolicy])
@on_ranks(2)
def test_keywords_of_units_in_torchs_words(rank: int, world_size: int, kind: Any) -> None:
    def choose(module: nn.Module) -> bool | dict[str, Any]:
        sizes = getattr(module, "in_features", 0), getattr(module, "out_features", 0)
        return {
            (7, 5): {"sharding_strategy": fsdp.ShardingStrategy.SHARD_GRAD_OP},
            (5, 4): {"mixed_precision": fsdp.MixedPrecision(param_dtype=torch.bfloat16)},
            (4, 3): True,
        }.get(sizes, False)

    case = CASES["mlp"]
    model = ShardedWrapper(case.model(), auto_wrap_policy=kind(choose))
    names = [wrapper.sharding_strategy.name for wrapper in sharded_modules(model)]
    assert names == ["FULL_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "FULL_SHARD"]
    # 8 bytes an element where nothing is cast, 2 where bfloat16 is gathered
    padded = {"fc1": (44, 8), "fc2": (24, 2), "fc3": (16, 8)}
    report = table(model)
    for name, (count, width) in padded.items():
        assert report[name][4] == f"{count * width} B"
    refused = kind(lambda module: {"coalesce_bytes": 0} if _is_linear(module) else False)
    with pytest.raises(ValueError, match="unit 'fc1' the policy sets coalesce_bytes"):
        ShardedWrapper(case.model(), auto_wrap_policy=refused)


class _Scaled(nn.Linear):
    """Calls its forward in its own way, and takes no attributes that it does not know."""

    def __init__(self) -> None:
        super().__init__(7, 7)
        self.__dict__["_call_impl"] = lambda x: 3 * nn.Linear.forward(self, x)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in {*vars(nn.Module()), "in_features", "out_features", "weight", "bias"}:
            raise AttributeError(name)
        super().__setattr__(name, value)


@on_ranks(2)
def test_the_modules_of_units_stay_what_they_are(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 7), _Scaled())
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(7, 7), _Scaled())
    model = ShardedWrapper(module, auto_wrap_policy=LINEARS, coalesce_bytes=0)
    assert [type(child) for child in model.children()] == [nn.Linear, _Scaled]
    x = torch.linspace(-1, 1, 14).reshape(2, 7)
    torch.testing.assert_close(model(x), plain(x))
    # A hook that is registered on a unit's wrapper runs when the model calls the unit.
    both = ShardedWrapper(Mlp(), auto_wrap_policy=LINEARS, coalesce_bytes=0)
    calls: list[str] = []
    for unit in sharded_modules(both)[1:]:
        unit.register_forward_hook(lambda *_: calls.append("forward"))
        unit.register_full_backward_hook(lambda *_: calls.append("backward"))
    both(torch.ones(2, 7, requires_grad=True)).sum().backward()
    assert calls == ["forward"] * 3 + ["backward"] * 3
