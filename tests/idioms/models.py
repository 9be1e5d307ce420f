"""What goes into a model, what comes out, and who calls whom."""

import inspect
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.idioms.side import ROWS, Side, add, idiom
from tests.models import Composed, Mlp

# ---------------------------------------------------------------- inputs and outputs


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


Pair = namedtuple("Pair", ["logits", "hidden"])


class Custom:
    """What no tree of containers knows."""

    __slots__ = ("hidden", "logits")

    def __init__(self, logits: Tensor, hidden: Tensor) -> None:
        self.logits, self.hidden = logits, hidden


Pack = Callable[[Tensor, Tensor], Any]


def _returned(pack: Pack, loss: Callable[[Any], Tensor], side: Side) -> Any:
    """Train a model that gives what two heads compute to ``pack``, and returns the result."""

    def forward(net: Any, x: Tensor) -> Any:
        x = torch.tanh(net.trunk(x))
        return pack(net.first(x), net.second(x))

    heads = {"first": nn.Linear(5, 3), "second": nn.Linear(5, 3)}
    model = side.wrap(Composed(forward, trunk=nn.Linear(7, 5), **heads))
    return side.fit(model, loss_of=lambda m, step: loss(m(side.draw(step, ROWS, 7))))


def _returns(title: str, loss: Callable[[Any], Tensor], **settings: Any) -> Callable[[Pack], Pack]:
    """Enter an idiom whose model returns what the decorated function makes of two tensors."""

    def enter(pack: Pack) -> Pack:
        add(pack.__name__, "models", title, partial(_returned, pack, loss), **settings)
        return pack

    return enter


def _joint(logits: Tensor, hidden: Tensor) -> Tensor:
    return (logits * hidden).square().mean()


def _of_attributes(out: Any) -> Tensor:
    return _joint(out.logits, out.hidden)


@_returns("outputs in a dictionary", lambda out: _joint(**out))
def output_dict(a: Tensor, b: Tensor) -> Any:
    return {"logits": a, "hidden": b}


@_returns("outputs in a dataclass", _of_attributes)
def output_dataclass(a: Tensor, b: Tensor) -> Any:
    return Output(a, b)


@_returns("outputs in a named tuple", _of_attributes)
def output_namedtuple(a: Tensor, b: Tensor) -> Any:
    return Pair(a, b)


@_returns(
    "nested outputs with None, numbers and strings",
    lambda out: _joint(out[0]["a"][0], out[1][1]["b"][0]),
)
def output_nested(a: Tensor, b: Tensor) -> Any:
    return [{"a": (a, None, 3)}, ["text", {"b": [b]}]]


@_returns("one tensor returned twice", lambda out: (out[0] + _joint(*out[1:3]) + out[3]).mean())
def output_repeated(a: Tensor, b: Tensor) -> Any:
    return a, a, b, a


@_returns("a loss over some of the outputs", lambda out: out[0].square().mean(), unused=True)
def loss_over_some(a: Tensor, b: Tensor) -> Any:
    return a, b


@_returns(
    "outputs that are views of one another",
    lambda out: out[1].square().mean() + out[3].square().mean(),
)
def output_views(a: Tensor, b: Tensor) -> Any:
    return a, a[0], a.detach(), b.T


@_returns("forward returns the loss", lambda out: out)
def loss_in_forward(a: Tensor, b: Tensor) -> Any:
    return (a - b).square().mean()


@idiom("outputs in an object with `__slots__`")
def output_object(side: Side) -> Any:
    return _returned(Output if side.implementation == "by hand" else Custom, _of_attributes, side)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, *, batch: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
        return {"out": self.body(batch["x"]) * scale}


@idiom("keyword arguments, inputs in a dictionary")
def keyword_inputs(side: Side) -> Any:
    model = side.wrap(Keywords(), Mlp)

    def loss_of(m: nn.Module, step: int) -> Tensor:
        return m(batch={"x": side.draw(step, ROWS, 7)}, scale=0.5)["out"].square().mean()

    return side.fit(model, loss_of=loss_of)


@idiom("no inputs at all")
def no_inputs(side: Side) -> Any:
    start = nn.Parameter(torch.ones(7))
    net = Composed(lambda net: net.body(net.start), body=Mlp(), start=start)
    return side.fit(side.wrap(net, Mlp), loss_of=lambda m, step: m().square().mean())


@idiom("`inspect.signature(model.forward)` shows the module's arguments")
def signature(side: Side) -> Any:
    model = side.wrap(Keywords(), Mlp)
    if side.implementation in ("ddp", "by hand"):
        model = side.inner(model)
    return sorted(inspect.signature(model.forward).parameters)


@idiom("an input that requires grad, and its gradient")
def input_gradient(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    grads = []
    for step in range(3):
        x = side.draw(step, ROWS, 7).requires_grad_()
        model(x).square().mean().backward()
        grads.append(x.grad)
        side.step(optimizer)
    return [*grads, model]


# ---------------------------------------------------------------- who calls whom


class Encoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5))
        self.decoder = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def _after(side: Side, call: Callable[[Any, Tensor], Tensor]) -> Any:
    model = side.wrap(Encoding(), nn.Sequential, nn.Linear)
    losses = side.fit(model)[:-1]
    with torch.no_grad():
        losses.append(call(side.inner(model), side.draw(30, 2, 7)))
    return losses + side.fit(model, first=5)


@idiom("a submodule called directly, for evaluation")
def submodule_called(side: Side) -> Any:
    return _after(side, lambda inner, x: inner.encoder(x))


@idiom("another method than `forward`, for evaluation")
def other_method(side: Side) -> Any:
    return _after(side, lambda inner, x: inner.encode(x))


@idiom("the module inside called instead of the wrapper, for evaluation")
def inner_called(side: Side) -> Any:
    return _after(side, lambda inner, x: inner(x))


@idiom("a wrapper's submodules called one by one by a training step's function")
def parts_called(side: Side) -> Any:
    parts = nn.ModuleDict({"encoder": nn.Linear(7, 5), "decoder": nn.Linear(5, 3)})

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.parts["decoder"](torch.tanh(net.parts["encoder"](x)))

    return side.fit(side.wrap(Composed(forward, parts=parts)))


@idiom("a parent that reads a child's weight: `F.linear(x, self.child.weight)`")
def parent_reads_child(side: Side) -> Any:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.fc2(torch.tanh(F.linear(x, net.fc1.weight, net.fc1.bias)))

    return side.fit(side.wrap(Composed(forward, fc1=nn.Linear(7, 5), fc2=nn.Linear(5, 3))))


@idiom("a parent that iterates over the layers of a `Sequential`")
def iterated_sequential(side: Side) -> Any:
    def forward(net: Any, x: Tensor) -> Tensor:
        for layer in net.body:
            x = layer(x)
        return x

    body = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    return side.fit(side.wrap(Composed(forward, body=body), nn.Sequential))


@idiom("an embedding fetched from inside a unit: `get_input_embeddings()(ids)`")
def fetched_embedding(side: Side) -> Any:
    class Language(Composed): ...

    def forward(net: Any, tokens: Tensor) -> Tensor:
        return net.language(net.language.table(tokens) * net.scale)

    language = Language(lambda net, x: net.head(x), table=nn.Embedding(10, 5), head=nn.Linear(5, 3))
    net = Composed(forward, language=language, scale=nn.Parameter(torch.ones(5)))
    model = side.wrap(net, Language)
    return side.fit(model, loss_of=lambda m, step: m(side.tokens(step, ROWS, 3)).square().mean())


@idiom("a module used twice in one forward")
def used_twice(side: Side) -> Any:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.fc2(net.mid(torch.tanh(net.mid(torch.tanh(net.fc1(x))))))

    layers = {"fc1": nn.Linear(7, 5), "mid": nn.Linear(5, 5), "fc2": nn.Linear(5, 3)}
    return side.fit(side.wrap(Composed(forward, **layers)))


@idiom("two submodules wrapped one by one, then the whole")
def wrapped_one_by_one(side: Side) -> Any:
    net = Mlp()
    if side.implementation not in ("ddp", "by hand"):
        net.fc1 = side.wrap(net.fc1, nn.Conv2d)
        if side.is_flatshard:
            return side.fit(side.shard(net))
        if side.implementation == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel

            cpu = torch.device("cpu")
            return side.fit(FullyShardedDataParallel(net, use_orig_params=True, device_id=cpu))
    return side.fit(side.wrap(net))


@idiom("two wrapped models, chained, with one loss")
def chained(side: Side) -> Any:
    first, second = side.wrap(Mlp()), side.wrap(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))
    optimizer = side.sgd(first, second)
    for step in range(3):
        F.mse_loss(second(first(side.draw(step, ROWS, 7))), side.draw(50, ROWS, 3)).backward()
        side.step(optimizer)
    return [first, second]


# ---------------------------------------------------------------- state in forward


@idiom("an attribute of a submodule set from outside: `model.body.memory = None`")
def attribute_from_outside(side: Side) -> Any:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.memory = nn.Parameter(torch.ones(7)), None

        def forward(self, x: Tensor) -> Tensor:
            out = x * self.weight + (0.0 if self.memory is None else self.memory)
            self.memory = out.detach()
            return out

    def forward(net: Any, x: Tensor, reset: bool) -> Tensor:
        if reset:
            net.body.memory = None
        return net.head(net.body(x))

    net = Composed(forward, body=Remembering(), head=nn.Linear(7, 3))
    model = side.wrap(net, Remembering)
    losses = side.fit(
        model, loss_of=lambda m, step: m(side.draw(step, ROWS, 7), step % 2 == 0).square().mean()
    )
    side.inner(model).body.memory = None
    return [*losses, model(side.draw(9, ROWS, 7), False)]


class WithBuffer(nn.Module):
    """Its buffer is a mean over what it has seen."""

    def __init__(self, reassigns: bool) -> None:
        super().__init__()
        self.fc1, self.fc2, self.reassigns = nn.Linear(7, 5), nn.Linear(5, 3), reassigns
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        seen = x.detach().mean(0)
        if self.training:
            if self.reassigns:
                self.mean = self.mean * 0.9 + seen * 0.1
            else:
                self.mean.mul_(0.9).add_(seen, alpha=0.1)
        return self.fc2(torch.tanh(x - self.mean))


@idiom("a buffer updated in place in forward")
def buffer_in_place(side: Side) -> Any:
    return side.fit(side.wrap(WithBuffer(False)))


@idiom("a buffer that forward reassigns")
def buffer_reassigned(side: Side) -> Any:
    return side.fit(side.wrap(WithBuffer(True)))


@idiom("a buffer replaced from outside, by rank 0 alone")
def buffer_replaced(side: Side) -> Any:
    model = side.wrap(WithBuffer(False))
    if side.rank == 0:
        side.inner(model).mean = torch.ones(5)
    return side.fit(model)


@idiom("buffers in place and `no_sync`")
def buffer_no_sync(side: Side) -> Any:
    model, optimizer = side.begin(WithBuffer(False))
    losses: list[Tensor] = []
    for step in range(4):
        with side.no_sync(model):
            side.closure(model, step, losses)()
        side.learn(model, optimizer, 20 + step)
    return losses


@idiom("dropout, with a seed for each rank")
def dropout(side: Side) -> Any:
    model = side.wrap(nn.Sequential(nn.Linear(7, 5), nn.Dropout(0.5), nn.Linear(5, 3)))
    return side.fit(model, loss_of=side.seeded_loss)
