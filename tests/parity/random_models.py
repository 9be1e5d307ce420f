"""Random models for `test_random_models.py`: modules made of a case's description."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = W = 6
Json = dict[str, Any]


def _attend(leaf: "Leaf", x: Tensor) -> Tensor:
    one = x.unsqueeze(1)
    return x + leaf.inner(one, one, one, need_weights=False)[0].squeeze(1)


def _running(leaf: "Leaf", x: Tensor) -> Tensor:
    if leaf.training:
        leaf.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    # tanh saves a tensor for backward, so a checkpoint computes this layer again, and then updates
    # the mean again. If only weights were saved, flatshard would all-gather the weights, and the
    # checkpoint would not compute the layer again.
    return ((x - leaf.mean) * leaf.weight).tanh()


def _reassigned(leaf: "Leaf", x: Tensor) -> Tensor:
    if leaf.training:
        leaf.mean = leaf.mean * 0.9 + x.detach().to(leaf.mean.dtype).mean(0) * 0.1
    return ((x - leaf.mean) * leaf.weight).tanh()


linear = nn.functional.linear
Forward = Callable[[Any, Tensor], Tensor]
LEAVES: dict[str, tuple[dict[str, tuple[int, ...]] | Callable[..., nn.Module], Forward]] = {
    "linear": (
        {"weight": (W, W), "bias": (W,)},
        lambda leaf, x: linear(x, leaf.weight, leaf.bias).tanh(),
    ),
    "biasless": ({"weight": (W, W)}, lambda leaf, x: linear(x, leaf.weight).tanh()),
    "low_rank": ({"down": (1, W), "up": (W, 1)}, lambda leaf, x: x + x @ leaf.down.T @ leaf.up.T),
    "scalar": (
        {"scale": (), "offset": (1,)},
        lambda leaf, x: (x * leaf.scale + leaf.offset).tanh(),
    ),
    "empty": (
        {"nothing": (0, W), "shift": (W,)},
        lambda leaf, x: x + (x @ leaf.nothing.T).sum(-1, keepdim=True) + leaf.shift,
    ),
    "odd": ({"values": (7,)}, lambda leaf, x: x + leaf.values[1:] * leaf.values[0]),
    "norm": (lambda: nn.LayerNorm(W), lambda leaf, x: leaf.inner(x)),
    "batch_norm": (lambda: nn.BatchNorm1d(W), lambda leaf, x: leaf.inner(x)),
    "lookup": (
        lambda: nn.Embedding(4, W),
        lambda leaf, x: x + leaf.inner((x.detach().sum(-1) * 3).long() % 4),
    ),
    "recurrent": (
        lambda: nn.GRU(W, W, batch_first=True),
        lambda leaf, x: leaf.inner(x.unsqueeze(0))[0].squeeze(0),
    ),
    "attention": (lambda: nn.MultiheadAttention(W, 2, batch_first=True), _attend),
    "running": ({"weight": (W,)}, _running),
    "reassigned": ({"weight": (W,)}, _reassigned),
    "lora": (
        {"weight": (W, W), "down": (2, W), "up": (W, 2)},
        lambda leaf, x: (x @ leaf.weight.T + x @ leaf.down.T @ leaf.up.T).tanh(),
    ),
}
"""Layers: the shapes of their parameters, or the module inside, and their forward."""

BUFFERED = {"batch_norm", "running", "reassigned"}
"""Kinds of leaves whose buffers change in forward."""


class Leaf(nn.Module):
    """A layer of parameters; ``kind`` is a key of `LEAVES`."""

    def __init__(self, kind: str, generator: torch.Generator) -> None:
        super().__init__()

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / 2)

        self.kind = kind
        content, self._forward = LEAVES[kind]
        if callable(content):
            self.inner = content().double()
            for param in self.inner.parameters():
                param.data = new(*param.shape).data
        else:
            for name, shape in content.items():
                setattr(self, name, new(*shape))
        if kind in ("running", "reassigned"):
            self.register_buffer("mean", torch.zeros(W, dtype=torch.float64))
        if kind == "lora":  # the layer below it is frozen
            self.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


class Box(nn.Module):
    """Modules that run one after the other, in the way that ``kind`` says."""

    def __init__(self, kind: str, body: list[nn.Module], every: int) -> None:
        super().__init__()
        self.kind, self.body, self.every = kind, nn.ModuleList(body), every
        self.step, self.rank = 0, 0

    def run(self, x: Tensor) -> Tensor:
        for module in self.body:
            x = module(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return BOXES[self.kind](self, x)


def _without_grad(box: Box, x: Tensor) -> Tensor:
    with torch.no_grad():
        return x + box.run(x)


def _reader(box: Box, x: Tensor) -> Tensor:
    """Reads parameters that another module owns."""
    for param in box.body[0].parameters():
        x = x + param.to(x.dtype).sum().tanh()
    return box.run(x)


BOXES: dict[str, Callable[[Box, Tensor], Tensor]] = {
    "sequence": Box.run,
    "frozen": Box.run,
    "residual": lambda box, x: x + box.run(x),
    "twice": lambda box, x: box.run(box.run(x)),
    "reentrant": lambda box, x: checkpoint(box.run, x, use_reentrant=True),
    "checkpoint": lambda box, x: checkpoint(box.run, x, use_reentrant=False),
    "unused": lambda box, x: {"used": box.body[0](x), "unused": box.run(x)}["used"],
    "sometimes": lambda box, x: box.run(x) if box.step % box.every == 0 else x,
    "by_rank": lambda box, x: box.run(x) if (box.step + box.rank) % box.every == 0 else x,
    "narrow": lambda box, x: box.run(x.float()).to(x.dtype),
    "no_grad": _without_grad,
    "reader": _reader,
    # What PEFT's enable_input_require_grads does.
    "needs_grad": lambda box, x: box.run(
        x if x.requires_grad else x.requires_grad_(torch.is_grad_enabled())
    ),
}


def build(case: Json) -> nn.Module:
    """The model of a case, with the same values on every rank."""
    generator = torch.Generator().manual_seed(case["seed"])
    made: list[Leaf] = []
    root = Box("sequence", [_build(node, generator, made) for node in case["tree"]], 1)
    return nn.Sequential(Leaf("linear", generator), root, Leaf("linear", generator))


def _build(node: Json, generator: torch.Generator, made: list[Leaf]) -> nn.Module:
    kind = node["kind"]
    if kind in BOXES:
        # Dtypes differ: what is inside is shared with nothing outside.
        inside: list[Leaf] = [] if kind == "narrow" else made
        body = [_build(one, generator, inside) for one in node["body"]]
        module: nn.Module = Box(kind, body, node["every"])
        if kind == "narrow":
            module.float()
        if kind == "frozen":
            module.requires_grad_(False)
    elif kind == "shared" and made:
        return made[node["of"] % len(made)]
    else:
        module = Leaf("linear" if kind in ("shared", "tied") else kind, generator)
        others = [one for one in made if one.kind in ("linear", "biasless")]
        if kind == "tied" and others:
            module.weight = others[node["of"] % len(others)].weight
        made.append(module)
    module.is_unit = node["unit"]
    return module


def kinds_in(nodes: list[Json]) -> set[str]:
    """The kinds of all modules in a tree."""
    found: set[str] = set()
    for node in nodes:
        found |= {node["kind"], *kinds_in(node.get("body", []))}
    return found
