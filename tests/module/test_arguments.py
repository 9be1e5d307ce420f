"""What frameworks and programs pass, read and assign: used, refused or warned of."""

import copy
import enum
import functools
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from flatshard import BackwardPrefetch, CPUOffload, MixedPrecision, ShardedWrapper, ShardingStrategy
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import assert_raises, naming, on_ranks
from tests.models import CASES, Mlp
from tests.oracle import assert_same, assert_trains_alike, snapshot


@on_ranks(2)
def test_arguments(rank: int, world_size: int) -> None:
    _flags()
    _use_orig_params(rank)
    _meshes()
    _groups(rank)
    _state(rank)


def _flags() -> None:
    """Flags take 0 and 1, but no text: `"no"` is true for Python."""
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
    with warnings.catch_warnings(record=True, action="always") as caught:
        models = [ShardedWrapper(Mlp(), use_orig_params=value) for value in values]
    notes = ["ShardedWrapper ignores use_orig_params: parameters keep their names and shapes"]
    assert [str(one.message) for one in caught] == (notes if rank == 0 else [])
    shapes = [(name, param.shape) for name, param in Mlp().named_parameters()]
    for model in models:
        assert [(name, param.shape) for name, param in model.named_parameters()] == shapes


def _meshes() -> None:
    """A mesh with a dimension that is not for data parallelism raises."""
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
    expected = "load_state_dict: expected a dict of tensors by name, got"
    for value in (None, 1, [("fc1.weight", 0)]):
        assert_raises(TypeError, expected, model.load_state_dict, value)
    # One rank's mistake is every rank's error.
    odd = "adam" if rank else optimizer
    expected = r"expected a torch\.optim\.Optimizer, got 'adam'"
    assert_raises((TypeError, ValueError), expected, ShardedWrapper.optim_state_dict, model, odd)
    state = ShardedWrapper.optim_state_dict(model, optimizer)
    with pytest.raises((TypeError, ValueError), match=expected):
        ShardedWrapper.optim_state_dict_to_load(model, odd, state)
    # The order of its arguments in torch before 2.1.
    with pytest.raises(TypeError, match=r"the model must be an nn\.Module, got dict"):
        ShardedWrapper.optim_state_dict_to_load(state, model, optimizer)


def test_torchs_enums_are_equal() -> None:
    """Members of torch's enums equal flatshard's."""
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


# ---------------------------------------------------------------- torch's wrappers around it


LINEARS = ModuleWrapPolicy({nn.Linear})


def _fsdp(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def _data_parallel(module: nn.Module) -> Any:
    return DataParallel(module)(torch.ones(2, 7))  # it looks at parameters only here


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": _fsdp,
    "fully_shard": fully_shard,
    "replicate": replicate,
    "DataParallel": _data_parallel,
}


@pytest.mark.by_turns
@on_ranks(2)
def test_around_a_sharded_model(rank: int, world_size: int) -> None:
    """DistributedDataParallel gave the parameters of all ranks the values of rank 0's."""
    case = CASES["mlp"]
    model = case.wrap()
    for name, make in MAKERS.items():
        for module in (model, nn.Sequential(nn.Linear(7, 7), model)):
            expected = f"^{name} cannot wrap a ShardedWrapper: .* leave"
            with naming(name), pytest.raises(ValueError, match=expected):
                make(module)
    assert_trains_alike(case, rank, world_size, model)
    # A loop over the blocks of a model meets no wrapper.
    model = CASES["mlp"].wrap(auto_wrap_policy=None)
    for name in ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard"):
        with naming(name), pytest.raises(ValueError, match=f"^{name} cannot wrap a ShardedWrapper"):
            MAKERS[name](next(model.module.children()))


@on_ranks(1)
def test_with_policy_around_a_sharded_model(rank: int, world_size: int) -> None:
    inner = ShardedWrapper(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"module is already a ShardedWrapper .*a Sequential; 1"):
        ShardedWrapper(inner, auto_wrap_policy=LINEARS)
    outer = nn.Sequential(nn.Tanh(), inner)
    with pytest.raises(ValueError, match=r"contains, at '1', .* wrap the model once"):
        ShardedWrapper(outer, auto_wrap_policy=LINEARS)


# ---------------------------------------------------------------- what frameworks do


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        self.seen = self.fc1(ids).dtype
        return self.norm(self.fc2(self.fc1(ids))) * scale


@on_ranks(2)
def test_frameworks(rank: int, world_size: int) -> None:
    _signature()
    _parts_are_moved_where_they_are()
    _attributes_of_fsdp(rank, world_size)


def _signature() -> None:
    """A trainer drops the columns of a batch that the signature of forward does not name."""
    model = ShardedWrapper(_Net(), auto_wrap_policy=LINEARS)
    expected = inspect.signature(_Net().forward)
    for one in (model, copy.deepcopy(model)):
        assert inspect.signature(one.forward) == expected
        assert inspect.signature(one.fc1.forward) == inspect.signature(nn.Linear(1, 1).forward)
        assert one.forward.__name__ == "forward"
        assert one.forward.__self__ is one
    # Accelerate wraps the function, and puts the method in the place of the old one.
    function = model.forward.__func__

    @functools.wraps(function)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return function(*args, **kwargs)

    model.forward = types.MethodType(under_autocast, model)
    assert inspect.signature(model.forward) == expected
    model(torch.ones(2, 4), scale=2.0)
    assert model.seen is torch.bfloat16


def _parts_are_moved_where_they_are() -> None:
    """As teardowns do, also for units that are coalesced."""
    model = ShardedWrapper(_Net(), auto_wrap_policy=LINEARS)
    before = snapshot(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.module.cpu()
    model.module.to(torch.float32)
    model.fc1.float()
    for child in model.children():
        child.to("cpu")
    assert_same(model, before, 0.0, 0.0)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    rnn = ShardedWrapper(nn.GRU(4, 2), sharding_strategy="NO_SHARD").cpu()
    rnn(torch.ones(2, 4))[0].sum().backward()
    for change in (nn.Module.double, nn.Module.share_memory):
        with naming(change), pytest.raises(RuntimeError, match="is sharded"):
            change(model.fc1)


def _attributes_of_fsdp(rank: int, world_size: int) -> None:
    theirs = FullyShardedDataParallel(_Net(), device_id=torch.device("cpu"))
    public = {name for name in vars(theirs) if not name.startswith("_")} - set(vars(nn.Module()))
    missing = {"params", "training_state"}
    precision = MixedPrecision(torch.bfloat16)
    ours = ShardedWrapper(_Net(), auto_wrap_policy=LINEARS, mixed_precision=precision)
    assert {name for name in public if not hasattr(ours, name)} == missing
    assert (ours.rank, ours.world_size) == (rank, world_size)
    assert ours.process_group is dist.group.WORLD
    assert ours.compute_device == theirs.compute_device
    assert ours.mixed_precision == precision
    assert ours.cpu_offload == CPUOffload()
    assert ours.backward_prefetch is BackwardPrefetch.AUTO
    assert ours.forward_prefetch is True
    for name in (*missing, "_fsdp_wrapped_module"):
        assert_raises(AttributeError, f"{name} is not available .*: use", getattr, ours, name)
