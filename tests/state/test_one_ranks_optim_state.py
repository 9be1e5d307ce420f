"""``optimizer.state_dict()`` itself: the state of one rank alone."""

from dataclasses import asdict, dataclass

import pytest
import torch
from torch.utils import _pytree as pytree

from flatshard import ShardedWrapper
from tests.harness import run_ranks
from tests.models import CASES
from tests.oracle import OPTIMIZERS, own_parts
from tests.state.everything import StateDict, loss_of_rows, train

pytestmark = pytest.mark.by_turns


@dataclass
class Snapshot:
    optimizer: StateDict


def test_one_ranks_state() -> None:
    states = run_ranks(_one_ranks_state, 2, None)
    run_ranks(_one_ranks_state, 2, states)
    run_ranks(_other_layout, 3, states)


def _one_ranks_state(rank: int, world_size: int, states: list[StateDict] | None) -> StateDict:
    """Goes into the same place; elsewhere the first step at the latest refuses it."""
    case = CASES["mlp"]
    model = case.wrap(case.model())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    if states is not None:
        with pytest.raises(ValueError, match="only the parts of one rank"):
            ShardedWrapper.optim_state_dict_to_load(model, optimizer, states[rank])
        optimizer.load_state_dict(states[rank])
    train(model, optimizer, range(2), case, rank, world_size)
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
    case = CASES["mlp"]
    model = case.wrap(case.model())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    optimizer.load_state_dict(states[0])  # nothing of ours sees this yet
    loss_of_rows(model, case, 0, rank, world_size).backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"rank 0 of 2.*rank \d of 3.*optim_state_dict"):
            optimizer.step()
    plain = case.model()
    other = OPTIMIZERS["adamw"](plain.parameters())
    other.load_state_dict(states[0])
    loss_of_rows(plain, case, 0, 0, 1).backward()
    with pytest.raises(RuntimeError, match=r"rank 0 of 2.*not sharded"):
        other.step()
