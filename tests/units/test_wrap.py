"""Wrap policies choose what torch's choose, and `find_units` keeps units apart that must be."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn

from flatshard.units import policies
from flatshard.units.module_tree import Ignored
from flatshard.units.policies import (
    ChosenModule,
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    as_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from tests.harness import assert_raises
from tests.units.choosing import find_units


class Block(nn.Module):
    def __init__(self, width: int = 4, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.act = nn.ReLU()
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class Lists(nn.Module):
    """Containers in containers, each kind without a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 30)})
        self.scales = nn.ParameterList([torch.ones(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return self.heads["b"](x * self.scales[0])


class Shared(nn.Module):
    """One block under two parents, and a weight under two modules."""

    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.left = nn.Sequential(nn.Linear(4, 4), block)
        self.right = nn.Sequential(block, nn.Linear(4, 5))
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(self.left(x)) + self.right(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 64), nn.ReLU(), Block(64, 8))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8))


MODELS = [mlp, encoder, Lists, Shared]


def names(plans: list[ChosenModule]) -> list[str]:
    return [plan.name for plan in plans]


def below(root: nn.Module, *classes: type[nn.Module]) -> set[nn.Module]:
    """All that lies strictly inside modules of some classes."""
    tops = [module for module in root.modules() if isinstance(module, classes)]
    return {inner for top in tops for inner in top.modules() if inner is not top}


def torch_choice(root: nn.Module, policy: Any, **ignored: Any) -> list[nn.Module]:
    """What torch would wrap, in its order, less what can't be a unit."""
    ignored_modules = {m for top in ignored.get("modules", ()) for m in top.modules()}
    ignored_params = {p for m in ignored_modules for p in m.parameters()}
    wrapped: list[nn.Module] = []

    def record(module: nn.Module, **_: Any) -> nn.Module:
        wrapped.append(module)
        return module

    if isinstance(policy, torch_wrap._Policy):
        targets = policy._run_policy(root, ignored_modules, {})
        torch_wrap._post_order_apply(root, torch_wrap._construct_wrap_fn(root, targets, record))
    else:
        torch_wrap._recursive_wrap(
            root, policy, record, ignored_modules, ignored_params, only_wrap_children=True
        )
    read_by_others = below(root, nn.MultiheadAttention)
    return [
        module
        for module in dict.fromkeys(wrapped)
        if any(p not in ignored_params for p in module.parameters())
        and not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList)
        and module not in read_by_others
    ]


def is_wide(module: nn.Module) -> bool:
    return getattr(module, "out_features", 0) >= 8


LAYERS = {Block, nn.TransformerEncoderLayer}
WITH_CLASSES: dict[str, Any] = {
    "min_num_params": 30,
    "force_leaf_modules": {Block},
    "exclude_wrap_modules": {nn.Linear, nn.ModuleList, nn.ModuleDict},
}
Make = Callable[[Any], Any]


def given(name: str, **arguments: Any) -> Make:
    """A policy function of torch's module, or ours of the same name, with some arguments."""
    return lambda offers: functools.partial(getattr(offers, f"{name}_wrap_policy"), **arguments)


NUMELS = (0, 1, 30, 76, 100, 150, 500, 100_000)
POLICIES: dict[str, Make] = {
    **{f"{numel}": given("size_based_auto", min_num_params=numel) for numel in NUMELS},
    "size by default": lambda w: w.size_based_auto_wrap_policy,
    "size with classes": given("size_based_auto", **WITH_CLASSES),
    "transformer": given("transformer_auto", transformer_layer_cls=LAYERS),
    "lambda": given("lambda_auto", lambda_fn=is_wide),
    "always": lambda w: w.always_wrap_policy,
    "module": lambda w: w.ModuleWrapPolicy(LAYERS),
    "module, nested": lambda w: w.ModuleWrapPolicy([nn.Linear, nn.MultiheadAttention]),
    "custom": lambda w: w.CustomPolicy(is_wide),
}
each_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)


@pytest.mark.parametrize("model", MODELS)
@each_policy
def test_chooses_what_torch_chooses(make: Make, model: Callable[[], nn.Module]) -> None:
    root = model()
    expected = torch_choice(root, make(torch_wrap))
    for policy in (make(policies), make(torch_wrap)):
        assert [plan.module for plan in find_units(root, policy)] == expected


@each_policy
def test_ignores_what_torch_ignores(make: Make) -> None:
    root = Lists()
    ignored = [root.stages[0], root.heads["a"], root.stages[1][1].up]
    expected = torch_choice(root, make(torch_wrap), modules=ignored)
    below = frozenset(module for top in ignored for module in top.modules())
    found = find_units(root, make(policies), Ignored(below))
    assert [plan.module for plan in found] == expected


# --- sizes ---


def test_ignored_parameters_count_for_nothing() -> None:
    root = nn.Sequential(Block(), nn.Linear(4, 4))
    told: dict[nn.Module, int] = {}

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        told[module] = nonwrapped_numel
        return True

    places = {(root[0].up, "weight"), (root[1], "weight"), (root[1], "bias")}
    plans = find_units(root, policy, Ignored(places=frozenset(places)))
    assert names(plans) == ["0.up", "0.down", "0"]  # root[1] has no parameter left
    assert told[root[0].up] == 8
    below = [(module, name) for module in root.modules() for name in ("weight", "bias")]
    everything = Ignored(places=frozenset(below))
    assert find_units(root, always_wrap_policy, everything) == []
    assert find_units(root, ModuleWrapPolicy({Block}), everything) == []


# --- what never becomes a unit ---


@pytest.mark.parametrize("policy", [always_wrap_policy, CustomPolicy(lambda module: True)])
class TestNeverUnits:
    def test_inside_attention(self, policy: Any) -> None:
        class Attention(nn.MultiheadAttention):
            pass

        root = nn.ModuleDict({"a": nn.MultiheadAttention(4, 1), "b": Attention(4, 1)})
        assert names(find_units(root, policy)) == ["a", "b"]
        assert find_units(root["a"], policy) == []

    def test_parametrizations(self, policy: Any) -> None:
        class Scale(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(nn.Linear(1, 1))

            def forward(self, weight: torch.Tensor) -> torch.Tensor:
                return weight * self.net(weight.new_ones(1))

        root = nn.Sequential(nn.Linear(4, 4), Block())
        nn.utils.parametrizations.weight_norm(root[0])
        nn.utils.parametrize.register_parametrization(root[1].up, "weight", Scale())
        assert names(find_units(root, policy)) == ["0", "1.up", "1.down", "1"]

    def test_without_forward(self, policy: Any) -> None:
        found = names(find_units(Lists(), policy))
        assert "stages.0.0" in found
        assert "heads.a" in found
        assert not {"stages", "stages.0", "heads", "scales"} & set(found)

    def test_forward_set_on_the_instance(self, policy: Any) -> None:
        root = nn.Sequential(nn.ModuleList([nn.Linear(4, 4)]))
        root[0].forward = lambda x: root[0][0](x)
        assert names(find_units(root, policy)) == ["0.0", "0"]

    @pytest.mark.filterwarnings("ignore:`torch.jit")
    def test_scripted(self, policy: Any) -> None:
        root = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4))))
        assert names(find_units(root, policy)) == ["0.0", "0"]

    def test_without_parameters(self, policy: Any) -> None:
        layers = nn.ReLU(), nn.Sequential(nn.Dropout()), nn.BatchNorm1d(2, affine=False)
        assert find_units(nn.Sequential(*layers), policy) == []

    @pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="newer torch")
    def test_linear_cross_entropy(self, policy: Any) -> None:
        assert names(find_units(nn.Sequential(nn.LinearCrossEntropyLoss(4, 5)), policy)) == ["0"]

    def test_inside_shifted_window_attention(self, policy: Any) -> None:
        swin = pytest.importorskip("torchvision.models.swin_transformer")
        attention = swin.ShiftedWindowAttentionV2(8, [7, 7], [0, 0], 2)
        assert names(find_units(nn.Sequential(attention), policy)) == ["0"]


# --- overrides and reprs ---


@pytest.mark.parametrize("cls", [CustomPolicy, torch_wrap.CustomPolicy])
def test_custom_policy_overrides(cls: Any) -> None:
    root = nn.Sequential(nn.Linear(2, 2), Block(), nn.LayerNorm(2))
    keywords = {"forward_prefetch": True}
    answers = {root[0]: keywords, root[1]: True, root[2]: {}}
    plans = find_units(root, cls(lambda module: answers.get(module, False)))
    assert plans == [ChosenModule("0", root[0], keywords), ChosenModule("1", root[1])]
    plans[0].overrides.clear()
    assert keywords  # the plan has its own


def test_a_policy_object_needs_no_base_class() -> None:
    class Second:
        def _run_policy(self, root_module: Any, ignored_modules: Any, root_kwargs: Any) -> Any:
            return {root_module: {}, root_module[1]: {"limit_all_gathers": False}, Block(): {}}

    root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert find_units(root, Second()) == [ChosenModule("1", root[1], {"limit_all_gathers": False})]


def test_size_policy_defaults_match_torch_and_can_be_changed() -> None:
    theirs = torch_wrap.size_based_auto_wrap_policy
    assert size_based_auto_wrap_policy.FORCE_LEAF_MODULES == theirs.FORCE_LEAF_MODULES
    assert size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES == theirs.EXCLUDE_WRAP_MODULES
    for name in ("size_based", "transformer", "lambda"):
        name += "_auto_wrap_policy"
        signatures = (inspect.signature(getattr(w, name)) for w in (policies, torch_wrap))
        ours, other = ([(p.name, p.default) for p in s.parameters.values()] for s in signatures)
        assert ours == other
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=10)
    with mock.patch.object(size_based_auto_wrap_policy, "FORCE_LEAF_MODULES", {Block}):
        assert names(find_units(mlp(), policy)) == ["0", "2"]


# --- bad input ---

TYPE_ERRORS = [
    (20_000, "got 20000 (int)"),
    ({Block, nn.Linear}, "got {Block, Linear} (set)"),
    ([Block], "got {Block} (list)"),
    (Block, "got Block"),
    (ModuleWrapPolicy, "got ModuleWrapPolicy"),
    (Block(), "got an instance of Block"),
    (print, "got print, which cannot be called with the keywords module, recurse"),
    (lambda module: True, "<lambda>, which cannot be called"),
    (lambda module, recurse, nonwrapped_numel, extra: True, "missing a required argument: 'extra'"),
    (transformer_auto_wrap_policy, "'transformer_layer_cls'"),
    (functools.partial(size_based_auto_wrap_policy, 20_000), "size_based_auto_wrap_policy(20000)"),
    (functools.partial(size_based_auto_wrap_policy, min_params=1), "which cannot be called"),
    (
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=Block),
        "transformer_layer_cls: expected a set of classes, for example {Block}, got Block.",
    ),
    (
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={"Block"}),
        "transformer_layer_cls: expected a set of classes, for example {Block}, got {'Block'}.",
    ),
]


@pytest.mark.parametrize(("policy", "message"), TYPE_ERRORS, ids=lambda value: None)
def test_wrong_policies(policy: Any, message: str) -> None:
    checks: list[Any] = [functools.partial(find_units, mlp())]
    # An argument of a policy is checked when that is called.
    checks += [] if "transformer_layer_cls:" in message else [as_policy]
    for check in checks:
        with pytest.raises(TypeError) as caught:
            check(policy)
        assert message in str(caught.value)
        if "transformer_layer_cls:" not in message:
            assert "ModuleWrapPolicy({" in str(caught.value)
            example = "functools.partial(size_based_auto_wrap_policy, min_num_params="
            assert example in str(caught.value)


@pytest.mark.parametrize("bound", [-1, 1e6, True, "20000", None])
def test_wrong_min_num_params(bound: Any) -> None:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=bound)
    message = r"min_num_params: expected an int >= 0, .*, got"
    assert_raises(ValueError, message, policy, module=Block(), recurse=True, nonwrapped_numel=0)
    assert_raises(ValueError, message, find_units, mlp(), policy)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["Block"], "got {'Block'}"),
        ({Block, 3}, "got {3, Block}"),
        ([Block()], "got {an instance of Block}"),
        (Block, "for example {Block}, got Block"),
        ("Block", "expected a set of classes"),
        (None, "got None"),
    ],
)
def test_wrong_classes(classes: Any, message: str) -> None:
    expected = f"^module_classes: (?=expected).*{re.escape(message)}"
    assert_raises(TypeError, expected, ModuleWrapPolicy, classes)
    for keyword, recurse in (("force_leaf_modules", True), ("exclude_wrap_modules", False)):
        policy = functools.partial(size_based_auto_wrap_policy, **{keyword: classes or 0})
        assert_raises(TypeError, f"{keyword}: expected", policy, Block(), recurse, 1, 0)


def test_wrong_custom_policies() -> None:
    assert_raises(TypeError, "expected a function of one module", CustomPolicy, {Block})
    policy = CustomPolicy(lambda module: None)
    assert_raises(ValueError, r"got None for module '' \(Sequential\)", find_units, mlp(), policy)
