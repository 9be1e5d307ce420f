"""Models of other libraries train as under DistributedDataParallel.

By default five with parts of all kinds; THOROUGH=1 adds five, and `scripts/evidence.py zoo` trains
all, with FSDP1 beside.
"""

from pathlib import Path

import pytest
import torch

from tests.combinations import every
from tests.harness import run_ranks
from tests.outcomes import Cell
from tests.zoo import trial
from tests.zoo.families import FAMILIES

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


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), list(enumerate(SAMPLE)))
def test_model(number: int, name: str, tmp_path: Path) -> None:
    for family in FAMILIES:
        pytest.importorskip(family)
    arguments = trial.POLICIES[number % len(trial.POLICIES)], str(tmp_path / "oracle")
    preload = tuple(sorted({one.partition("/")[0] for one in SAMPLE}))
    run_ranks(trial.train, 2, name, "ddp", *arguments, preload=preload)
    found = run_ranks(trial.train, 2, name, "flatshard", *arguments, preload=preload)
    assert trial.judge(found) == Cell("right")


def test_differences() -> None:
    state = {"a": torch.ones(2, dtype=torch.float64)}
    arguments = [1.0], [1.0], state
    assert not trial.compare(*arguments, dict(state), torch.float64)
    moved = {"a": state["a"] + 1e-4}
    assert "differs by" in trial.compare(*arguments, moved, torch.float64)
    assert "other names" in trial.compare(*arguments, {"b": state["a"]}, torch.float64)
    assert "loss 0" in trial.compare([1.0], [1.001], state, state, torch.float64)
