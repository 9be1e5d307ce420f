"""Optimizers that step in backward: the numbers of ``backward()`` and ``step()``, to the bit."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import ShardedWrapper, ShardingStrategy, declare_elementwise
from flatshard.comm.work import AsyncWork, PendingSends
from flatshard.engine import reduce_queue
from flatshard.extras.step_in_backward import is_sending
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import every
from tests.harness import assert_raises, naming, on_ranks
from tests.models import CASES, Case
from tests.oracle import assert_identical, local_loss, snapshot, step_and_zero, trainable

STEPS = 4


def _sgd(params: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, **options)


def _adamw(params: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Two groups, each with parameters of all units, that lie between one another."""
    params = list(params)
    flat = any(param.dim() == 1 and param.numel() > 100 for param in params)
    decayed = params[::2] if flat else [param for param in params if param.dim() > 1]
    rest = [param for param in params if all(param is not one for one in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01, **options)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "sgd-fused": partial(_sgd, fused=True),
    "adamw": _adamw,
    "adamw-foreach": partial(_adamw, foreach=True),
    "adamw-fused": partial(_adamw, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


Make = Callable[[Sequence[nn.Parameter]], list[torch.optim.Optimizer]]


def _ends(
    case: Case, strategy: str, make: Make, num_early: int, removes: bool, *ranks: int
) -> tuple[dict[str, Tensor], list[dict[str, Any]], int]:
    """Train with schedulers; ``num_early`` optimizers step in backward, the first for two steps.

    Returns weights, the optimizers' states, and how many units were stepped in backward.
    """
    model = case.wrap(case.model(torch.float32), sharding_strategy=strategy)
    optimizers, early = make(trainable(model)), 0
    steppers = [model.step_in_backward(one) for one in optimizers[:num_early]]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.9) for one in optimizers]
    for step in range(STEPS):
        local_loss(model, case, step, *ranks, torch.float32).backward()
        stepped = model._sharded_unit.context.extension("step_in_backward")
        early += 0 if stepped is None else len(stepped._stepped)
        if removes and step == STEPS // 2 and steppers:
            steppers[0].remove()  # the other goes on
        step_and_zero(*optimizers)
        for scheduler in schedulers:
            scheduler.step()
    states = [ShardedWrapper.optim_state_dict(model, one)["state"] for one in optimizers]
    return snapshot(model), states, early


def _early_alike(
    case: str, strategy: str, make: Make, num_early: int, removes: bool, *ranks: int
) -> int:
    weights, states, none = _ends(CASES[case], strategy, make, 0, removes, *ranks)
    found, found_states, early = _ends(CASES[case], strategy, make, num_early, removes, *ranks)
    assert_identical(found, weights)
    assert_identical(found_states, states)
    assert none == 0
    return early


def _configurations() -> Iterator[tuple[str, str, str]]:
    strategies = [one.name for one in ShardingStrategy if not one.placement.hybrid]
    for number, case in enumerate(CASES):
        if case == "mixed-types":  # float64 alone
            continue
        optimizer = list(OPTIMIZERS)[number % len(OPTIMIZERS)]
        yield case, optimizer, strategies[number % len(strategies)]
    for optimizer in OPTIMIZERS:
        yield "transformer", optimizer, "FULL_SHARD"


def _divided(params: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Two optimizers with parameters of all units, and one that never steps in backward."""
    kinds: list[Callable[..., torch.optim.Optimizer]] = [_sgd, OPTIMIZERS["adagrad"], _sgd]
    return [kind(params[number::3]) for number, kind in enumerate(kinds)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_bitwise(rank: int, world_size: int) -> None:
    """What is stepped early, and when, may differ between ranks; the numbers may not."""
    early = 0
    for name, optimizer, strategy in every(4, _configurations(), world_size):
        with naming((name, optimizer, strategy)):
            make: Make = lambda params, kind=OPTIMIZERS[optimizer]: [kind(params)]  # noqa: E731
            early += _early_alike(name, strategy, make, 1, False, rank, world_size)
    assert early > 0
    for strategy in ("FULL_SHARD", "SHARD_OP", "NO_SHARD"):
        with naming(f"several optimizers, {strategy}"):
            assert _early_alike("transformer", strategy, _divided, 2, True, rank, world_size) > 0


# ---------------------------------------------------------------- what must not be stepped early


class Layer(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.rare = nn.Parameter(torch.ones(6))
        self.recomputes = False

    def forward(self, x: Tensor, rarely: bool = True) -> Tensor:
        if self.recomputes:
            x = checkpoint(self._scaled, x, use_reentrant=False)
        x = torch.tanh(self.linear(x))
        return x * self.rare if rarely else x

    def _scaled(self, x: Tensor) -> Tensor:
        return x * F.linear(x, self.linear.weight.detach())


class Net(nn.Module):
    """Layers of which some script makes something unusual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Layer(), Layer(), Layer()
        self.mixing = nn.Parameter(torch.eye(6) + 0.1)
        self.forwards: Callable[[Net, Tensor], Tensor] = Net.plain

    def forward(self, x: Tensor) -> Tensor:
        return self.forwards(self, x)

    def plain(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x))) @ self.mixing

    def detached(self, x: Tensor) -> Tensor:
        """The last use in backward needs the weight, and gives it no gradient."""
        x = F.linear(self.first(x), self.mixing.detach())
        return F.linear(self.third(self.second(x)), self.mixing)

    def interleaved(self, x: Tensor) -> Tensor:
        """Units come again, so the unit gathered next is guessed wrong."""
        x = self.first(self.second(self.first(self.second(x))))
        return self.third(x) @ self.mixing

    def recomputed_without_grad(self, x: Tensor) -> Tensor:
        def teach(x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.third(x)
            return x * target

        x = checkpoint(teach, self.first(x), use_reentrant=False)
        return self.third(self.second(x)) @ self.mixing

    def twice_in_segments(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.second, self.first(x), use_reentrant=True)
        return self.third(x) @ self.mixing


class Script:
    """One way to train a ``Net``, with a step in backward or after it."""

    def __init__(self, rank: int, strategy: str, in_backward: bool) -> None:
        self.rank, self.in_backward = rank, in_backward
        torch.default_generator.manual_seed(3)
        policy = ModuleWrapPolicy([Layer])
        self.model = ShardedWrapper(Net(), sharding_strategy=strategy, auto_wrap_policy=policy)
        self.net: Any = self.model.module
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.registration = self.model.step_in_backward(self.optimizer) if in_backward else None

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + self.rank)
        return self.model(torch.randn(4, 6, generator=generator)).square().mean()

    def step(self, set_to_none: bool = True) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none)

    def train(self, steps: int, set_to_none: bool = True) -> None:
        for step in range(steps):
            self.loss(step).backward()
            self.step(set_to_none)


def uses(forwards: Callable[[Net, Tensor], Tensor]) -> Callable[[Script], None]:
    def script(run: Script) -> None:
        run.net.forwards = forwards
        run.train(3)

    script.__name__ = forwards.__name__
    return script


def recomputed_in_unit(run: Script) -> None:
    """The weight is needed once more after its gradient is there."""
    run.net.second.recomputes = True
    uses(Net.plain)(run)


def whole_model_recomputed(run: Script) -> None:
    """Each recomputation has a backward of its own, which adds to the gradients."""
    for _ in range(3):
        x = torch.randn(2, 4, 6, requires_grad=True)
        outputs = [checkpoint(run.model, part, use_reentrant=True) for part in x]
        sum(output.square().mean() for output in outputs).backward()
        run.step()


def used_on_one_rank(run: Script) -> None:
    run.net.first.register_forward_pre_hook(lambda _, args: (*args, run.rank == 0))
    with mock.patch.object(reduce_queue, "_STALL_SECONDS", 0.05):
        run.train(3, set_to_none=False)


def penalties(run: Script) -> None:
    """Their gradients come last, after those of the whole forward, or alone."""
    for step in range(4):
        penalty = sum(p.square().sum() for p in run.model.parameters()) * 0.1
        (penalty + run.loss(step) if step < 3 else penalty).backward()
        run.step()


def two_forwards(run: Script) -> None:
    run.net.forwards = Net.recomputed_without_grad
    for step in range(3):
        (run.loss(step) + run.loss(10 + step)).backward(retain_graph=step == 1)
        run.step()


def accumulated(run: Script) -> None:
    """Of what ``no_sync`` accumulates, nothing is stepped before the backward after it."""
    for step, options in enumerate(({}, {"max_bytes": 250}, {"replicas_only": True})):
        with run.model.no_sync(**options):
            run.loss(step).backward()
            torch.autograd.grad(run.model(x := torch.ones(1, 6, requires_grad=True)).sum(), x)
        run.loss(10 + step).backward()
        run.step()


def hooked(run: Script) -> None:
    """Hooks see the average before it is used."""
    seen = []
    for param in (run.net.mixing, *run.net.first.parameters()):
        param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.mul_(0.5)))
    run.train(2)
    assert len(seen) == 2 * 4


def closures(run: Script) -> None:
    def closure(step: int) -> Tensor:
        run.optimizer.zero_grad()
        (loss := run.loss(step)).backward()
        return loss

    for step in range(3):
        run.optimizer.step(partial(closure, step))


def removed(run: Script) -> None:
    """Then it is an ordinary optimizer, whose gradients are kept; and again not."""
    for step in range(4):
        run.loss(step).backward()
        if step % 2:
            run.model.clip_grad_norm_(0.01)
        run.step()
        if run.registration is not None:
            run.registration.remove()
            if step % 2:
                run.registration = run.model.step_in_backward(run.optimizer)


USES = [Net.plain, Net.detached, Net.interleaved]
USES += [Net.recomputed_without_grad, Net.twice_in_segments]
SCRIPTS = [*map(uses, USES), recomputed_in_unit, whole_model_recomputed, used_on_one_rank]
SCRIPTS += [penalties, two_forwards, accumulated, hooked, closures, removed]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@on_ranks()
def test_what_waits_for_the_end(rank: int, world_size: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(min(2, world_size))
    strategies = {
        1: ["FULL_SHARD"],
        2: ["FULL_SHARD", "SHARD_OP", "NO_SHARD"],
        4: ["HYBRID_SHARD", "HYBRID_SHARD_OP"],
    }
    for number, strategy in enumerate(strategies[world_size]):
        scripts = every(2, SCRIPTS, number) if world_size < 4 else [hooked, accumulated]
        for script in scripts:
            with naming((strategy, script.__name__)):
                ends = []
                for in_backward in (False, True):
                    run = Script(rank, strategy, in_backward)
                    script(run)
                    ends.append(snapshot(run.model))
                assert_identical(ends[1], ends[0])


def test_not_while_others_take() -> None:
    """A shard that another rank may still be reading is not written."""

    taking, shard, other = mock.Mock(), torch.zeros(4), torch.zeros(4)
    taking.is_completed.return_value = False
    pending_sends = PendingSends()
    AsyncWork([], "a gather", [shard.detach()], sends=[taking]).wait(pending_sends)
    assert is_sending(pending_sends, shard[2:])
    assert not is_sending(pending_sends, other)
    assert not taking.wait.called
    taking.is_completed.return_value = True
    assert not is_sending(pending_sends, shard)


# ---------------------------------------------------------------- errors


class Counting(torch.optim.SGD):
    """Keeps something per group."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


@pytest.mark.uncoalesced
@on_ranks(2)
def test_refused(rank: int, world_size: int) -> None:
    run = Script(rank, "FULL_SHARD", in_backward=False)
    model, params = run.model, list(run.model.parameters())
    declare_elementwise(Counting)
    counting = Counting(params, lr=0.1)
    adam, sgd = torch.optim.Adam(params[:2]), torch.optim.SGD(params)
    for wrong, error, says in (
        (params, TypeError, "expected a torch.optim.Optimizer"),
        (torch.optim.LBFGS(params), ValueError, "LBFGS may need the gradients of all parameters"),
        (torch.optim.SGD(nn.Linear(2, 2).parameters()), ValueError, "holds no parameter"),
        (sgd if rank else torch.optim.LBFGS(params), ValueError, "LBFGS"),
        (sgd if rank else adam, ValueError, "the optimizer is Adam on rank 0, SGD on rank 1"),
        (torch.optim.SGD(params[rank:]), ValueError, "'mixing' is in group 0 on rank 0, nothing"),
    ):
        assert_raises(error, says, model.step_in_backward, wrong)

    registration = model.step_in_backward(counting)
    assert_raises(NotImplementedError, r"Counting.step\(\) changes 'count'", run.loss(0).backward)
    registration.remove()
    model.zero_grad()
    model.state_dict()  # no rank was left waiting

    model.step_in_backward(adam)
    says = "SGD holds parameters that another optimizer already steps"
    assert_raises(ValueError, says, model.step_in_backward, sgd)
    assert_raises(ValueError, "on a part of the module", ShardedWrapper, nn.Sequential(model))
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\) needs all gradients"):
        model.clip_grad_norm_(1.0)
    scaler = torch.amp.GradScaler("cpu")
    says = "enabled GradScaler unscales gradients after backward"
    assert_raises(ValueError, says, model.step_in_backward, torch.optim.SGD(params), scaler)
    scaler.scale(run.loss(0)).backward()
    assert params[2].grad is not None  # which no optimizer steps in backward
    assert_raises(RuntimeError, r"'mixing': .*GradScaler", scaler.unscale_, adam)
    with pytest.raises(RuntimeError, match=r"'mixing': .*Clipping by a norm"):
        nn.utils.clip_grad_norm_(params[:1], 1.0)
    assert_raises(RuntimeError, "stepped the parameter and dropped", params[0].grad.norm)
    assert "ConsumedGrad('mixing'" in repr(params[0].grad)


@pytest.mark.uncoalesced
@on_ranks(2)
def test_a_backward_that_fails_in_the_middle(rank: int, world_size: int) -> None:
    """All ranks hear of gradients that come too late; what a failing backward leaves is told."""

    def fail(*_: Any) -> None:
        raise ArithmeticError

    run = Script(rank, "FULL_SHARD", in_backward=True)
    hook = run.net.first.register_forward_hook(lambda _m, _a, out: out.register_hook(fail) and None)
    with pytest.raises(ArithmeticError):
        run.loss(0).backward()
    hook.remove()
    left = r"failed after step_in_backward\(\) had stepped [12] of 4 units"
    with pytest.warns(UserWarning, match=left):
        run.loss(1).backward()
    run.step()
    assert all(param.isfinite().all() for param in run.model.state_dict().values())

    x = torch.randn(4, 6, requires_grad=True)
    recomputed = checkpoint(run.model, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"unit '(second|third)' got more gradient after"):
        (recomputed.sum() + run.loss(2)).backward()
    with pytest.warns(UserWarning, match="a backward failed"):
        run.model.state_dict()
