"""Ranks that do not do alike: where one can go on without the others it does not wait for them."""

import contextlib

from tests.distributed.test_peer_memory import mapping
from tests.distributed.test_training import Run, _assert_same_model
from tests.harness import naming, run_ranks
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
