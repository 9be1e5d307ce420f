"""``model.plan`` predicts what a rank holds."""

import pytest
import torch
from torch import Tensor, nn

from flatshard import ShardedWrapper
from flatshard.memory_plan import checkpoint_blocks
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import on_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def step(model: nn.Module) -> Tensor:
    return model(torch.ones(32, 64)).sum()


@pytest.mark.uncoalesced  # units as small as a block
@pytest.mark.parametrize("collectives", ["native", "sockets"])
@on_ranks(2)
def test_predicted_beside_measured(rank: int, world_size: int, collectives: str) -> None:
    plain = nn.Sequential(*(Block() for _ in range(4)))
    policy = ModuleWrapPolicy({Block})
    model = ShardedWrapper(plain, auto_wrap_policy=policy, collectives=collectives)
    optimizer = torch.optim.AdamW(model.parameters())
    found = model.plan(step, optimizer)
    assert found.measured.keys() == {"parameters"}
    with model.record_steps():
        for _ in range(2):
            step(model).backward()
            optimizer.step()
    found = model.plan(step, optimizer)
    assert {"parameters", "gradients", "optimizer", "unsharded"} <= found.measured.keys()
    assert found.differing == [], found
    assert "measured" in str(found)


@pytest.mark.uncoalesced  # units as small as a block
@on_ranks(2)
def test_checkpointed_model_is_planned_and_stays_the_same(rank: int, world_size: int) -> None:
    activations = {}
    for kind in ("none", "block"):
        plain = nn.Sequential(*(Block() for _ in range(4)))
        checkpoint_blocks(list(plain), kind)
        model = ShardedWrapper(plain, auto_wrap_policy=ModuleWrapPolicy({Block}))
        before = [{**module.__dict__} for module in model.modules()]
        found = model.plan(step)
        activations[kind] = found.outcome.highest["activations"]
        after = [{**module.__dict__} for module in model.modules()]
        assert after == before  # the same hooks, wrappers and tensors
        step(model).backward()
        assert all(param.grad is not None for param in model.parameters())
    assert activations["block"] < activations["none"]
