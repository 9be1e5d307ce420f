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


def test_gpt() -> None:
    assert auto(Gpt()) == {
        "embed": "policy 'auto': a large Embedding",
        **{f"blocks.{i}": REPEATED.format(4, "Block") for i in range(4)},
        "head": "policy 'auto': a large Linear",
    }  # positions are small enough to join the norm in the root


def test_tied_embedding_and_head_stay_in_the_root() -> None:
    assert names(find_units(Gpt(tied=True), "auto")) == [
        "positions",
        *(f"blocks.{i}" for i in range(4)),
    ]


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


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_torchs_transformer() -> None:
    assert names(find_units(nn.Transformer(), "auto")) == [
        f"{part}.layers.{i}" for part in ("encoder", "decoder") for i in range(6)
    ]


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


def test_stages_of_blocks() -> None:
    """Every stage is of one class, and so large that its blocks are units."""

    class Stage(Layer):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
            self.shrink = nn.Linear(width, width)

    model = nn.Sequential(Stage(64, 2), Stage(512, 4), Stage(1024, 2))
    found = find_units(model, "auto")
    blocks = [f"1.blocks.{i}" for i in range(4)] + [f"2.blocks.{i}" for i in range(2)]
    # Stage 0 is too small in all, so it is the root's, and stage 1's own layer joins it there.
    assert names(found) == [*blocks, "2.shrink"]


def test_blocks_in_blocks() -> None:
    """Where the outer ones are small against the model, they are the units."""

    class Group(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(512), Block(512))

    model = nn.Sequential(*(Group() for _ in range(10)))
    assert names(find_units(model, "auto")) == [str(i) for i in range(10)]
    few = nn.Sequential(*(Group() for _ in range(3)))
    assert names(find_units(few, "auto")) == [f"{i}.blocks.{j}" for i in range(3) for j in (0, 1)]


def test_the_two_attentions_of_a_decoders_block_do_not_divide_it() -> None:
    """Although they are most of the block, and the block is half of the model."""
    blocks = [Block(1024), Block(1024)]
    for block in blocks:
        block.cross = Attention(1024)
    assert names(find_units(nn.Sequential(*blocks), "auto")) == ["0", "1"]


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


def test_blocks_without_a_class() -> None:
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).append(nn.GELU())
            for _ in range(8)
        )
    )
    assert names(find_units(model, "auto")) == [str(i) for i in range(8)]


@pytest.mark.parametrize("nested", [False, True])
def test_mlp(nested: bool) -> None:
    layers = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(6)), nn.Linear(1000, 3))
    model = nn.ModuleDict({"net": layers}) if nested else layers
    prefix = "net." if nested else ""
    assert names(find_units(model, "auto")) == [f"{prefix}{i}" for i in range(6)]


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_tiny_model_is_one_unit(case: object) -> None:
    assert auto(case.build()) == {}


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(10_000, 10_000),
        lambda: nn.Sequential(nn.Linear(10_000, 10_000), nn.Linear(10_000, 3)),
        lambda: nn.Sequential(nn.ReLU()),
        lambda: Gpt(depth=12, width=64, vocabulary=1000),  # 600,000 elements in blocks
    ],
)
def test_one_unit_is_enough(build: Callable[[], nn.Module]) -> None:
    assert auto(build()) == {}


def test_many_small_blocks_are_units_all_the_same() -> None:
    """Else the root would hold them, and so nearly all of the model, throughout a step."""
    model = Gpt(depth=60, width=128, vocabulary=1000)  # 200,000 elements in each
    assert auto(model) == {f"blocks.{i}": REPEATED.format(60, "Block") for i in range(60)}


def test_small_blocks_join_in_what_contains_them() -> None:
    model = nn.Sequential(nn.Sequential(*(Block(96) for _ in range(24))), nn.Linear(512, 512))
    reason = "the rest of its elements, in parts that are too small for units"
    assert auto(model)["0"] == f"policy 'auto': {reason}"


def test_the_root_takes_in_no_large_module() -> None:
    model = Gpt(vocabulary=10_000)
    model.positions = None
    found = find_units(model, "auto")
    assert held(model, found)[""] == 2 * 512
    assert {"embed", "head"} <= set(names(found))


def test_the_bound_is_inclusive() -> None:
    exact = nn.Linear(MIN_UNIT_NUMEL // 500, 500, bias=False)
    below = [nn.Linear(MIN_UNIT_NUMEL // 500 - 1, 500, bias=False) for _ in range(2)]
    model = nn.Sequential(exact, *below, nn.Linear(2000, 2000), nn.Linear(2000, 2000))
    assert names(find_units(model, "auto")) == ["0", "3", "4"]


def test_ignored_parameters_count_for_nothing() -> None:
    model = Gpt()
    found = find_units(model, "auto", Ignored(frozenset(model.blocks.modules())))
    assert names(found) == ["embed", "head"]
    found = find_units(model, "auto", Ignored(places=frozenset({(model.embed, "weight")})))
    assert "embed" not in names(found)


def test_functions_read_the_weights_of_attentions_children() -> None:
    model = nn.Sequential(*(nn.MultiheadAttention(1024, 8) for _ in range(3)))
    assert names(find_units(model, "auto")) == ["0", "1", "2"]


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


@settings(max_examples=80, deadline=None)
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


def test_a_small_root_takes_the_smallest_first() -> None:
    sizes = [ROOT_TAKES_NUMEL + 1000, 400_000, 300_000, 5_000_000]
    model = nn.Sequential(*(nn.Linear(1000, size // 1000, bias=False) for size in sizes))
    model.append(nn.LayerNorm(10))
    assert names(find_units(model, "auto")) == ["0", "1", "3"]
