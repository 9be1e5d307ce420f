"""``model.plan`` predicts what a rank holds, at the speed of the device on which the model is."""

import pytest
import torch
from torch import Tensor, nn

from flatshard import ShardedWrapper
from flatshard.extras.plan import hardware, planning
from flatshard.extras.plan.hardware import DEVICES, Device, device_of
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
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        slow = Device(1e6, 1e6, 1e12, 0.0, is_gpu=False)
        patch.setattr(planning, "device_of", lambda kind: asked.append(kind) or slow)
        found = model.plan(step, optimizer)
    # Backward has twice the operations of forward; the input needs no gradient.
    flops = 3 * 4 * 2 * (2 * 32 * 64 * 256) - 2 * 32 * 64 * 256
    assert asked == ["cpu"]
    assert found.outcome.compute_seconds == pytest.approx(flops / 1e6, rel=0.01)
    with model.record_steps():
        for _ in range(2):
            step(model).backward()
            optimizer.step()
    found = model.plan(step, optimizer)
    assert {"parameters", "gradients", "optimizer", "unsharded"} <= found.measured.keys()
    assert found.differing == [], found
    assert "measured" in str(found)
    # A CPU needs longer than an H100, which needs 4 microseconds for each of these operators.
    assert found.outcome.compute_seconds > flops / DEVICES["h100"].flops


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


@pytest.mark.parametrize(
    ("name", "gib", "key"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "h100"),
        ("NVIDIA H100 NVL", 93.1, "h100-96gb"),
        ("NVIDIA A100-SXM4-40GB", 39.5, "a100-40gb"),
        ("NVIDIA GB200", 184.0, "gb200"),
        ("AMD Instinct MI300X", 191.0, "mi300x"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx4090"),
    ],
)
def test_a_known_card_is_found_by_its_name(
    name: str, gib: float, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Properties:
        total_memory = gib * 2**30

    Properties.name = name  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    assert device_of.__wrapped__("cuda") == DEVICES[key]


def test_other_devices_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    device_of.cache_clear()
    calls: list[str] = []
    real = hardware.calibrate
    monkeypatch.setattr(
        hardware, "calibrate", lambda kind, **more: calls.append(kind) or real(kind, **more)
    )
    assert device_of("cpu") is device_of("cpu")
    assert calls == ["cpu"]  # measured once
    assert 1e8 < device_of("cpu").flops < DEVICES["h100"].flops
    device_of.cache_clear()
