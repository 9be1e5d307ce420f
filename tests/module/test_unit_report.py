"""A table of units, and what is said about plans that waste time or memory."""

import pytest
import torch
from torch import nn

from flatshard.module.unit_report import (
    FEW_ELEMENTS,
    LARGE_MODEL_NUMEL,
    LARGE_TIE_NUMEL,
    MANY_UNITS,
    FlatParamRow,
    UnitRow,
    UnitSize,
    describe,
    lint,
    lint_one_unit,
)
from tests.models import CASES

M = 1_000_000


def test_the_table() -> None:
    weights = FlatParamRow(torch.float32, True, 1_000_000, 24, 4_000_096)
    frozen = FlatParamRow(torch.bfloat16, False, 500, 0, 1000)
    rows = [
        UnitRow("", "Net", (), "FULL_SHARD", 2, "root: what is left", "sockets"),
        UnitRow("blocks.0", "Block", (weights,), "FULL_SHARD", 2, "by hand", "sockets"),
        UnitRow(
            "head", "Linear", (weights, frozen), "SHARD_GRAD_OP", 16, "policy p", "shared memory"
        ),
    ]
    lines = describe(rows).splitlines()
    assert lines == [line.rstrip() for line in lines]
    cells = [[cell for cell in line.split("  ") if cell] for line in lines]
    header = "unit,class,elements,padding,flat parameters,unsharded,strategy,ranks,transport,why"
    assert [cell.strip() for cell in cells[0]] == header.split(",")
    assert [[cell.strip() for cell in line] for line in cells[1:]] == [
        [
            *("(root)", "Net", "0", "0 (0.0%)", "none", "0 B"),
            *("FULL_SHARD", "2", "sockets", "root: what is left"),
        ],
        [
            *("blocks.0", "Block", "1,000,000", "24 (0.0%)", "float32", "3.8 MiB"),
            *("FULL_SHARD", "2", "sockets", "by hand"),
        ],
        [
            *(
                "head",
                "Linear",
                "1,000,500",
                "24 (0.0%)",
                "float32 1,000,000 + bfloat16 frozen 500",
            ),
            *("3.8 MiB", "SHARD_GRAD_OP", "16", "shared memory", "policy p"),
        ],
        ["total", "3 units", "2,000,500", "48 (0.0%)", "7.6 MiB"],
    ]
    # Numbers end, and words begin, in the same column.
    assert {line.index("FULL_SHARD") for line in lines[1:3]} == {lines[0].index("strategy")}
    assert {line.index("24 (") + 9 for line in lines[2:4]} == {lines[0].index("padding") + 7}


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
    (remark,) = lint(units, [])
    assert f"{MANY_UNITS} of {MANY_UNITS + 2} units" in remark
    assert "norm0, norm1, norm2, 29 more" in remark
    assert "min_num_params" in remark
    assert lint(units[:MANY_UNITS] + units[-1:], []) == []
    assert lint(sizes(**{f"l{i}": FEW_ELEMENTS for i in range(100)}), []) == []


def test_one_unit_far_larger_than_the_others() -> None:
    blocks = {f"block{i}": 2 * M for i in range(6)}
    units = sizes(**blocks)
    big = UnitSize(("tower",), 21 * M, M)
    (remark,) = lint([*units, big], [])
    assert "unit 'tower' holds 21,000,000 elements" in remark
    assert "the median of 7 units (2,000,000)" in remark
    (remark,) = lint([UnitSize(("",), 21 * M, M), *units[1:]], [])
    assert "the root holds" in remark
    for fine in (
        UnitSize(("tower",), 20 * M, M),  # ten times is not more than ten times
        UnitSize(("embed",), 90 * M, 89 * M),  # one parameter, which nothing divides
    ):
        assert lint([*units, fine], []) == []
    few = sizes(a=M, b=M)
    assert lint([*few, UnitSize(("c",), 90 * M, M)], []) == []  # no median to speak of
    small = sizes(**{f"block{i}": 2000 for i in range(6)})
    assert lint([*small, UnitSize(("tower",), 900_000, 1000)], []) == []


def test_a_tie_that_empties_two_units() -> None:
    units = sizes(root=20 * M, embed=0, head=0, blocks=20 * M)
    names = ["embed.weight", "head.proj.weight"]
    (remark,) = lint(units, [(LARGE_TIE_NUMEL, names)])
    assert "'embed.weight' and 'head.proj.weight' are one weight of 1,000,000" in remark
    assert "units 'embed', 'head'" in remark
    for numel, places in (
        (LARGE_TIE_NUMEL - 1, names),
        (LARGE_TIE_NUMEL, ["wte.weight", "lm_head.weight"]),  # both in the root
        (LARGE_TIE_NUMEL, ["embed.weight", "embed.again.weight"]),
        (LARGE_TIE_NUMEL, ["embed.weight", "lm_head.weight"]),  # the root holds one anyway
        (LARGE_TIE_NUMEL, ["embedding.weight", "heads.weight"]),  # no names of units
    ):
        assert lint(units, [(numel, places)]) == []


def test_good_plans_pass() -> None:
    assert lint(sizes(root=500, **{f"block{i}": 7 * M for i in range(12)}, head=38 * M), []) == []
    assert lint([], []) == []
    assert lint(sizes(root=11), [(11, ["a", "b"])]) == []
