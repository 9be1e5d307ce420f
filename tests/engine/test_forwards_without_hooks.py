"""Programs that train as usual for three steps, after which forwards have no saved-tensor hooks.

Then they do something else, which backward may notice only without the hooks.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import allow_warnings, naming, on_ranks
from tests.mapping import mapping
from tests.oracle import assert_same, snapshot, step_and_zero

_USUAL = 3

_Program = Callable[["_Model", nn.Module, Tensor], None]


# For each block, a tensor of its last forward.
_inner: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.times = 1
        self.keeps = self.keeps_view = self.has_hooks = self.reads_late = False

    def forward(self, x: Tensor) -> Tensor:
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self.has_hooks = top is not None
        if self.reads_late:  # backward reads the weights after all of their gradients have arrived
            x = F.linear(F.linear(x, self.up.weight.detach()), self.down.weight.detach())
        hidden = torch.tanh(self.up(x))
        inner = [self.down(hidden) for _ in range(self.times)]
        _inner[self] = inner[-1]
        if self.keeps:
            self.kept = {"inner": inner}
        if self.keeps_view:
            self.view = self.up.weight.t()
        return x + inner[0].relu()


class _Model(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 6), _Block(), _Block(), nn.Linear(6, 3))
        self.double()
        self.reads_outside = False

    @property
    def blocks(self) -> list[_Block]:
        return [module for module in self.modules() if isinstance(module, _Block)]

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.reads_outside:
            # The second use finds the block unsharded.
            weights = [self.blocks[0].down.weight, self.blocks[0].down.weight]
            terms = (F.linear(F.linear(out, self[3].weight.t()), one.t()) for one in weights)
            out = out + sum(terms).mean()
        return out


def _sum(model: _Model) -> Tensor:
    return sum((_inner[block].square().mean() for block in model.blocks), torch.zeros(()))


def _plainly(model: _Model, run: nn.Module, loss: Tensor) -> None:
    loss.backward()


def _with_inner_loss(model: _Model, run: nn.Module, loss: Tensor) -> None:
    (loss + _sum(model)).backward()


def _inner_backward_first(model: _Model, run: nn.Module, loss: Tensor) -> None:
    _sum(model).backward(retain_graph=True)
    loss.backward()


def _inner_backward_last(model: _Model, run: nn.Module, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    _sum(model).backward()


def _twice(model: _Model, run: nn.Module, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def _second_order(model: _Model, run: nn.Module, loss: Tensor) -> None:
    (grad,) = torch.autograd.grad(loss, model.x, create_graph=True)
    (loss + grad.square().sum()).backward()


def _several_times(model: _Model, run: nn.Module, loss: Tensor) -> None:
    for block in model.blocks:
        block.times = 2
    run(model.x)
    _inner_backward_first(model, run, run(model.x).square().mean())


def _other_times(model: _Model, run: nn.Module, loss: Tensor) -> None:
    for number in (3, 1, 2, 5):
        model.blocks[1].times = number
        _with_inner_loss(model, run, run(model.x).square().mean())


def _outside(model: _Model, run: nn.Module, loss: Tensor) -> None:
    model.reads_outside = True
    run(model.x).square().mean().backward()


def _evaluates_between(model: _Model, run: nn.Module, loss: Tensor) -> None:
    run(model.x + 1)
    with torch.no_grad():
        run(model.x + 2)
    loss.backward()


_ONE_FORWARD = (_plainly, _with_inner_loss, _twice, _second_order)
_RIGHT = (*_ONE_FORWARD, _several_times, _other_times, _outside, _evaluates_between)


def _trained(
    sharded: bool, strategy: str, last: _Program, first: _Program, *flags: str
) -> dict[str, Tensor]:
    """Train for three steps whose backward is ``first``, and for two whose backward is ``last``."""
    module = _Model()
    for block in module.blocks:
        block.keeps, block.reads_late = "keeps" in flags, "reads late" in flags
    model: nn.Module = module
    if sharded:
        settings = {"sharding_strategy": strategy, "coalesce_bytes": 0}
        model = ShardedWrapper(module, auto_wrap_policy=ModuleWrapPolicy({_Block}), **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(_USUAL + 2):
        torch.manual_seed(step)
        module.x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
        loss = model(module.x).square().mean()
        if sharded and first is _plainly and 0 < step <= _USUAL:
            assert [block.has_hooks for block in module.blocks] == ["keeps" in flags] * 2, step
        (first if step < _USUAL else last)(module, model, loss)
        step_and_zero(optimizer)
    return snapshot(model)


def _assert_same_numbers(
    last: _Program, first: _Program = _plainly, *flags: str, strategy: str = "FULL_SHARD"
) -> None:
    """The sharded model ends where the unwrapped one does."""
    plain, sharded = (_trained(one, strategy, last, first, *flags) for one in (False, True))
    assert_same(sharded, plain)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_programs_that_change(rank: int, world_size: int, strategy: str) -> None:
    """The numbers of the unwrapped model, without an error."""
    for last in _RIGHT:
        with naming(last.__name__), allow_warnings(UserWarning, ".* outside of the unit"):
            _assert_same_numbers(last, strategy=strategy)


@on_ranks(2)
def test_late_reads_and_backwards_that_begin_inside_of_units(rank: int, world_size: int) -> None:
    for last in _ONE_FORWARD:
        with naming(last.__name__):
            _assert_same_numbers(last, _plainly, "reads late")
    # From the first step on inside of units: forwards always have hooks.
    for program in (_inner_backward_first, _inner_backward_last):
        _assert_same_numbers(program, program)
    # From the fourth step on: right if a module keeps the tensor; else autograd raises, as for any
    # changed tensor.
    _assert_same_numbers(_inner_backward_first, _plainly, "keeps")
    with pytest.raises(RuntimeError, match="expected version"):
        _trained(True, "FULL_SHARD", _inner_backward_first, _plainly)


@pytest.mark.parametrize("transport", ["native", "sockets"])
@on_ranks(2)
def test_ranks_that_differ(rank: int, world_size: int, transport: str) -> None:
    """A forward that is unlike earlier ones on one rank alone changes no all-gather."""
    plain, module = _Model(), _Model()
    policy = ModuleWrapPolicy({_Block})
    model = ShardedWrapper(module, auto_wrap_policy=policy, coalesce_bytes=0, collectives=transport)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]

    def loss(module: _Model, run: nn.Module, step: int, of_rank: int) -> Tensor:
        for number, block in enumerate(module.blocks):
            block.times = 1 + (step > _USUAL and (step + number) % 2 == of_rank)
        torch.manual_seed(2 * step + of_rank)
        out = run(torch.randn(4, 5, dtype=torch.float64)).square().mean()
        return out + _sum(module)

    for step in range(_USUAL + 4):
        for one in range(world_size):
            (loss(plain, plain, step, one) / world_size).backward()
        loss(module, model, step, rank).backward()
        step_and_zero(*optimizers)
    assert_same(model, plain)


@pytest.mark.parametrize("operation", ["unlike forward", "norm", "penalty", "kept view"])
@on_ranks(2, group_timeout=20)
def test_mapped_shards(rank: int, world_size: int, operation: str) -> None:
    """A rank that keeps the memory of a buffer does not keep other ranks' shards mapped."""
    with mapping(), allow_warnings(UserWarning, ".* outside of the unit"):
        plain, model = _Model(), ShardedWrapper(_Model())
        runs = [(one, torch.optim.SGD(one.parameters(), lr=0.1)) for one in (plain, model)]
        torch.manual_seed(1)
        for step in range(2 * _USUAL):
            x = torch.randn(4, 5, dtype=torch.float64)
            for run, optimizer in runs:
                inner = plain if run is plain else model.module
                is_last = step == 2 * _USUAL - 2
                inner.blocks[0].times = 1 + (is_last and operation == "unlike forward")
                inner.blocks[0].keeps_view = is_last and operation == "kept view"
                loss = run(x).square().mean()
                weight = inner[3].weight
                if is_last and operation == "penalty":
                    loss = loss + weight.norm()
                loss.backward()
                step_and_zero(optimizer)
                if is_last and operation == "norm":
                    assert weight.norm().item() > 0
    assert_same(model.state_dict(), plain.state_dict())
