"""Ranks that do not do alike: where one can go on without the others it does not wait for them."""

import contextlib

import pytest

from tests.distributed.test_peer_memory import mapping
from tests.distributed.test_training import Run, _assert_same_model
from tests.harness import allow_warnings, naming, run_ranks
from tests.models import CASES
from tests.oracle import local_loss


def test_a_backward_under_no_sync_on_one_rank_alone() -> None:
    """Where units stay gathered between forward and backward, nothing is needed from others."""
    run_ranks(_lonely_backward, 2, group_timeout=5)


def _lonely_backward(rank: int, world_size: int) -> None:
    for collectives in ("sockets", "auto"):
        for name, strategy in (("mlp", "SHARD_GRAD_OP"), ("mlp-one-unit", "FULL_SHARD")):
            with naming(f"{collectives}, {strategy}"):
                case = CASES[name]
                plain = Run(case.model(), case, rank, world_size)
                with mapping() if collectives == "auto" else contextlib.nullcontext():
                    model = case.wrap(
                        case.model(), sharding_strategy=strategy, collectives=collectives
                    )
                    sharded = Run(model, case, rank, world_size)
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
                _assert_same_model(sharded, plain)


def test_accumulated_gradients_edited_where_a_rank_has_no_part() -> None:
    """It took the edit for zero_grad(), and waited for the others, which had raised."""
    run_ranks(_edited_elsewhere, 2, group_timeout=5)


def _edited_elsewhere(rank: int, world_size: int) -> None:
    case = CASES["mlp"]
    plain = Run(case.model(), case, rank, world_size)
    sharded = Run(case.wrap(case.model()), case, rank, world_size)
    bias = sharded.parameter("fc3.bias")
    with sharded.no_sync():
        sharded.loss(0).backward()
        assert bias.grad is not None
        bias.grad.mul_(0.5)
        sharded.loss(1).backward()
    with pytest.raises(RuntimeError, match=r"unit 'fc3': .* were edited"):
        sharded.loss(2).backward()
    sharded.optimizer.zero_grad()
    with allow_warnings(UserWarning, "a backward failed"):
        sharded.train(2, 3)
    with sharded.no_sync():
        sharded.loss(0).backward()
        bias.grad.mul_(0.5)
        sharded.loss(1).backward()
    sharded.optimizer.zero_grad()  # takes the edit along
    for run in (sharded, plain):
        run.train(3 if run is sharded else 2, 5)
    _assert_same_model(sharded, plain)
