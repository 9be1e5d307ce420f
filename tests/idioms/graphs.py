"""Autograd: hooks, checkpoints, higher derivatives, transforms, compiled code."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.idioms.side import ROWS, Side, add, idiom
from tests.models import Composed, Mlp

# ---------------------------------------------------------------- hooks


@idiom("module hooks: forward, forward pre, full backward, full backward pre")
def module_hooks(side: Side) -> Any:
    model = side.wrap(Mlp())
    inner = side.inner(model)
    seen: list[Any] = []

    def scale_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * 0.5,)

    def shift(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output + 1

    def look(_: nn.Module, grad_input: Any, grad_output: tuple[Tensor, ...]) -> None:
        seen.append(grad_output[0].detach().clone())

    inner.fc1.register_forward_pre_hook(scale_input)
    inner.fc2.register_forward_hook(shift)
    inner.fc2.register_full_backward_hook(look)
    inner.fc3.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,))
    return [*side.fit(model), *seen]


@idiom("module hooks from before wrapping")
def module_hooks_before(side: Side) -> Any:
    net = Mlp()
    net.fc2.register_forward_hook(lambda _, inputs, output: output * 0.5)
    net.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
    return side.fit(side.wrap(net))


@idiom("tensor hooks on activations")
def tensor_hooks(side: Side) -> Any:
    seen: list[Tensor] = []

    class Watching(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.fc1(x))
            if x.requires_grad:
                x.register_hook(lambda grad: seen.append(grad.clone()))
                x.register_hook(lambda grad: grad * 0.5)
            return self.fc3(self.fc2(x))

    return [*side.fit(side.wrap(Watching())), *seen]


@idiom("`register_hook` on parameters")
def parameter_hooks(side: Side) -> Any:
    net = Mlp()
    net.fc1.weight.register_hook(lambda grad: grad * 2)
    model = side.wrap(net)
    params = dict(side.inner(model).named_parameters())
    # Not linear: the hook must get this rank's gradient, and not the average.
    params["fc2.weight"].register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return side.fit(model)


@idiom("`register_post_accumulate_grad_hook` on parameters")
def post_accumulate_hooks(side: Side) -> Any:
    net = Mlp()
    calls: list[int] = []

    def halve(param: Tensor) -> None:
        calls.append(param.numel())
        param.grad.mul_(0.5)

    net.fc1.weight.register_post_accumulate_grad_hook(halve)
    model = side.wrap(net)
    return [*side.fit(model), len(calls)]


@idiom("`saved_tensors_hooks` of the user's: `save_on_cpu`")
def save_on_cpu(side: Side) -> Any:
    model = side.wrap(Mlp())

    def loss_of(m: nn.Module, step: int) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return side.loss(m, step)

    return side.fit(model, loss_of=loss_of)


# ---------------------------------------------------------------- checkpoints


Run = Callable[[nn.Module, Tensor], Tensor]


class Blocks(nn.Module):
    """Blocks that a function runs."""

    def __init__(self, run: Run, frozen_first: bool) -> None:
        super().__init__()
        self.first, self.last, self.run = nn.Linear(7, 6), nn.Linear(6, 3), run
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 6))
            for _ in range(3)
        )
        if frozen_first:
            self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.last(x)


def _checkpointed(run: Run, unit: type[nn.Module], frozen_first: bool, side: Side) -> Any:
    return side.fit(side.wrap(Blocks(run, frozen_first), unit), loss_of=side.seeded_loss)


_plain: Run = partial(checkpoint, use_reentrant=False)
_reentrant: Run = partial(checkpoint, use_reentrant=True)


def _nested(block: nn.Module, x: Tensor) -> Tensor:
    return _plain(lambda y: _plain(block, y), x)


def _sequential(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint_sequential(block, 2, x, use_reentrant=False)


_BLOCK, _LAYER = nn.Sequential, nn.Linear
for _name, _title, _run, _unit in (
    ("checkpoint_units", "`checkpoint(use_reentrant=False)` around units", _plain, _BLOCK),
    ("checkpoint_layers", "the same with units inside the checkpoint", _plain, _LAYER),
    ("reentrant_units", "`checkpoint(use_reentrant=True)` around units", _reentrant, _BLOCK),
    ("reentrant_layers", "the same with units inside the checkpoint", _reentrant, _LAYER),
    ("checkpoint_frozen", "`checkpoint(use_reentrant=False)` after a frozen layer", _plain, _BLOCK),
    ("checkpoint_nested", "a checkpoint in a checkpoint", _nested, _BLOCK),
    ("checkpoint_sequential", "`checkpoint_sequential`", _sequential, _LAYER),
):
    _script = partial(_checkpointed, _run, _unit, _name == "checkpoint_frozen")
    add(_name, "graphs", _title, _script)


@idiom("an embedding as a unit inside a checkpoint")
def checkpointed_embedding(side: Side) -> Any:
    layers = nn.Sequential(nn.Embedding(10, 5), nn.Linear(5, 3))
    net = Composed(lambda net, tokens: _plain(net.layers, tokens), layers=layers)
    model = side.wrap(net, nn.Embedding, nn.Linear)
    return side.fit(model, loss_of=lambda m, s: m(side.tokens(s, ROWS, 3)).square().mean())


# ---------------------------------------------------------------- higher derivatives


@idiom("`autograd.grad` for inputs")
def grad_of_inputs(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    results = []
    for step in range(3):
        x = side.draw(step, ROWS, 7).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().mean(), x)
        results.append(slope)
        F.mse_loss(model(x.detach() + 0.1 * slope.sign()), side.draw(50, ROWS, 3)).backward()
        side.step(optimizer)
    return [*results, model]


@idiom("`autograd.grad` for parameters")
def grad_of_parameters(side: Side) -> Any:
    model = side.wrap(Mlp())
    # It reduces nothing: the same rows on all ranks.
    loss = model(side.draw(0, ROWS, 7, of=0)).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


@idiom("a gradient penalty: `autograd.grad(..., create_graph=True)`, then `backward()`")
def gradient_penalty(side: Side) -> Any:
    model = side.wrap(Mlp())

    def loss_of(m: nn.Module, step: int) -> Tensor:
        x = side.draw(step, ROWS, 7).requires_grad_()
        out = m(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()

    return side.fit(model, loss_of=loss_of)


@idiom("forces: `autograd.grad` inside forward")
def grad_in_forward(side: Side) -> Any:
    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = net.body(x).square().sum()
            return torch.autograd.grad(energy, x, create_graph=net.training)[0]

    model = side.wrap(Composed(forward, body=Mlp()))
    return side.fit(model, loss_of=lambda m, s: m(side.draw(s, ROWS, 7)).square().mean())


def penalty_of(model: nn.Module) -> Tensor:
    return 0.1 * sum(p.pow(2).sum() for p in model.parameters())


@idiom("a penalty of parameters outside forward: `sum(p.pow(2).sum())`")
def penalty(side: Side) -> Any:
    return side.fit(side.wrap(Mlp()), loss_of=lambda m, s: side.loss(m, s) + penalty_of(m))


@idiom("`torch.func.functional_call` of the model inside, with other weights")
def functional_call(side: Side) -> Any:
    model = side.wrap(Mlp())
    results = side.fit(model)[:-1]
    torch.manual_seed(9)
    other = {name: value + 1 for name, value in Mlp().named_parameters()}
    x = side.draw(9, ROWS, 7)
    with torch.no_grad():
        results.append(torch.func.functional_call(side.inner(model), other, (x,)))
    return [*results, *side.fit(model)]


@idiom("`torch.func.functional_call` with its own parameters, scaled")
def functional_call_own(side: Side) -> Any:
    model = side.wrap(Mlp())
    inner = side.inner(model)
    params = {name: p.detach() * 0.5 for name, p in inner.named_parameters()}
    with torch.no_grad():
        out = torch.func.functional_call(inner, params, (side.draw(9, ROWS, 7),))
    return [out, *side.fit(model)]


@idiom("`autocast` to bfloat16")
def autocast(side: Side) -> Any:
    model = side.wrap(Mlp().float())

    def loss_of(m: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = m(side.draw(step, ROWS, 7).float())
        return out.float().square().mean()

    return side.fit(model, loss_of=loss_of)


@idiom("a custom `autograd.Function` over parameters")
def custom_function(side: Side) -> Any:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.T

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.T @ x

    weight = nn.Parameter(torch.ones(3, 5))
    net = Composed(
        lambda net, x: Product.apply(net.fc1(x), net.weight), fc1=nn.Linear(7, 5), weight=weight
    )
    return side.fit(side.wrap(net))


@idiom("activations edited in place")
def in_place_activations(side: Side) -> Any:
    activations = nn.ReLU(inplace=True), nn.SiLU(inplace=True)
    layers = nn.Linear(7, 5), nn.Linear(5, 4), nn.Linear(4, 3)
    net = nn.Sequential(layers[0], activations[0], layers[1], activations[1], layers[2])
    return side.fit(side.wrap(net))


@idiom("`detach` in the middle, `stop_gradient`", unused=True)
def detached(side: Side) -> Any:
    layers = {"fc1": nn.Linear(7, 5), "fc3": nn.Linear(5, 3)}
    net = Composed(lambda net, x: net.fc3(torch.tanh(net.fc1(x)).detach()), **layers)
    return side.fit(side.wrap(net))


# ---------------------------------------------------------------- compiled


@idiom("`torch.compile` of the wrapped model", slow=True)
def compiled_wrapper(side: Side) -> Any:
    model = side.wrap(Mlp())
    compiled = torch.compile(model, backend="aot_eager")
    return side.fit(model, loss_of=lambda m, step: side.loss(compiled, step))


@idiom("`torch.compile` before wrapping", slow=True)
def compiled_before(side: Side) -> Any:
    model = side.wrap(torch.compile(Mlp(), backend="aot_eager"))
    assert not hasattr(model, "absent")
    return side.fit(model)[:-1]


@idiom("`module.compile()` of blocks after wrapping", slow=True)
def compiled_blocks(side: Side) -> Any:
    model = side.wrap(Mlp())
    inner = side.inner(model)
    for layer in (inner.fc1, inner.fc2):
        layer.compile(backend="aot_eager")
    return side.fit(model)[:-1]
