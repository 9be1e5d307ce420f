"""Averages over ranks: in rank order, in pieces, and in another dtype on the wire."""

import itertools
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard import ShardedWrapper
from flatshard.comm.ranks import communicator
from flatshard.comm.transports import Gather, ReduceScatter, sockets
from flatshard.comm.work import AsyncWork, PendingSends
from flatshard.options import Collectives, TransportOptions
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import naming, on_ranks, run_ranks
from tests.models import CASES
from tests.oracle import OPTIMIZERS, assert_same_state, snapshot, train, train_steps, trainable

pytestmark = pytest.mark.by_turns

SOCKETS = TransportOptions(Collectives.SOCKETS)


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks(fresh=True)
def test_averages_in_pieces(rank: int, world_size: int) -> None:
    """Bit by bit what one piece gives, whatever their number and when each rank comes."""
    sockets.PIECE_BYTES = 64
    sockets._ADDED_AT_ONCE = 6
    comm = communicator(dist.group.WORLD, mode=SOCKETS)
    dtypes = (torch.float32, torch.float64, torch.complex64)
    cases = list(itertools.product((0, 1, 15, 16, 17, 70), dtypes))
    started: list[tuple[AsyncWork, Tensor, Tensor]] = []
    for tag, (numel, dtype) in enumerate(cases):
        values = [
            torch.randn(numel * world_size, dtype=dtype, generator=_seeded(100 * tag + other))
            for other in range(world_size)
        ]
        expected = _sum_in_order([one.chunk(world_size)[rank] for one in values] if numel else [])
        out = torch.full((numel,), torch.nan, dtype=dtype)
        if tag % world_size == rank:
            time.sleep(0.01)
        pending = comm.reduce_scatter(ReduceScatter(values[rank], out, "test", tag))
        started.append((pending, out, expected))
    pending_sends = PendingSends()
    for pending, out, expected in started:
        deadline = time.monotonic() + 10
        while not pending.done():  # without a wait, which another rank may never answer
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        pending.wait(pending_sends)
        assert torch.equal(out, expected.to(out.dtype))
    pending_sends.wait_sends()


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _sum_in_order(parts: list[Tensor]) -> Tensor:
    total = torch.zeros(0) if not parts else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total / max(len(parts), 1)


@on_ranks(2)
def test_a_reduction_that_another_rank_starts_late(rank: int, world_size: int) -> None:
    comm = communicator(dist.group.WORLD, mode=SOCKETS)
    out = torch.empty(5)
    request = ReduceScatter(torch.ones(10), out, "test", 1)
    if rank == 0:
        pending = comm.reduce_scatter(request)
        time.sleep(0.05)
        assert not pending.done()
        comm.host.gather(None, "not before")
    else:
        comm.host.gather(None, "not before")
        pending = comm.reduce_scatter(request)
    pending.wait()
    assert out.tolist() == [1.0] * 5


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


def test_training_with_a_wire_dtype() -> None:
    results = run_ranks(_train_narrow, 2)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def _train_narrow(rank: int, world_size: int) -> list[Tensor]:
    ends = []
    for wire_dtype in (torch.bfloat16, torch.bfloat16, None):
        torch.manual_seed(0)
        stack = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        policy = ModuleWrapPolicy({nn.Linear})
        model = ShardedWrapper(stack, auto_wrap_policy=policy, wire_dtype=wire_dtype)
        seen: list[Tensor] = []
        model.module[0].module.register_forward_pre_hook(
            lambda module, *_, seen=seen: seen.append(module.weight.detach().clone())
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(5):
            exact = model.state_dict()["0.weight"]
            x = torch.randn(4, 8, generator=_seeded(10 * step + rank))
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(seen[-1], exact.to(wire_dtype or exact.dtype).float())
        ends.append((torch.cat([p.flatten() for p in model.state_dict().values()]), seen[-1]))
    assert "sockets, bfloat16" not in model.unit_report()
    narrow, again, plain = ends
    assert torch.equal(narrow[0], again[0])
    assert not torch.equal(narrow[0], plain[0])
    torch.testing.assert_close(narrow[0], plain[0], rtol=0.0, atol=2e-2)
    assert torch.isfinite(narrow[0]).all()
    return [narrow[0], narrow[1]]


NARROW_WAYS: list[dict[str, Any]] = [
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
