"""Loops that train, and ranks that do not do the same: right, or an error that all ranks raise."""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from flatshard import ShardedWrapper
from flatshard.engine import reduce_queue
from tests.comm_hooks import Averaging
from tests.harness import allow_warnings, assert_raises, naming, on_ranks
from tests.idioms.side import Side
from tests.idioms.together import Headed, Net
from tests.mapping import mapping
from tests.models import CASES, Case, Composed, vectors
from tests.oracle import ROWS, local_loss
from tests.side import Run, assert_same_model, pair
from tests.ways import on_ranks_each_way

pytestmark = pytest.mark.by_turns


@pytest.mark.parametrize("sync", [None, True])
@on_ranks(2)
def test_buffers_without_broadcast(rank: int, world_size: int, sync: bool | None) -> None:
    """Ranks keep the buffers with which they start, unless ``sync_module_states=True``.

    DistributedDataParallel with ``broadcast_buffers=False`` does the same: torch's DDP passes that
    option to ``_sync_module_states``.
    """
    case = CASES["batch-norm"]
    plain = case.model()
    plain.norm.running_mean.fill_(rank)
    expected = torch.full_like(plain.norm.running_mean, 0 if sync else rank)
    model = case.wrap(plain, broadcast_buffers=False, sync_module_states=sync)
    model.eval()  # so that the forward itself leaves them alone
    model(case.batch(0, ROWS)[0])
    assert torch.equal(model.norm.running_mean, expected)


@on_ranks(2)
def test_gradients_that_the_program_keeps(rank: int, world_size: int) -> None:
    """The objects of gradients are used again, but not those that the program still holds."""
    torch.manual_seed(3)
    model = ShardedWrapper(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    params: list[Any] = list(model.parameters())

    def step() -> None:
        model(torch.randn(4, 6)).square().sum().backward()

    def whole(grads: list[Any]) -> list[Tensor]:
        return [grad.full_tensor().clone() for grad in grads]

    step()
    kept = [param.grad for param in params]
    values = whole(kept)
    model.zero_grad()
    step()
    torch.testing.assert_close(whole(kept), values, rtol=0, atol=0)
    parts = [param.grad.detach() for param in params]
    values = whole(parts)
    known = [weakref.ref(param.grad) for param in params]
    model.zero_grad()
    assert [one() for one in known] == [None] * len(params)
    step()
    torch.testing.assert_close(whole(parts), values, rtol=0, atol=0)
    params[1].grad = torch.zeros(params[1].shape)
    assert not params[1].spec.original.kept_grad.__dict__, "memory is freed"
    params[0].grad.tag = 1
    before = {id(param.grad) for param in params}
    model.zero_grad()
    assert not any(param.spec.original.kept_grad.__dict__ for param in params), "memory is freed"
    step()
    assert id(params[0].grad) in before, "used again"
    assert not hasattr(params[0].grad, "tag")


# ---------------------------------------------------------------- a module in two wrappers


@on_ranks_each_way(2)
def test_a_trained_unit_in_two_outermost_wrappers(rank: int, world_size: int, way: str) -> None:
    side = Side(f"flatshard {way}")
    two = "is trained, and is also in another .* .around a Headed."
    remedy = "models = ShardedWrapper.nn.ModuleList"
    encoder = side.wrap(Net())
    encoder(side.draw(0, ROWS, 7)).sum().backward()  # has been trained as a model of its own
    actor = side.wrap_whole(Headed(encoder))
    assert_raises(ValueError, f"{two}.*{remedy}", side.wrap_whole, Headed(encoder))
    # The error about a policy must not recommend two wrappers.
    with pytest.raises(ValueError, match=f"{two}.*{remedy}"):
        ShardedWrapper(Headed(encoder), auto_wrap_policy="auto")
    side.loss(actor, 0).backward()
    encoder.requires_grad_(False)
    critic, third = side.wrap_whole(Headed(encoder)), side.wrap_whole(Headed(encoder))
    for model in (actor, critic, third):
        side.loss(model, 0).backward()
    encoder.requires_grad_(True)
    for model in (actor, critic, encoder):
        assert_raises(ValueError, f"Headed.*{remedy}", model, side.draw(0, ROWS, 7))
    # Without the other wrappers, the encoder belongs to the last one, whichever that is.
    freed = [weakref.ref(actor), weakref.ref(critic)]
    del actor, critic, model
    side.loss(third, 0).backward()
    assert [one() for one in freed] == [None, None]
    assert all(param.grad is not None for param in third.parameters())
    freed = [weakref.ref(third)]
    del third
    gc.collect()
    assert freed[0]() is None, "the encoder must not keep a model that was dropped"
    side.loss(side.wrap_whole(Headed(encoder)), 0).backward()


@on_ranks_each_way(2)
def test_an_unwrapped_module_in_two_wrappers(rank: int, world_size: int, way: str) -> None:
    side, encoder = Side(f"flatshard {way}"), Net()
    first = side.wrap(Headed(encoder), Net)
    expected = "unit 'encoder' is trained, and is also in another .*ModuleList"
    assert_raises(ValueError, expected, side.wrap, Headed(encoder))
    for again in (first, first.module):
        assert_raises(ValueError, r"ModuleList|already a ShardedWrapper", side.wrap, again)
    side.loss(first, 0).backward()


# ---------------------------------------------------------------- ranks that differ


@on_ranks(2, group_timeout=5)
def test_a_backward_under_no_sync_on_one_rank_alone(rank: int, world_size: int) -> None:
    """Where units stay gathered between forward and backward, nothing is needed from others."""
    for collectives in ("sockets", "auto"):
        for name, strategy in (("mlp", "SHARD_GRAD_OP"), ("mlp-one-unit", "FULL_SHARD")):
            with naming(f"{collectives}, {strategy}"):
                case = CASES[name]
                plain = Run(case.model(), case, rank, world_size)
                settings = {"sharding_strategy": strategy, "collectives": collectives}
                with mapping() if collectives == "auto" else contextlib.nullcontext():
                    sharded = Run(case.wrap(**settings), case, rank, world_size)
                    sharded.train(0, 2)
                    with sharded.no_sync():
                        loss = sharded.loss(2)
                        if rank == 0:
                            loss.backward()
                        # What rank 0 freed, the others hold still: all must gather again.
                        sharded.loss(3).backward()
                    sharded.train(4, 6)
                plain.train(0, 2)
                (local_loss(plain.model, case, 2, 0, world_size) / world_size).backward()
                plain.loss(3).backward()
                plain.train(4, 6)
                assert_same_model(sharded, plain)


@pytest.mark.uncoalesced  # the message names one layer
@on_ranks(2, group_timeout=5)
def test_accumulated_gradients_edited_where_a_rank_has_no_part(rank: int, world_size: int) -> None:
    """An edit of accumulated gradients raises on all ranks, also where a rank has no part."""
    sharded, plain = pair(rank, world_size, "full")
    bias = sharded.parameter("fc3.bias")

    def accumulate_and_edit() -> None:
        with sharded.no_sync():
            sharded.loss(0).backward()
            bias.grad.mul_(0.5)
            sharded.loss(1).backward()

    accumulate_and_edit()
    assert_raises(RuntimeError, r"unit 'fc3': .* were edited", sharded.loss(2).backward)
    sharded.optimizer.zero_grad()
    with allow_warnings(UserWarning, "a backward failed"):
        sharded.train(2, 3)
    accumulate_and_edit()
    sharded.optimizer.zero_grad()  # takes the edit along
    for run in (sharded, plain):
        run.train(3 if run is sharded else 2, 5)
    assert_same_model(sharded, plain)


class _Pair(Composed):
    """One unit, of which a rank may leave out the second half."""


def _pairs() -> nn.Module:
    def halves(net: Any, x: Tensor, is_whole: bool) -> Tensor:
        x = torch.tanh(net.first(x))
        return net.second(x) if is_whole else x

    def forward(net: Any, x: Tensor, halved: int | None) -> Tensor:
        """Leaves out the second half of pair ``halved``."""
        for index, one in enumerate(net.pairs):
            x = one(x, index != halved)
        return x

    pairs = [_Pair(halves, first=nn.Linear(7, 7), second=nn.Linear(7, 7)) for _ in range(4)]
    return Composed(forward, pairs=nn.ModuleList(pairs))


_PAIRS = Case("pairs", _pairs, vectors, (_Pair,))
_SETTINGS: list[dict[str, Any]] = [
    *({"collectives": transport} for transport in ("auto", "sockets", "native")),
    {"sharding_strategy": "NO_SHARD"},
]


def _unlike_step(run: Run, step: int, halved: int | None = 2) -> None:
    """Rank 1 leaves something out."""
    run.backward(
        lambda rank: run.model(run.rows(step, rank), halved if rank == 1 else None).pow(2).mean()
    )
    run.step()


@pytest.mark.uncoalesced  # one unit would be used by all
@on_ranks(2, group_timeout=5)
def test_units_that_ranks_use_in_part(rank: int, world_size: int) -> None:
    """Ranks learn which parts are used, so that later steps wait for no reduction."""
    for keywords in _SETTINGS:
        has_hook = keywords != {"collectives": "sockets"}
        with naming(f"{keywords}, hook={has_hook}"):
            sharded, plain = pair(rank, world_size, "full", _PAIRS, **keywords)
            hook = Averaging()
            if has_hook:
                sharded.model.register_comm_hook("state", hook)
            stalls = []
            for run in (plain, sharded):
                for step, halved in enumerate((None, 2, 2, 0, None)):
                    with _counting_stalls() as counted:
                        _unlike_step(run, step, halved)
                    stalls.append(len(counted))
            assert_same_model(sharded, plain)
            assert len(hook.calls) == (20 if has_hook else 0)
            if not has_hook and rank == 0:
                assert stalls[6] > 0, "the case is no case"
                assert stalls[7] == 0


@on_ranks(2, group_timeout=5)
def test_two_models_in_one_backward(rank: int, world_size: int) -> None:
    """Reductions of two models in one backward are kept apart."""
    for keywords in _SETTINGS:
        pairs = [pair(rank, world_size, "full", _PAIRS, **keywords) for _ in range(2)]
        with naming(keywords), mock.patch.object(reduce_queue, "_STALL_SECONDS", 0.1):
            for step in range(3):
                for runs in zip(*pairs, strict=True):
                    _step_of_two(*runs, step)
            for sharded, plain in pairs:
                assert_same_model(sharded, plain)


def _step_of_two(first: Run, second: Run, step: int) -> None:
    """Each rank leaves out something else, in a model that the other uses whole."""

    def loss(rank: int) -> Tensor:
        middle = first.model(first.rows(step, rank), 2 if rank == 1 else None)
        end = second.model(middle.detach() if step % 2 else middle, 1 if rank == 0 else None)
        return middle.pow(2).mean() + end.pow(2).mean()

    first.backward(loss)
    first.step()
    second.step()


@contextlib.contextmanager
def _counting_stalls() -> Iterator[list[Any]]:
    stalls: list[Any] = []
    wait = reduce_queue.wait_until_reduced

    def counted(reduction: Any) -> bool:
        is_reduced = wait(reduction)
        if not is_reduced:
            stalls.append(reduction)
        return is_reduced

    with (
        mock.patch.object(reduce_queue, "_STALL_SECONDS", 0.1),
        mock.patch.object(reduce_queue, "wait_until_reduced", counted),
    ):
        yield stalls


@on_ranks_each_way(2)
def test_other_parameters_frozen(rank: int, world_size: int, way: str) -> None:
    """Ranks must freeze the same parameters; otherwise all raise, and name one."""
    sharded, _ = pair(rank, world_size, way)
    sharded.train(1, 2)
    sharded.parameter("fc3.bias").requires_grad_(rank == 0)
    bias = r"requires_grad of parameter 'fc3.bias' .* is True on rank 0, False on rank 1"
    assert_raises(RuntimeError, bias, sharded.loss(2).backward)
    # As many parameters on each rank.
    sharded.parameter("fc3.weight").requires_grad_(rank == 1)
    with pytest.raises(RuntimeError, match=r"requires_grad of parameter 'fc3\.\w*' .* on rank 1"):
        sharded.loss(2).backward()
