"""The models of published runs. Each module computes the part of one rank.

With tensor or context parallelism, a rank computes a part of each layer. The collectives over the
sequence and the matrix products in float8 are separate operators, so that a trace contains them:
``published::gather``, ``published::scatter`` and ``published::float8_mm``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import register_flop_formula

FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Form:
    """A model, a rank's part of the model, and the activation checkpointing."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    length: int
    head_size: int
    is_gpt: bool = False  # learned positions, LayerNorm, GELU, tied embeddings
    normalizes_heads: bool = False  # RMSNorm of queries and keys, as in Qwen3
    rotates_halves: bool = False  # rotary positions without complex numbers
    fuses_norms: bool = True
    tensor_ranks: int = 1
    context_ranks: int = 1
    checkpoint: str = "none"  # "full", "op", "op without attention" or "layer"
    float8: bool = False
    root_is_split: bool = False  # whether embedding and head are separate units
    # Where logits are cast to float32. "in model": in the model's forward. "in model, held": the
    # same, and the logits stay allocated until the end of backward. "after": in the loss.
    # "chunked": in the loss, for one chunk at a time. "compiled": in the loss's kernel.
    loss: str = "after"


# ---------------------------------------------------------------- operators


@torch.library.custom_op("published::gather", mutates_args=())
def gather(x: Tensor, dim: int, ranks: int) -> Tensor:
    raise NotImplementedError


@gather.register_fake
def _(x: Tensor, dim: int, ranks: int) -> Tensor:
    sizes = list(x.shape)
    sizes[dim] *= ranks
    return x.new_empty(sizes)


@torch.library.custom_op("published::scatter", mutates_args=())
def scatter(x: Tensor, dim: int, ranks: int) -> Tensor:
    raise NotImplementedError


@scatter.register_fake
def _(x: Tensor, dim: int, ranks: int) -> Tensor:
    sizes = list(x.shape)
    sizes[dim] //= ranks
    return x.new_empty(sizes)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.dim, ctx.ranks = inputs[1:]


gather.register_autograd(
    lambda context, grad: (scatter(grad, context.dim, context.ranks), None, None),
    setup_context=_keep,
)
scatter.register_autograd(
    lambda context, grad: (gather(grad, context.dim, context.ranks), None, None),
    setup_context=_keep,
)


@torch.library.custom_op("published::float8_mm", mutates_args=())
def float8_mm(left: Tensor, right: Tensor) -> Tensor:
    raise NotImplementedError


@float8_mm.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=torch.bfloat16)


@register_flop_formula(torch.ops.published.float8_mm)
def _(left: Any, right: Any, *_: Any, **__: Any) -> int:
    return int(2 * left[0] * left[1] * right[1])


def _as_float8(x: Tensor) -> Tensor:
    """Cast to float8, scaled by the largest absolute value."""
    return (x * (1.0 / x.abs().amax())).to(FLOAT8)


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(x, weight)
        return float8_mm(_as_float8(x), _as_float8(weight).t())

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = context.saved_tensors
        grad8 = _as_float8(grad)
        return float8_mm(grad8, _as_float8(weight)), float8_mm(grad8.t(), _as_float8(x))


class _Float8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Float8Product.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class _CompiledLoss(torch.autograd.Function):
    """Cross entropy in one compiled kernel, which makes no float32 copy of the logits."""

    @staticmethod
    def forward(context: Any, logits: Tensor) -> Tensor:
        context.save_for_backward(logits)
        return logits.amax(-1).float().mean()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return context.saved_tensors[0] * 1.0


# ---------------------------------------------------------------- parts


class _OwnNorm(nn.Module):
    """RMSNorm in float32 with several operators, as in torchtitan and in torch before 2.9."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).type_as(x) * self.weight


def _norm(form: Form, width: int) -> nn.Module:
    if form.is_gpt:
        return nn.LayerNorm(width, bias=False)
    return nn.RMSNorm(width, eps=1e-5) if form.fuses_norms else _OwnNorm(width)


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    if not rotation.is_complex():
        first, second = x.chunk(2, -1)
        return x * rotation + torch.cat((-second, first), -1) * rotation
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).type_as(x)


class _Attention(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form, size = form, form.head_size
        linear = partial(_Float8Linear if form.float8 else nn.Linear, bias=False)
        heads, kv_heads = (n // form.tensor_ranks for n in (form.heads, form.kv_heads))
        if form.is_gpt:
            self.joint = linear(form.width, (heads + 2 * kv_heads) * size)
        else:
            self.query = linear(form.width, heads * size)
            self.key, self.value = (linear(form.width, kv_heads * size) for _ in range(2))
        self.out = linear(heads * size, form.width)
        if form.normalizes_heads:
            self.query_norm, self.key_norm = (_norm(form, size) for _ in range(2))

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        form = self.form
        if form.is_gpt:
            query, key, value = (
                part.unflatten(-1, (-1, form.head_size)) for part in self.joint(x).chunk(3, -1)
            )
        else:
            query, key, value = (
                layer(x).unflatten(-1, (-1, form.head_size))
                for layer in (self.query, self.key, self.value)
            )
            if form.normalizes_heads:
                query, key = self.query_norm(query), self.key_norm(key)
            query, key = _rotate(query, rotation), _rotate(key, rotation)
        if (groups := form.heads // form.kv_heads) > 1:
            key, value = (one.repeat_interleave(groups, 2) for one in (key, value))
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        if form.context_ranks > 1:
            key, value = (gather(one, 2, form.context_ranks) for one in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().flatten(2))


class _FeedForward(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        linear = partial(_Float8Linear if form.float8 else nn.Linear, bias=False)
        hidden = form.hidden // form.tensor_ranks
        self.up, self.down = linear(form.width, hidden), linear(hidden, form.width)
        self.gate = None if form.is_gpt else linear(form.width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.ranks = form.tensor_ranks
        self.attention, self.feed_forward = _Attention(form), _FeedForward(form)
        self.norm1, self.norm2 = _norm(form, form.width), _norm(form, form.width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self._scatter(self.attention(self._gather(self.norm1(x)), rotation))
        return x + self._scatter(self.feed_forward(self._gather(self.norm2(x))))

    def _gather(self, x: Tensor) -> Tensor:
        return gather(x, 1, self.ranks) if self.ranks > 1 else x

    def _scatter(self, x: Tensor) -> Tensor:
        return scatter(x, 1, self.ranks) if self.ranks > 1 else x


class Embedding(nn.Embedding):
    pass


class Head(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.norm, self.ranks = _norm(form, form.width), form.tensor_ranks
        self.out = nn.Linear(form.width, form.vocab // form.tensor_ranks, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.out(gather(x, 1, self.ranks) if self.ranks > 1 else x)


class Decoder(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.embedding = Embedding(form.vocab // form.tensor_ranks, form.width)
        if form.is_gpt:
            self.positions = nn.Embedding(form.length, form.width)
        self.blocks = nn.ModuleList(Block(form) for _ in range(form.layers))
        _checkpoint(list(self.blocks), form.checkpoint)
        self.head = Head(form)
        if form.is_gpt:
            self.head.out.weight = self.embedding.weight
        half = form.head_size // 2
        rotation = (
            torch.empty(form.length, 1, 2 * half, dtype=torch.bfloat16)
            if form.rotates_halves or form.is_gpt
            else torch.empty(form.length, 1, half, dtype=torch.complex64)
        )
        self.register_buffer("rotation", rotation, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        form = self.form
        x = self.embedding(tokens)
        if form.tensor_ranks > 1:
            x = scatter(x, 1, form.tensor_ranks)
        if form.is_gpt:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, self.rotation[: tokens.shape[1]])
        logits = self.head(x)
        return logits.float() if form.loss.startswith("in model") else logits


def step(form: Form, batch: int, model: nn.Module) -> Tensor:
    """Return the loss, computed in the way of the published run (``form.loss``).

    ``model`` returns logits of shape ``(batch, length, vocab)``.
    """
    tokens = torch.zeros(batch, form.length // form.context_ranks, dtype=torch.long)
    logits = model(tokens)
    if form.loss == "compiled":
        return _CompiledLoss.apply(logits)
    targets = tokens % (form.vocab // form.tensor_ranks)
    if form.loss == "chunked":
        parts = zip(logits.chunk(8, 1), targets.chunk(8, 1), strict=True)
        losses = [F.cross_entropy(a.flatten(0, 1).float(), b.flatten()) for a, b in parts]
        return torch.stack(losses).mean()
    # `logits` stay allocated until this function returns, or until the end of backward ("held").
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    if form.loss.endswith("held"):
        loss.logits = logits
    return loss


# ---------------------------------------------------------------- checkpointing


def _selective_contexts(keeps_attention: bool) -> Any:
    """Return contexts that save attention, every second matrix product and reduce-scatters.

    Source: torchtitan's selective activation checkpointing. Backward recomputes the rest.
    """
    counts: Counter[bool] = Counter()

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = func.__name__
        if name.startswith(("mm", "addmm", "float8_mm")):
            counts[context.is_recompute] += 1
            saves = counts[context.is_recompute] % 2 == 1
        else:
            saves = ("attention" in name and keeps_attention) or name.startswith("scatter.")
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _checkpoint(blocks: list[nn.Module], kind: str) -> None:
    keywords: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind.startswith("op"):
        keywords["context_fn"] = partial(_selective_contexts, "without" not in kind)
    if kind != "none":
        for block in blocks[:: 2 if kind == "layer" else 1]:
            block.forward = partial(checkpoint, block.forward, **keywords)  # type: ignore[method-assign]
