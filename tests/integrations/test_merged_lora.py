"""``full_tensors(merge_lora=True)``, against PEFT's ``merge_and_unload`` of the unwrapped model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import flatshard
from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import assert_raises, full_disk, naming, on_ranks
from tests.integrations import PRELOAD, needs
from tests.oracle import assert_identical, snapshot

pytestmark = needs("peft", "lightning", "trl")  # the server of ranks loads the last two


class Experts(nn.Module):
    """Experts in one raw parameter, as transformers keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 5))
        self.down = nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eio,eoj->bj", x, self.up, self.down)


class Model(nn.Module):
    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.image = nn.Conv2d(1, 2, 3)
        self.experts, self.head = Experts(), nn.Linear(4, 3)
        self.attention = nn.MultiheadAttention(4, 2)
        self.turned = Conv1D(3, 4)  # its weight is the transpose of `nn.Linear`'s
        self.register_buffer("scale", torch.ones(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.second(self.first(self.table(tokens)).tanh())
        return self.head(self.experts(x))


def _config(**keywords: Any) -> Any:
    import peft

    return peft.LoraConfig(r=2, lora_alpha=4, **keywords)


_EVERYTHING = {
    "target_modules": ["table", "first", "second", "image"],
    "target_parameters": ["experts.up", "experts.down"],
    "modules_to_save": ["head"],
}


def _adapted(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    import peft

    torch.manual_seed(0)
    model = peft.get_peft_model(Model().to(dtype), config)
    with torch.no_grad():  # PEFT begins with an adapter that adds nothing
        for name, param in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                param.normal_()
    return model


def _everything() -> Any:
    return _adapted(_config(**_EVERYTHING))


def _two_adapters() -> Any:
    torch.manual_seed(1)
    model = _adapted(_config(target_modules=["first", "table"]))
    model.add_adapter("other", _config(target_modules=["second", "first"], use_rslora=True))
    model.base_model.set_adapter(["default", "other"])
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B.other" in name:
                param.normal_()
    return model


def _turned() -> Any:
    return _adapted(_config(target_modules=["turned"], fan_in_fan_out=True))


@on_ranks(2, fresh=True, preload=PRELOAD)
def test_merged_weights(rank: int, world_size: int, tmp_path: Path) -> None:
    for build in (_everything, _two_adapters, _turned):
        expected = build().merge_and_unload().state_dict()
        for keywords in (
            {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear, Experts}), "coalesce_bytes": 0},
            {"sharding_strategy": "NO_SHARD"},
            {"sharding_strategy": "SHARD_OP", "collectives": "native"},
            {"sharding_strategy": "SHARD_GRAD_OP"},
        ):
            with naming(f"{build.__name__}, {keywords}"):
                model = ShardedWrapper(build(), **keywords)
                before, items = snapshot(model), flatshard.full_tensors(model, merge_lora=True)
                found = {key: tensor.clone() for key, tensor in items}
                torch.testing.assert_close(found, dict(expected))
                assert_identical(snapshot(model), before)
    _arguments(rank)
    _saved(tmp_path / "merged.safetensors")
    _rounded_once()
    _refused()


def _arguments(rank: int) -> None:
    model = ShardedWrapper(_everything())
    expected, found = _everything().merge_and_unload().state_dict(), {}
    chosen: dict[str, Any] = {"names": ["first.weight"], "ranks": 1}
    for key, tensor in flatshard.full_tensors(model, merge_lora=True, **chosen):
        found[key] = tensor.clone()
    assert list(found) == (["first.weight"] if rank == 1 else [])
    if rank == 1:
        torch.testing.assert_close(found["first.weight"], expected["first.weight"])
    with pytest.raises(ValueError, match="no parameter or persistent buffer 'first"):
        flatshard.full_tensors(model, merge_lora=True, names=["first.base_layer.weight"])
    with model.module.disable_adapter():
        values = dict(flatshard.full_tensors(model, merge_lora=True, names=["head.weight"]))
    original = model.module.base_model.model.head.original_module.weight
    torch.testing.assert_close(values["head.weight"], original.full_tensor().detach())


def _saved(path: Path) -> None:
    model = ShardedWrapper(_everything())
    expected = _everything().merge_and_unload().state_dict()
    flatshard.checkpoint.save_safetensors(model, path, dtype=torch.float64, merge_lora=True)
    found = load_file(path)
    torch.testing.assert_close(found, {n: v.double() for n, v in expected.items()})
    dist.barrier()
    with full_disk(100), pytest.raises(OSError, match="File too large"):
        flatshard.checkpoint.save_safetensors(model, path.with_name("more"), merge_lora=True)
    assert load_file(path).keys() == expected.keys()


def _rounded_once() -> None:
    """In bfloat16, the sum is computed in float32."""
    narrow, wide = (_adapted(_config(target_modules=["first"]), torch.bfloat16) for _ in range(2))
    model, expected = ShardedWrapper(narrow), wide.float().merge_and_unload().state_dict()
    for key, tensor in flatshard.full_tensors(model, merge_lora=True):
        assert tensor.dtype is torch.bfloat16
        assert torch.equal(tensor, expected[key].bfloat16())


def _refused() -> None:
    import peft

    first = {"target_modules": ["first"]}
    for config, message in (
        (_config(**first, use_dora=True), "first' has adapters with a LoRA variant"),
        (_config(**first, lora_bias=True), "adapters with .* or a bias"),
        (
            _config(target_modules=["attention"]),
            "attention' is a MultiheadAttention, and only LoRA",
        ),
        (peft.IA3Config(**first, feedforward_modules=[]), "first' is a Linear, and only LoRA"),
    ):
        model = ShardedWrapper(_adapted(config))
        assert_raises(NotImplementedError, message, flatshard.full_tensors, model, merge_lora=True)
    prompted = _adapted(_config(**first))
    prompted.base_model = Model()  # as with prompt tuning, which has no adapters in layers
    with pytest.raises(NotImplementedError, match="'' is a PeftModel, and only LoRA"):
        flatshard.full_tensors(ShardedWrapper(prompted), merge_lora=True)
