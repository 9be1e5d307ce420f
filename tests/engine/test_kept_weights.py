"""Units that return or keep their weights, or views of them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatshard import ShardedWrapper
from flatshard.module.wrappers import handles_in
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import assert_raises, on_ranks
from tests.models import Case, Composed, vectors
from tests.oracle import assert_same, assert_same_gradients
from tests.scripts import torchrun
from tests.side import pair


class _Box:
    """An object that holds a tensor, where no hook finds the tensor."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class _Giver(nn.Module):
    """Returns a view of its weight."""

    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 3))
        self.kind = kind

    def forward(self) -> Any:
        return self.kind(self.weight.t())


def _taker() -> nn.Module:
    giver = _Giver(lambda view: view)
    return Composed(
        lambda net, x: net.linear(x) @ net.giver().t(), giver=giver, linear=nn.Linear(7, 7)
    )


@pytest.mark.parametrize("way", ["full", "grad_op"])
@on_ranks(2)
def test_unit_returns_a_view_of_its_weight(rank: int, world_size: int, way: str) -> None:
    """A view that a unit returns keeps its values after the unit is resharded."""
    sharded, plain = pair(rank, world_size, way, Case("taker", _taker, vectors, (_Giver,)))
    for run in (sharded, plain):
        run.train(0, 3)
    assert_same(sharded.model, plain.model, 1e-12)


class _Keeper(nn.Sequential):
    """Keeps its weight, for a penalty, as if it stayed the same object."""

    def __init__(self, numel: int) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(7, numel))
        self.kept: list[Tensor] = []
        self[0].register_forward_hook(self._keep)

    def _keep(self, linear: nn.Linear, *_: Any) -> None:
        assert type(linear.weight) is nn.Parameter
        self.kept[:] = [linear.weight]


@pytest.mark.parametrize("collectives", ["auto", "sockets"])
@pytest.mark.parametrize("numel", [7, 100_000])
@on_ranks(2)
def test_weight_kept_from_forward(rank: int, world_size: int, collectives: str, numel: int) -> None:
    """Uses of a weight that a module keeps from forward are right, or raise if it was freed."""
    plain, x = _Keeper(numel), torch.ones(3, 7)

    (plain(x).pow(2).mean() + plain.kept[0].pow(2).sum()).backward()
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        keeper = _Keeper(numel)
        keywords = {"sharding_strategy": strategy, "collectives": collectives}
        keywords["backward_prefetch"] = "BACKWARD_PRE"
        model = ShardedWrapper(keeper, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **keywords)
        for _ in range(2):
            out = model(x).pow(2).mean()
            (kept,) = keeper.kept
            assert kept.shape == (numel, 7)
            is_mapped = any(handle.memory.shows_shards for handle in handles_in(model))
            assert is_mapped is (numel > 7 and collectives == "auto")
            if strategy == "SHARD_GRAD_OP" and not is_mapped:
                (out + kept.pow(2).sum()).backward()
            else:
                assert "FreedParameter('0.weight')" in repr(kept)
                assert kept.requires_grad
                for use in (torch.sum, Tensor.t, lambda weight: x @ weight, lambda w: w.data):
                    assert_raises(RuntimeError, r"'0.weight': .* kept from a forward", use, kept)
                # What the error recommends.
                (out + model[0].weight.pow(2).sum()).backward()
            assert_same_gradients(model, plain, 1.3e-6, 1e-5)
            model.zero_grad()


READS_A_VIEW = """
import torch, torch.distributed as dist
from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from torch import nn

dist.init_process_group("gloo")
kept = []
linear = nn.Linear(7, 7)
linear.register_forward_pre_hook(lambda module, _: kept.append(module.weight[0]))
model = nn.Sequential(linear, nn.Linear(7, 7))
model = ShardedWrapper(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
model(torch.ones(3, 7))
if dist.get_rank() == 0:  # or both would write at once
    kept[0].sum()  # the last line
"""


_CLEARS = "_clear_storage_data_ptr_access_error_msg"


@pytest.mark.skipif(not hasattr(torch._C, _CLEARS), reason="torch cannot let reads raise")
def test_a_view_kept_from_forward(tmp_path: Path) -> None:
    """Reading a view after its unit was resharded ends the program with the line that read it."""
    script = tmp_path / "reads_a_view.py"
    script.write_text(READS_A_VIEW)
    done = torchrun(2, script, environment=dict(os.environ), cwd=tmp_path)
    last = READS_A_VIEW[: READS_A_VIEW.index("# the last line")].count("\n") + 1
    assert f'File "{script}", line {last}, in <module>' in done.err
    assert ": a view of an unsharded parameter (weight[0], weight.detach()) was read" in done.err


@pytest.mark.parametrize("grad", [True, False])
@on_ranks(2)
def test_view_of_a_weight_in_an_object_is_refused(rank: int, world_size: int, grad: bool) -> None:
    """Inside an object, the view that a unit returns cannot be copied."""
    model = ShardedWrapper(nn.Sequential(_Giver(_Box)), auto_wrap_policy=ModuleWrapPolicy({_Giver}))
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"clone\(\)"):
        model[0]()
