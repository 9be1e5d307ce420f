"""Forwards, backwards and steps that raise, after which training goes on; not in the table."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatshard import FlatShardTensor, declare_elementwise
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import assert_raises, naming
from tests.idioms.graphs import penalty_of
from tests.idioms.side import ROWS, Planned, Side, fail, failing, idiom, planned
from tests.idioms.together import Net
from tests.models import Composed, Mlp


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Planned


@idiom("the backward of an earlier forward, after another one that failed", by_hand=True)
def backward_after_failure(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    if side.implementation == "by hand":  # gradients of a part of the failed backward
        return side.fit(model, optimizer, steps=1)[1:]
    good = side.loss(model, 0)
    hook = side.inner(model).fc2.register_forward_hook(lambda _, inputs, out: _Failing.apply(out))
    bad = side.loss(model, 1)
    hook.remove()
    with planned():
        bad.backward()
    good.backward()
    side.step(optimizer)
    return [model]


@idiom("an exception in the first forward and backward, then an evaluation", by_hand=True)
def exceptions_at_first(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    for in_backward in (False, True):
        with failing(side.inner(model).fc2, in_backward):
            side.loss(model, 30).backward()
    optimizer.zero_grad()
    with torch.no_grad():
        output = side.loss(model, 70)
    return [output, *side.fit(model, optimizer)]


@idiom("exceptions before, within and after the step, by hooks and a closure")
def exception_in_step(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())

    def closure() -> Tensor:
        side.loss(model, 40).backward()
        raise Planned

    hooks = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
    for step, register in enumerate(hooks):
        side.loss(model, step).backward()
        handle = register(fail)
        with planned():
            optimizer.step()
        handle.remove()
        optimizer.zero_grad()
        side.learn(model, optimizer, 10 + step)
    with planned():
        optimizer.step(closure)
    optimizer.zero_grad()
    side.learn(model, optimizer, 20)
    return model


@idiom("of two chained models, one fails in forward or backward", by_hand=True)
def exception_between_models(side: Side) -> Any:
    first, second = side.wrap(Net()), side.wrap(Net(7, 3))
    optimizer = side.sgd(first, second)

    def backward(step: int) -> None:
        F.mse_loss(second(first(side.draw(step, ROWS, 7))), side.draw(50, ROWS, 3)).backward()

    for step, model in enumerate((second, first, first, second)):
        with failing(side.inner(model).up, in_backward=step < 2):
            backward(step)
        optimizer.zero_grad()
        for good in (10 * step, 10 * step + 1):
            backward(good)
            side.step(optimizer)
    return [first, second]


@idiom("a failed backward that loses what `no_sync` had accumulated, and says so", by_hand=True)
def lost_gradients(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    _accumulate(side, model, 0)
    with failing(side.inner(model).fc2, in_backward=True):
        side.loss(model, 1).backward()
    if side.is_flatshard:
        with pytest.warns(UserWarning, match="accumulated before this backward are lost"):
            side.loss(model, 2)
    optimizer.zero_grad()
    return side.fit(model, optimizer)


class _FailingSgd(torch.optim.SGD):
    error: BaseException | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.error is not None:
            raise self.error


class _FailingWithin(torch.optim.Optimizer):
    """An optimizer of the user's, in whose step no other step runs."""

    error: BaseException | None = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.add_(param.grad, alpha=-0.1)
        if self.error is not None:
            raise self.error


@idiom("an optimizer shows its parameters after a step that failed", ways="full no_shard")
def parameters_after_failed_step(side: Side) -> Any:
    # The first step of a class fails, and a later step, and one that the user interrupts.
    class FirstSeenHere(_FailingSgd):
        pass

    if side.is_flatshard:
        declare_elementwise(_FailingWithin)
    model = side.wrap(Mlp())
    params = list(model.parameters())
    # Torch hooks the step of each class at its first object. From here on, `super().step()` runs
    # the hooks inside of a step, too.
    torch.optim.SGD(params, lr=0.1)
    first = FirstSeenHere(params, lr=0.1, momentum=0.9)
    for optimizer in (first, _FailingWithin(params, {})):
        for step, error in enumerate((Planned(), Planned(), KeyboardInterrupt())):
            side.loss(model, step).backward()
            optimizer.error = error
            with contextlib.suppress(type(error)):
                optimizer.step()
                raise AssertionError("nothing was raised")
            optimizer.error = None
            shown = optimizer.param_groups[0]["params"]
            assert [*map(id, shown)] == [*map(id, params)]
            assert optimizer is not first or {*map(id, first.state)} == {*map(id, params)}
            optimizer.zero_grad()
            other = torch.optim.SGD([{"params": shown}], lr=0.2)
            side.learn(model, other, 10 + step)
    return model


@idiom("an exception in a backward inside a forward, which catches it", by_hand=True)
def exception_in_inner_backward(side: Side) -> Any:
    class Forces(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.up(x))
            hidden.register_hook(fail)
            with contextlib.suppress(Planned):
                self.down(hidden).sum().backward()
            return self.down(torch.tanh(self.up(x))) * self.scale

    model = side.wrap(Forces())
    params = list(model.parameters())
    optimizer = side.sgd(model)
    for step in range(2):
        output = model(side.draw(step, ROWS, 7))
        assert [*map(id, model.parameters())] == [*map(id, params)]
        optimizer.zero_grad()
        F.mse_loss(output, side.draw(50, ROWS, 7)).backward()
        side.step(optimizer)
    return model


SURPRISES = (
    *("nothing", "nothing", "no gradient", "another gradient", "data", "nothing", "state"),
    *("no state", "frozen", "nothing"),
)
"""What happens to a parameter in the middle of a run before a step."""


@idiom("what was stepped as one the last time may not be one this time", by_hand=True, ways="full")
def runs_that_users_break_up(side: Side) -> Any:
    model = side.wrap_whole(Mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    param: Any = side.inner(model).fc2.weight
    for step, surprise in enumerate(SURPRISES):
        side.loss(model, step).backward()
        if surprise == "no gradient":
            param.grad = None
        elif surprise == "another gradient":
            param.grad = param.grad * 2
        elif surprise == "data":
            param.data = param.data * 0.5
        elif surprise == "state":
            optimizer.state[param]["exp_avg"] = optimizer.state[param]["exp_avg"] * 3
        elif surprise == "no state":
            del optimizer.state[param]
        elif surprise == "frozen":
            param.requires_grad_(False)
        side.step(optimizer)
    return model


@idiom("groups that take turns along the parameters", ways="full")
def groups_that_take_turns(side: Side) -> Any:
    model = side.wrap_whole(Mlp())
    params = list(model.parameters())
    groups = [{"params": params[first::3], "lr": lr} for first, lr in enumerate((0.1, 0.0, 1))]
    return side.fit(model, torch.optim.SGD(groups, momentum=0.9))


@idiom("a closure of an optimizer of whole parameters, after `no_sync`", ways="full no_shard")
def closure_of_whole_parameters(side: Side) -> Any:
    class Outside(torch.optim.SGD):
        """Not known to be element-wise."""

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure) if self.defaults["lr"] else closure(sync=False)

    model = side.wrap(Mlp())
    optimizer = Outside(model.parameters(), lr=0.1, momentum=0.9)
    results = []
    for step in range(0, 6, 2):
        _accumulate(side, model, step + 1)
        results.append(optimizer.step(side.closure(model, step, [])).detach())
        optimizer.zero_grad()
    if side.is_flatshard:
        if isinstance(next(model.parameters()), FlatShardTensor):
            with pytest.raises(NotImplementedError, match="calls its closure with arguments"):
                Outside(model.parameters(), lr=0.0).step(side.closure(model, 0, []))
        for kind in (Outside, torch.optim.SGD):
            with pytest.raises(RuntimeError, match="accumulated under no_sync and not reduced"):
                kind(model.parameters(), lr=0.1).step(lambda: _accumulate(side, model, 0))
            model.zero_grad()
    return [*results, model]


# ---------------------------------------------------------------- gradients that are half reduced


class Branches(nn.Module):
    """Of its three branches, each rank uses those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(7, 5)
        self.branches = nn.ModuleList([nn.Linear(5, 3) for _ in range(3)])

    def forward(self, x: Tensor, which: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = torch.tanh(self.fc1(x))
        return sum((self.branches[index](x) for index in which), 0.1 * x[:, :3])


def _branched(side: Side, model: nn.Module, step: int, *which: int) -> Tensor:
    return side.loss(lambda x: model(x, which), step)


@idiom(
    "other branches on each rank: `.grad` is an average where some rank used one, or None",
    by_hand=True,
    ways="full grad_op no_shard op hybrid hybrid-op",
)
def branches_by_rank(side: Side) -> Any:
    net = Branches()
    net.spare = nn.Linear(5, 3)
    model = side.wrap_whole(net)
    optimizer = side.sgd(model)
    results = []
    for step in range(3):
        _branched(side, model, step, (step + side.rank) % 3).backward()
        results.append([p.grad is None for p in model.parameters()])
        side.step(optimizer)
    return [*results, model]


def _accumulate(side: Side, model: nn.Module, *steps: int, **keywords: Any) -> None:
    with side.no_sync(model, **keywords):
        for step in steps:
            side.loss(model, step).backward()


@idiom("`model.float().double()` between steps", by_hand=True, ways="full hybrid-op regather")
def converted_between_steps(side: Side) -> Any:
    model = side.wrap(Mlp())
    side.fit(model, steps=2)
    model.float().double()
    return side.fit(model, steps=2, first=2)


class _DataSgd(torch.optim.Optimizer):
    """Writes through ``p.data``, as optimizers from before ``no_grad`` do."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad.data, alpha=-0.1)


@idiom("an optimizer that writes through `p.data`", ways="op hybrid-op")
def optimizer_writes_through_data(side: Side) -> Any:
    if side.is_flatshard:
        declare_elementwise(_DataSgd)
    model = side.wrap(Mlp())
    return side.fit(model, _DataSgd(model.parameters(), {}))


@idiom("gradients dropped where ranks differ", by_hand=True, ways="hybrid hybrid-op")
def dropped_where_ranks_differ(side: Side) -> Any:
    model = side.wrap_whole(Branches())
    optimizer = side.sgd(model)
    for step in range(3):
        with side.no_sync(model, replicas_only=True):
            _branched(side, model, 2 * step, (side.rank + step) % 3).backward()
        side.inner(model).branches[step].weight.grad = None
        _branched(side, model, 2 * step + 1, (side.rank + step + 1) % 3).backward()
        side.step(optimizer)
    return model


@idiom("gradients dropped where a backward used none", by_hand=True, ways="full no_shard hybrid")
def dropped_where_unused(side: Side) -> Any:
    model = side.wrap_whole(Branches())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    side.loss(model, 0).backward()
    for to_none in (True, False):  # zeros, unlike None, let the weights decay
        with side.no_sync(model):
            _branched(side, model, 1, 0).backward()
        optimizer.zero_grad(set_to_none=to_none)
        _branched(side, model, 2, 1).backward()
        side.step(optimizer)
    return model


@idiom("frozen while gradients accumulate", by_hand=True, ways="full no_shard hybrid hybrid-op")
def frozen_while_accumulating(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    for step in range(3):
        _accumulate(side, model, 3 * step, replicas_only=step == 2)
        side.inner(model).fc1.requires_grad_(False)
        side.learn(model, optimizer, 3 * step + 1)
        side.inner(model).fc1.requires_grad_(True)
        side.learn(model, optimizer, 3 * step + 2)
    return model


@idiom("penalties while gradients accumulate", ways="full no_shard hybrid")
def penalty_while_accumulating(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    for first in (0, 10):
        with side.no_sync(model, replicas_only=first == 10):
            (side.loss(model, first) + penalty_of(model)).backward()
            side.loss(model, first + 1).backward()
            penalty_of(model).backward()  # autograd adds it in place to what `.grad` shows
        (side.loss(model, first + 2) + penalty_of(model)).backward()
        side.step(optimizer)
    return model


@idiom("a step on unreduced gradients: refused", ways="full grad_op no_shard hybrid-op")
def step_on_half_of_it(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())

    def step_is_refused() -> None:
        _accumulate(side, model, 1)
        if side.is_flatshard:
            assert_raises(RuntimeError, "no_sync", optimizer.step)

    step_is_refused()
    optimizer.zero_grad()
    side.loss(model, 0).backward()
    step_is_refused()
    side.learn(model, optimizer, 2)
    side.loss(model, 3).backward()
    _accumulate(side, model, 4)
    optimizer.zero_grad(set_to_none=False)
    # The gradient, dropped in place, is the same object, and nothing is missing in it now.
    side.learn(model, optimizer, 5)
    return model


@idiom(
    "accumulation in every mode of `no_sync`; what is dropped between is not reduced later",
    ways="full no_shard op hybrid hybrid-op hybrid-op-nodes-of-one "
    "hybrid-nodes-of-one regather keep native-hybrid-op",
)
def modes_of_accumulation(side: Side) -> Any:
    bounds: list[dict[str, Any]] = [{"max_bytes": bound} for bound in (0, 8 * 40, 10**6)]
    models = []
    for keywords in ({}, *bounds, {"replicas_only": True}, {"replicas_only": True, **bounds[1]}):
        model, optimizer = side.begin(Mlp())
        _accumulate(side, model, 0, 1, **keywords)
        side.learn(model, optimizer, 2)
        side.loss(model, 3).backward()
        _accumulate(side, model, 4, **keywords)
        side.learn(model, optimizer, 5)
        _accumulate(side, model, 6, **keywords)
        optimizer.zero_grad()
        side.learn(model, optimizer, 7)
        models.append(model)
    return models


@idiom("`zero_grad` between backwards under `no_sync`", ways="full grad_op no_shard")
def zeroed_while_accumulating(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    for first, set_to_none in ((0, True), (10, False)):
        _accumulate(side, model, first, first + 1)
        optimizer.zero_grad(set_to_none)
        _accumulate(side, model, first + 2)
        side.loss(model, first + 3).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none)
        side.loss(model, first + 4).backward()
        _accumulate(side, model, first + 5)
        optimizer.zero_grad(set_to_none)
        side.learn(model, optimizer, first + 6)
    return model


READS: dict[str, Callable[[Any, Any], Tensor]] = {
    "norm": lambda grad, _: grad.norm(),
    "pow": lambda grad, _: grad.pow(2).sum(),
    "clone": lambda grad, _: grad.clone().max(),
    "detach": lambda grad, _: grad.detach().mean(),
    "with the parameter": lambda grad, param: (param.detach() * grad).sum(),
    "in place": lambda grad, _: torch.zeros_like(grad).add_(grad).sum(),
    "foreach": lambda grad, _: torch._foreach_mul([grad], 2.0)[0].norm(),
}


@idiom("numbers computed from gradients that are not reduced: refused", ways="full")
def reads_of_unreduced_gradients(side: Side) -> Any:
    model = side.wrap(Mlp())
    weight = side.inner(model).fc2.weight
    with side.no_sync(model):
        side.loss(model, 0).backward()
        for name, read in READS.items() if side.is_flatshard else ():
            with naming(name), pytest.raises(RuntimeError, match="under no_sync and not reduced"):
                read(weight.grad, weight)
    kept, weight.grad = weight.grad, None
    side.loss(model, 1).backward()
    with pytest.raises(RuntimeError, match="not red") if side.is_flatshard else side.no_sync(model):
        kept.sum()
    return [read(weight.grad, weight) for read in READS.values()]


@idiom("a rank leaves out a parameter of the root, over sockets", unused=True, ways="full")
def root_that_is_over_early(side: Side) -> Any:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.second(torch.tanh(net.first(x)))
        return x if side.rank == 1 else x * net.scale.prod()

    scale = nn.Parameter(torch.ones(3))
    net = Composed(forward, first=nn.Linear(7, 7), second=nn.Linear(7, 3), scale=scale)
    if not side.is_flatshard:
        return side.fit(side.wrap(net))
    policy = ModuleWrapPolicy({nn.Linear})
    return side.fit(side.shard(net, auto_wrap_policy=policy, collectives="sockets"))


@idiom("a gradient replaced while it accumulates: refused", ways="full no_shard")
def replaced_while_accumulating(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    _accumulate(side, model, 0)
    if side.is_flatshard:
        for param in model.parameters():
            param.grad = param.grad * 0.5
        assert_raises(RuntimeError, "were edited", side.loss(model, 1).backward)
    optimizer.zero_grad()
    return side.fit(model, optimizer, steps=2, first=2)


@idiom("two models of different strategies in one backward", ways="hybrid hybrid-op")
def two_strategies(side: Side) -> Any:
    model, other = side.wrap(Mlp()), Mlp()
    if side.is_flatshard:
        policy = ModuleWrapPolicy({nn.Linear})
        other = side.shard(other, sharding_strategy="HYBRID_SHARD_OP", auto_wrap_policy=policy)
    else:
        other = side.wrap(other)
    optimizer = side.sgd(model, other)
    for step in range(4):
        x = side.draw(step, ROWS, 7)
        outputs = model(x), other(x)
        (outputs[0].pow(2).mean() + F.mse_loss(*outputs)).backward()
        side.step(optimizer)
    return [model, other]


@idiom("`float()` while gradients accumulate", by_hand=True, ways="full no_shard hybrid")
def converted_while_accumulating(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    side.loss(model, 0).backward()
    _accumulate(side, model, 1, replicas_only=side.implementation.endswith("hybrid"))
    model.float()
    if side.is_flatshard:
        assert_raises(RuntimeError, "accumulated under no_sync", optimizer.step)
    model.double()
    side.learn(model, optimizer, 2)
    # The conversions round: not to more digits than float32 has.
    return {name: value.float() for name, value in side.state(model).items()}
