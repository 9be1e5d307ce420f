"""``no_sync(uneven=True)``: ranks with different numbers of micro-batches, against plain models."""

import functools
import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatshard import CPUOffload, MixedPrecision, ShardedWrapper
from flatshard.extras import uneven
from flatshard.module.wrappers import handles_in
from tests.comm_hooks import Averaging
from tests.harness import allow_warnings, assert_raises, naming, on_ranks
from tests.models import CASES, Case, loss_of
from tests.oracle import ROWS, assert_identical, assert_same, sgd, snapshot
from tests.ways import WAYS, ranks_of

# Micro-batches of each rank in each step.
_COUNTS = {
    1: ((2,), (1,)),
    2: ((3, 1), (0, 2), (1, 1)),
    3: ((0, 2, 3), (1, 0, 1)),
    4: ((2, 0, 1, 3), (1, 1, 0, 2)),
}


def _batch(case: Case, rank: int, step: int, number: int) -> Any:
    return case.batch(1000 * step + 10 * rank + number, ROWS)


def _train_plain(case: Case, rank: int) -> nn.Module:
    """The unwrapped model: rank 0's buffers at the start of a step, averages at its end."""
    model = case.model()
    optimizer, world_size = sgd(model), dist.get_world_size()
    for step, counts in enumerate(_COUNTS[world_size]):
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
        optimizer.zero_grad()
        for number in range(counts[rank]):
            inputs, target = _batch(case, rank, step, number)
            loss_of(model(inputs), target).backward()
        for param in (param for param in model.parameters() if param.requires_grad):
            used = torch.tensor(int(param.grad is not None))
            dist.all_reduce(used)
            if used:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad)
                param.grad /= world_size
        optimizer.step()
    return model


def _nothing() -> None: ...


def _train(model: Any, case: Case, rank: int, act: Any = _nothing, scales: bool = False) -> None:
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scales)
    scaler.scale(torch.zeros(()))  # also on ranks without micro-batches
    for step, counts in enumerate(_COUNTS[dist.get_world_size()]):
        optimizer.zero_grad()
        with model.no_sync(uneven=True):
            for number in range(counts[rank]):
                inputs, target = _batch(case, rank, step, number)
                scaler.scale(loss_of(model(inputs), target)).backward()
                if number:
                    act()
        scaler.step(optimizer)
        scaler.update()


def _assert_trains_as_plain(case: Case, rank: int, **keywords: Any) -> None:
    model = case.wrap(case.model(), **keywords)
    _train(model, case, rank)
    assert_same(model, _train_plain(case, rank))


_FORMS: dict[str, dict[str, Any]] = {
    "batch-norm": {},
    "frozen": {"collectives": "native"},
    "unused": {"collectives": "sockets"},
    "tied-across-units": {},
    "checkpointed": {"collectives": "native"},
    "checkpointed-reentrant": {},
    "twice": {"coalesce_bytes": 0},
    "mixed-types": {"cpu_offload": CPUOffload()},
    "lstm": {"sharding_strategy": "SHARD_OP"},
    "mlp": {"mixed_precision": MixedPrecision(reduce_dtype=torch.float64)},
    "nested": {"sharding_strategy": "NO_SHARD"},
}


@pytest.mark.by_turns
@pytest.mark.parametrize("way", WAYS)
@on_ranks(ranks_of)
def test_every_strategy(rank: int, world_size: int, way: str) -> None:
    WAYS[way].set_nodes()
    _assert_trains_as_plain(CASES["mlp"], rank, **WAYS[way].keywords)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_every_kind_of_model(rank: int, world_size: int) -> None:
    nth = {1: 5, 2: 1, 3: 2}[world_size]
    for name, keywords in list(_FORMS.items())[::nth]:
        with naming(name):
            _assert_trains_as_plain(CASES[name], rank, **keywords)


@on_ranks(2)
def test_what_ranks_may_do_alone(rank: int, world_size: int) -> None:
    case = CASES["mlp"]
    expected = _train_plain(case, rank)
    inputs = case.batch(9, ROWS)[0]

    def evaluate() -> None:
        with torch.no_grad():
            model(inputs)

    def differentiate() -> None:
        x = inputs.clone().requires_grad_()
        torch.autograd.grad(model(x).sum(), x)

    def penalize() -> None:
        x = inputs.clone().requires_grad_()
        torch.autograd.grad(model(x).sum(), x, create_graph=True)

    def fail_in_forward() -> None:
        assert_raises(RuntimeError, "shapes", model, inputs[:, 1:])

    def nested() -> None:
        with model.no_sync():
            evaluate()

    def convert() -> None:  # without effect
        model.to("cpu").double()

    for act in (evaluate, differentiate, penalize, fail_in_forward, nested, convert):
        model = case.wrap(case.model())
        with naming(act.__name__):
            _train(model, case, rank, act)
            assert_same(model, expected)
            for _ in range(2):  # the ranks take the same steps together again
                loss_of(model(inputs), case.batch(9, ROWS)[1]).backward()
    model = case.wrap(case.model())
    said = mock.Mock()
    with mock.patch.object(uneven, "_warn_once", functools.cache(said)):
        for _ in range(2):
            with model.no_sync(uneven=True):
                evaluate()
    assert said.call_count == (rank == 0)
    model = case.wrap(case.model())
    _train(model, case, rank, scales=True)
    assert_same(model, expected)
    model = case.wrap(case.model())
    hook = Averaging()
    model.register_comm_hook("state", hook)
    _train(model, case, rank)
    assert_same(model, expected)
    assert len(hook.calls) == len(_COUNTS[2]) * len(list(handles_in(model)))


@on_ranks(2)
def test_bad_use_is_named_on_all_ranks(rank: int, world_size: int) -> None:
    case = CASES["mlp"]
    inputs, target = case.batch(0, ROWS)
    model: Any = case.wrap(case.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def leave(act: Callable[[], object], message: str) -> None:
        expected = message if rank == 1 else f"{message}.* \\(rank 1\\)"
        with naming(message), pytest.raises(RuntimeError, match=expected):  # noqa: PT012
            with model.no_sync(uneven=True):
                loss_of(model(inputs), target).backward()
                if rank == 1:
                    act()
        optimizer.zero_grad()
        loss_of(model(inputs), target).backward()  # the model can be used again
        optimizer.zero_grad()

    leave(optimizer.step, re.escape("step() got gradients that were accumulated under no_sync"))
    leave(lambda: model(inputs[:, 1:]), "shapes")
    with allow_warnings(message="a backward failed"):
        _changed_on_one_rank(case, rank)
    leave(lambda: ShardedWrapper.summon_full_params(model).__enter__(), "summon_full_params")
    leave(lambda: model.no_sync(max_bytes=1).__enter__(), re.escape("no_sync() was called inside"))
    with pytest.raises(ValueError, match="uneven=True without max_bytes"):
        model.no_sync(uneven=True, max_bytes=1).__enter__()
    with pytest.raises(RuntimeError, match="inside of join"), model.join():
        model.no_sync(uneven=True).__enter__()
    stepped = case.wrap(case.model())
    stepped.step_in_backward(torch.optim.SGD(stepped.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"no_sync\(uneven=True\) needs all gradients"):
        stepped.no_sync(uneven=True).__enter__()
    with allow_warnings(message="a backward failed"):
        _failed_backward(model, rank)


@on_ranks(2, group_timeout=60)
def test_one_rank_does_not_leave(rank: int, world_size: int) -> None:
    """Both ranks end long before the group's timeout, and rank 0 names the call of rank 1."""
    case = CASES["mlp"]
    inputs, target = case.batch(rank, ROWS)
    model: Any = case.wrap(case.model())
    context = model.no_sync(uneven=True)
    context.__enter__()
    loss_of(model(inputs), target).backward()
    begun = time.monotonic()
    # The error of the program's own barrier is the backend's; flatshard logs the reason.
    expected = "pair closure" if rank else r"rank 1 in \[torch.distributed.barrier.*FS-DEADLOCK"
    with pytest.raises(RuntimeError, match=expected):
        dist.barrier() if rank else context.__exit__(None, None, None)
    assert time.monotonic() - begun < 20


@on_ranks(2)
def test_narrow_parameters(rank: int, world_size: int) -> None:
    """With equal numbers of micro-batches, the gradients are those of a usual `no_sync`."""
    case, narrow = CASES["mlp"], MixedPrecision(param_dtype=torch.bfloat16)
    models: list[Any] = [case.wrap(case.model(), mixed_precision=narrow) for _ in range(2)]

    def backward(model: Any, number: int) -> None:
        inputs, target = _batch(case, rank, 0, number)
        loss_of(model(inputs), target).backward()

    with models[0].no_sync(uneven=True):
        backward(models[0], 0)
        backward(models[0], 1)
    with models[1].no_sync():
        backward(models[1], 0)
    backward(models[1], 1)
    assert_identical(*([param.grad.to_local() for param in model.parameters()] for model in models))


def _changed_on_one_rank(case: Case, rank: int) -> None:
    inputs, target = case.batch(0, ROWS)
    changes: dict[str, Callable[[Any], object]] = {
        "requires_grad of .*fc1.weight.* is True on rank 0": (
            lambda model: model.fc1.weight.requires_grad_(False)
        ),
        "a conversion of the model was called inside": lambda model: model.to(torch.float32),
    }
    for message, change in changes.items():
        model: Any = case.wrap(case.model())
        with naming(message), pytest.raises(RuntimeError, match=message):  # noqa: PT012
            with model.no_sync(uneven=True):
                loss_of(model(inputs), target).backward()
                if rank == 1:
                    change(model)


def _failed_backward(model: Any, rank: int) -> None:
    """A backward that fails on one rank, whose program then asks all ranks to skip the step."""
    inputs, target = CASES["mlp"].batch(0, ROWS)
    before = snapshot(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failed = torch.zeros(1)

    def fail(_: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    x = inputs.clone().requires_grad_()
    if rank:
        x.register_hook(fail)
    with model.no_sync(uneven=True):
        try:
            loss_of(model(x), target).backward()
        except torch.OutOfMemoryError:
            failed += 1
    dist.all_reduce(failed)
    assert failed.item() == 1
    optimizer.zero_grad()
    optimizer.step()
    assert_same(model, before)
