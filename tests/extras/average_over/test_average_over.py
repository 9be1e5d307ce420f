"""``average_over``: the mean over all ranks' tokens, against one process with all tokens."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flatshard
from flatshard import MixedPrecision
from flatshard.comm.work import CollectiveError
from tests.combinations import usual_and_every
from tests.comm_hooks import Averaging
from tests.harness import assert_raises, naming, on_ranks
from tests.models import CASES, Case
from tests.oracle import assert_same, sgd, step_and_zero
from tests.ways import WAYS, ranks_of

MLP = CASES["mlp"]

_STEPS, _MICRO_BATCHES, _CLIP = 3, 3, 0.5


def _count(rank: int, step: int, number: int) -> int:
    """Rows of a micro-batch: uneven, and none on some rank in some steps."""
    return (3 * rank + 2 * step + number) % 4


def _loss(model: Any, case: Case, rank: int, step: int, number: int) -> Any:
    """The sum over the rows of one micro-batch."""
    rows = _count(rank, step, number)
    inputs, target = case.batch(100 * step + 10 * rank + number, 4)
    return F.mse_loss(model(inputs)[:rows], target[:rows], reduction="sum")


def _train_plain(case: Case, world_size: int) -> nn.Module:
    model = case.model()
    optimizer = sgd(model)
    for step in range(_STEPS):
        places = [(rank, n) for rank in range(world_size) for n in range(_MICRO_BATCHES)]
        losses = [_loss(model, case, rank, step, number) for rank, number in places]
        (sum(losses) / sum(_count(rank, step, number) for rank, number in places)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        step_and_zero(optimizer)
    return model


def _train(model: Any, case: Case, rank: int, how: str = "no_sync", scales: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scales)
    for step in range(_STEPS):
        counts = [(number, _count(rank, step, number)) for number in range(_MICRO_BATCHES)]
        if how == "uneven":
            counts = [(number, rows) for number, rows in counts if rows]
        for number, rows in counts:
            accumulating = model.no_sync(replicas_only=how == "replicas_only")
            with contextlib.nullcontext() if number == counts[-1][0] else accumulating:
                model.average_over(torch.tensor(rows) if number else rows)
                scaler.scale(_loss(model, case, rank, step, number)).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(_CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=step != 1)


@pytest.mark.by_turns
@pytest.mark.parametrize("way", usual_and_every(2, WAYS))
@on_ranks(ranks_of)
def test_every_strategy(rank: int, world_size: int, way: str) -> None:
    WAYS[way].set_nodes()
    expected = _train_plain(MLP, world_size)
    ways = {"uneven": ("op", "no_shard"), "replicas_only": ("native-hybrid", "hybrid-zero2")}
    for how in ("no_sync", *(how for how, some in ways.items() if way in some)):
        with naming(how):
            model = MLP.wrap(**WAYS[way].keywords)
            _train(model, MLP, rank, how)
            assert_same(model, expected)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_one_rank_and_reduce_dtype(rank: int, world_size: int) -> None:
    rounds = {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)}
    model = MLP.wrap(**rounds if world_size > 1 else {})
    _train(model, MLP, rank, scales=world_size > 1)
    tolerance = {"rtol": 0.1, "atol": 0.02} if world_size > 1 else {}
    assert_same(model, _train_plain(MLP, world_size), **tolerance)


def _gradients(model: Any) -> dict[str, Tensor]:
    return {name: param.grad.full_tensor() for name, param in model.named_parameters()}


@on_ranks(2)
def test_counts_follow_the_gradients(rank: int, world_size: int) -> None:
    """Gradients that the program or a failure drops take their counts along."""
    model: Any = MLP.wrap()

    def backward(number: int) -> None:
        model.average_over(_count(rank, 0, number))
        _loss(model, MLP, rank, 0, number).backward()

    for _ in range(3):  # the first steps also agree on an order
        with flatshard.collectives.record() as plain:
            _loss(model, MLP, rank, 0, 1).backward()
        model.zero_grad()
    with flatshard.collectives.record() as counted:
        backward(1)
    assert len(counted) == len(plain), "counts are sent without a message of their own"
    expected = _gradients(model)
    for set_to_none in (True, False):
        model.zero_grad()
        with model.no_sync():
            backward(0)
        model.zero_grad(set_to_none=set_to_none)
        backward(1)
        assert_same(_gradients(model), expected)
    model.zero_grad()
    for tensor in ("loss", "input"):  # the backward fails before or after the model's
        assert_raises(RuntimeError, "planted", _fail_in_backward, model, MLP, tensor)
        backward(1)
        model.zero_grad()
    backward(1)
    assert_same(_gradients(model), expected)
    model.zero_grad()
    # A backward that computes only gradients of inputs leaves the count for the next backward.
    for accumulating in (False, True):
        model.average_over(_count(rank, 0, 1))
        with model.no_sync() if accumulating else contextlib.nullcontext():
            inputs = MLP.batch(1, 4)[0].requires_grad_()
            torch.autograd.grad(model(inputs).sum(), inputs)
        _loss(model, MLP, rank, 0, 1).backward()
        assert_same(_gradients(model), expected)
        model.zero_grad()
    _as_before_any_count(model, MLP, rank)


def _as_before_any_count(model: Any, case: Case, rank: int) -> None:
    """Without counts, `join` and `no_sync(max_bytes=...)` give what they give without the extra."""
    grads = []
    for one in (model, case.wrap()):
        with one.no_sync(max_bytes=100):
            _loss(one, case, rank, 0, 1).backward()
        one.zero_grad()
        with one.join():
            for number in range(2 - rank):
                one.zero_grad()
                _loss(one, case, rank, 0, number).backward()
        grads.append(_gradients(one))
    assert_same(*grads)


def _fail_in_backward(model: Any, case: Case, tensor: str) -> None:
    def fail(grad: Any) -> None:
        raise RuntimeError("planted")

    inputs, target = case.batch(1, 4)
    inputs.requires_grad_()
    model.average_over(7)
    loss = F.mse_loss(model(inputs), target)
    (loss if tensor == "loss" else inputs).register_hook(fail)
    loss.backward()


@on_ranks(2)
def test_wrong_counts_are_named_on_all_ranks(rank: int, world_size: int) -> None:
    model: Any = MLP.wrap()

    def backward(*counts: Any) -> None:
        if counts[rank] is not None:
            model.average_over(counts[rank])
        _loss(model, MLP, rank, 0, 1).backward()

    def raises(message: str, act: Callable[[], object], kind: Any = RuntimeError) -> None:
        assert_raises(kind, message, act)
        assert all(param.grad is None for param in model.parameters())

    raises("counts of average_over, backward", lambda: backward(None, 2), CollectiveError)
    raises("rank 1 passed no count", lambda: backward(2, None))
    raises("rank 1 passed the count -2", lambda: backward(2, -2))
    raises("rank 0 passed the count nan", lambda: backward(float("nan"), 2))
    raises("add up to 0", lambda: backward(0, 0.0))
    for wrong in (torch.ones(2), torch.tensor(1j), "2"):
        with pytest.raises(TypeError):
            model.average_over(wrong)
    with model.no_sync(max_bytes=100):
        raises("only some units", lambda: backward(1, 1))
    model.register_comm_hook("state", Averaging())
    raises("a communication hook is registered", lambda: backward(1, 1))
    model = MLP.wrap()
    model.average_over(1)
    model.register_comm_hook("state", Averaging())  # after the count
    raises("a communication hook is registered", _loss(model, MLP, rank, 0, 1).backward)
    model = MLP.wrap()
    model.average_over(1)
    model.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))  # after the count
    raises(r"average_over\(\) needs all gradients", _loss(model, MLP, rank, 0, 1).backward)
    raises(r"average_over\(\) needs all gradients", lambda: backward(1, 1))
    model = MLP.wrap()
    with model.no_sync():
        backward(1, float("-inf"))
    raises("rank 1 passed the count -inf", lambda: backward(1, float("inf")))
