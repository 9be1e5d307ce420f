"""Parameters: their kinds, ties and edits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from tests.idioms.side import ROWS, Side, add, idiom
from tests.models import Composed, Mlp

# ---------------------------------------------------------------- kinds


class Kind(nn.Module):
    """Layers around parameters of an unusual kind, used by a function."""

    def __init__(self, odd: nn.Parameter) -> None:
        super().__init__()
        self.fc1, self.fc2, self.odd = nn.Linear(7, 5), nn.Linear(5, 3), odd

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.odd.is_complex():
            return self.fc2((x * self.odd).abs())
        if self.odd.numel() == 0:
            return self.fc2(x + (x.sum(-1, keepdim=True) @ self.odd.T).sum(-1, keepdim=True))
        return self.fc2(x * self.odd.to(x.dtype))


@idiom("a 0-d parameter")
def zero_dim(side: Side) -> Any:
    return side.fit(side.wrap(Kind(nn.Parameter(torch.tensor(2.0))), Kind, nn.Linear))


def _odd(make: Callable[[], Tensor], side: Side) -> Any:
    value = make()
    odd = nn.Parameter(value, value.is_floating_point() or value.is_complex())
    return side.fit(side.wrap(Kind(odd), nn.Linear))


for _name, _title, _make in (
    ("empty", "an empty parameter", lambda: torch.zeros(0, 1)),
    ("complex_parameter", "a complex parameter", lambda: torch.ones(5) * (1 + 2j)),
    ("mixed_dtypes", "parameters of two dtypes in a module", lambda: torch.ones(5).float()),
    ("integer_parameter", "a frozen integer parameter", lambda: torch.arange(5).to(torch.int8)),
    ("tiny", "fewer elements than ranks, odd sizes", lambda: torch.ones(1)),
):
    add(_name, "parameters", _title, partial(_odd, _make))


@idiom("parameters that are not contiguous (`channels_last`)")
def channels_last(side: Side) -> Any:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3)).to(
        memory_format=torch.channels_last
    )
    model = side.wrap(net, nn.Conv2d)
    return side.fit(model, loss_of=lambda m, s: m(side.draw(s, ROWS, 2, 6, 6)).square().mean())


@idiom("`ParameterList`, `ParameterDict`")
def parameter_containers(side: Side) -> Any:
    def forward(net: Any, x: Tensor) -> Tensor:
        for param in net.listed:
            x = x * param
        return net.head(x + net.named["shift"])

    listed = nn.ParameterList([torch.ones(7), torch.ones(7)])
    named = nn.ParameterDict({"shift": torch.ones(7)})
    return side.fit(side.wrap(Composed(forward, listed=listed, named=named, head=nn.Linear(7, 3))))


# ---------------------------------------------------------------- ties


@idiom("weights tied across units")
def tied(side: Side) -> Any:
    net = nn.Sequential(
        nn.Embedding(10, 5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 10, bias=False)
    )
    net[3].weight = net[0].weight
    model = side.wrap(net, nn.Embedding, nn.Linear)

    def loss_of(m: nn.Module, step: int) -> Tensor:
        tokens = side.tokens(step, ROWS, 3)
        return F.cross_entropy(m(tokens).flatten(0, 1), tokens.view(-1))

    return side.fit(model, loss_of=loss_of)


@idiom("a head that reads the embedding's weight")
def tied_by_reading(side: Side) -> Any:
    net = Composed(
        lambda net, tokens: torch.tanh(net.mid(net.table(tokens))) @ net.table.weight.T,
        table=nn.Embedding(10, 5),
        mid=nn.Linear(5, 5),
    )
    model = side.wrap(net, nn.Embedding, nn.Linear)
    return side.fit(model, loss_of=lambda m, s: m(side.tokens(s, ROWS, 3)).square().mean())


@idiom("one module in two places")
def shared_module(side: Side) -> Any:
    shared = nn.Linear(5, 5)
    first, second = nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared, nn.ReLU())
    net = nn.Sequential(nn.Linear(7, 5), first, second, nn.Linear(5, 3))
    return side.fit(side.wrap(net, nn.Sequential))


# ---------------------------------------------------------------- edits


@idiom("parameters edited between steps, under `no_grad`")
def edited(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    losses = []
    for step in range(4):
        losses += side.fit(model, optimizer, steps=1, first=step)[:1]
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9).clamp_(-0.5, 0.5)
    return [*losses, model]


@idiom("parameters edited through `p.data`")
def edited_data(side: Side) -> Any:
    model = side.wrap(Mlp())
    losses = side.fit(model, steps=2)[:-1]
    for param in model.parameters():
        param.data.mul_(0.5)
        param.data = param.data + 0.1
    return [*losses, *side.fit(model, first=2)]


@idiom("`nn.init` after wrapping")
def init_after_wrapping(side: Side) -> Any:
    model = side.wrap(Mlp())
    for name, param in model.named_parameters():
        if name.endswith("weight"):
            torch.manual_seed(5)
            nn.init.trunc_normal_(param, std=0.1)
        else:
            nn.init.constant_(param, 0.1)
    return side.fit(model)


@idiom("`nn.init.orthogonal_`, `model.apply(init)` after wrapping")
def apply_after_wrapping(side: Side) -> Any:
    model = side.wrap(Mlp())

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.manual_seed(5)
            nn.init.orthogonal_(module.weight)
            nn.init.zeros_(module.bias)

    model.apply(init)
    return side.fit(model)


@idiom("a weight clamped in place in forward")
def edited_in_forward(side: Side) -> Any:
    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            net.weight.clamp_(-0.95, 0.95)
        return net.head(x * net.weight)

    net = Composed(forward, weight=nn.Parameter(torch.ones(7)), head=nn.Linear(7, 3))
    return side.fit(side.wrap(net))


@idiom("`param.data = ...` in forward: a frozen momentum encoder")
def momentum_encoder(side: Side) -> Any:
    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            pairs = zip(net.query.parameters(), net.key.parameters(), strict=True)
            for query, key in pairs:
                key.data = key.data * 0.5 + query.data * 0.5
            keys = net.key(x)
        return net.query(x) - 0.5 * keys

    class Momentum(Composed): ...

    net = Momentum(forward, query=nn.Linear(7, 3), key=nn.Linear(7, 3).requires_grad_(False))
    net.key.load_state_dict(net.query.state_dict())
    return side.fit(side.wrap(net, Momentum))


@idiom("`parameters_to_vector`, `vector_to_parameters`")
def as_vector(side: Side) -> Any:
    model = side.wrap(Mlp())
    side.fit(model)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    return [vector, side.loss(model, 9)]


@idiom("`p.shape`, `p.numel()`, `p.norm()`, `p.mean()` of parameters, on all ranks")
def looked_at(side: Side) -> Any:
    model = side.wrap(Mlp())
    side.fit(model)
    seen: list[Any] = [sum(p.numel() + p[0].shape.numel() for p in model.parameters())]
    for param in model.parameters():
        seen += [list(param.shape), param.norm(), param.mean(), param.abs().max(), param.std()]
    return seen


# ---------------------------------------------------------------- frozen


class Lora(nn.Module):
    """A frozen layer and a trained product of low rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class LoraStack(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(Lora(16) for _ in range(3))
        self.head = nn.Linear(16, 3).requires_grad_(False)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens).requires_grad_()
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def _lora(reentrant: bool | None, side: Side) -> Any:
    model = side.wrap(LoraStack(reentrant), Lora)
    return side.fit(model, loss_of=lambda m, s: m(side.tokens(s, ROWS, 3)).square().mean())


add("lora", "parameters", "LoRA: frozen base, trained adapters", partial(_lora, None))
for _name, _value in (("lora_checkpoint", False), ("lora_reentrant", True)):
    _title = f"LoRA and `checkpoint(use_reentrant={_value})`, an input that requires grad"
    add(_name, "parameters", _title, partial(_lora, _value))


@idiom("some layers frozen before wrapping")
def frozen_layers(side: Side) -> Any:
    net = Mlp()
    net.fc1.requires_grad_(False)
    net.fc3.weight.requires_grad_(False)
    return side.fit(side.wrap(net))


# ---------------------------------------------------------------- parametrisations


def _parametrised(change: Callable[[nn.Linear], nn.Module], side: Side) -> Any:
    net = Mlp()
    net.fc2 = change(net.fc2)
    model = side.wrap(net)
    if (weight := vars(side.inner(model).fc2).get("weight")) is not None:
        nn.init.constant_(weight.data, 0.1)
    return side.fit(model)


_prune = partial(prune.l1_unstructured, name="weight", amount=0.5)
for _name, _title, _change in (
    ("weight_norm", "`parametrizations.weight_norm`", parametrizations.weight_norm),
    ("orthogonal", "`parametrizations.orthogonal`", parametrizations.orthogonal),
    ("spectral_norm", "`parametrizations.spectral_norm`", parametrizations.spectral_norm),
    ("weight_norm_by_hooks", "`torch.nn.utils.weight_norm`, by hooks", nn.utils.weight_norm),
    ("spectral_norm_by_hooks", "`torch.nn.utils.spectral_norm`, by hooks", nn.utils.spectral_norm),
    ("pruned", "`torch.nn.utils.prune`", _prune),
):
    add(_name, "parameters", _title, partial(_parametrised, _change))


@idiom("an own parametrisation")
def own_parametrization(side: Side) -> Any:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).T

    net = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    nn.utils.parametrize.register_parametrization(net[1], "weight", Symmetric())
    return side.fit(side.wrap(net))
