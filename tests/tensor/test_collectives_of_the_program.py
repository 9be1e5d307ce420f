"""Collectives of a program on sharded tensors: right, or refused before they communicate."""

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed._symmetric_memory  # defines its operators
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from flatshard import ShardedWrapper
from flatshard.comm.communicator import ALONE
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import FlatShardTensor, is_collective
from flatshard.units.layout import LocalSpan, ParamSpan
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import allow_warnings, assert_raises, naming, on_ranks
from tests.models import CASES
from tests.oracle import assert_same, snapshot
from tests.ways import WAYS

# They take tensors, and are none of a program's collectives on a tensor that may be sharded.
OTHERS = {
    dist: {
        "recv_object_list",  # of Python objects, which it makes
        "_new_window",  # of a backend that gloo and NCCL are not
        *("_compute_bucket_assignment_by_size", "_verify_params_across_processes"),
        *("_register_builtin_comm_hook", "_register_comm_hook", "monitored_barrier", "barrier"),
    },
    functional: {
        name
        for name in dir(functional)
        if name.endswith(("_meta", "_backward", "_setup_context", "_inplace"))
        or name.startswith(("_", "legacy_", "backend_impl"))
    },
    # They clone the tensor, which all-gathers, and communicate the full copies.
    differentiable: {"all_reduce", "broadcast", "reduce"},
}
NAMES_OF_TENSORS = ("tensor", "input", "output", "self", "shard", "obj")
NAMES_OF_TENSORS += ("op_list", "gather_list", "scatter_list")
RESULTS = {("all_gather_object", "object_list"), ("gather_object", "object_gather_list")}
RESULTS |= {("scatter_object_list", "scatter_object_output_list")}
"""Lists that get the objects of other ranks."""


def _signatures(module: ModuleType) -> Iterator[tuple[str, list[str], list[str]]]:
    """Each function that takes tensors: its name, these parameters, and all parameters.

    A collective that a newer torch adds is among them.
    """
    for name, function in inspect.getmembers(module, inspect.isfunction):
        is_own = str(function.__module__).startswith("torch.distributed")
        if is_own and name not in OTHERS[module]:
            every = [*inspect.signature(function).parameters]
            taking = [one for one in every if any(part in one for part in NAMES_OF_TENSORS)]
            if taking := [one for one in taking if not one.endswith("split_sizes")]:
                yield name, taking, every


def _argument(function: str, name: str, tensor: Any) -> Any:
    """A tensor in the form in which a parameter takes tensors."""
    if name == "p2p_op_list":
        return [dist.P2POp(dist.isend, tensor, 1)]
    if name.endswith("lists"):
        return [[tensor, tensor]]
    is_list = "list" in name or name in ("tensors", "inputs") or function.endswith("coalesced")
    return [tensor, tensor] if is_list else tensor


def _call(module: ModuleType, name: str, taking: list[str], every: list[str], place: str) -> Any:
    """A call of a collective whose parameter ``place`` gets the sharded tensor."""
    peer = 1 if name.endswith(("send", "recv", "send_object_list")) else 0
    values: dict[str, Any] = {"group": dist.group.WORLD, "src": peer, "dst": peer}
    values |= {"reduceOp": "sum", "src_dst": [1, 0], "gather_dim": 0}
    values |= {"output_split_sizes": None, "input_split_sizes": None}
    values["scatter_dim"] = [0, 0] if name.endswith("coalesced") else 0

    def call(tensor: Any) -> object:
        plain = torch.ones(tensor.shape, dtype=tensor.dtype)
        given = {one: _argument(name, one, tensor if one == place else plain) for one in taking}
        others = {one: values[one] for one in every if one in values}
        return getattr(module, name)(**given, **others)

    return call


def _calls() -> dict[str, Callable[[Any], object]]:
    """Each collective, with a sharded tensor in the place of each parameter that takes tensors."""
    return {
        f"{module.__name__}.{name}, {place}": _call(module, name, taking, every, place)
        for module in OTHERS
        for name, taking, every in _signatures(module)
        for place in taking
        if (name, place) not in RESULTS
    } | {
        "async": lambda t: dist.all_reduce(t, async_op=True),
        "product": lambda t: dist.all_reduce(t, dist.ReduceOp.PRODUCT),
        "from any rank": lambda t: dist.recv(t),
        "buckets": lambda t: dist._broadcast_coalesced(dist.group.WORLD, [t], 9, 0),
    }


def _model(way: str = "full", **keywords: Any) -> ShardedWrapper:
    case = CASES["mlp"]
    keywords = {**WAYS[way].keywords, **keywords}
    policy = ModuleWrapPolicy({nn.Linear})
    return ShardedWrapper(case.model(), auto_wrap_policy=policy, coalesce_bytes=0, **keywords)


@on_ranks(2)
def test_refused_before_they_communicate(rank: int, world_size: int) -> None:
    """Only rank 0 calls them: whatever communicates would wait for rank 1, and time out."""
    model = _model()
    before = snapshot(model)
    param = model.fc2.weight
    model(torch.ones(2, 7).double()).sum().backward()
    computed = torch.zeros_like(param).copy_(torch.ones(param.shape))
    tensors = [param, param.data.clone() * 2, param.grad, computed]
    with allow_warnings():
        calls = _calls()
    for name, call in calls.items() if rank == 0 else ():
        for tensor in tensors:
            refused = pytest.raises(RuntimeError, match=r"'fc2\.weight'.* is sharded")
            with naming(name), allow_warnings(), refused:
                call(tensor)
    with allow_warnings(UserWarning), torch.no_grad():
        for view, remedy in (
            (param[0], r"clone\(\)"),
            (_flatten_dense_tensors([param.data]), "full_tensor"),
            (_flatten_dense_tensors([param.grad.data]), r"clone\(\)"),
        ):
            with pytest.raises(RuntimeError, match=f"all_reduce writes to a view .*{remedy}"):
                dist.all_reduce(view)
    with pytest.raises(RuntimeError, match=r"^gradient of .* already averaged over all ranks"):
        dist.all_reduce(param.grad)
    for tensor, start in ((param, "parameter"), (param.grad, "gradient of")):
        for name in ("numpy", "tolist", "share_memory_", "__dlpack__"):
            with pytest.raises(RuntimeError, match=rf"^{start} 'fc2\.weight'.*full_tensor"):
                getattr(tensor, name)()
        assert_raises(RuntimeError, r"apply_\(\) needs the full", tensor.apply_, abs)
    assert_same(model, before, 0.0, 0.0)


@on_ranks(2)
def test_in_summon(rank: int, world_size: int) -> None:
    """The way that the errors name: also values that differ between the ranks are right."""
    for way in ("full", "grad_op"):
        model = _model(way)
        before = snapshot(model)
        with ShardedWrapper.summon_full_params(model), torch.no_grad():
            for p in model.parameters():
                p.mul_(rank + 1)
                dist.all_reduce(p)
                p[0].fill_(rank)
                dist.broadcast(p.data, 1)
        for name, value in model.state_dict().items():
            total = sum(range(1, world_size + 1)) * before[name]
            total[0] = 1
            torch.testing.assert_close(value, total, rtol=1e-12, atol=0)


# ---------------------------------------------------------------- operators, one by one


def _shard() -> FlatShardTensor:
    """A range in the middle of a parameter of two by three."""
    span = ParamSpan("w", (2, 3), 0, 6, (0, 1))
    spec = ShardSpec("w", "unit", span, LocalSpan(0, 3, 1), comm=ALONE)
    return FlatShardTensor.parameter(torch.tensor([0.2, 0.4, 0.6]), spec, False)


def _full() -> Tensor:
    return torch.tensor([[0.1, 0.2, 0.4], [0.6, 0.8, 0.9]])


def _operators(is_wanted: Callable[[Any], bool]) -> list[Any]:
    found = []
    for schema in torch._C._jit_get_all_schemas():
        if is_wanted(schema):
            namespace, _, name = schema.name.partition("::")
            packet = getattr(getattr(torch.ops, namespace), name, None)
            overload = getattr(packet, schema.overload_name or "default", None)
            if overload is not None:
                found.append(overload)
    return found


def _communicates(schema: Any) -> bool:
    kinds = ((one.name, str(one.type)) for one in schema.arguments)
    return any(name == "group_name" or "c10d.ProcessGroup" in kind for name, kind in kinds)


def test_operators_of_collectives() -> None:
    """Also those that no Python function passes a sharded tensor to."""
    operators = _operators(_communicates)
    assert len(operators) > 60
    for operator in operators:
        with naming(operator):
            assert is_collective(operator)
            with pytest.raises(RuntimeError, match=r"'w'.*FS-COLLECTIVE"):
                FlatShardTensor.__torch_dispatch__(operator, (), (_shard(),))


VALUES = {
    "number": 0.5,
    "float": 0.5,
    "List[float]": [0.5],
    "bool": False,
    "str": "mean",
    "int": 0,
    "SymInt": 0,
    "List[int]": [0],
    "List[SymInt]": [0],
}


def _arguments(operator: Any, written: Callable[[], Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Values for each argument; the tensors that the operator writes come from ``written``."""
    args: list[Any] = []
    kwargs = {}
    for argument in operator._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        kind = str(argument.type)
        value: Any = None
        if "Tensor" in kind and (is_written or not kind.startswith("Optional")):
            value = written() if is_written else _full()
            value = [value] if kind.startswith("List") else value
        elif argument.has_default_value():
            value = argument.default_value
        elif not kind.startswith("Optional"):
            value = VALUES.get(kind.partition("[")[0] if "SymInt" not in kind else kind)
            value = VALUES.get(kind, value)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _writes(schema: Any) -> bool:
    return schema.name.startswith("aten::") and any(
        argument.alias_info is not None
        and argument.alias_info.is_write
        and "Tensor" in str(argument.type)
        for argument in schema.arguments
    )


@on_ranks(2)
def test_nested_lists(rank: int, world_size: int) -> None:
    """Sharded tensors in nested lists, which torch's dispatcher does not see, raise, too."""
    groups = [dist.new_group([each]) for each in range(world_size)]
    model = ShardedWrapper(nn.Linear(8, 8))
    weight, alone = model.module.weight, groups[rank]
    other, before = torch.zeros(8, 8), weight.full_tensor()
    calls: list[Callable[[], object]] = [
        lambda: dist.scatter(other, [weight], rank, alone),
        lambda: dist.gather(other, [weight], rank, alone),
        lambda: dist.all_gather([weight], other, alone),
        lambda: dist.reduce_scatter(other, [weight], group=alone),
        lambda: dist.all_to_all([other], [weight], alone),
        lambda: dist.all_to_all([weight], [other], alone),
    ]
    for number, call in enumerate(calls):
        with naming(number):
            assert_raises(RuntimeError, r"'weight'.*FS-COLLECTIVE", call)
    for call in (
        lambda: alone.scatter([other], [[weight]]).wait(),
        lambda: alone.reduce_scatter([other], [[weight]]).wait(),
    ):
        assert_raises(RuntimeError, r"asked for its address|data pointer|'weight'", call)
    assert weight.dtype is torch.float32
    # Views of a copy, which only `__torch_dispatch__` sees there; the write was lost.
    with allow_warnings(UserWarning), torch.no_grad():
        for call in (
            lambda: alone.allreduce([weight.data[0]]).wait(),
            lambda: alone.alltoall([weight.data[0]], [other[0]]).wait(),
            lambda: dist.all_to_all([weight.data[0]], [other[0]], alone),
        ):
            assert_raises(RuntimeError, r"'weight'.* writes to a view", call)
        assert torch.equal(weight.data[0], before[0])
    assert torch.equal(weight.full_tensor(), before)


@on_ranks(2)
def test_out_of_an_operation_is_a_gradient(rank: int, world_size: int) -> None:
    """StyleGAN2 and EDM make gradients finite by ``torch.nan_to_num(p.grad, out=p.grad)``."""
    model = ShardedWrapper(nn.Linear(8, 8))
    (model(torch.arange(8.0)[None]).sum() * torch.tensor(torch.inf)).backward()
    for param in model.parameters():
        expected = torch.nan_to_num(param.grad.full_tensor(), nan=0.5, posinf=1e5)
        version = param.grad._version
        result = torch.nan_to_num(param.grad, nan=0.5, posinf=1e5, out=param.grad)
        assert result is param.grad
        assert param.grad._version > version
        assert torch.equal(param.grad.full_tensor(), expected)
        plain = torch.empty_like(expected)
        with allow_warnings(UserWarning):
            torch.nan_to_num(param.grad, out=plain)
        assert torch.equal(plain, expected)
        with allow_warnings(UserWarning), pytest.raises(RuntimeError, match="be cast"):
            torch.add(param.grad, 0.5, out=torch.zeros_like(param.grad, dtype=torch.int32))


def test_operators_that_write() -> None:
    """In place or with ``out=``: what the plain tensor then has, or a named error."""
    operators, num_right = _operators(_writes), 0
    assert len(operators) > 1000
    for operator in operators:
        shards: list[FlatShardTensor] = []

        def written(shards: list[FlatShardTensor] = shards) -> Tensor:
            shards.append(_shard())
            return shards[-1]

        args, kwargs = _arguments(operator, written)
        with naming(operator):
            before = [shard.local._version for shard in shards]
            torch.manual_seed(0)
            try:
                FlatShardTensor.__torch_dispatch__(operator, (), tuple(args), kwargs)
            except Exception as error:
                # Torch's own error: of arguments that make no sense, before anything is written.
                is_named = "'w'" in str(error)
                assert is_named or [shard.local._version for shard in shards] == before
                assert is_named or all(torch.equal(s.local, _shard().local) for s in shards)
                continue
            plains: list[Tensor] = []
            args, kwargs = _arguments(operator, lambda p=plains: p.append(_full()) or p[-1])
            torch.manual_seed(0)
            operator(*args, **kwargs)
            for shard, plain, version in zip(shards, plains, before, strict=True):
                torch.testing.assert_close(shard.local, plain.flatten()[1:4], equal_nan=True)
                assert shard.local._version > version or torch.equal(plain, _full())
            num_right += 1
    assert num_right > 100
