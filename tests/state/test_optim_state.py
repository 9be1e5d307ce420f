"""Optimizer state by name: into and out of any strategy, world size and plain optimizer."""

import copy
import io
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatshard import FlatShardTensor, ShardedWrapper
from flatshard.collectives import record
from tests.harness import assert_raises, naming, on_ranks, run_ranks
from tests.models import CASES
from tests.oracle import OPTIMIZERS, own_parts, trainable
from tests.state.everything import CASE, StateDict, loss_of_rows, train
from tests.ways import select

pytestmark = pytest.mark.by_turns

MLP = CASES["mlp"]
save, load = ShardedWrapper.optim_state_dict, ShardedWrapper.optim_state_dict_to_load


def _assert_alike(actual: StateDict, expected: StateDict, tolerance: float = 1e-10) -> None:
    """The same state of the same parameters, in any order of these, and the same groups."""
    assert set(actual["state"]) == set(expected["state"])
    for name, state in expected["state"].items():
        with naming(name):
            assert list(actual["state"][name]) == list(state)
            for key, value in state.items():
                found = actual["state"][name][key]
                torch.testing.assert_close(found, value, rtol=0.0, atol=tolerance)
                if isinstance(value, Tensor):
                    assert type(found) is Tensor
                    assert found.stride() == value.stride(), key
    assert len(actual["param_groups"]) == len(expected["param_groups"])
    for group, other in zip(actual["param_groups"], expected["param_groups"], strict=True):
        assert set(group["params"]) == set(other["params"])
        assert {**group, "params": None} == {**other, "params": None}


def _by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateDict:
    """A plain optimizer's state with names for positions, without the library."""
    names = {id(param): name for name, param in model.named_parameters()}
    plain = optimizer.state_dict()
    ids = [id(param) for group in optimizer.param_groups for param in group["params"]]
    groups = [
        {**group, "params": [names[ids[position]] for position in group["params"]]}
        for group in plain["param_groups"]
    ]
    state = {names[ids[position]]: value for position, value in plain["state"].items()}
    return {"state": state, "param_groups": groups}


# ---------------------------------------------------------------- all kinds of optimizers

CHOSEN = select("full", "no_shard")
# ---------------------------------------------------------------- groups and what else there is


def _grouped(model: nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1, "tag": "matrices"},
        {"params": [p for p in params if p.ndim <= 1], "lr": 0.002},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_groups_and_schedulers(rank: int, world_size: int) -> None:
    plain = CASE.model()
    model = CASE.wrap()
    saved = {}
    for one in (plain, model):
        optimizer = _grouped(one)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        ours = (rank, world_size) if one is model else (0, 1)
        for step in range(3):
            train(one, optimizer, range(step, step + 1), CASE, *ours)
            scheduler.step()
        saved[one] = save(one, optimizer)
    _assert_alike(saved[model], saved[plain])
    assert saved[model]["param_groups"][0]["initial_lr"] == 0.01
    assert saved[model]["param_groups"][1]["lr"] == 0.002 / 8

    # Groups are found by the parameters in them, in whatever order.
    backwards = {**saved[model], "param_groups": saved[model]["param_groups"][::-1]}
    optimizer = _grouped(model)
    load(model, optimizer, backwards, load_directly=True)
    assert [group.get("tag") for group in optimizer.param_groups] == ["matrices", None]
    _assert_alike(save(model, optimizer), saved[model], 0.0)

    other = CASE.wrap()
    with pytest.raises(ValueError, match=r"parameters '.*' and '.*' are in one group.*decay"):
        load(other, OPTIMIZERS["adamw"](trainable(other)), saved[plain])


@on_ranks(2)
def test_container_with_plain_parameters(rank: int, world_size: int) -> None:
    """Two wrappers and a plain module; state of the optimizer's own."""

    def build(wrap: Callable[[nn.Module], nn.Module]) -> nn.ModuleDict:
        torch.manual_seed(0)
        parts = {name: nn.Linear(3, 3).double() for name in ("a", "plain", "b")}
        return nn.ModuleDict({n: p if n == "plain" else wrap(p) for n, p in parts.items()})

    states = []
    for wrap in (lambda part: part, ShardedWrapper, lambda part: ShardedWrapper(part)):
        model = build(wrap)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if states:
            load(model, optimizer, states[-1], False, True)
        for _ in range(0 if states else 2):
            model["b"](model["plain"](model["a"](torch.ones(2, 3).double()))).sum().backward()
            optimizer.step()
            optimizer.state["mine"] = {"x": torch.ones(2), "y": 3}
        states.append(save(model, optimizer))
    names = [f"{part}.{name}" for part in ("a", "plain", "b") for name in ("weight", "bias")]
    assert set(states[0]["state"]) == {*names, "mine"}
    for state in states[1:]:
        _assert_alike(state, states[0], 0.0)


@on_ranks(2)
def test_names_for_positions(rank: int, world_size: int) -> None:
    """Names that the optimizer itself, or DistributedDataParallel, gave."""
    plain = MLP.model()
    named = torch.optim.AdamW(reversed(list(plain.named_parameters())))
    train(plain, named, range(2), MLP)
    expected = _by_name(plain, named)
    (group,) = expected["param_groups"]
    del group["param_names"]
    under_ddp = {
        "state": {f"module.{name}": value for name, value in expected["state"].items()},
        "param_groups": [{**group, "params": [f"module.{name}" for name in group["params"]]}],
    }
    for way in CHOSEN.values():
        model = MLP.wrap(**way.keywords)
        for given in (named.state_dict(), expected, under_ddp):
            optimizer = torch.optim.AdamW(model.named_parameters())
            load(model, optimizer, given, load_directly=True)
            assert "param_names" in optimizer.param_groups[0]
            _assert_alike(save(model, optimizer), expected, 0.0)
        by_name = load(model, optimizer, expected, is_named_optimizer=True)
        names = [name for name, _ in model.named_parameters()]
        assert by_name["param_groups"][0]["params"] == names
        assert list(by_name["state"]) == names
        again = save(model, optimizer, by_name)
        _assert_alike(again, expected, 0.0)


@pytest.mark.uncoalesced  # counts gathers of each layer
@on_ranks(2)
def test_result_is_whole_and_apart(rank: int, world_size: int) -> None:
    model = MLP.wrap()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(2), MLP, rank, world_size)
    with record() as events:
        saved = save(model, optimizer)
    moved = [event for event in events if event.kind == "all_to_all"]
    assert len(moved) == len(("fc1", "fc2", "fc3")) * len(("exp_avg", "exp_avg_sq"))
    # Each rank sends its elements once, to the other rank.
    held = sum(p.local.numel() for p in model.parameters() if isinstance(p, FlatShardTensor))
    assert sum(event.nbytes for event in moved) == 2 * 8 * held

    file = io.BytesIO()
    torch.save(saved, file)
    numel = sum(one.numel() for state in saved["state"].values() for one in state.values())
    assert len(file.getvalue()) < 12_000 + 2 * 8 * numel
    file.seek(0)
    _assert_alike(torch.load(file, weights_only=True), saved, 0.0)

    with naming("between forward and backward"):
        loss = loss_of_rows(model, MLP, 0, rank, world_size)
        _assert_alike(save(model, optimizer), saved, 0.0)
        loss.backward()
        optimizer.zero_grad()

    # Nothing shares memory: not what was saved, nor what was loaded.
    before = save(model, optimizer)
    load(model, optimizer, saved, load_directly=True)
    train(model, optimizer, range(2, 3), MLP, rank, world_size)
    _assert_alike(saved, before, 0.0)
    with pytest.raises(AssertionError):
        _assert_alike(save(model, optimizer), before)

    only = save(model, optimizer, rank0_only=True, offload_to_cpu=False)
    assert (only == {}) == (rank > 0)


@on_ranks(2)
def test_dtypes(rank: int, world_size: int) -> None:
    """Cast to the parameter's, but for ``step``: as plain optimizers do."""
    plain = MLP.model()
    expected = torch.optim.AdamW(plain.parameters())
    train(plain, expected, range(2), MLP)
    saved = _by_name(plain, expected)
    other = MLP.model(torch.bfloat16).bfloat16()
    cast = torch.optim.AdamW(other.parameters())
    cast.load_state_dict(expected.state_dict())
    for way in CHOSEN.values():
        model = MLP.wrap(MLP.model().bfloat16(), **way.keywords)
        optimizer = torch.optim.AdamW(model.parameters())
        load(model, optimizer, saved, load_directly=True)
        _assert_alike(save(model, optimizer), _by_name(other, cast), 0.0)


# ---------------------------------------------------------------- what cannot be done


@on_ranks(2)
def test_errors_reach_all_ranks(rank: int, world_size: int) -> None:
    model = MLP.wrap()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, range(2), MLP, rank, world_size)
    saved = save(model, optimizer)

    def changed(name: str, **entries: Any) -> StateDict:
        state = {**saved["state"], name: {**saved["state"][name], **entries}}
        return {**saved, "state": state}

    def refused(message: str, given: StateDict) -> None:
        assert_raises(ValueError, message, load, model, optimizer, given)

    refused(r"rank 1: expected an optimizer state.*rank0_only", saved if rank == 0 else {})
    for wrong in (torch.ones(7, 5), torch.ones(35), torch.ones(1), torch.ones(5, 1)):
        given = changed("fc1.weight", exp_avg=wrong)
        refused(r"'exp_avg' of.*'fc1.weight'.*\(5, 7\).*got", given)
    given = changed("fc1.bias", exp_avg=torch.ones(5 - rank))
    refused(r"rank 1: state 'exp_avg' of parameter 'fc1.bias'", given)
    given = changed("fc2.bias", step=torch.tensor(2.0 + rank))
    refused(r"'step' of 'fc2.bias' is 2.0 on rank 0, 3.0 on rank 1", given)

    (group,) = saved["param_groups"]
    for params in (group["params"][1:], [*group["params"], "fc9.weight"]):
        given = {**saved, "param_groups": [{**group, "params": params}]}
        refused(r"Missing in the state: 'fc1|Unexpected: 'fc9", given)
    few = torch.optim.AdamW(list(model.parameters())[:2])
    with pytest.raises(ValueError, match=r"6 parameters without names.*has 2"):
        load(model, few, torch.optim.AdamW(MLP.model().parameters()).state_dict())
    assert_raises(ValueError, "outermost ShardedWrapper", save, model.module.fc1, optimizer)

    # Nothing was sent before all ranks knew.
    own = copy.deepcopy(own_parts(optimizer))
    if rank == 1:
        del own["state"][3]["exp_avg_sq"]
    with pytest.raises(ValueError, match=r"'exp_avg_sq' of 'fc2.bias' is .* on rank 0, nothing on"):
        save(model, optimizer, own)
    own["state"][3]["exp_avg_sq"] = torch.ones(17)
    with pytest.raises(ValueError, match=r"rank \d: state 'exp_avg_sq' of parameter 'fc2.bias'"):
        save(model, optimizer, own)
    with ShardedWrapper.summon_full_params(model):
        assert_raises(RuntimeError, "under summon_full_params", save, model, optimizer)
    _assert_alike(save(model, optimizer), saved, 0.0)
    train(model, optimizer, range(2, 3), MLP, rank, world_size)


# ---------------------------------------------------------------- the state of one rank


@dataclass
class Snapshot:
    optimizer: StateDict


def test_one_ranks_state() -> None:
    states = run_ranks(_one_ranks_state, 2, None)
    run_ranks(_one_ranks_state, 2, states)
    run_ranks(_other_layout, 3, states)


def _one_ranks_state(rank: int, world_size: int, states: list[StateDict] | None) -> StateDict:
    """Goes into the same place; elsewhere the first step at the latest refuses it."""
    model = MLP.wrap()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    if states is not None:
        with pytest.raises(ValueError, match="only the parts of one rank"):
            load(model, optimizer, states[rank])
        optimizer.load_state_dict(states[rank])
    train(model, optimizer, range(2), MLP, rank, world_size)
    if states is not None:
        with pytest.raises(RuntimeError, match=r"rank \d of 2.*rank \d of 2.*optim_state_dict"):
            optimizer.load_state_dict(states[1 - rank])
        assert own_parts(optimizer)["state"][0]["step"] == 4
        assert all("flatshard" not in group for group in optimizer.param_groups)
    own = own_parts(optimizer)
    copied = asdict(Snapshot(own))["optimizer"]  # minGPT saves this: it copies tensor by tensor
    torch.testing.assert_close(copied["state"], own["state"], rtol=0, atol=0)
    for leaf in pytree.tree_leaves(copied["state"]):
        assert type(leaf) is torch.Tensor
        assert leaf.untyped_storage().nbytes() == leaf.nbytes, "its neighbours were copied, too"
    if rank > 0:
        return optimizer.state_dict()
    with pytest.warns(UserWarning, match="contains only this rank's parts"):
        return optimizer.state_dict()


def _other_layout(rank: int, world_size: int, states: list[StateDict]) -> None:
    model = MLP.wrap()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    optimizer.load_state_dict(states[0])  # nothing of ours sees this yet
    loss_of_rows(model, MLP, 0, rank, world_size).backward()
    for _ in range(2):
        assert_raises(RuntimeError, r"rank 0 of 2.*rank \d of 3.*optim_state_dict", optimizer.step)
    plain = MLP.model()
    other = OPTIMIZERS["adamw"](plain.parameters())
    other.load_state_dict(states[0])
    loss_of_rows(plain, MLP, 0, 0, 1).backward()
    assert_raises(RuntimeError, r"rank 0 of 2.*not sharded", other.step)
