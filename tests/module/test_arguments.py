"""Arguments that have a meaning for Python or for torch, and none here: refused or warned of."""

import enum
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from flatshard import BackwardPrefetch, ShardedWrapper, ShardingStrategy
from tests.harness import naming, on_ranks
from tests.models import Mlp


@on_ranks(2)
def test_arguments(rank: int, world_size: int) -> None:
    _flags()
    _use_orig_params(rank)
    _meshes()
    _groups(rank)
    _state(rank)


def _flags() -> None:
    """`"no"` is true for Python, and 0 was not False."""
    for keyword in (
        *("sync_module_states", "forward_prefetch", "limit_all_gathers"),
        *("broadcast_buffers", "forward_sync_buffers"),
    ):
        match = f"{keyword.replace('forward_sync', 'broadcast')}: expected True or False, got 'no'"
        with naming(keyword), pytest.raises(TypeError, match=match):
            ShardedWrapper(Mlp(), **{keyword: "no"})
    model = ShardedWrapper(Mlp(), broadcast_buffers=0)
    assert not model.broadcast_buffers
    for context in (
        lambda: ShardedWrapper.summon_full_params(model, writeback="no"),
        lambda: ShardedWrapper.summon_full_params(model, recurse="no"),
        lambda: model.no_sync(replicas_only="no"),
    ):
        with pytest.raises(TypeError, match="expected True or False, got 'no'"), context():
            pass


def _use_orig_params(rank: int) -> None:
    """FSDP1's keyword, of which ranks may pass different values."""
    values = [None, True, rank == 0, False]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models = [ShardedWrapper(Mlp(), use_orig_params=value) for value in values]
    notes = ["ShardedWrapper ignores use_orig_params: parameters keep their names and shapes"]
    assert [str(one.message) for one in caught] == (notes if rank == 0 else [])
    shapes = [(name, param.shape) for name, param in Mlp().named_parameters()]
    for model in models:
        assert [(name, param.shape) for name, param in model.named_parameters()] == shapes


def _meshes() -> None:
    """Of a mesh for data and tensor parallelism, one dimension was taken for replicas."""
    for names in (("dp", "tp"), ("dp_shard", "tp"), ("pp", "dp_replicate"), ("shard", "dp_shard")):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
        with naming(names), pytest.raises(ValueError, match=rf"device_mesh: .*'{names[0]}', "):
            ShardedWrapper(Mlp(), device_mesh=mesh)
        one_dimension = ShardedWrapper(Mlp(), device_mesh=mesh[names[0]])
        assert one_dimension.sharding_strategy is ShardingStrategy.FULL_SHARD
    for names in (None, ("dp_replicate", "dp_shard"), ("shard", "replica")):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
        hybrid = ShardedWrapper(Mlp(), device_mesh=mesh)
        assert hybrid.sharding_strategy is ShardingStrategy.HYBRID_SHARD
    assert hybrid.extra_repr().endswith("over 1 rank")


def _groups(rank: int) -> None:
    first = dist.new_group([0])
    if rank == 1:
        for group in (first, (first, first)):
            with pytest.raises(ValueError, match="process_group: rank 1 is not in this group"):
                ShardedWrapper(nn.Tanh(), group)


def _state(rank: int) -> None:
    model = ShardedWrapper(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for value in (None, 1, [("fc1.weight", 0)]):
        with pytest.raises(
            TypeError, match="load_state_dict: expected a dict of tensors by name, got"
        ):
            model.load_state_dict(value)
    # One rank's mistake is every rank's error.
    odd = "adam" if rank else optimizer
    with pytest.raises(
        (TypeError, ValueError), match=r"expected a torch\.optim\.Optimizer, got 'adam'"
    ):
        ShardedWrapper.optim_state_dict(model, odd)
    state = ShardedWrapper.optim_state_dict(model, optimizer)
    with pytest.raises(
        (TypeError, ValueError), match=r"expected a torch\.optim\.Optimizer, got 'adam'"
    ):
        ShardedWrapper.optim_state_dict_to_load(model, odd, state)
    # The order of its arguments in torch before 2.1.
    with pytest.raises(TypeError, match=r"the model must be an nn\.Module, got dict"):
        ShardedWrapper.optim_state_dict_to_load(state, model, optimizer)


def test_torchs_enums_are_equal() -> None:
    """`wrapper.sharding_strategy == ShardingStrategy.FULL_SHARD` was False with torch's enum."""
    for theirs in fsdp.ShardingStrategy:
        for ours in ShardingStrategy:
            same = theirs.name.removeprefix("_") == ours.name
            assert (ours == theirs) is same
            assert (theirs == ours) is same
            assert (ours != theirs) is not same
    strategy = ShardingStrategy.FULL_SHARD
    assert {fsdp.ShardingStrategy.FULL_SHARD: 1}[strategy] == 1
    assert fsdp.BackwardPrefetch.BACKWARD_PRE == BackwardPrefetch.BACKWARD_PRE
    assert strategy != "FULL_SHARD"
    assert strategy != enum.Enum("Other", "FULL_SHARD").FULL_SHARD
    assert nn.Linear not in (strategy,)
