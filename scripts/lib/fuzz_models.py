"""The random models of `fuzz.py`: modules made of a case's description."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6
Json = dict[str, Any]

# ---------------------------------------------------------------- the models


class Leaf(nn.Module):
    """A layer of parameters; what is inside depends on ``kind``."""

    def __init__(self, kind: str, generator: torch.Generator) -> None:
        super().__init__()

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / 2)

        self.kind = kind
        if kind in ("linear", "biasless"):
            self.weight = new(WIDTH, WIDTH)
            self.bias = new(WIDTH) if kind == "linear" else None
        elif kind == "low_rank":
            self.down, self.up = new(1, WIDTH), new(WIDTH, 1)
        elif kind == "scalar":
            self.scale, self.offset = new(), new(1)
        elif kind == "empty":
            self.nothing, self.shift = new(0, WIDTH), new(WIDTH)
        elif kind == "odd":
            self.values = new(7)
        elif kind == "norm":
            self.inner = nn.LayerNorm(WIDTH, dtype=torch.float64)
        elif kind == "batch_norm":
            self.inner = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        elif kind == "lookup":
            self.inner = nn.Embedding(4, WIDTH, dtype=torch.float64)
            self.inner.weight.data = new(4, WIDTH).data
        elif kind == "recurrent":
            self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True, dtype=torch.float64)
            for param in self.inner.parameters():
                param.data = new(*param.shape).data
        elif kind == "attention":
            self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dtype=torch.float64)
            for param in self.inner.parameters():
                param.data = new(*param.shape).data
        elif kind in ("running", "reassigned"):
            self.weight = new(WIDTH)
            self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        elif kind == "lora":  # the layer below it is frozen
            self.weight = new(WIDTH, WIDTH).requires_grad_(False)
            self.down, self.up = new(2, WIDTH), new(WIDTH, 2)
        else:
            raise ValueError(f"no such layer: {kind!r}")

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("linear", "biasless"):
            return nn.functional.linear(x, self.weight, self.bias).tanh()
        if self.kind == "low_rank":
            return x + x @ self.down.T @ self.up.T
        if self.kind == "scalar":
            return (x * self.scale + self.offset).tanh()
        if self.kind == "empty":
            return x + (x @ self.nothing.T).sum(-1, keepdim=True) + self.shift
        if self.kind == "odd":
            return x + self.values[1:] * self.values[0]
        if self.kind == "lookup":
            return x + self.inner((x.detach().sum(-1) * 3).long() % 4)
        if self.kind == "recurrent":
            return self.inner(x.unsqueeze(0))[0].squeeze(0)
        if self.kind == "attention":
            one = x.unsqueeze(1)
            return x + self.inner(one, one, one, need_weights=False)[0].squeeze(1)
        if self.kind == "running":
            if self.training:
                self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            # tanh saves a tensor for backward, so a checkpoint computes this layer again, and then
            # updates the mean again. If only weights were saved, flatshard would all-gather the
            # weights, and the checkpoint would not compute the layer again.
            return ((x - self.mean) * self.weight).tanh()
        if self.kind == "reassigned":
            if self.training:
                self.mean = self.mean * 0.9 + x.detach().to(self.mean.dtype).mean(0) * 0.1
            return ((x - self.mean) * self.weight).tanh()
        if self.kind == "lora":
            return (x @ self.weight.T + x @ self.down.T @ self.up.T).tanh()
        return self.inner(x)


LEAVES = ("linear", "biasless", "low_rank", "scalar", "empty", "odd", "norm", "batch_norm")
LEAVES += ("lookup", "recurrent", "attention", "running", "reassigned", "lora")
BUFFERED = {"batch_norm", "running", "reassigned"}
"""Kinds of leaves whose buffers change in forward."""


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

    def forward(self, x: Tensor) -> Any:
        if self.kind == "residual":
            return x + self.run(x)
        if self.kind == "twice":
            return self.run(self.run(x))
        if self.kind == "reentrant":
            return checkpoint(self.run, x, use_reentrant=True)
        if self.kind == "checkpoint":
            return checkpoint(self.run, x, use_reentrant=False)
        if self.kind == "unused":  # a dictionary, of which the caller uses one value
            return {"used": self.body[0](x), "unused": self.run(x)}["used"]
        if self.kind == "sometimes":
            return self.run(x) if self.step % self.every == 0 else x
        if self.kind == "by_rank":
            return self.run(x) if (self.step + self.rank) % self.every == 0 else x
        if self.kind == "narrow":
            return self.run(x.float()).to(x.dtype)
        if self.kind == "no_grad":
            with torch.no_grad():
                return x + self.run(x)
        if self.kind == "reader":  # of parameters that another module owns
            for param in self.body[0].parameters():
                x = x + param.to(x.dtype).sum().tanh()
            return self.run(x)
        if self.kind == "needs_grad":  # what PEFT's enable_input_require_grads does
            return self.run(x if x.requires_grad else x.requires_grad_(torch.is_grad_enabled()))
        return self.run(x)


BOXES = ("sequence", "residual", "twice", "reentrant", "checkpoint", "unused", "sometimes")
BOXES += ("narrow", "frozen", "no_grad", "needs_grad", "reader", "by_rank")


def build(case: Json) -> nn.Module:
    """The model of a case, with the same values on every rank."""
    generator = torch.Generator().manual_seed(case["seed"])
    made: list[Leaf] = []
    root = Box("sequence", [_build(node, generator, made) for node in case["tree"]], 1)
    return nn.Sequential(Leaf("linear", generator), root, Leaf("linear", generator))


def _build(node: Json, generator: torch.Generator, made: list[Leaf]) -> nn.Module:
    kind = node["kind"]
    if kind == "shared" and made:
        return made[node["of"] % len(made)]
    if kind == "tied":
        others = [one for one in made if one.kind in ("linear", "biasless")]
        leaf = Leaf("linear", generator)
        if others:
            leaf.weight = others[node["of"] % len(others)].weight
    elif kind in BOXES:
        # Dtypes differ: what is inside is shared with nothing outside.
        inside: list[Leaf] = [] if kind == "narrow" else made
        body = [_build(one, generator, inside) for one in node["body"]]
        box = Box(kind, body, node.get("every", 2))
        if kind == "narrow":
            box.float()
        if kind == "frozen":
            box.requires_grad_(False)
        box.is_unit = node["unit"]
        return box
    else:
        leaf = Leaf("linear" if kind == "shared" else kind, generator)
    leaf.is_unit = node["unit"]
    made.append(leaf)
    return leaf


def kinds_in(nodes: list[Json]) -> set[str]:
    """The kinds of all modules in a tree."""
    found: set[str] = set()
    for node in nodes:
        found |= {node["kind"], *kinds_in(node.get("body", []))}
    return found
