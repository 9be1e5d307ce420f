"""Models that change, and passes that fail, between the steps of every strategy.

A script runs with the plain model on the rows of all ranks and with the sharded one on this rank's,
and has to come to the same end.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatshard import declare_elementwise
from tests.harness import allow_warnings, run_ranks
from tests.models import CASES, Case, loss_of, vectors
from tests.oracle import OPTIMIZERS, ROWS, assert_same_state, snapshot, trainable
from tests.side import Run, Script, assert_same_model
from tests.ways import WAYS


class _Branches(nn.Module):
    """Of its three branches, each rank uses those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(7, 5)
        self.branches = nn.ModuleList([nn.Linear(5, 3) for _ in range(3)])

    def forward(self, x: Tensor, which: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = torch.tanh(self.fc1(x))
        return sum((self.branches[index](x) for index in which), 0.1 * x[:, :3])


_CASES = {**CASES, "branches": Case("branches", _Branches, vectors)}


def _backward(run: Run, step: int, which: Callable[[int], tuple[int, ...]]) -> None:
    """A backward in which rank ``r`` uses the branches ``which(r)``."""
    ranks = [run.rank] if run.is_sharded else range(run.world_size)
    inputs, target = run.case.batch(step, run.world_size * ROWS)
    for rank in ranks:
        x, y = (tensor.chunk(run.world_size)[rank] for tensor in (inputs, target))
        (loss_of(run.model(x, which(rank)), y) / len(ranks)).backward()


def _penalty(run: Run) -> Tensor:
    return 0.1 * sum(p.pow(2).sum() for p in run.model.parameters())


# ---------------------------------------------------------------- scripts


def converted_between_steps(run: Run) -> None:
    """Optimizers went on to update the memory of before the conversion."""
    run.train(0, 2)
    run.model.float().double()
    run.optimizer = OPTIMIZERS["sgd"](trainable(run.model))
    run.train(2, 4)


class _DataSgd(torch.optim.Optimizer):
    """Writes through ``p.data``, as optimizers from before ``no_grad`` do."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad.data, alpha=-0.1)


def optimizer_writes_through_data(run: Run) -> None:
    """Nobody saw that, and what was gathered before the first step served for ever."""
    declare_elementwise(_DataSgd)
    run.optimizer = _DataSgd(run.model.parameters())
    run.train(0, 4)


def dropped_where_ranks_differ(run: Run) -> None:
    """What the other rank of a node had reduced into this one's part survived zero_grad()."""
    for step in range(3):
        with run.no_sync(replicas_only=True):
            _backward(run, 2 * step, lambda rank, step=step: ((rank + step) % 3,))
        run.parameter(f"branches.{step}.weight").grad = None
        _backward(run, 2 * step + 1, lambda rank, step=step: ((rank + step + 1) % 3,))
        run.step()


def dropped_where_unused(run: Run) -> None:
    """Gradients of the first backward were hidden from zero_grad() by the second one."""
    run.loss(0).backward()
    with run.no_sync():
        _backward(run, 1, lambda rank: (0,))
    run.optimizer.zero_grad()
    run.train(2, 3)


def frozen_while_accumulating(run: Run) -> None:
    """Gradients from before stayed in the buffer, and .grad was None."""
    for step in range(3):
        with run.no_sync(replicas_only=step == 2):
            run.loss(3 * step).backward()
        run.model.fc1.requires_grad_(False)
        run.loss(3 * step + 1).backward()
        run.step()
        run.model.fc1.requires_grad_(True)
        run.train(3 * step + 2, 3 * step + 3)


def penalty_while_accumulating(run: Run) -> None:
    """Autograd added the penalty's gradient to what is shown of the buffer: an error."""
    for first in (0, 10):
        with run.no_sync(replicas_only=first == 10):
            (run.loss(first) + _penalty(run)).backward()
            run.loss(first + 1).backward()
        (run.loss(first + 2) + _penalty(run)).backward()
        run.step()


def failed_backward_after_another(run: Run) -> None:
    """Gradients from before the failed backward came back after zero_grad()."""
    run.loss(0).backward()
    hook = run.submodule("fc2").register_forward_hook(_fail_later)
    with pytest.raises(ValueError, match="bad backward"):
        run.loss(1).backward()
    hook.remove()
    run.optimizer.zero_grad()
    with allow_warnings(UserWarning, "a backward failed"):
        run.train(2, 4)


def _fail_later(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
    output.register_hook(_fail)


def _fail(_: Tensor) -> None:
    raise ValueError("bad backward")


def step_on_half_of_it_is_refused(run: Run) -> None:
    """An optimizer took the reduced gradient and left what was accumulated for the next step."""
    run.loss(0).backward()
    with run.no_sync():
        run.loss(1).backward()
    if run.is_sharded:
        with pytest.raises(RuntimeError, match="no_sync"):
            run.optimizer.step()
    run.loss(2).backward()
    run.step()


def replaced_while_accumulating_is_refused(run: Run) -> None:
    """What replaced the gradient was added to it."""
    with run.no_sync():
        run.loss(0).backward()
    if run.is_sharded:
        for param in run.model.parameters():
            param.grad = param.grad * 0.5
        with pytest.raises(RuntimeError, match="were edited"):
            run.loss(1).backward()
    run.optimizer.zero_grad()
    with allow_warnings(UserWarning, "a backward failed"):
        run.train(2, 4)


def two_models_in_one_backward(run: Run) -> None:
    """Second stages of their reductions met in whatever order the first ones ended: a hang."""
    other = run.case.model()
    if run.is_sharded:
        other = run.case.wrap(other, sharding_strategy="HYBRID_SHARD_OP")
    optimizer = OPTIMIZERS["sgd"](other.parameters())
    for step in range(4):
        outputs = run.model(run.inputs(step)), other(run.inputs(step))
        (outputs[0].pow(2).mean() + F.mse_loss(*outputs)).backward()
        run.step()
        optimizer.step()
        optimizer.zero_grad()


SCRIPTS: list[tuple[Script, str, list[str]]] = [
    (converted_between_steps, "mlp", ["full", "hybrid-op", "regather"]),
    (optimizer_writes_through_data, "mlp", ["op", "hybrid-op"]),
    (dropped_where_ranks_differ, "branches", ["hybrid", "hybrid-op"]),
    (dropped_where_unused, "branches", ["no_shard", "hybrid"]),
    (frozen_while_accumulating, "mlp", ["full", "no_shard", "hybrid", "hybrid-op"]),
    (penalty_while_accumulating, "mlp", ["full", "no_shard", "hybrid"]),
    (failed_backward_after_another, "mlp", ["no_shard", "hybrid"]),
    (step_on_half_of_it_is_refused, "mlp", ["full", "hybrid-op"]),
    (replaced_while_accumulating_is_refused, "mlp", ["full", "no_shard"]),
    (two_models_in_one_backward, "mlp", ["hybrid", "hybrid-op"]),
]


def _combinations() -> Iterator[Any]:
    for script, name, ways in SCRIPTS:
        for way in ways:
            yield pytest.param(script, name, way, id=f"{script.__name__}-{way}")


@pytest.mark.parametrize(("script", "name", "way"), list(_combinations()))
def test_script(script: Script, name: str, way: str) -> None:
    run_ranks(_run_both, WAYS[way].world_size, script, name, way)


def _run_both(rank: int, world_size: int, script: Script, name: str, way: str) -> None:
    WAYS[way].set_nodes()
    case = _CASES[name]
    plain = Run(case.model(), case, rank, world_size)
    sharded = Run(case.wrap(case.model(), **WAYS[way].keywords), case, rank, world_size)
    for run in (plain, sharded):
        script(run)
    assert_same_model(sharded, plain)


@pytest.mark.parametrize("way", ["full", "no_shard", "hybrid-replicas"])
def test_converted_while_accumulating(way: str) -> None:
    run_ranks(_converted_while_accumulating, 4, way)


def _converted_while_accumulating(rank: int, world_size: int, way: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    strategy = {"full": "FULL_SHARD", "no_shard": "NO_SHARD"}.get(way, "HYBRID_SHARD")
    case = CASES["mlp"]
    sharded = Run(case.wrap(case.model(), sharding_strategy=strategy), case, rank, world_size)
    plain = Run(case.model(), case, rank, world_size)
    for run in (sharded, plain):
        run.loss(0).backward()
        with run.no_sync(**({"replicas_only": True} if way == "hybrid-replicas" else {})):
            run.loss(1).backward()
        run.model.float()
        if run.is_sharded:
            with pytest.raises(RuntimeError, match="accumulated under no_sync"):
                run.optimizer.step()
        run.model.double()
        run.loss(2).backward()
        run.step()
    assert_same_state(sharded.model.state_dict(), snapshot(plain.model), 0.0, 1e-6)
