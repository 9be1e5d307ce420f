"""``join``: inputs that end sooner on some ranks, against DistributedDataParallel's."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from flatshard import ShardedWrapper, sharded_modules
from tests.comm_hooks import Averaging
from tests.harness import assert_raises, naming, on_ranks
from tests.models import CASES, loss_of
from tests.oracle import ROWS, assert_same, assert_same_gradients, step_and_zero, step_with

MLP = CASES["mlp"]

pytestmark = pytest.mark.by_turns

# Batches of each rank.
_UNEVEN = {2: ((1, 3), (3, 0), (3, 2), (2, 2)), 3: ((3, 1, 2), (0, 2, 2))}


def _train(model: Any, rank: int, count: int, how: str = "", case: str = "mlp", **more: Any) -> Any:
    """A batch on every rank, then as many as it has, inside ``join``; returns the optimizer.

    ``how``: "clips", "accumulates", "evaluates", or "zeros" for ``set_to_none=False``.
    """
    is_sharded = isinstance(model, ShardedWrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    def step(number: int) -> None:
        inputs, target = CASES[case].batch(100 * rank + number, ROWS)
        syncs = how != "accumulates" or number % 2
        with contextlib.nullcontext() if syncs else model.no_sync():
            loss_of(model(inputs), target).backward()
        if not syncs:
            return
        if how == "clips":
            clips = getattr(model, "clip_grad_norm_", partial(clip_grad_norm_, model.parameters()))
            clips(0.05)
        optimizer.step()
        optimizer.zero_grad(set_to_none=how != "zeros")
        if how == "evaluates" and is_sharded:
            model.eval()
            with torch.no_grad():
                model(inputs)
            model.train()

    step(1)
    with model.join(**more):
        for number in range(count * (2 if how == "accumulates" else 1)):
            step(number)
    return optimizer


_FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "active": ({}, {"divide_by_initial_world_size": False}),
    "clips": ({"collectives": "sockets"}, {"how": "clips"}),
    "accumulates": ({"collectives": "native"}, {"how": "accumulates"}),
    "evaluates": ({"sharding_strategy": "SHARD_GRAD_OP"}, {"how": "evaluates"}),
    "zeros": ({}, {"how": "zeros"}),
    "op": ({"sharding_strategy": "SHARD_OP"}, {"divide_by_initial_world_size": False}),
    "no_shard": ({"sharding_strategy": "NO_SHARD"}, {"how": "clips"}),
    "batch norm": ({}, {"case": "batch-norm"}),
    "shared": ({"collectives": "native"}, {"case": "twice"}),
    "checkpoints": ({}, {"case": "checkpointed"}),
    "frozen": ({}, {"case": "frozen"}),
}


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks(group_timeout=20)
def test_uneven_inputs(rank: int, world_size: int) -> None:
    forms = list(_FORMS.items())
    for position, (name, (keywords, how)) in enumerate(forms if world_size == 2 else forms[::3]):
        uneven = _UNEVEN[world_size]
        counts = uneven[position % len(uneven)]
        case = CASES[how.get("case", "mlp")]
        sharded = case.wrap(**keywords)
        ddp = DistributedDataParallel(case.model())
        with naming(f"{name}, {counts}"):
            for model in (ddp, sharded):
                _train(model, rank, counts[rank], **how)
            assert_same(sharded, ddp.module)
            assert_same_gradients(sharded, ddp.module)  # the next epoch adds to them
    _check_state(rank, world_size)


def _check_state(rank: int, world_size: int) -> None:
    """All parts of the optimizer's state are those of the rank that had input last."""
    sharded, ddp = MLP.wrap(), DistributedDataParallel(MLP.model())
    mine, theirs = (_train(model, rank, 2 * rank) for model in (sharded, ddp))
    full = ShardedWrapper.optim_state_dict(sharded, mine)["state"]
    if rank == world_size - 1:
        for (name, _), state in zip(sharded.named_parameters(), theirs.state.values(), strict=True):
            assert_same(full[name]["momentum_buffer"], state["momentum_buffer"])


class _OfItsOwn(torch.optim.SGD):
    """Not known to be element-wise."""

    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        return super().step(closure)


def _loss(model: nn.Module, number: int) -> Tensor:
    inputs, target = CASES["mlp"].batch(number, ROWS)
    return loss_of(model(inputs), target)


def _loop(
    model: Any,
    optimizer: torch.optim.Optimizer,
    count: int,
    act: Callable[[Any], object] = lambda model: None,
    after: Callable[[Any], object] = lambda model: None,
    **keywords: Any,
) -> None:
    with model.join(**keywords):
        for number in range(count):
            _loss(model, number).backward()
            act(model)
            step_and_zero(optimizer)
            after(model)


def _edit_gradients(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-6)


def _edit_parameters(model: Any) -> None:
    with torch.no_grad():
        model.fc1.weight.clamp_(-0.01, 0.01)


@on_ranks(2, group_timeout=20)
def test_what_nobody_can_follow(rank: int, world_size: int) -> None:
    """Rank 0 has three batches, rank 1 one or none."""
    case, sgd, ends = CASES["mlp"], torch.optim.SGD, {"throw_on_early_termination": True}
    for kind, counts, keywords, message in (
        (sgd, (3, 1), {"act": _edit_gradients}, "rank 0: gradients were edited after backward"),
        (sgd, (3, 1), {"act": _edit_parameters}, "rank 0: parameters were edited between steps"),
        (sgd, (2, 1), {"after": _edit_parameters}, "rank 0: parameters were edited between steps"),
        (sgd, (3, 0), {}, r"rank 1: .*ranks with input stepped SGD.*join\(optimizers="),
        (sgd, (3, 1), ends, r"no input is left on ranks 1"),
        (_OfItsOwn, (3, 1), {}, "_OfItsOwn is not known to be element-wise"),
    ):
        model = case.wrap()
        optimizer = kind(model.parameters(), lr=0.1)
        assert_raises(RuntimeError, message, _loop, model, optimizer, counts[rank], **keywords)
    _no_input_at_all(rank)
    _schedule_that_fell_behind(rank)
    _refused(rank)


def _no_input_at_all(rank: int) -> None:
    model, plain = MLP.wrap(), MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _loop(model, optimizer, 2 * rank, optimizers=[optimizer])
    halved = torch.optim.SGD(plain.parameters(), lr=0.1 / 2)  # an average with no gradient
    for number in range(2):
        step_with([halved], partial(_loss, plain, number))
    assert_same(model, plain)


def _schedule_that_fell_behind(rank: int) -> None:
    model = CASES["mlp"].wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    _loop(model, optimizer, 3 - rank, after=lambda _: schedule.step())
    with pytest.raises(RuntimeError, match=r"must take the same action.* missed scheduler"):
        _loop(model, optimizer, 2, after=lambda _: schedule.step())


def _refused(rank: int) -> None:
    model = MLP.wrap(allow_divergence=[nn.Linear])
    with pytest.raises(NotImplementedError, match=r"join\(\) cannot be .* may be skipped"):
        model.join().__enter__()
    model = MLP.wrap()
    model.register_comm_hook("state", Averaging())
    with pytest.raises(NotImplementedError, match=r"join\(\) cannot .* has a communication hook"):
        model.join().__enter__()
    model = MLP.wrap()
    assert_raises(
        RuntimeError, "is inside a wrapper", sharded_modules(model.fc1)[0].join().__enter__
    )
    with model.join(enable=False):
        pass
    same = pytest.raises(RuntimeError, match="ranks with input must take the same action")
    with same, model.join(), torch.set_grad_enabled(rank == 0):
        model(MLP.batch(0, ROWS)[0])
