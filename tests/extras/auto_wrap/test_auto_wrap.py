"""The policy "auto" makes sensible units of models of every build, on the meta device."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flatshard.extras.auto_wrap import MIN_UNIT_NUMEL, ROOT_TAKES_NUMEL
from flatshard.units.module_tree import Ignored
from flatshard.units.policies import ChosenModule
from tests.models import CASES
from tests.units.choosing import find_units

REPEATED = "policy 'auto': one of {} repeated {}"


@pytest.fixture(autouse=True)
def _without_memory() -> Iterator[None]:
    with torch.device("meta"):
        yield


class Layer(nn.Module):
    """What the models below are made of; only parameters matter here."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Attention(Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)


class FeedForward(Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Block(Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = FeedForward(width)


class Gpt(Layer):
    def __init__(
        self, depth: int = 4, width: int = 512, vocabulary: int = 30_000, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def names(plans: list[ChosenModule]) -> list[str]:
    return [plan.name for plan in plans]


def auto(model: nn.Module) -> dict[str, str]:
    return {plan.name: plan.reason for plan in find_units(model, "auto")}


def held(model: nn.Module, plans: list[ChosenModule]) -> dict[str, int]:
    """Elements of each unit, the root's under an empty name; found by brute force.

    Units are small sets here, so each weight's places are simply looked up.
    """
    paths = dict(model.named_parameters(remove_duplicate=False))
    sizes = dict.fromkeys([*names(plans), ""], 0)
    for param in dict.fromkeys(model.parameters()):
        places = [name for name, other in paths.items() if other is param]
        around = [
            unit
            for unit in sizes
            if all(not unit or place.startswith(f"{unit}.") for place in places)
        ]
        sizes[max(around, key=len)] += param.numel()
    return sizes


# ---------------------------------------------------------------- builds of models


class Group(Layer):
    def __init__(self, width: int = 512, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.shrink = nn.LayerNorm(width)


def with_cross_attention(width: int) -> Block:
    block = Block(width)
    block.cross = Attention(width)
    return block


def layers(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1000, size // 1000, bias=False) for size in sizes))


def numbered(name: str, count: int) -> list[str]:
    return [name.format(number) for number in range(count)]


CHOICES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a tied embedding and head stay in the root": (
        lambda: Gpt(tied=True),
        ["positions", *numbered("blocks.{}", 4)],
    ),
    "torch's transformer": (
        nn.Transformer,
        numbered("encoder.layers.{}", 6) + numbered("decoder.layers.{}", 6),
    ),
    # Stage 0 is too small in all, so it is the root's; the others' blocks are units.
    "stages of blocks": (
        lambda: nn.Sequential(Group(64), Group(512, 4), Group(1024)),
        numbered("1.blocks.{}", 4) + numbered("2.blocks.{}", 2),
    ),
    "blocks in groups that are small against the model": (
        lambda: nn.Sequential(*(Group() for _ in range(10))),
        numbered("{}", 10),
    ),
    "blocks in few groups": (
        lambda: nn.Sequential(*(Group() for _ in range(3))),
        [f"{i}.blocks.{j}" for i in range(3) for j in (0, 1)],
    ),
    # Although they are most of the block, and the block is half of the model.
    "the two attentions of a decoder's block do not divide it": (
        lambda: nn.Sequential(with_cross_attention(1024), with_cross_attention(1024)),
        ["0", "1"],
    ),
    "blocks without a class": (
        lambda: nn.Sequential(
            *(nn.Sequential(*layers(2_000_000, 2_000_000), nn.GELU()) for _ in range(8))
        ),
        numbered("{}", 8),
    ),
    "an MLP": (lambda: layers(*[1_001_000] * 6, 3000), numbered("{}", 6)),
    "an MLP in a module": (
        lambda: nn.ModuleDict({"net": layers(*[1_001_000] * 6, 3000)}),
        numbered("net.{}", 6),
    ),
    "one layer": (lambda: nn.Linear(10_000, 10_000), []),
    "one large layer": (lambda: nn.Sequential(nn.Linear(10_000, 10_000), nn.Linear(9, 3)), []),
    "nothing to shard": (lambda: nn.Sequential(nn.ReLU()), []),
    "small blocks": (lambda: Gpt(depth=12, width=64, vocabulary=1000), []),  # 600,000 elements
    "a layer at the bound": (
        lambda: layers(MIN_UNIT_NUMEL, *[MIN_UNIT_NUMEL - 1000] * 2, *[4_000_000] * 2),
        ["0", "3", "4"],
    ),
    "functions read the weights of attention's children": (
        lambda: nn.Sequential(*(nn.MultiheadAttention(1024, 8) for _ in range(3))),
        ["0", "1", "2"],
    ),
    "a small root takes the smallest first": (
        lambda: layers(ROOT_TAKES_NUMEL + 1000, 400_000, 300_000, 5_000_000).append(
            nn.LayerNorm(10)
        ),
        ["0", "1", "3"],
    ),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", CHOICES)
def test_units_of_a_model(name: str) -> None:
    build, expected = CHOICES[name]
    assert names(find_units(build(), "auto")) == expected


def test_gpt() -> None:
    assert auto(Gpt()) == {
        "embed": "policy 'auto': a large Embedding",
        **{f"blocks.{i}": REPEATED.format(4, "Block") for i in range(4)},
        "head": "policy 'auto': a large Linear",
    }  # positions are small enough to join the norm in the root


def test_tie_inside_a_module_goes_with_it() -> None:
    model = nn.Sequential(Gpt(tied=True), nn.Linear(512, 4000))
    model[0].__class__ = type("Tied", (Gpt,), {})
    found = find_units(model, "auto")
    assert names(found)[-2:] == ["0", "1"]
    assert held(model, found)["0"] == 30_000 * 512 + 2 * 512


def test_tied_blocks_do_not_count_what_they_share() -> None:
    model = Gpt()
    for block in model.blocks[1:]:
        block.mlp = model.blocks[0].mlp
        block.attention = model.blocks[0].attention
    found = find_units(model, "auto")
    assert not any(name.startswith("blocks.") and name.count(".") == 1 for name in names(found))
    # A module that is shared as a whole can be a unit itself, but it is inside blocks.
    assert held(model, found)[""] >= sum(p.numel() for p in model.blocks[0].mlp.parameters())


def test_model_inside_a_model() -> None:
    """As Hugging Face and many trainers have it: all but the head is one attribute."""
    model = nn.ModuleDict({"model": Gpt(), "head": nn.Linear(512, 4000)})
    assert "model.blocks.3" in auto(model)
    assert "model" not in auto(model)


def test_resnet() -> None:
    resnet50 = pytest.importorskip("torchvision.models").resnet50()
    found = find_units(resnet50, "auto")
    assert names(found) == [
        "layer2",
        *(f"layer3.{i}" for i in range(6)),
        *(f"layer4.{i}" for i in range(3)),
        "fc",
    ]
    assert held(resnet50, found)[""] < MIN_UNIT_NUMEL  # the stem and layer1
    assert held(resnet50, found)["layer2"] == 1_219_584


class MixtureBlock(Layer):
    """A block whose feed-forward part is a choice of experts."""

    def __init__(self, width: int, experts: str, expert: type[FeedForward]) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.mlp = nn.ModuleDict({"router": nn.Linear(width, 4)})
        self.mlp[experts] = nn.ModuleList(expert(width) for _ in range(4))


class Expert(FeedForward):
    """Known by its class, under any name."""


@pytest.mark.parametrize(("experts", "expert"), [("experts", FeedForward), ("choices", Expert)])
@pytest.mark.parametrize("depth", [1, 2, 12])
def test_experts_are_no_units(depth: int, experts: str, expert: type[FeedForward]) -> None:
    """Also where a block of theirs is most of the model."""
    blocks = nn.ModuleList(MixtureBlock(512, experts, expert) for _ in range(depth))
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Linear(512, 10_000)})
    chosen = names(find_units(model, "auto"))
    assert not [name for name in chosen if f".{experts}." in name]
    if depth > 1:
        assert chosen == [*(f"blocks.{i}" for i in range(depth)), "head"]


def test_blocks_of_different_classes() -> None:
    kinds = [type(f"Block{i}", (Block,), {}) for i in range(6)]
    model = nn.Sequential(*(kind(512) for kind in kinds), nn.Linear(512, 512))
    assert auto(model) == {
        **{str(i): "policy 'auto': one of 6 modules of the same shapes" for i in range(6)},
        "6": "policy 'auto': a large Linear",
    }


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_tiny_model_is_one_unit(case: object) -> None:
    assert auto(case.build()) == {}


def test_many_small_blocks_are_units_all_the_same() -> None:
    """Else the root would hold them, and so nearly all of the model, throughout a step."""
    model = Gpt(depth=60, width=128, vocabulary=1000)  # 200,000 elements in each
    assert auto(model) == {f"blocks.{i}": REPEATED.format(60, "Block") for i in range(60)}


def test_the_root_takes_in_no_large_module() -> None:
    model = Gpt(vocabulary=10_000)
    model.positions = None
    found = find_units(model, "auto")
    assert held(model, found)[""] == 2 * 512
    assert {"embed", "head"} <= set(names(found))


def test_ignored_parameters_count_for_nothing() -> None:
    model = Gpt()
    found = find_units(model, "auto", Ignored(frozenset(model.blocks.modules())))
    assert names(found) == ["embed", "head"]
    found = find_units(model, "auto", Ignored(places=frozenset({(model.embed, "weight")})))
    assert "embed" not in names(found)


# ---------------------------------------------------------------- any model


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    kind = draw(st.sampled_from(["linear", "norm", "block"] + ["sequential", "list"] * (depth > 0)))
    width = draw(st.sampled_from([8, 300, 700]))
    if kind == "linear":
        return nn.Linear(width, draw(st.sampled_from([8, 300, 2000])))
    if kind == "norm":
        return nn.LayerNorm(width)
    if kind == "block":
        return Block(width)
    children = draw(st.lists(trees(depth - 1), min_size=1, max_size=4))
    return nn.Sequential(*children) if kind == "sequential" else nn.ModuleList(children)


@settings(max_examples=25, deadline=None)
@given(children=st.lists(trees(), min_size=1, max_size=5), data=st.data())
def test_no_unit_is_too_small(children: list[nn.Module], data: st.DataObject) -> None:
    model = nn.Sequential(*children)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for _ in range(data.draw(st.integers(0, 3)) if layers else 0):
        first, second = (data.draw(st.sampled_from(layers)) for _ in range(2))
        if first.weight.shape == second.weight.shape:
            second.weight = first.weight
    found = find_units(model, "auto")
    sizes = held(model, found)
    root = sizes.pop("")
    assert all(size >= MIN_UNIT_NUMEL for size in sizes.values()), sizes
    assert len(sizes) != 1 or root >= MIN_UNIT_NUMEL
    assert root + sum(sizes.values()) == sum(p.numel() for p in model.parameters())
    assert [(p.name, p.reason) for p in find_units(model, "auto")] == [
        (p.name, p.reason) for p in found
    ]
