"""Some models of the zoo train as under DistributedDataParallel (`scripts/tables/models.py`: all).

By default five with parts of all kinds train; THOROUGH=1 adds five.
"""

import importlib.util

import pytest
import torch
from lib.rank_processes import Raised, Ranks, Said
from model_zoo import trial
from models import Row, judge, markdown, try_model
from table_cells import Cell

from tests.combinations import every

FAMILIES = ("timm", "torchvision", "transformers")
SAMPLE = every(
    2,
    (
        "torchvision/shufflenet_v2_x0_5",  # batch norm
        "timm/test_vit",
        "transformers/GPT2LMHeadModel",  # an output layer tied to the embedding
        "torchvision/vit",
        "transformers/MambaForCausalLM",  # a recurrence
        "transformers/LlamaForCausalLM",
        "transformers/T5ForConditionalGeneration",  # one embedding for encoder and decoder
        "transformers/ViTForImageClassification",
        "transformers/MixtralForCausalLM",  # experts
        "transformers/CLIPModel",
    ),
)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, FAMILIES)), reason="needs the extra `models`"
)
def test_a_sample() -> None:
    rows = []
    with Ranks(2, preload=sorted({name.partition("/")[0] for name in SAMPLE})) as ranks:
        for number, name in enumerate(SAMPLE):
            policy = trial.POLICIES[number % len(trial.POLICIES)]
            rows.append(try_model(ranks, name, policy, ["flatshard"], 120.0))
    assert [row.cells.get("flatshard") for row in rows] == [Cell("right")] * len(SAMPLE), rows


def test_verdicts() -> None:
    fine = Said("returned", trial.Result(torch.float64, 3, [1.0]))
    odd = Said("returned", trial.Result(torch.float64, 3, [1.0], "loss 0 is 1, not 2"))
    raised, hangs = Said("raised", Raised("ValueError", "no", "")), Said("hangs", "")
    assert judge([fine, fine]) == Cell("right")
    assert judge([fine, odd]) == Cell("wrong", "loss 0 is 1, not 2")
    assert judge([raised, raised]) == Cell("raises", "ValueError: no")
    assert judge([raised, hangs]).verdict == "hangs"
    assert judge([Said("died", -11), hangs]) == Cell("crashes", "rank 0 ends with exit code -11")
    cells = {"flatshard": Cell("right"), "fsdp1": Cell("raises", "ValueError: no")}
    page = markdown([Row("timm/a", "auto", 7, "float32", cells)], list(cells), "command")
    assert "| `a` | 7, float32 | auto | right | raises [1](#notes-on-architectures) |" in page
    assert "| fsdp1 | 0 | 1 | 0 | 0 | 0 |" in page
    fine = {side: Cell("right") for side in cells}
    page = markdown([Row("timm/a", "auto", 7, "float32", fine)], list(cells), "command")
    assert "- Right, policy auto: `a` (7, float32)" in page


def test_differences() -> None:
    state = {"a": torch.ones(2, dtype=torch.float64)}
    arguments = [1.0], [1.0], state
    assert not trial._compare(*arguments, dict(state), torch.float64)
    moved = {"a": state["a"] + 1e-4}
    assert "differs by" in trial._compare(*arguments, moved, torch.float64)
    assert "other names" in trial._compare(*arguments, {"b": state["a"]}, torch.float64)
    assert "loss 0" in trial._compare([1.0], [1.001], state, state, torch.float64)
