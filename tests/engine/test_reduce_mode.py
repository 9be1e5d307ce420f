"""In which dtype and order gradients are added up, over ranks and over micro-batches."""

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatshard import MixedPrecision, ShardedWrapper, collectives, sharded_modules
from flatshard.comm.transports import sockets
from flatshard.engine import gradients, reduce_queue
from flatshard.options.extras import default_extra
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import naming, on_ranks

pytestmark = pytest.mark.by_turns

BF16 = torch.bfloat16
WIDTH = 600


class Scaled(nn.Linear):
    """Has a parameter that not every rank uses."""

    def __init__(self) -> None:
        super().__init__(7, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, use_scale: bool) -> Tensor:
        return torch.tanh(super().forward(x) * (self.scale if use_scale else 1.0))


class Branches(nn.Module):
    """A small unit, a large one, and the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled()
        self.second = nn.Linear(16, WIDTH)
        self.shift = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, use_scale: bool) -> Tensor:
        x = self.first(x, use_scale)
        return self.second(x).float().square().mean() + (x[:, :5] * self.shift).float().sum()


def _model() -> Branches:
    torch.default_generator.manual_seed(3)
    return Branches()


def _inputs(rank: int, batch: int = 0) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * batch + rank))


def _wrap(mode: str, strategy: str, **precision: Any) -> ShardedWrapper:
    settings = {"sharding_strategy": strategy, "collectives": mode}
    policy, precision = ModuleWrapPolicy({Scaled, nn.Linear}), MixedPrecision(**precision)
    return ShardedWrapper(_model(), auto_wrap_policy=policy, mixed_precision=precision, **settings)


def _backward(model: nn.Module, rank: int, batch: int = 0) -> None:
    model(_inputs(rank, batch), use_scale=rank != 1).backward()


def _local(rank: int, batches: int = 1, compute: torch.dtype = torch.float32) -> list[Tensor]:
    """One rank's gradients, summed over micro-batches in fp32."""
    total = [torch.zeros_like(param) for param in _model().parameters()]
    for batch in range(batches):
        model = _model().to(compute)
        model(_inputs(rank, batch).to(compute), use_scale=rank != 1).backward()
        for one, param in zip(total, model.parameters(), strict=True):
            if param.grad is not None:
                one += param.grad.float()
    return total


def _average(ranks: list[list[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """What is sent is rounded to ``dtype``; it is added in fp32 and in rank order."""
    averages = []
    for of_ranks in zip(*ranks, strict=True):
        total = torch.zeros_like(of_ranks[0])
        for gradient in of_ranks:
            total += gradient.to(dtype).float()
        averages.append(total / len(ranks))
    return averages


def _check(model: ShardedWrapper, expected: list[Tensor]) -> None:
    for (name, param), theirs in zip(model.named_parameters(), expected, strict=True):
        assert param.grad.dtype == torch.float32
        assert torch.equal(getattr(param.grad, "full_tensor", param.grad.detach)(), theirs), name


@contextlib.contextmanager
def _small_limits() -> Iterator[None]:
    """As if the large unit had millions of elements: read in place, and in several pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "_SMALL_BYTES", 1 << 12)
        if default_extra("shared_memory") is not None:
            patch.setattr("flatshard.extras.shared_memory._PIECE_NUMEL", 1000)
        patch.setattr(sockets, "PIECE_BYTES", 1 << 12)
        patch.setattr(sockets, "_ADDED_AT_ONCE", 300)
        # A parameter that a rank does not use holds up its other units' reductions.
        patch.setattr(reduce_queue, "_STALL_SECONDS", 0.01)
        patch.setenv("LOCAL_WORLD_SIZE", "2")  # for HYBRID strategies
        yield


# ---------------------------------------------------------------- over ranks


TRANSPORTS = ("auto", "sockets", "native")
MODES = [
    *itertools.product(TRANSPORTS, ["fixed_order"], ("FULL_SHARD", "NO_SHARD")),
    *itertools.product(("auto", "sockets"), ["auto"], ["FULL_SHARD"]),
]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@on_ranks()
def test_gradients_are_alike_by_any_transport(rank: int, world_size: int) -> None:
    """Bit for bit, though the ranks come in the opposite order."""
    local = [_local(one) for one in range(world_size)]
    for dtype in (torch.float32, BF16):
        average = _average(local, dtype)
        ways = [*MODES, *[(m, "auto", "NO_SHARD") for m in ("auto", "sockets") if dtype is BF16]]
        if world_size == 4:  # within nodes of two, then rounded to cross: fixed for a grid
            stages = _average([_average(local[:2], dtype), _average(local[2:], dtype)], dtype)
            hybrid = ("HYBRID_SHARD", "HYBRID_SHARD_OP")
            ways += itertools.product(TRANSPORTS, ["fixed_order"], hybrid)
        for mode, reduce_mode, strategy in ways:
            expected = stages if "HYBRID" in strategy else average
            with naming((dtype, mode, reduce_mode, strategy)), _small_limits():
                model = _wrap(mode, strategy, reduce_dtype=dtype, reduce_mode=reduce_mode)
                time.sleep(0.003 * (world_size - rank))
                _backward(model, rank)
                _check(model, expected)


@on_ranks(2)
def test_half_the_bytes(rank: int, world_size: int) -> None:
    """An all-reduce sends bf16 one way, and the sums, in fp32, the other."""
    for mode in ("auto", "native"):
        for strategy, share in (("FULL_SHARD", 0.5), ("NO_SHARD", 0.75)):
            sent: dict[torch.dtype, dict[str, int]] = {}
            for dtype in (torch.float32, BF16):
                model = _wrap(mode, strategy, param_dtype=dtype, reduce_mode="fixed_order")
                with collectives.record() as events:
                    _backward(model, rank)
                kinds = ("gather", "reduce", "all_reduce")
                sent[dtype] = {k: sum(e.nbytes for e in events if e.kind == k) for k in kinds}
            for kind, nbytes in sent[torch.float32].items():
                ratio = 0.5 if kind == "gather" else share
                assert sent[BF16][kind] == ratio * nbytes, (mode, strategy, kind)
            assert sent[BF16]["reduce" if strategy == "FULL_SHARD" else "all_reduce"] > 0


# ---------------------------------------------------------------- over micro-batches


@pytest.mark.uncoalesced  # counts what each unit keeps
@on_ranks(2)
def test_sums_under_no_sync_are_fp32(rank: int, world_size: int) -> None:
    """Only what is sent is rounded, once. Micro-batches beyond the first take fp32, not before."""
    batches = 4
    for compute in (torch.float32, BF16):
        everyone = [_local(one, batches, compute) for one in range(world_size)]
        expected = _average(everyone, BF16)
        for mode, strategy in itertools.product(("auto", "sockets"), ("FULL_SHARD", "NO_SHARD")):
            with naming((compute, mode, strategy)), _small_limits():
                model = _wrap(mode, strategy, param_dtype=compute, reduce_dtype=BF16)
                held = []
                with model.no_sync():
                    for batch in range(batches - 1):
                        _backward(model, rank, batch)
                        held.append(_held_bytes(model))
                _backward(model, rank, batches - 1)
                _check(model, expected)
                assert _held_bytes(model) == 0
                # A rank that does not use a parameter has nothing of it.
                numel = sum(p.numel() for p in _model().parameters()) - 16 * (rank == 1)
                assert held == [numel * compute.itemsize, 4 * numel, 4 * numel]


def _held_bytes(model: ShardedWrapper) -> int:
    units = [wrapper._sharded_unit for wrapper in sharded_modules(model)]
    return sum(handle.grads.nbytes for unit in units for handle in unit.handles)


@on_ranks(2)
def test_sums_of_averages_are_fp32(rank: int, world_size: int) -> None:
    """Without ``no_sync`` every backward's average is added to ``.grad``, and nothing is kept."""
    expected = _average([_local(one) for one in range(world_size)], BF16)
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        model = _wrap("auto", strategy, reduce_dtype=BF16)
        for _ in range(3):
            _backward(model, rank)
            assert _held_bytes(model) == 0
        _check(model, [one + one + one for one in expected])


@on_ranks(2)
def test_max_bytes_counts_what_sums_take(rank: int, world_size: int) -> None:
    model = _wrap("auto", "FULL_SHARD", param_dtype=BF16)
    first = (7 * 16 + 16 + 16) * 4
    with model.no_sync(max_bytes=first):
        for batch in range(2):
            _backward(model, rank, batch)
            assert _held_bytes(model) <= first
    assert not any(isinstance(p.grad, type(None)) for p in model.second.parameters())


# ---------------------------------------------------------------- what is refused


@on_ranks(2)
def test_refused(rank: int, world_size: int) -> None:
    for value, error in (("fixed", ValueError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match=r'reduce_mode: .* Use one of "auto", "fixed_order"'):
            MixedPrecision(reduce_mode=value)
    with pytest.raises(ValueError, match=r"setting \d+ is .*ReduceMode.AUTO.*FIXED_ORDER"):
        _wrap("auto", "FULL_SHARD", reduce_mode=("auto", "fixed_order")[rank])
    model = _wrap("auto", "FULL_SHARD", reduce_mode="fixed_order")
    with pytest.raises(ValueError, match=r"may add gradients in any order, but the root"):
        model.register_comm_hook(None, lambda state, full, out: None)
