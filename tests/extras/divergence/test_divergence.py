"""``allow_divergence``: ranks that skip units, or run them in another order."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import ShardedWrapper
from flatshard.wrap import CustomPolicy
from tests.comm_hooks import Averaging
from tests.harness import assert_raises, naming, on_ranks, rank_0_warns
from tests.mapping import mapping
from tests.models import Case, Residual, vectors
from tests.oracle import ROWS, assert_same_gradients
from tests.side import Run, assert_same_model, pair

pytestmark = pytest.mark.by_turns


class _Mixture(nn.Module):
    """Runs the experts of a list, one after the other, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 3)
        self.experts = nn.ModuleList([Residual(7, 9) for _ in range(4)])

    def forward(self, x: Tensor, chosen: list[int], checkpointed: bool = False) -> Tensor:
        x = torch.tanh(self.first(x))
        for index in chosen:
            expert = self.experts[index]
            x = checkpoint(expert, x, use_reentrant=False) if checkpointed else expert(x)
        return self.last(x)


_MIXTURE = Case("mixture", _Mixture, vectors, (nn.Linear, Residual))

# Of each step, the experts of ranks 0 and 1: skipped, in another order, twice, none.
_CHOSEN = (
    ([0], [1]),
    ([0, 1, 2], [2, 1, 0]),
    ([3, 3], [3]),
    ([], [0, 2]),
    ([], []),
    ([1, 3], [0, 1, 3]),
)

_FORMS: dict[str, dict[str, Any]] = {
    "sockets": {
        "auto_wrap_policy": CustomPolicy(
            lambda module: {"allow_divergence": True} if isinstance(module, Residual) else False
        ),
        "collectives": "sockets",
    },
    "native": {"allow_divergence": ["experts"], "collectives": "native"},
    "shared memory": {"allow_divergence": [Residual]},
    "grad_op": {"allow_divergence": [Residual], "sharding_strategy": "SHARD_GRAD_OP"},
    # What a step skipped is still unsharded in the next one: its modules hold shards, though.
    "op": {"allow_divergence": True, "sharding_strategy": "SHARD_OP", "coalesce_bytes": 0},
    "hook": {"allow_divergence": [Residual]},
    "step": {"allow_divergence": [Residual]},  # in backward
    "no_shard": {"allow_divergence": [Residual], "sharding_strategy": "NO_SHARD"},
}


def _losses(run: Run, step: int, **keywords: Any) -> Any:
    """This rank's loss, or on the plain side each rank's share of it."""
    for rank in [run.rank] if run.is_sharded else range(run.world_size):
        rows = _MIXTURE.batch(step, run.world_size * ROWS)[0].chunk(run.world_size)[rank]
        loss = run.model(rows, _CHOSEN[step][rank], **keywords).pow(2).mean()
        yield loss if run.is_sharded else loss / run.world_size


@on_ranks(2, group_timeout=10)
def test_units_that_ranks_skip(rank: int, world_size: int) -> None:
    for name, keywords in _FORMS.items():
        with naming(name), mapping() if name == "shared memory" else contextlib.nullcontext():
            runs = sharded, plain = pair(rank, world_size, "full", _MIXTURE, **keywords)
            if name == "hook":
                sharded.model.register_comm_hook("state", Averaging())
            elif name == "step":
                sharded.model.step_in_backward(sharded.optimizer)
            for step in range(len(_CHOSEN)):
                for run in runs:
                    for loss in _losses(run, step, checkpointed=step == 1):
                        loss.backward()
                if name != "step":
                    assert_same_gradients(sharded.model, plain.model)
                for run in runs:
                    run.step()
                    if name == "op":
                        continue  # an evaluation would reshard what it tests
                    with torch.no_grad():  # each rank in its own way, or not at all
                        run.model(run.inputs(step), _CHOSEN[step][rank])
            assert_same_model(sharded, plain)


@on_ranks(2, group_timeout=10)
def test_steps_out_of_the_ordinary(rank: int, world_size: int) -> None:
    for collectives in ("sockets", "native"):
        keywords = {"allow_divergence": [Residual], "collectives": collectives}
        keywords["sharding_strategy"] = "SHARD_GRAD_OP"  # backward alone needs no all-gather
        runs = sharded, plain = pair(rank, world_size, "full", _MIXTURE, **keywords)
        with naming(collectives):
            for run in runs:
                with run.no_sync():
                    for number, loss in enumerate(_losses(run, 0)):
                        if (rank if run.is_sharded else number) == 0:
                            loss.backward()  # on one rank alone
                for loss in _losses(run, 1):
                    loss.backward(retain_graph=True)
                    loss.backward()
                for both in zip(_losses(run, 2), _losses(run, 3), strict=True):
                    for loss in both:  # two forwards, then two backwards
                        loss.backward()
                run.step()
            assert_same_model(sharded, plain)


@on_ranks(2, group_timeout=30)
def test_refused(rank: int, world_size: int) -> None:
    for value, error, message in (
        (Residual, TypeError, "expected True, or a list"),
        ("experts", TypeError, "expected True, or a list"),
        ([3], TypeError, "got a list that contains 3"),
        (["expert"], ValueError, "'expert' is not in the _Mixture"),
        ([nn.Conv2d], ValueError, "is not in the _Mixture"),
    ):
        assert_raises(error, message, _MIXTURE.wrap, _MIXTURE.model(), allow_divergence=value)
    with rank_0_warns(rank, "allow_divergence has no effect"):
        ShardedWrapper(_MIXTURE.model(), allow_divergence=["experts"])


@on_ranks(4, group_timeout=10)
def test_groups_of_units_that_may_all_diverge(rank: int, world_size: int) -> None:
    """Groups that only some settings need are made on all ranks."""
    model = _MIXTURE.wrap(allow_divergence=True, reshard_after_forward=2)
    model(_MIXTURE.batch(0, ROWS)[0], [rank]).sum().backward()
