"""What kinds of models once trained wrongly, or not at all."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import allow_warnings, run_ranks
from tests.models import Case, vectors
from tests.oracle import assert_same
from tests.scripts import torchrun
from tests.side import pair
from tests.ways import BASIC

each_way = pytest.mark.parametrize("way", BASIC)


class _Quantized(nn.Module):
    """An integer weight that is not trained, with a scale that is."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.arange(21, dtype=torch.int8).view(7, 3)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype) * self.scale


@each_way
def test_integer_parameter(way: str) -> None:
    """An int8 parameter was to be viewed as one that can require grad, which torch refuses."""
    run_ranks(_integers, 2, way)


def _integers(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way, Case("quantized", _Quantized, vectors))
    for run in (sharded, plain):
        run.train(0, 3)
    assert_same(sharded.model, plain.model, 1e-12)


class _Box:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@dataclass
class _Record:
    hidden: Tensor
    extra: object = None


class _Boxing(nn.Module):
    """Computes again in backward, and returns its output in an object."""

    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up = nn.Linear(7, 9)
        self.down = nn.Linear(9, 7)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(checkpoint(self._inner, x, use_reentrant=False))

    def _inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class _Boxes(nn.Module):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first = _Boxing(kind)
        self.second = _Boxing(kind)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x).hidden
        return self.head(x + self.second(x).hidden)


@pytest.mark.parametrize("kind", [_Box, _Record])
@each_way
def test_checkpoint_in_a_unit_that_returns_an_object(way: str, kind: type) -> None:
    """Outputs were not found in the object, so nothing was gathered for the recomputation."""
    run_ranks(_boxed, 2, way, kind)


def _boxed(rank: int, world_size: int, way: str, kind: type) -> None:
    case = Case("boxes", functools.partial(_Boxes, kind), vectors, (_Boxing,))
    sharded, plain = pair(rank, world_size, way, case)
    for run in (sharded, plain):
        run.train(0, 3)
    assert_same(sharded.model, plain.model, 1e-12)


class _Giver(nn.Module):
    """Returns a view of its weight."""

    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 3))
        self.kind = kind

    def forward(self) -> Any:
        return self.kind(self.weight.t())


class _Taker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.giver = _Giver(lambda view: view)
        self.linear = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.giver().t()


@pytest.mark.parametrize("way", ["full", "grad_op"])
def test_unit_returns_a_view_of_its_weight(way: str) -> None:
    """The view's memory was freed after forward, and whoever read it got a crash."""
    run_ranks(_returned_view, 2, way)


def _returned_view(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way, Case("taker", _Taker, vectors, (_Giver,)))
    for run in (sharded, plain):
        run.train(0, 3)
    assert_same(sharded.model, plain.model, 1e-12)


class _Keeper(nn.Sequential):
    """Keeps its weight, for a penalty, as if it stayed the same object."""

    def __init__(self, numel: int) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(7, numel))
        self.kept: list[Tensor] = []
        self[0].register_forward_hook(self._keep)

    def _keep(self, linear: nn.Linear, *_: Any) -> None:
        assert type(linear.weight) is nn.Parameter
        self.kept[:] = [linear.weight]


@pytest.mark.parametrize("collectives", ["auto", "sockets"])
@pytest.mark.parametrize("numel", [7, 100_000])
def test_a_weight_kept_from_forward(collectives: str, numel: int) -> None:
    """Its memory was freed with its unit: whoever read it got a crash, or others' next step."""
    run_ranks(_kept_weight, 2, collectives, numel)


def _kept_weight(rank: int, world_size: int, collectives: str, numel: int) -> None:
    plain, x = _Keeper(numel), torch.ones(3, 7)

    (plain(x).pow(2).mean() + plain.kept[0].pow(2).sum()).backward()
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        keeper = _Keeper(numel)
        model = ShardedWrapper(
            keeper,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            sharding_strategy=strategy,
            collectives=collectives,
            backward_prefetch="BACKWARD_PRE",
        )
        for _ in range(2):
            out = model(x).pow(2).mean()
            (kept,) = keeper.kept
            assert kept.shape == (numel, 7)
            is_mapped = any(
                h.memory.shows_shards
                for unit in model._sharding.context.units
                for h in unit.handles
            )
            assert is_mapped is (numel > 7 and collectives == "auto")
            if strategy == "SHARD_GRAD_OP" and not is_mapped:
                (out + kept.pow(2).sum()).backward()
            else:
                assert "FreedParameter('0.weight')" in repr(kept)
                assert kept.requires_grad
                for use in (torch.sum, Tensor.t, lambda weight: x @ weight, lambda w: w.data):
                    with pytest.raises(RuntimeError, match=r"'0.weight': .* in forward, which"):
                        use(kept)
                # What the error recommends.
                (out + model[0].weight.pow(2).sum()).backward()
            for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
            model.zero_grad()


READS_A_VIEW = """
import torch, torch.distributed as dist
from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from torch import nn

dist.init_process_group("gloo")
kept = []
linear = nn.Linear(7, 7)
linear.register_forward_pre_hook(lambda module, _: kept.append(module.weight[0]))
model = nn.Sequential(linear, nn.Linear(7, 7))
model = ShardedWrapper(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
model(torch.ones(3, 7))
if dist.get_rank() == 0:  # or both would write at once
    kept[0].sum()  # the last line
"""


_CLEARS = "_clear_storage_data_ptr_access_error_msg"


@pytest.mark.skipif(not hasattr(torch._C, _CLEARS), reason="torch cannot let reads raise")
def test_a_view_kept_from_forward(tmp_path: Path) -> None:
    """The process ended without a word."""
    script = tmp_path / "reads_a_view.py"
    script.write_text(READS_A_VIEW)
    done = torchrun(2, script, environment=dict(os.environ), cwd=tmp_path)
    last = READS_A_VIEW[: READS_A_VIEW.index("# the last line")].count("\n") + 1
    assert f'File "{script}", line {last}, in <module>' in done.err
    assert ": a view of its unsharded parameters was read that forward" in done.err


@pytest.mark.parametrize("grad", [True, False])
def test_view_of_a_weight_in_an_object_is_refused(grad: bool) -> None:
    """An object can't be copied in its owner's place, so its view was of freed memory."""
    run_ranks(_hidden_view, 2, grad)


def _hidden_view(rank: int, world_size: int, grad: bool) -> None:
    model = ShardedWrapper(nn.Sequential(_Giver(_Box)), auto_wrap_policy=ModuleWrapPolicy({_Giver}))
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"clone\(\)"):
        model[0]()


@pytest.mark.parametrize("whole", [True, False], ids=["model", "block"])
def test_compiled(whole: bool) -> None:
    """Tracing ran into the gathering of parameters, and kept tensors that were freed later."""
    run_ranks(_compiled, 2, whole)


def _compiled(rank: int, world_size: int, whole: bool) -> None:
    sharded, plain = pair(rank, world_size, "full")
    with allow_warnings():
        if whole:
            forward = torch.compile(sharded.model, backend="eager")
        else:
            sharded.submodule("fc2").compile(backend="eager")
            forward = sharded.model
        for step in range(3):
            outputs = [forward(sharded.inputs(step)), plain.model(sharded.inputs(step))]
            torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
            outputs[0].pow(2).mean().backward()
            plain.model(plain.inputs(step)).pow(2).mean().backward()
            plain.step()
            sharded.step()
            assert_same(sharded.model, plain.model, 1e-12)


@pytest.mark.parametrize("collectives", ["auto", "sockets", "native"])
def test_lazy_conjugates(collectives: str) -> None:
    """Views that autograd saved lost their conjugation, gradients sent or read in place, too."""
    run_ranks(_lazy_conjugates, 2, collectives)


def _lazy_conjugates(rank: int, world_size: int, collectives: str) -> None:
    for numel in (6, (1 << 17) + 2):  # the larger one's gradients stay where autograd made them
        plain, wrapped = _Complex(numel), _Complex(numel)
        sharded = ShardedWrapper(wrapped, auto_wrap_policy=None, collectives=collectives)
        batches = [
            torch.randn(numel, generator=torch.Generator().manual_seed(one))
            for one in range(world_size)
        ]
        torch.stack([plain(x) for x in batches]).mean().backward()
        sharded(batches[rank]).backward()
        with ShardedWrapper.summon_full_params(sharded, with_grads=True):
            for param, expected in zip(wrapped.parameters(), plain.parameters(), strict=True):
                assert expected.grad is not None
                torch.testing.assert_close(param.grad, expected.grad.resolve_conj().resolve_neg())


class _Complex(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.phase = nn.Parameter(torch.randn(numel, dtype=torch.complex64, generator=generator))
        self.turn = nn.Parameter(torch.randn(numel, dtype=torch.complex64, generator=generator))
        self.real = nn.Parameter(torch.randn(numel, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        # The conjugate itself is saved, and one gradient is a conjugate, another a negative.
        product = x * (self.phase * self.phase.conj() * self.turn.conj()).imag
        alone = (x * self.turn.conj()).imag + torch.complex(x, self.real).conj().imag
        return (product + alone).mean()
