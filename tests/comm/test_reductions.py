"""Averages over ranks: in rank order, in pieces, and in another dtype on the wire."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm.ranks import communicator
from flatshard.comm.transports import Gather, ReduceScatter, sockets
from flatshard.options import Collectives, TransportOptions
from tests.harness import naming, on_ranks, run_ranks
from tests.models import CASES
from tests.oracle import OPTIMIZERS, assert_same_state, snapshot, train, train_steps, trainable

pytestmark = pytest.mark.by_turns

SOCKETS = TransportOptions(Collectives.SOCKETS)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _sum_in_order(parts: list[Tensor]) -> Tensor:
    total = torch.zeros(0) if not parts else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total / max(len(parts), 1)


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks(fresh=True)
def test_narrow_on_the_wire(rank: int, world_size: int) -> None:
    """Gathered alike on all ranks; sums of what came in bfloat16 and of what is one's own."""
    sockets.PIECE_BYTES = 600
    comm = communicator(dist.group.WORLD, mode=TransportOptions(wire_dtype=torch.bfloat16))
    assert comm.transport_for().name == "sockets, bfloat16"
    tag = 0
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.float16, torch.int64):
        for numel in (1, 7, 300, 1025):
            tag += 1
            values = [
                (100 * torch.randn(numel * world_size, generator=_seeded(r))).to(dtype)
                for r in range(world_size)
            ]
            is_narrow = dtype in (torch.float32, torch.float64)
            sent = [one.to(torch.bfloat16).to(dtype) if is_narrow else one for one in values]
            for exact, parts in ((False, sent), (True, values)):
                out = torch.empty(numel * world_size, dtype=dtype)
                mine = values[rank][:numel].clone()
                comm.all_gather(Gather(mine, out, "test", tag, "test", exact=exact)).wait()
                assert torch.equal(out, torch.cat([part[:numel] for part in parts]))
                assert torch.equal(mine, values[rank][:numel])
            if not is_narrow:
                continue
            parts = [(values if r == rank else sent)[r] for r in range(world_size)]
            expected = _sum_in_order([part.chunk(world_size)[rank] for part in parts])
            out = torch.empty(numel, dtype=dtype)
            comm.reduce_scatter(ReduceScatter(values[rank].clone(), out, "test", tag)).wait()
            assert torch.equal(out, expected)


NARROW_WAYS: list[dict[str, Any]] = [
    {},
    {"sharding_strategy": "SHARD_GRAD_OP"},
    {"sharding_strategy": "SHARD_OP"},
    {"sharding_strategy": "HYBRID_SHARD_OP"},
    {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": 2},
]


def _train_narrow_ways(
    rank: int, world_size: int, expected: dict[str, Tensor]
) -> list[dict[str, Tensor]]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    case, ends = CASES["transformer"], []
    for keywords in NARROW_WAYS:
        with naming(keywords):
            model = case.wrap(case.model(torch.float32), wire_dtype=torch.bfloat16, **keywords)
            assert "sockets, bfloat16" in model.unit_report()
            optimizer = OPTIMIZERS["sgd"](trainable(model))
            train_steps(model, optimizer, case, rank, world_size, dtype=torch.float32)
            ends.append(snapshot(model))
            # bfloat16 keeps 8 bits; what is sent is rounded in every step, sums are not.
            assert_same_state(ends[-1], expected, 0.0, 3e-2)
            assert any(not torch.equal(ends[-1][name], one) for name, one in expected.items())
    return ends


def test_strategies_with_a_wire_dtype() -> None:
    """Close to the unwrapped model, and the same on all ranks."""
    expected = train(CASES["transformer"], 4, dtype=torch.float32).state
    first, *others = run_ranks(_train_narrow_ways, 4, expected)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
