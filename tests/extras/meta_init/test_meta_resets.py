"""What gives modules on the meta device values besides ``reset_parameters()``, and what is left."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import flatshard
from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.extras.meta_init.test_meta_init import on_meta
from tests.harness import naming, on_ranks
from tests.oracle import snapshot
from tests.ways import BASIC


class Norm(nn.Module):
    """Without ``reset_parameters()``, as transformers' are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Rotary(nn.Module):
    """A buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inv_freq.cos()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = Norm(), nn.Linear(4, 4)
        self.down = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Pretrained(nn.Module):
    """Its constructor would end with ``self.apply(self._init_weights)``."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.blocks, self.head = Rotary(), nn.Sequential(Block(), Block()), Norm()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.rotary(x)))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)
            nn.init.zeros_(module.bias)
        elif isinstance(module, Block):
            nn.init.constant_(module.down.weight, 0.25)  # over what its own call gave
        elif isinstance(module, Norm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Rotary):
            module.inv_freq.copy_(torch.arange(4.0))


def _expected() -> Pretrained:
    model = Pretrained()
    with torch.no_grad():
        model.apply(model._init_weights)
    return model


CASES = [*(("full", number) for number in range(3)), ("no_shard", 2)]
POLICIES = (None, ModuleWrapPolicy({Block}), ModuleWrapPolicy({nn.Linear}))


@on_ranks(2)
def test_init_weights_and_a_function_that_recurses(rank: int, world_size: int) -> None:
    expected = _expected()

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu")
        module.apply(expected._init_weights)

    for (way, number), init_fn in itertools.product(CASES, (None, init)):
        keywords = {"auto_wrap_policy": POLICIES[number], "param_init_fn": init_fn}
        with naming(f"{way} {number} {init_fn}"):
            model = ShardedWrapper(on_meta(Pretrained), **keywords, **BASIC[way].keywords)
            names = ("blocks.0.norm.weight", "blocks.1.up.weight", "head.weight")
            if init_fn is None:
                names = expected.state_dict()
                torch.testing.assert_close(model(torch.ones(4)), expected(torch.ones(4)))
            for name in names:
                assert torch.equal(model.state_dict()[name], expected.state_dict()[name])
    # A part that has values keeps them.
    half = on_meta(Pretrained)
    half.blocks[0] = Block()
    before = snapshot(half.blocks[0])
    model = ShardedWrapper(half, auto_wrap_policy=ModuleWrapPolicy({Block}))
    torch.testing.assert_close(dict(model.blocks[0].state_dict()), before)
    assert model.state_dict()["blocks.1.up.weight"].unique().tolist() == [0.5]


@on_ranks(2)
def test_buffers_that_no_state_dict_has(rank: int, world_size: int) -> None:
    expected = _expected()
    for sync in (None, True):
        keywords = {"auto_wrap_policy": POLICIES[1], "param_init_fn": flatshard.leave_empty}
        model = ShardedWrapper(on_meta(Pretrained), sync_module_states=sync, **keywords)
        model.load_state_dict(expected.state_dict())
        torch.testing.assert_close(model(torch.ones(4)), expected(torch.ones(4)))
    # Where nothing says what it is, the error says how to.
    module = on_meta(lambda: nn.Sequential(Rotary(), nn.Linear(4, 4)))
    model = ShardedWrapper(module, param_init_fn=flatshard.leave_empty)
    model.load_state_dict(nn.Sequential(Rotary(), nn.Linear(4, 4)).state_dict())
    with pytest.raises(RuntimeError, match=r"'0.inv_freq': .*persistent=False are in no state"):
        model(torch.ones(4))


@on_ranks(2)
def test_ignored_modules_are_left_alone(rank: int, world_size: int) -> None:
    """`param_init_fn` is not called with ignored modules, whose tensors stay as they are."""
    seen = []

    def init(module: nn.Module) -> None:
        seen.append(module)
        module.to_empty(device="cpu", recurse=False)
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 7.0)

    for init_fn in (init, None):
        for policy in (None, ModuleWrapPolicy({nn.Sequential})):
            module = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3))))
            real, meta = nn.Linear(4, 4), on_meta(lambda: nn.Linear(4, 4))
            module[1].extend([real, nn.Sequential(meta)])
            before = real.weight.detach().clone()
            keywords = {"param_init_fn": init_fn, "auto_wrap_policy": policy}
            model = ShardedWrapper(module, ignored_modules=[real, module[1][2]], **keywords)
            assert torch.equal(model.module[1][1].weight, before)
            assert meta.weight.is_meta
            assert not {real, meta, module[1][2]} & set(seen)
            if init_fn is not None:
                assert model.state_dict()["1.0.weight"].unique().tolist() == [7.0]
    # A single parameter; functions for whole modules gave it theirs.
    module = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    module[0].weight = real = nn.Parameter(torch.eye(4))
    with pytest.raises(ValueError, match="param_init_fn would overwrite"):
        ShardedWrapper(module, param_init_fn=nn.Module.to_empty, ignored_states=[real])
    assert torch.equal(real, torch.eye(4))
