"""Every way in which a gradient reaches a sharded parameter: averaged, or refused by name."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from flatshard import CollectiveError, MixedPrecision, ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import allow_warnings, assert_raises, naming, on_ranks
from tests.oracle import assert_same, step_and_zero
from tests.ways import BASIC, WAYS

D = 6
Use = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """``inner`` computes with the parameters of a child that is a unit of its own."""

    def __init__(self, inner: Use | None = None) -> None:
        super().__init__()
        self.inner, self.body, self.head = inner, nn.Linear(D, D), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).tanh()
        return x if self.inner is None else self.inner(self, x)


HEAD: Use = lambda net, x: net.head(x)  # noqa: E731


def _quiet() -> contextlib.AbstractContextManager[None]:
    return allow_warnings(UserWarning, ".*outside of the unit's forward")


def _wrap(model: nn.Module, way: str = "full") -> ShardedWrapper:
    policy = ModuleWrapPolicy({nn.Linear})
    return ShardedWrapper(
        model.double(), auto_wrap_policy=policy, coalesce_bytes=0, **WAYS[way].keywords
    )


def _batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, D, generator=generator).double()


def _nothing(*_: Any) -> None:
    pass


def _compare(
    way: str, loss: Use, inner: Use | None = None, between: Any = _nothing, before: Any = _nothing
) -> None:
    """Train beside DistributedDataParallel; ``before`` and ``between`` get the module inside."""
    models = _pair(way, inner)
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            before(model.module)
            with _quiet():
                loss(model, _batch(step)).backward()
                between(model.module)
            step_and_zero(optimizer)
    assert_same(models[0], models[1].module, 1e-12)


def _pair(way: str, inner: Use | None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Net(inner).double()
    return _wrap(copy.deepcopy(plain), way), DistributedDataParallel(plain)


# ---------------------------------------------------------------- a `torch.autograd.Function`

# How a function makes the memory of the weight's gradient, or a part of the gradient.
STARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros_like": torch.zeros_like,
    "empty_like": lambda w: torch.empty_like(w).zero_(),
    "clone": lambda w: w.clone() * 0,
    "detach": lambda w: w.detach() * 0,
    "rand_like": lambda w: torch.rand_like(w) * 0,
    "foreach": lambda w: torch._foreach_mul([w], 0.0)[0],
    "new_zeros": lambda w: w.new_zeros(w.shape),
    "weight": lambda w: 0.3 * w,
}


def _fused(start: Callable[[Tensor], Tensor], in_backward: bool) -> Any:
    """A loss that returns the gradient of the weight, as Liger and TRL have it."""

    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found, of_weight = x @ weight.t(), start(weight)
        of_weight += 2 * found.t() @ x
        return found.pow(2).sum() + start(weight).pow(2).sum() / 0.6, 2 * found @ weight, of_weight

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            loss, *grads = run(x, weight)
            ctx.save_for_backward(*((x, weight) if in_backward else grads))
            return loss

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            of_x, of_weight = ctx.saved_tensors
            if in_backward:
                _, of_x, of_weight = run(of_x, of_weight)
            return gradient * of_x, gradient * of_weight

    return Fused.apply


class L1(torch.autograd.Function):
    """A penalty with another factor on each rank."""

    @staticmethod
    def forward(weight: Tensor, factor: float) -> Tensor:
        return factor * weight.norm(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        weight, ctx.factor = inputs
        ctx.save_for_backward(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor * ctx.saved_tensors[0].sign(), None


class Nested(torch.autograd.Function):
    """Its gradient is the weight itself, and a gradient that it computes inside."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: float) -> Tensor:
        ctx.weight, ctx.factor = weight, factor
        with torch.enable_grad():
            return L1.apply(weight, factor) + (factor * weight).pow(2).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            value = (ctx.factor * ctx.weight).pow(2).sum()
        (found,) = torch.autograd.grad(value, ctx.weight)
        found = found + torch.zeros_like(ctx.weight) + ctx.factor * ctx.weight.sign()
        return gradient * found, None


class Itself(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return 0.5 * weight.pow(2).sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        return ctx.saved_tensors[0]


def _head(model: Any) -> Any:
    return model.module.head.weight


def _own() -> float:
    """A factor that differs between ranks."""
    return 0.1 * (dist.get_rank() + 1)


@on_ranks(2)
def test_functions_that_return_gradients(rank: int, world: int) -> None:
    for name, start in STARTS.items():
        for in_backward in (False, True):
            fused = _fused(start, in_backward)
            inside: Use = lambda m, x, f=fused: f(x, m.head.weight)  # noqa: E731
            again: Use = lambda m, x, f=inside: checkpoint(  # noqa: E731
                partial(f, m), x, use_reentrant=True
            )
            for way in BASIC if name == "zeros_like" else ["full"]:
                with naming((name, in_backward, way)):
                    compare = partial(_compare, way)
                    compare(lambda m, x, f=fused: f(m(x), _head(m)))
                    compare(lambda m, x: m(x), inside)
                    if way == "full":
                        compare(lambda m, x: m(x), again)


PENALTIES: dict[str, Use] = {
    "other factors": lambda m, x: L1.apply(_head(m), _own()),
    "nested": lambda m, x: Nested.apply(_head(m), _own()),
    "itself": lambda m, x: Itself.apply(_head(m)),
    "of a square": lambda m, x: L1.apply(_head(m) * _head(m), _own()),
    "formulas": lambda m, x: (
        _own() * _head(m).clamp(-0.2, 0.2).sigmoid().pow(3).sum() + _head(m).abs().mean()
    ),
}


@on_ranks(2)
def test_penalties(rank: int, world: int) -> None:
    for name, penalty in PENALTIES.items():
        for way in BASIC if name == "other factors" else ["full"]:
            with naming((name, way)):
                _compare(way, lambda m, x, p=penalty: m(x).pow(2).sum() + p(m, x))


# ---------------------------------------------------------------- hooks

HOOKS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "decay": lambda g, w, factor: g + factor * w,
    "nothing": lambda g, w, factor: torch.zeros_like(w),
    "mask": lambda g, w, factor: torch.where(w > 0, g, factor * g),
}


@on_ranks(2)
def test_hooks(rank: int, world: int) -> None:
    """Hooks of a parameter compute with this rank's gradient, and with full tensors."""
    for name, change in HOOKS.items():
        models = _pair("full", HEAD)
        for model in models:
            weight = _head(model)
            weight.register_hook(lambda g, w=weight, f=change: f(g, w, _own()))
            with naming(name), _quiet():
                model(_batch(0)).pow(2).sum().backward()
        found, expected = (_head(model).grad for model in models)
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------- refused


class Premade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, made: Tensor, write: Any) -> Tensor:
        ctx.made, ctx.write = made, write
        return made.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        ctx.write(ctx.made)
        return ctx.made, None, None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


def _hooked(weight: Any, change: Callable[[Tensor], Any]) -> Tensor:
    doubled = 2 * weight
    doubled.register_hook(change)
    return doubled.pow(2).sum()


def _scale_in_place(gradient: Tensor, factor: float) -> None:
    torch._foreach_mul_([gradient], factor)


ONES = torch.ones(D, D).double()
REFUSED: dict[str, Callable[[Any, float], Tensor]] = {
    "written": lambda w, f: Premade.apply(w, torch.zeros_like(w), lambda t: t.add_(f * ONES)),
    "written with a number": lambda w, f: Premade.apply(w, w.detach() * 0, lambda t: t.add_(f)),
    "reversed": lambda w, f: Reversed.apply(w, f).pow(2).sum(),
    "hook": lambda w, f: _hooked(w, lambda g: f * g),
    "hook in place": lambda w, f: _hooked(w, lambda g: g.mul_(f)),
    "foreach hook": lambda w, f: _hooked(w, lambda g: _scale_in_place(g, f)),
}


@on_ranks(2)
def test_refused(rank: int, world: int) -> None:
    """Each rank's range would have the gradient of another rank."""
    wanted = r"'head.weight' \(unit 'head', rank \d\): backward got a sharded tensor|different coll"
    for name, penalty in REFUSED.items():
        model = _wrap(Net())
        with _quiet(), naming(name), pytest.raises((RuntimeError, CollectiveError), match=wanted):
            (model(_batch(0)).sum() + penalty(_head(model), _own())).backward()


# ---------------------------------------------------------------- assigned by hand


def _noise(module: nn.Module, *, alike: bool) -> Iterator[tuple[Any, Tensor]]:
    """Each parameter, with a tensor for it."""
    for number, param in enumerate(module.parameters()):
        generator = torch.Generator().manual_seed(10 * number + (0 if alike else dist.get_rank()))
        yield param, torch.randn(param.shape, generator=generator).double()


def _assign(module: nn.Module, *, alike: bool = True, like: bool = False) -> None:
    for param, value in _noise(module, alike=alike):
        param.grad = torch.zeros_like(param).copy_(value) if like else value


def _assign_on_first(module: nn.Module) -> None:
    if dist.get_rank() == 0:
        _assign(module)


def _loss(model: Any, x: Tensor) -> Tensor:
    return model(x).pow(2).sum() + _own() * _head(model).pow(2).sum()


@on_ranks(2)
def test_assigned_gradients(rank: int, world: int) -> None:
    for way in ("full", "no_shard"):
        compare = partial(_compare, way, _loss)
        # As under DDP, the next backward averages what is in `.grad`.
        compare(before=partial(_assign, alike=False))
        compare(before=_assign_on_first)
        compare(before=lambda m: [setattr(p, "grad", p.new_zeros(p.shape)) for p in m.parameters()])
        # After backward, all ranks have to assign the same.
        compare(between=_assign)
    _assigned_beside_a_cast(rank, world)
    model = _wrap(Net(HEAD))
    _assign(model, like=True)
    with pytest.raises(RuntimeError, match=r"'.*weight'.* was set to a sharded tensor"):
        model(_batch(0)).sum().backward()
    model = _wrap(Net(HEAD))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(_batch(0)).sum().backward()
    _assign(model, alike=False)
    assert_raises(RuntimeError, r"'.*weight'.* different full tensors in .grad", optimizer.step)


def _assigned_beside_a_cast(rank: int, world: int) -> None:
    """Every rank holds the parameters whole, but computes with a copy in another dtype."""
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = ShardedWrapper(nn.Linear(D, D), sharding_strategy="NO_SHARD", mixed_precision=precision)
    inputs = torch.ones(4, D).float()
    model(inputs).sum().backward()
    once = [param.grad.clone() for param in model.parameters()]
    model(inputs).sum().backward()
    for param, grad in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(param.grad, 2 * grad)
        param.grad = torch.full_like(param, rank)
    model(inputs).sum().backward()
    for param, grad in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(param.grad, grad + (world - 1) / 2, rtol=1e-2, atol=1e-2)


# ---------------------------------------------------------------- reads and writes


def _adaptive(param: Any) -> None:
    """Adaptive clipping, as timm and composer have it."""
    if param.dim() > 1:
        largest = param.detach().norm(dim=1, keepdim=True).clamp_(min=1e-3).mul_(0.1)
        norm = param.grad.detach().norm(dim=1, keepdim=True)
        clipped = param.grad.detach() * (largest / norm.clamp(min=1e-6))
        param.grad.detach().copy_(torch.where(norm < largest, param.grad.detach(), clipped))


def _central(param: Any) -> None:
    if param.dim() > 1:
        param.grad.add_(-param.grad.mean(dim=1, keepdim=True))


def _quantile(param: Any) -> None:
    param.grad.copy_(torch.minimum(param.grad, torch.quantile(param.grad, 0.7)))


def _masked(param: Any) -> None:
    param.grad[param.detach() > 0.1] = 0.05


def _low_rank(param: Any) -> None:
    if param.dim() > 1:
        param.data.addmm_(ONES[:, :2], ONES[:2], alpha=0.01)
        param.data.addr_(param.grad.mean(0), param.data.mean(1), alpha=0.1)


def _cut(param: Any) -> None:
    param.data[0] = 0.1
    param.data.renorm_(2, 0, 0.5) if param.dim() > 1 else None


@on_ranks(2)
def test_reads_and_writes_that_gather(rank: int, world: int) -> None:
    for change in (_adaptive, _central, _quantile, _masked, _low_rank, _cut):
        for way in BASIC if change is _adaptive else ["full"]:
            with naming((change.__name__, way)):
                _compare(way, _loss, HEAD, lambda m, c=change: [c(one) for one in m.parameters()])


@on_ranks(2)
def test_read_of_a_gradient_on_one_rank(rank: int, world: int) -> None:
    """Unreduced gradients and changes of the shape raise before any communication."""
    model = _wrap(Net(HEAD))
    with model.no_sync():
        model(_batch(0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^gradient of 'head.weight'.*along a dimension"):
        _head(model).grad.norm(dim=1)
    model.zero_grad()
    model(_batch(0)).sum().backward()
    with _quiet(), pytest.raises(RuntimeError, match=r"'head.weight'.*t_ needs the full tensor"):
        _head(model).data.t_()

    def run() -> None:
        if rank == 0:
            _head(model).grad.norm(dim=1)
        model(_batch(1)).sum().backward()

    with _quiet(), pytest.raises(CollectiveError, match=r"different collectives|rank . raised"):
        run()


@on_ranks(2)
def test_bounded_names(rank: int, world: int) -> None:
    """A running average's text told all operations of all steps."""
    model = _wrap(Net(HEAD))
    model(_batch(0)).sum().backward()
    average = torch.zeros(D, D).double() + _head(model).grad.abs() * 0.85
    for _ in range(3):
        average = 0.85 * average + 0.15 * (_head(model) * _head(model).grad).abs()
    with pytest.raises(RuntimeError) as caught:
        average.numpy()
    assert str(caught.value).startswith("result of add() with 'head.weight' (unit 'head', rank")


@on_ranks(2)
def test_a_hook_never_gets_a_part_of_a_gradient(rank: int, world_size: int) -> None:
    # Autograd would call the hook only with the gradient from forward, so the hook's result would
    # replace one part of the gradient.
    model = _wrap(Net(HEAD))
    weight = model.module.head.weight
    hook = weight.register_hook(torch.zeros_like)
    model(_batch(0)).square().mean().backward()  # without other uses, the hook is right
    assert not weight.grad.norm()
    loss = model(_batch(1)).square().mean() + weight.pow(2).sum()
    with pytest.raises(RuntimeError, match=r"'head.weight'.*would get only a part of the gradient"):
        loss.backward()
    hook.remove()
    (model(_batch(1)).square().mean() + weight.pow(2).sum()).backward()
