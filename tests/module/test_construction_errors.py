"""What the constructor refuses, and what it takes with a warning; the same on every rank."""

import itertools
import re
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatshard
from flatshard import ShardedWrapper, ShardingStrategy
from flatshard.tensor import flat_parameter
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import allow_warnings, assert_raises, naming, on_ranks, rank_0_warns
from tests.models import CASES, Mlp
from tests.oracle import assert_same_state, assert_trains_alike, sgd, train, train_steps

pytestmark = pytest.mark.by_turns

LINEARS = ModuleWrapPolicy({nn.Linear})


# ---------------------------------------------------------------- process groups


@on_ranks(2, init_group=False)
def test_several_ranks_without_a_process_group(rank: int, world_size: int) -> None:
    assert_raises(RuntimeError, "init_process_group", ShardedWrapper, Mlp())


@on_ranks(1, init_group=False)
def test_one_process_without_a_process_group(rank: int, world_size: int) -> None:
    case = CASES["batch-norm"]
    expected = train(case, 1)
    for strategy in ShardingStrategy:
        with naming(strategy):
            with pytest.warns(UserWarning, match="no process group") as caught:
                model = case.wrap(sharding_strategy=strategy)
            assert len(caught) == 1, [str(one.message) for one in caught]
            assert train_steps(model, sgd(model), case, rank, world_size) == expected.losses
            assert_same_state(model.state_dict(), expected.state, 0.0, 0.0)


# ---------------------------------------------------------------- tensors without plain memory


def _freed() -> torch.Tensor:
    tensor = torch.ones(4, 4)
    tensor.untyped_storage().resize_(8)
    return tensor


@pytest.mark.filterwarnings(
    "ignore:.*quantized tensor",
    "ignore:.*nested tensors",
    "ignore:Sparse",
    "ignore:.*no process group",
)
def test_tensors_without_plain_memory() -> None:
    """The error names the tensor and its kind."""
    kinds = {
        "quantized": torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8),
        "of layout torch.sparse_coo": torch.eye(4).to_sparse(),
        "of layout torch.sparse_csr": torch.eye(4).to_sparse_csr(),
        "of layout torch._mkldnn": torch.ones(4, 4).to_mkldnn(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "freed": _freed(),
    }
    for kind, tensor in kinds.items():
        for sync in (None, True):
            with_buffer, with_param = nn.Linear(3, 3), nn.Linear(3, 3)
            with_buffer.register_buffer("odd", tensor)
            with_param.odd = nn.Parameter(tensor, requires_grad=False)
            for model, what in ((with_buffer, "buffer"), (with_param, "parameter")):
                found = re.escape(f"ShardedWrapper: {what} 'odd' is {kind}")
                with pytest.raises(TypeError, match=f"{found}, but only dense tensors"):
                    ShardedWrapper(model, sync_module_states=sync)


# ---------------------------------------------------------------- ranks that differ


def _renamed(model: Mlp) -> None:
    model.fc2.offset = nn.Parameter(model.fc2.bias.detach().clone())
    del model.fc2.bias
    model.fc2.register_parameter("bias", None)


CHANGES: list[tuple[Callable[[Mlp], object], str]] = [
    (lambda model: setattr(model, "fc2", nn.Linear(5, 6)), "fc2.weight"),
    (_renamed, "fc2.bias"),
    (lambda model: model.fc2.double(), "fc2.weight"),
    (lambda model: model.fc2.weight.requires_grad_(False), "fc2.weight"),
    (lambda model: setattr(model.fc3, "bias", None), "fc3.bias"),
]


@on_ranks(3)
def test_ranks_with_different_models(rank: int, world_size: int) -> None:
    for (change, name), odd_rank in itertools.product(CHANGES, range(3)):
        model = Mlp()
        if rank == odd_rank:
            change(model)
        with naming((name, odd_rank)), pytest.raises(ValueError, match=re.escape(name)):
            ShardedWrapper(model, auto_wrap_policy=LINEARS)
    # Nothing is left behind that would hinder the next attempt.
    torch.manual_seed(0)
    ShardedWrapper(Mlp(), auto_wrap_policy=LINEARS)(torch.ones(2, 7))


@on_ranks(2)
def test_ranks_with_different_settings(rank: int, world_size: int) -> None:
    """With other units, each rank would wait for other gathers of the same parameters."""
    settings: dict[str, tuple[Any, Any]] = {
        "sharding_strategy": ("FULL_SHARD", "HYBRID_SHARD"),
        "coalesce_bytes": (0, 4096),
        "auto_wrap_policy": (LINEARS, None),
    }
    for keyword, values in settings.items():
        expected = rf"setting \d+ is .*{values[0]}.* on rank 0, .* on rank 1"
        expected = "fc1" if keyword == "auto_wrap_policy" else expected
        assert_raises(ValueError, expected, ShardedWrapper, Mlp(), **{keyword: values[rank]})


@on_ranks(4, group_timeout=5)
def test_ranks_with_other_transports_and_transposed_groups(rank: int, world_size: int) -> None:
    """Settings are compared before any process group is made."""
    pairs = [dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]]
    pairs.append(dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0])
    for keywords in ({"collectives": "native"}, {"wire_dtype": torch.bfloat16}):
        for process_group in (None, tuple(pairs)):
            odd = keywords if rank == 1 else {}
            name, expected = next(iter(keywords)), r"is .* on rank 0, .* on rank 1\. Pass the same"
            with pytest.raises(ValueError, match=f"ranks differ: {name} {expected} collectives"):
                ShardedWrapper(Mlp(), process_group, "FULL_SHARD", **odd)
    model = Mlp()
    model.fc2 = ShardedWrapper(model.fc2, tuple(reversed(pairs)), "HYBRID_SHARD")
    with pytest.raises(ValueError, match=r"unit 'fc2' shards .* does the opposite"):
        ShardedWrapper(model, tuple(pairs), "HYBRID_SHARD")
    torch.manual_seed(0)
    ShardedWrapper(Mlp(), auto_wrap_policy=LINEARS)(torch.ones(2, 7))


@on_ranks(2)
def test_ranks_with_different_weights(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    mine = Mlp()
    torch.manual_seed(0)
    expected = Mlp().state_dict()
    with rank_0_warns(rank, "different weights"):
        model = ShardedWrapper(mine)
    assert_same_state(model.state_dict(), expected, 0.0, 0.0)


# ---------------------------------------------------------------- the module


@on_ranks(2)
def test_a_second_wrapper_and_a_policy_without_units_warn(rank: int, world_size: int) -> None:
    with rank_0_warns(rank, "Conv2d"):
        model = ShardedWrapper(Mlp(), auto_wrap_policy=ModuleWrapPolicy({nn.Conv2d}))
    assert flatshard.sharded_modules(model) == [model]
    case = CASES["mlp"]
    inner = case.wrap()
    with rank_0_warns(rank, "the module, a Mlp, .*Wrap the module once"):
        model = ShardedWrapper(inner)
    assert_trains_alike(case, rank, world_size, model)


@on_ranks(2)
def test_no_parameters(rank: int, world_size: int) -> None:
    inputs = torch.randn(3, requires_grad=True)
    for strategy in ShardingStrategy:
        model = ShardedWrapper(nn.Tanh(), sharding_strategy=strategy)
        output = model(inputs)
        output.sum().backward()
        assert torch.equal(output, inputs.tanh())
        assert not list(model.parameters())
        assert not model.state_dict()
    container = ShardedWrapper(nn.Sequential(), auto_wrap_policy=None)
    assert container
    assert len(container) == 0
    assert torch.equal(container(torch.ones(2)), torch.ones(2))
    assert torch.allclose(inputs.grad, len(ShardingStrategy) * (1 - inputs.detach().tanh() ** 2))


# ---------------------------------------------------------------- arguments


@on_ranks(2)
def test_bad_arguments(rank: int, world_size: int) -> None:
    """Refused before any communication, so that no rank waits for another."""
    expected: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"shardin_strategy": "FULL_SHARD"}, TypeError, "sharding_strategy"),
        ({"autowrap_policy": None}, TypeError, "auto_wrap_policy"),
        ({"frobnicate": 1}, TypeError, "frobnicate"),
        ({"sharding_strategy": 3}, TypeError, "FULL_SHARD"),
        ({"sharding_strategy": ShardingStrategy}, TypeError, "FULL_SHARD"),
        ({"sharding_strategy": "FULL_SHRAD"}, ValueError, "FULL_SHARD"),
        ({"auto_wrap_policy": {nn.Linear}}, TypeError, "auto_wrap_policy"),
        ({"auto_wrap_policy": "automatic"}, ValueError, "expected \"auto\", .* got 'automatic'"),
        ({"auto_wrap_policy": "size_policy"}, ValueError, "To use size_policy, pass the object"),
        ({"coalesce_bytes": -1}, ValueError, r"coalesce_bytes: expected 0 .* or more, got -1"),
        ({"coalesce_bytes": "1M"}, TypeError, "coalesce_bytes: expected an int"),
        ({"mixed_precision": torch.bfloat16}, TypeError, "mixed_precision"),
        ({"cpu_offload": "yes"}, TypeError, "cpu_offload"),
    ]
    for keywords, error, match in expected:
        assert_raises(error, match, ShardedWrapper, Mlp(), **keywords)
    wrapped = nn.parallel.DistributedDataParallel(Mlp())
    with allow_warnings(message="Lazy modules"):
        lazy = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3))
    with allow_warnings(message=".*torch.jit"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    modules: list[tuple[Any, type[Exception], str]] = [
        ([Mlp()], TypeError, "Module"),
        (nn.Sequential(wrapped), ValueError, r"'0' is a DistributedDataParallel.*its \.module"),
        (lazy, ValueError, r"1\.weight"),
        (scripted, RuntimeError, "replace the scripted module by the original module"),
    ]
    for module, error, match in modules:
        assert_raises(error, match, ShardedWrapper, module)


# ---------------------------------------------------------------- warnings that are errors


@on_ranks(2, group_timeout=5.0)
def test_a_warning_that_is_an_error_leaves_no_rank_waiting(rank: int, world_size: int) -> None:
    """Only rank 0 warns, after its last collective."""
    with warnings.catch_warnings(action="error"):
        keywords = {"bucket_cap_mb": 1, "sync_module_states": True}
        if rank == 0:
            assert_raises(UserWarning, "ShardedWrapper ignores", ShardedWrapper, Mlp(), **keywords)
        else:
            ShardedWrapper(Mlp(), **keywords)
    dist.barrier()


@on_ranks(2)
def test_a_thread_that_reads_stacks_for_a_moment(rank: int, world_size: int) -> None:
    """While a thread reads a stack, the stack's views live, and torch cannot swap a parameter."""
    layer = nn.Linear(3, 2)
    views = [layer.weight.view(-1)]
    clock = SimpleNamespace(sleep=lambda _: views.clear())
    with mock.patch.object(flat_parameter, "time", clock):
        ShardedWrapper(layer)
    assert not views
