"""The policy "auto" makes sensible units of models of every build, on the meta device."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from flatshard.extras.auto_wrap import MIN_UNIT_NUMEL, ROOT_TAKES_NUMEL, one_unit_warning
from flatshard.units.module_tree import Ignored, ModuleTree
from flatshard.units.policies import ChosenModule
from tests.models import CASES, Case, Composed
from tests.units.choosing import find_units


@pytest.fixture(autouse=True)
def _without_memory() -> Iterator[None]:
    with torch.device("meta"):
        yield


class Layer(Composed):
    """What the models below are made of; only parameters matter here."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__(lambda module, x: x, **parts)


class Attention(Layer):
    def __init__(self, width: int) -> None:
        super().__init__(qkv=nn.Linear(width, 3 * width), out=nn.Linear(width, width))


class FeedForward(Layer):
    def __init__(self, width: int) -> None:
        super().__init__(up=nn.Linear(width, 4 * width), down=nn.Linear(4 * width, width))


class Block(Layer):
    def __init__(self, width: int) -> None:
        norm, attention = nn.LayerNorm(width), Attention(width)
        super().__init__(norm=norm, attention=attention, mlp=FeedForward(width))


class Gpt(Layer):
    def __init__(self, depth: int = 4, width: int = 512, vocabulary: int = 30_000) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)


def tied_gpt() -> Gpt:
    model = Gpt()
    model.head.weight = model.embed.weight
    return model


def names(plans: list[ChosenModule]) -> list[str]:
    return [plan.name for plan in plans]


def held(model: nn.Module, plans: list[ChosenModule]) -> dict[str, int]:
    """Elements of each unit, the root's under an empty name; found by brute force.

    Units are small sets here, so each weight's places are simply looked up.
    """
    paths = dict(model.named_parameters(remove_duplicate=False))
    sizes = dict.fromkeys([*names(plans), ""], 0)
    for param in dict.fromkeys(model.parameters()):
        places = [name for name, other in paths.items() if other is param]
        around = [u for u in sizes if all(not u or place.startswith(f"{u}.") for place in places)]
        sizes[max(around, key=len)] += param.numel()
    return sizes


# ---------------------------------------------------------------- builds of models


class Group(Layer):
    def __init__(self, width: int = 512, depth: int = 2) -> None:
        blocks = nn.ModuleList(Block(width) for _ in range(depth))
        super().__init__(blocks=blocks, shrink=nn.LayerNorm(width))


def with_cross_attention() -> Block:
    block = Block(1024)
    block.cross = Attention(1024)
    return block


def without_a_class() -> nn.Module:
    return nn.Sequential(*layers(2_000_000, 2_000_000), nn.GELU())


def layers(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1000, size // 1000, bias=False) for size in sizes))


def mlp() -> nn.Module:
    return layers(*[1_001_000] * 6, 3000)


def stack(count: int, build: Callable[..., nn.Module], *arguments: int) -> nn.Module:
    return nn.Sequential(*(build(*arguments) for _ in range(count)))


def in_a_model() -> nn.Module:
    """As Hugging Face and many trainers have it: all but the head is one attribute."""
    return nn.ModuleDict({"model": Gpt(), "head": nn.Linear(512, 4000)})


def without_positions() -> nn.Module:
    model = Gpt(vocabulary=10_000)
    model.positions = None
    return model


def sharing_parts() -> nn.Module:
    """Blocks do not count what they share. What is shared as a whole is inside of blocks."""
    model = Gpt()
    for block in model.blocks[1:]:
        block.mlp, block.attention = model.blocks[0].mlp, model.blocks[0].attention
    return model


def different_classes() -> nn.Module:
    kinds = [type(f"Block{i}", (Block,), {}) for i in range(6)]
    return nn.Sequential(*(kind(512) for kind in kinds), nn.Linear(512, 512))


def small_root() -> nn.Module:
    return layers(ROOT_TAKES_NUMEL + 1000, 400_000, 300_000, 5_000_000).append(nn.LayerNorm(10))


def at_the_bound() -> nn.Module:
    return layers(MIN_UNIT_NUMEL, *[MIN_UNIT_NUMEL - 1000] * 2, *[4_000_000] * 2)


def expanded(words: str) -> list[str]:
    """The names of units: ``blocks.{2}`` is short for ``blocks.0 blocks.1``."""
    found = []
    for word in words.split():
        name, _, count = word.removesuffix("}").partition("{")
        found += [f"{name}{number}" for number in range(int(count))] if count else [word]
    return found


CHOICES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    # Positions are small enough to join the norm in the root, which takes in no large module.
    "gpt": (Gpt, "embed blocks.{4} head"),
    "without positions": (without_positions, "embed blocks.{4} head"),
    # A tied embedding and head stay in the root.
    "tied": (tied_gpt, "positions blocks.{4}"),
    "a model in a model": (in_a_model, "model.embed model.blocks.{4} model.head head"),
    "blocks that share their parts": (sharing_parts, "embed positions head"),
    # 200,000 elements in each. Else the root would hold them, and so nearly all of the model,
    # throughout a step. If all have 600,000 elements, they are one unit.
    "many small blocks": (lambda: Gpt(60, 128, 1000), "blocks.{60}"),
    "small blocks": (lambda: Gpt(12, 64, 1000), ""),
    "blocks of different classes": (different_classes, "{7}"),
    "torch's transformer": (nn.Transformer, "encoder.layers.{6} decoder.layers.{6}"),
    # Stage 0 is too small in all, so it is the root's; the others' blocks are units.
    "stages": (
        lambda: nn.Sequential(Group(64), Group(512, 4), Group(1024)),
        "1.blocks.{4} 2.blocks.{2}",
    ),
    # Groups of blocks are small against the model, or not.
    "many groups": (lambda: stack(10, Group), "{10}"),
    "few groups": (lambda: stack(3, Group), "0.blocks.{2} 1.blocks.{2} 2.blocks.{2}"),
    # Two attentions do not divide a decoder's block, although they are most of the block, and the
    # block is half of the model.
    "two attentions": (lambda: stack(2, with_cross_attention), "{2}"),
    "blocks without a class": (lambda: stack(8, without_a_class), "{8}"),
    "an MLP": (mlp, "{6}"),
    "an MLP in a module": (lambda: nn.ModuleDict({"net": mlp()}), "net.{6}"),
    "one layer": (lambda: nn.Linear(10_000, 10_000), ""),
    "one large layer": (lambda: nn.Sequential(nn.Linear(10_000, 10_000), nn.Linear(9, 3)), ""),
    "nothing to shard": (lambda: nn.Sequential(nn.ReLU()), ""),
    "a layer at the bound": (at_the_bound, "0 3 4"),
    # Functions read the weights of attention's children.
    "attention": (lambda: stack(3, nn.MultiheadAttention, 1024, 8), "{3}"),
    # It takes the smallest first.
    "a small root": (small_root, "0 1 3"),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", CHOICES)
def test_units_of_a_model(name: str) -> None:
    build, expected = CHOICES[name]
    model = build()
    found = find_units(model, "auto")
    assert names(found) == expanded(expected)
    assert sum(held(model, found).values()) == sum(p.numel() for p in model.parameters())


def test_reasons() -> None:
    assert {plan.reason for plan in find_units(Gpt(), "auto")} == {
        "policy 'auto': a large Embedding",
        "policy 'auto': one of 4 repeated Block",
        "policy 'auto': a large Linear",
    }
    build, _ = CHOICES["blocks of different classes"]
    reasons = [plan.reason for plan in find_units(build(), "auto")]
    assert reasons[0] == "policy 'auto': one of 6 modules of the same shapes"


def test_tie_inside_a_module_goes_with_it() -> None:
    model = nn.Sequential(tied_gpt(), nn.Linear(512, 4000))
    model[0].__class__ = type("Tied", (Gpt,), {})
    found = find_units(model, "auto")
    assert names(found)[-2:] == ["0", "1"]
    assert held(model, found)["0"] == 30_000 * 512 + 2 * 512


def test_resnet() -> None:
    resnet50 = pytest.importorskip("torchvision.models").resnet50()
    found = find_units(resnet50, "auto")
    assert names(found) == expanded("layer2 layer3.{6} layer4.{3} fc")
    assert held(resnet50, found)[""] < MIN_UNIT_NUMEL  # the stem and layer1
    assert held(resnet50, found)["layer2"] == 1_219_584


class MixtureBlock(Layer):
    """A block whose feed-forward part is a choice of experts."""

    def __init__(self, width: int, experts: str, expert: type[FeedForward]) -> None:
        super().__init__(attention=Attention(width))
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
        assert chosen == expanded(f"blocks.{{{depth}}} head")


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_tiny_model_is_one_unit_without_a_warning(case: Case) -> None:
    assert find_units(case.build(), "auto") == []
    assert one_unit_warning(ModuleTree(case.build())) == []


def test_a_large_layer_in_one_unit_may_be_wrapped_by_hand() -> None:
    layer = nn.TransformerEncoderLayer(2048, 8, batch_first=True)
    for large in (nn.Linear(10_000, 10_000), layer):
        assert one_unit_warning(ModuleTree(large)) == []


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
    again = find_units(model, "auto")
    assert [(p.name, p.reason) for p in again] == [(p.name, p.reason) for p in found]
