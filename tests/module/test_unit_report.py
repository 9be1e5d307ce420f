"""A table of units, and what is said about plans that waste time or memory."""

import pytest
import torch
from torch import nn

from flatshard.module.unit_report import (
    FEW_ELEMENTS,
    LARGE_MODEL_NUMEL,
    LARGE_TIE_NUMEL,
    MANY_UNITS,
    UnitSize,
    lint_one_unit,
    lint_sizes,
    tabulate,
)
from tests.models import CASES

M = 1_000_000


def test_columns_are_aligned() -> None:
    table = tabulate([("unit", "elements"), ("head", "1,000"), ("blocks.0", "5")], numbers={1})
    assert table == "unit      elements\nhead         1,000\nblocks.0         5"


def sizes(**numels: int) -> list[UnitSize]:
    """Units of one parameter each; of several in the root."""
    root = UnitSize(("",), numels.pop("root", 0), 0)
    return [root, *(UnitSize((name,), numel, numel) for name, numel in numels.items())]


# ---------------------------------------------------------------- one unit


@pytest.mark.parametrize("depth", [2, 12])
def test_a_large_model_in_one_unit(depth: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(_large_block() for _ in range(depth)))
    (remark,) = lint_one_unit(model)
    assert f"each of {depth} repeated blocks" in remark
    assert 'auto_wrap_policy="auto"' in remark


def _large_block() -> nn.Module:
    return nn.Sequential(nn.Linear(2000, 2000), nn.ReLU(), nn.Sequential(nn.Linear(2000, 2000)))


def test_a_small_model_in_one_unit_is_fine() -> None:
    with torch.device("meta"):
        model = nn.Sequential(_large_block())
        assert sum(p.numel() for p in model.parameters()) < LARGE_MODEL_NUMEL
        assert lint_one_unit(model) == []


def test_a_large_layer_in_one_unit_may_be_wrapped_by_hand() -> None:
    with torch.device("meta"):
        assert lint_one_unit(nn.Linear(10_000, 10_000)) == []
        assert lint_one_unit(nn.TransformerEncoderLayer(2048, 8, batch_first=True)) == []


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_no_false_alarm_for_test_models(case: object) -> None:
    assert lint_one_unit(case.build()) == []


# ---------------------------------------------------------------- several units


def test_many_small_units() -> None:
    units = sizes(**{f"norm{i}": FEW_ELEMENTS - 1 for i in range(MANY_UNITS)}, head=M)
    (remark,) = lint_sizes(units, [])
    assert f"{MANY_UNITS} of {MANY_UNITS + 2} units" in remark
    assert "norm0, norm1, norm2, 29 more" in remark
    assert "min_num_params" in remark
    assert lint_sizes(units[:MANY_UNITS] + units[-1:], []) == []
    assert lint_sizes(sizes(**{f"l{i}": FEW_ELEMENTS for i in range(100)}), []) == []


def test_one_unit_far_larger_than_the_others() -> None:
    blocks = {f"block{i}": 2 * M for i in range(6)}
    units = sizes(**blocks)
    big = UnitSize(("tower",), 21 * M, M)
    (remark,) = lint_sizes([*units, big], [])
    assert "unit 'tower' holds 21,000,000 elements" in remark
    assert "the median of 7 units (2,000,000)" in remark
    (remark,) = lint_sizes([UnitSize(("",), 21 * M, M), *units[1:]], [])
    assert "the root holds" in remark
    for fine in (
        UnitSize(("tower",), 20 * M, M),  # ten times is not more than ten times
        UnitSize(("embed",), 90 * M, 89 * M),  # one parameter, which nothing divides
    ):
        assert lint_sizes([*units, fine], []) == []
    few = sizes(a=M, b=M)
    assert lint_sizes([*few, UnitSize(("c",), 90 * M, M)], []) == []  # no median to speak of
    small = sizes(**{f"block{i}": 2000 for i in range(6)})
    assert lint_sizes([*small, UnitSize(("tower",), 900_000, 1000)], []) == []


def test_a_tie_that_empties_two_units() -> None:
    units = sizes(root=20 * M, embed=0, head=0, blocks=20 * M)
    names = ["embed.weight", "head.proj.weight"]
    (remark,) = lint_sizes(units, [(LARGE_TIE_NUMEL, names)])
    assert "'embed.weight' and 'head.proj.weight' are one weight of 1,000,000" in remark
    assert "units 'embed', 'head'" in remark
    for numel, places in (
        (LARGE_TIE_NUMEL - 1, names),
        (LARGE_TIE_NUMEL, ["wte.weight", "lm_head.weight"]),  # both in the root
        (LARGE_TIE_NUMEL, ["embed.weight", "embed.again.weight"]),
        (LARGE_TIE_NUMEL, ["embed.weight", "lm_head.weight"]),  # the root holds one anyway
        (LARGE_TIE_NUMEL, ["embedding.weight", "heads.weight"]),  # no names of units
    ):
        assert lint_sizes(units, [(numel, places)]) == []


def test_good_plans_pass() -> None:
    assert (
        lint_sizes(sizes(root=500, **{f"block{i}": 7 * M for i in range(12)}, head=38 * M), [])
        == []
    )
    assert lint_sizes([], []) == []
    assert lint_sizes(sizes(root=11), [(11, ["a", "b"])]) == []
