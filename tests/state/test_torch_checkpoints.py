"""Where ``torch.distributed.checkpoint`` (DCP) could lose or mix up values of sharded state."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from flatshard import CPUOffload, ShardedWrapper
from flatshard.checkpoint import full_optim_state_dict, full_state_dict
from flatshard.state import model_state
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import allow_warnings, assert_raises, on_ranks
from tests.models import CASES
from tests.oracle import OPTIMIZERS, assert_identical, snapshot, trainable
from tests.state.everything import CASE, loss_of_rows, train
from tests.ways import Keywords

# ---------------------------------------------------------------- loading in place


def _net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 6), nn.Linear(6, 1))


@pytest.mark.parametrize("collectives", ["auto", "native"])
@pytest.mark.parametrize(
    "keywords",
    [{"sharding_strategy": "SHARD_OP"}, {"reshard_after_forward": False}],
    ids=["op", "keep"],
)
@on_ranks(4)
def test_loads_into_unsharded_units(
    rank: int, world_size: int, keywords: Keywords, collectives: str, tmp_path: Path
) -> None:
    """After a load, each rank gathers again, also one that holds nothing of a unit."""
    settings = {**keywords, "collectives": collectives, "coalesce_bytes": 0}
    policy = ModuleWrapPolicy((nn.Linear,))
    saved, model = (
        ShardedWrapper(_net(seed), auto_wrap_policy=policy, **settings) for seed in range(2)
    )
    x = torch.randn(5, 3)
    with allow_warnings():
        dcp.save(saved.sharded_state_dict(), checkpoint_id=tmp_path)
        model(x).sum().backward()
        dcp.load(model.sharded_state_dict(), checkpoint_id=tmp_path)
    assert torch.equal(model(x), saved(x))


@pytest.mark.parametrize("is_on_disk", [False, True], ids=["host", "disk"])
@on_ranks(2)
def test_offloaded(rank: int, world_size: int, is_on_disk: bool, tmp_path: Path) -> None:
    offload = CPUOffload(offload_params=True, path=tmp_path if is_on_disk else None)
    results = []
    for call, steps in ((dcp.save, range(2)), (dcp.load, range(5, 6))):
        with allow_warnings():
            model = CASE.wrap(cpu_offload=offload)
            optimizer = OPTIMIZERS["adamw"](trainable(model))
            train(model, optimizer, steps, CASE, rank, world_size)
            get_state_dict(model, optimizer)
            weights, state = get_state_dict(model, optimizer)
            call({"model": weights, "optimizer": state["state"]}, checkpoint_id=tmp_path / "saved")
        full = ShardedWrapper.optim_state_dict(model, optimizer)["state"]
        moments = {name: values["exp_avg"] for name, values in full.items()}
        results.append((model.state_dict(), moments))
    torch.testing.assert_close(results[1], results[0], rtol=0.0, atol=0.0)


# ---------------------------------------------------------------- what would lose values


@on_ranks(2)
def test_units_of_some_ranks(rank: int, world_size: int) -> None:
    """Experts of different ranks have the same names: refused, since one rank's would be saved."""
    groups = [dist.new_group([number]) for number in range(2)]
    model = _net(0)
    model[1] = ShardedWrapper(model[1], process_group=groups[rank])
    model = ShardedWrapper(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for ask in (
        model.sharded_state_dict,
        lambda: get_model_state_dict(model),
        lambda: get_optimizer_state_dict(model, optimizer),
    ):
        expected = r"trains only on ranks \d of the model's ranks"
        assert_raises(NotImplementedError, expected, ask)
    ask, expected = ShardedWrapper.optim_state_dict, "optim_state_dict: .* train only on some"
    with ShardedWrapper.state_dict_type(model, "SHARDED_STATE_DICT"):
        assert_raises(NotImplementedError, expected, ask, model, optimizer)
    full = StateDictOptions(full_state_dict=True)
    assert get_model_state_dict(model, options=full)["1.weight"].shape == (6, 1)


@on_ranks(2)
def test_writer_of_safetensors(rank: int, world_size: int, tmp_path: Path) -> None:
    """It keeps one box of a tensor from each rank, and in its default mode one from all."""
    cut_in_a_row = nn.Linear(5, 7)
    one_row = nn.Linear(40, 1, bias=False)
    for number, (layer, is_distributed, is_right) in enumerate(
        [(cut_in_a_row, True, False), (one_row, False, False), (one_row, True, True)]
    ):
        model = ShardedWrapper(copy.deepcopy(layer))
        settings = dict.fromkeys(("save_distributed", "enable_consolidation"), is_distributed)
        writer = dcp.HuggingFaceStorageWriter(str(tmp_path / str(number)), **settings)
        expected = r"'weight': HuggingFaceStorageWriter .*save_safetensors\("
        refused = pytest.raises(BaseException, match=expected)
        with allow_warnings(), nullcontext() if is_right else refused:
            dcp.save(model.sharded_state_dict(), storage_writer=writer)
        if not is_right:
            continue
        found = load_file(next((tmp_path / str(number)).glob("*.safetensors")))
        torch.testing.assert_close(found, model.state_dict(), rtol=0.0, atol=0.0)


@on_ranks(2)
def test_what_has_no_boxes(rank: int, world_size: int) -> None:
    model = ShardedWrapper(_net(0))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    for param in model.parameters():
        optimizer.state[param]["rows"] = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"'rows' of parameter '0.weight' .* has shape \(2, 3\)"):
        get_optimizer_state_dict(model, optimizer)


@on_ranks(2)
def test_broadcast_from_rank_0(rank: int, world_size: int) -> None:
    """Torch sends memory as it lies: channels_last arrived as other values, on some ranks."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    for case in (CASES["mlp"], CASE):
        plain, model = case.model(), case.wrap()
        theirs, optimizer = (OPTIMIZERS["adamw"](trainable(one)) for one in (plain, model))
        loss_of_rows(plain, case, 0, 0, 1).backward()
        theirs.step()
        expected = copy.deepcopy(get_state_dict(plain, theirs))
        weights, state = get_state_dict(plain, theirs) if rank == 0 else ({}, {})
        for load, value in ((set_model_state_dict, weights), (set_optimizer_state_dict, state)):
            refused = pytest.raises(ValueError, match=r"'conv.weight': broadcast_from_rank0")
            with refused if case is CASE else nullcontext():
                load(model, *([optimizer] if value is state else []), value, options=options)
        if case is not CASE:
            loaded = ShardedWrapper.optim_state_dict(model, optimizer)["state"]
            assert_identical((model.state_dict(), loaded), (expected[0], expected[1]["state"]))


class RowMeans(torch.optim.SGD):
    """Reads rows of its gradients, at gradients of zero only if ``always``."""

    always = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        grads = [param.grad for param in params if param.grad is not None]
        if self.always or any(grad.norm() > 0 for grad in grads):
            for grad in grads:
                grad.sub_(grad.mean(dim=-1, keepdim=True))
        super().step(closure)


class RowMeansUnlessZero(RowMeans):
    always = False


@pytest.mark.parametrize("kind", [RowMeans, RowMeansUnlessZero])
@on_ranks(2)
def test_state_of_a_new_optimizer(rank: int, world_size: int, kind: type[RowMeans]) -> None:
    """`get_state_dict` first makes a step with gradients of zero."""
    case, plain = CASES["mlp"], CASES["mlp"].model()
    model = case.wrap()
    optimizers = [kind(one.parameters(), lr=0.1, momentum=0.9) for one in (model, plain)]
    with allow_warnings():
        get_state_dict(model, optimizers[0])
    train(model, optimizers[0], range(2), case, rank, world_size)
    train(plain, optimizers[1], range(2), case)
    torch.testing.assert_close(snapshot(model), snapshot(plain))


# ---------------------------------------------------------------- full state dicts


@on_ranks(2)
def test_full_on_rank_0(rank: int, world_size: int, tmp_path: Path) -> None:
    """Rank 0 alone keeps copies, in host memory: by our functions and by torch's."""
    model = CASE.wrap()
    optimizer = OPTIMIZERS["adamw"](trainable(model))
    train(model, optimizer, range(2), CASE, rank, world_size)
    expected = model.state_dict(), ShardedWrapper.optim_state_dict(model, optimizer)
    on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with mock.patch.object(model_state, "gather_full", wraps=model_state.gather_full) as gather:
        ours = full_state_dict(model), full_optim_state_dict(model, optimizer)
        theirs = get_model_state_dict(model, options=on_rank_0)
    assert {call.args[1].type for call in gather.mock_calls} == {"cpu"}
    assert {call.kwargs["is_kept"] for call in gather.mock_calls} == {rank == 0}
    _, state = get_state_dict(model, optimizer, options=on_rank_0)
    if rank > 0:
        assert (*ours, theirs, state) == ({}, {}, {}, {})
    else:
        for found in (ours, (theirs, ours[1])):
            torch.testing.assert_close(found[0], expected[0], rtol=0.0, atol=0.0)
            torch.testing.assert_close(found[1]["state"], expected[1]["state"])
        for name in expected[1]["state"]:
            torch.testing.assert_close(state["state"][name], expected[1]["state"][name])
    frozen = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    left = get_model_state_dict(model, options=frozen)
    assert ("frozen.bias" in left, "frozen.weight" in left) == (False, rank == 0)

    with allow_warnings():
        dcp.save(model.sharded_state_dict(), checkpoint_id=tmp_path)
    if rank == 0:
        dcp_to_torch_save(tmp_path, tmp_path / "full.pt")
        converted = torch.load(tmp_path / "full.pt", weights_only=True)
        torch.testing.assert_close(converted, expected[0], rtol=0.0, atol=0.0)
        plain = CASE.model()
        plain_optimizer = OPTIMIZERS["adamw"](trainable(plain))
        assert full_state_dict(plain).keys() == expected[0].keys()
        assert full_optim_state_dict(plain, plain_optimizer)["state"] == {}
