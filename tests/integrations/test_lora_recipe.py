"""The recipe that merges adapters of LoRA and hands the weights to an inference engine."""

from typing import Any

import pytest
import torch
from torch import nn

import flatshard
from flatshard import ShardedWrapper
from tests.documents import Engine, fences
from tests.harness import ROOT, run_ranks
from tests.integrations import PRELOAD


def test_merging_lora_as_the_recipe_does() -> None:
    for name in ("peft", "lightning", "trl"):  # the server of ranks loads the last two
        pytest.importorskip(name)
    run_ranks(_lora, 2, fresh=True, preload=PRELOAD)


def _lora(rank: int, world_size: int) -> None:
    import peft

    def adapted() -> Any:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["0", "2"])
        return peft.get_peft_model(plain, config)

    recipe = next(
        one.text
        for one in fences(ROOT / "docs" / "recipes.md")
        if one.heading == "All weights to an inference engine" and "def merged" in one.text
    )
    plain = adapted()
    with torch.no_grad():  # peft begins with an adapter that adds nothing
        for name, param in plain.named_parameters():
            if "lora_B" in name:
                param.fill_(0.5)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    expected = {
        f"base_model.model.{name}": value
        for name, value in plain.merge_and_unload().state_dict().items()
    }
    wrapped = adapted()
    wrapped.load_state_dict(state)
    names = {
        "model": ShardedWrapper(wrapped),
        "flatshard": flatshard,
        "engine": Engine(),
    }
    exec(recipe, names)
    torch.testing.assert_close(names["engine"].loaded, expected)
