"""The models of published runs. Each module computes the part of one rank.

With tensor or context parallelism, a rank computes a part of each layer. The collectives over the
sequence and the matrix products in float8 are separate operators, so that a trace contains them:
``published::gather``, ``published::scatter``, ``published::ring``, ``published::ring_back`` and
``published::float8_mm``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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
    gathers_heads: bool = False  # all heads are normalized on each tensor-parallel rank
    rotates_halves: bool = False  # rotary positions without complex numbers
    # Rotary positions by 2x2 matrices in float32, as in IBM's foundation-model-stack
    # (`RotaryEmbedding.adjusted_qk` in fms/modules/positions.py, February 2024).
    rotates_by_matrices: bool = False
    fuses_norms: bool = True
    tensor_ranks: int = 1
    context_ranks: int = 1
    # Activation checkpointing: "none", "full", "layer", or a `kind` of `_selective_contexts`.
    checkpoint: str = "none"
    # Whether backward recomputes only the operators whose results it needs.
    stops_early: bool = True
    # With "layer": number of blocks in a group. The first block of each group is checkpointed.
    checkpoint_every: int = 1
    float8: bool = False
    # Whether weights are all-gathered in float8, so that layers need not cast the weights.
    gathers_float8: bool = False
    # Whether backward uses the float8 weights of forward. torch.compile saves a weight in float8
    # rather than in bfloat16, because it does not know that FSDP gathers again
    # (pytorch/pytorch#141881).
    saves_float8: bool = False
    # Whether inputs and gradients are cast to float8 before their all-gathers. Needs `float8` and
    # `tensor_ranks` > 1.
    sends_float8: bool = False
    root_is_split: bool = False  # whether embedding and head are separate units
    # Where logits are cast to float32. "in model": in the model's forward. "in model, held": the
    # same, and the logits stay allocated until the end of backward. "after": in the loss.
    # "chunked": in the loss, for one chunk at a time. "chunked head": the same, and logits are also
    # computed for one chunk at a time. "compiled": in the loss's kernel.
    loss: str = "after"


# ---------------------------------------------------------------- operators


def _collective(name: str, dim: int, grows: bool) -> Callable[[Tensor, int], Tensor]:
    """Register an operator that makes ``dim`` larger, or smaller, by the number of ranks."""

    @torch.library.custom_op(f"published::{name}", mutates_args=())
    def run(x: Tensor, ranks: int) -> Tensor:
        raise NotImplementedError

    @run.register_fake
    def _(x: Tensor, ranks: int) -> Tensor:
        sizes = list(x.shape)
        sizes[dim] = sizes[dim] * ranks if grows else sizes[dim] // ranks
        return x.new_empty(sizes)

    return run


gather, scatter = _collective("gather", 0, True), _collective("scatter", 0, False)
# Context parallelism: the keys and values of all ranks in forward, and their gradients in backward.
ring_gather, ring_scatter = _collective("ring", 2, True), _collective("ring_back", 2, False)


class _GatherKeys(torch.autograd.Function):
    """All-gather keys or values over the context-parallel ranks."""

    @staticmethod
    def forward(context: Any, x: Tensor, ranks: int) -> Tensor:
        context.ranks = ranks
        return ring_gather(x, ranks)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ring_scatter(grad, context.ranks), None


def _gathered(x: Tensor, dim: int, ranks: int) -> Tensor:
    """All-gather along ``dim``.

    torch's functional collectives work along dimension 0. For another dimension, they copy the
    whole tensor after an all-gather, and before a reduce-scatter.
    """
    return torch.cat(gather(x, ranks).chunk(ranks), dim)


class _GatherSequence(torch.autograd.Function):
    """All-gather along dimension 1 in forward, reduce-scatter in backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, ranks: int) -> Tensor:
        context.ranks = ranks
        return _gathered(x, 1, ranks)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _ScatterSequence.forward(context, grad, context.ranks), None


class _ScatterSequence(torch.autograd.Function):
    """Reduce-scatter along dimension 1 in forward, all-gather in backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, ranks: int) -> Tensor:
        context.ranks = ranks
        return scatter(torch.cat(x.chunk(ranks, 1)), ranks)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _gathered(grad, 1, context.ranks), None


class _GatherHeads(torch.autograd.Function):
    """All-gather the heads in forward, take this rank's heads in backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, ranks: int) -> Tensor:
        context.ranks = ranks
        return _gathered(x, 2, ranks)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.chunk(context.ranks, 2)[0].contiguous(), None


class _OwnHeads(torch.autograd.Function):
    """Take this rank's heads in forward, all-gather the heads in backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, ranks: int) -> Tensor:
        context.ranks = ranks
        return x.chunk(ranks, 2)[0].contiguous()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _gathered(grad, 2, context.ranks), None


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


@torch.library.custom_op("published::float8_weight", mutates_args=())
def float8_weight(weight: Tensor) -> Tensor:
    raise NotImplementedError


@float8_weight.register_fake
def _(weight: Tensor) -> Tensor:
    return torch.empty_like(weight, dtype=FLOAT8)


def _weight_as_float8(weight: Tensor, form: Form) -> Tensor:
    if weight.dtype == FLOAT8:
        return weight
    if form.gathers_float8:
        return weight.view(FLOAT8)[:, : weight.shape[1]]  # allocates nothing: stands for the weight
    return float8_weight(weight) if form.saves_float8 else _as_float8(weight)


def _transposed(x8: Tensor) -> Tensor:
    """Copy a float8 matrix: matrix products in float8 contract the last dimension of both sides."""
    return x8.t().contiguous()


class _Float8Columns(torch.autograd.Function):
    """Linear layers with the same input. The input is all-gathered if a rank holds a part of it."""

    @staticmethod
    def forward(context: Any, x: Tensor, form: Form, *weights: Tensor) -> tuple[Tensor, ...]:
        context.form = form
        if form.sends_float8:
            x = _gathered(_as_float8(x), 1, form.tensor_ranks)
        x8 = x if form.sends_float8 else _as_float8(x)
        found, saved = [], []
        for weight in weights:
            weight8 = _weight_as_float8(weight, form)
            saved.append(weight8 if form.saves_float8 else weight)
            found.append(float8_mm(x8.flatten(0, -2), weight8.t()).unflatten(0, x.shape[:-1]))
        context.save_for_backward(x, *saved)
        return tuple(found)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Any, ...]:
        form, (x, *weights) = context.form, context.saved_tensors
        total, found = None, []
        x8 = _transposed((x if form.sends_float8 else _as_float8(x)).flatten(0, -2))
        for grad, weight in zip(grads, weights, strict=True):
            grad8 = _as_float8(grad.flatten(0, -2))
            part = float8_mm(grad8, _transposed(_weight_as_float8(weight, form)).t())
            total = part if total is None else total + part
            found.append(float8_mm(_transposed(grad8), x8.t()))
        assert total is not None
        total = total.unflatten(0, x.shape[:-1])
        if form.sends_float8:
            total = _ScatterSequence.forward(context, total, form.tensor_ranks)
        return total, None, *found


class _Float8Row(torch.autograd.Function):
    """Linear layer whose result is reduce-scattered over the sequence."""

    @staticmethod
    def forward(context: Any, x: Tensor, form: Form, weight: Tensor) -> Tensor:
        context.form, weight8 = form, _weight_as_float8(weight, form)
        context.save_for_backward(x, weight8 if form.saves_float8 else weight)
        product = float8_mm(_as_float8(x).flatten(0, -2), weight8.t())
        return _ScatterSequence.forward(
            context, product.unflatten(0, x.shape[:-1]), form.tensor_ranks
        )

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        form, (x, weight) = context.form, context.saved_tensors
        grad8 = _gathered(_as_float8(grad), 1, form.tensor_ranks).flatten(0, -2)
        x8, shape = _transposed(_as_float8(x).flatten(0, -2)), x.shape[:-1]
        before = float8_mm(grad8, _transposed(_weight_as_float8(weight, form)).t())
        return before.unflatten(0, shape), None, float8_mm(_transposed(grad8), x8.t())


def _columns(form: Form, x: Tensor, *layers: nn.Linear) -> Sequence[Tensor]:
    """Return the results of layers whose columns are sharded over the tensor-parallel ranks."""
    weights = [layer.weight for layer in layers]
    if form.tensor_ranks > 1 and not form.sends_float8:
        x = _GatherSequence.apply(x, form.tensor_ranks)
    if form.float8:
        return _Float8Columns.apply(x, form, *weights)  # type: ignore[no-any-return]
    return [layer(x) for layer in layers]


def _row(form: Form, x: Tensor, layer: nn.Linear) -> Tensor:
    """Return the result of a layer whose rows are sharded over the tensor-parallel ranks."""
    if form.sends_float8:
        return _Float8Row.apply(x, form, layer.weight)  # type: ignore[no-any-return]
    x = _Float8Columns.apply(x, form, layer.weight)[0] if form.float8 else layer(x)
    return x if form.tensor_ranks == 1 else _ScatterSequence.apply(x, form.tensor_ranks)


class _CompiledLoss(torch.autograd.Function):
    """Cross entropy in one compiled kernel, which makes no float32 copy of the logits."""

    @staticmethod
    def forward(context: Any, logits: Tensor) -> Tensor:
        context.save_for_backward(logits)
        return logits.amax(-1).float().mean()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return context.saved_tensors[0] * 1.0


class _ChunkedHead(torch.autograd.Function):
    """Mean loss of logits that are computed for one chunk of the sequence at a time.

    torchtitan's ``ChunkedCELoss`` runs the backward of the head and of the loss in forward, chunk
    by chunk. The gradients of the head's weight and input are added up in float32.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        before, total = [], torch.zeros_like(weight, dtype=torch.float32)
        for chunk in x.chunk(8, 1):
            logits = chunk.contiguous() @ weight.t()
            result = torch.log_softmax(logits.float(), -1)
            gradient = (result.exp() - 1.0).type_as(logits)
            before.append((gradient @ weight).float())
            total += gradient.flatten(0, 1).t() @ chunk.flatten(0, 1)
        context.save_for_backward(torch.cat(before, 1).type_as(x), total)
        return result.mean()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        before, total = context.saved_tensors
        return before * grad, total.type_as(before)


class _ParallelLoss(torch.autograd.Function):
    """Cross entropy of logits that are sharded over the vocabulary.

    torch's ``loss_parallel`` runs separate operators instead of the fused kernels, so more tensors
    of the size of the logits are alive: three in forward, and four in backward.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, targets: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        result = shifted - shifted.exp().sum(-1, keepdim=True).log()
        context.save_for_backward(result, targets)
        return result.gather(1, targets[:, None]).mean()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        result, targets = context.saved_tensors
        gradient = torch.zeros_like(result)
        gradient.scatter_(1, targets[:, None], -1.0)
        return (gradient + result.exp()) * grad, None


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
    if rotation.dim() == 5:
        vectors = x.float().unflatten(-1, (-1, 2)).unsqueeze(-2)
        return (rotation * vectors).sum(-1).flatten(-2).type_as(x)
    if not rotation.is_complex():
        first, second = x.chunk(2, -1)
        return x * rotation + torch.cat((-second, first), -1) * rotation
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).type_as(x)


class _Attention(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form, size = form, form.head_size
        linear = partial(nn.Linear, bias=False)
        # With more ranks than heads of keys and values, each rank has one of these heads.
        heads, kv_heads = (max(1, n // form.tensor_ranks) for n in (form.heads, form.kv_heads))
        self.parts = [one * size for one in (heads, kv_heads, kv_heads)]
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
                part.unflatten(-1, (-1, form.head_size))
                for part in _columns(form, x, self.joint)[0].split(self.parts, -1)
            )
        else:
            query, key, value = (
                one.unflatten(-1, (-1, form.head_size))
                for one in _columns(form, x, self.query, self.key, self.value)
            )
            ranks = form.tensor_ranks if form.gathers_heads else 1
            if ranks > 1:
                query, key = (_GatherHeads.apply(one, ranks) for one in (query, key))
            if form.normalizes_heads:
                query, key = self.query_norm(query), self.key_norm(key)
            query, key = _rotate(query, rotation), _rotate(key, rotation)
            if ranks > 1:
                query, key = (_OwnHeads.apply(one, ranks) for one in (query, key))
        if (groups := query.shape[2] // key.shape[2]) > 1:
            key, value = (one.repeat_interleave(groups, 2) for one in (key, value))
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        if form.context_ranks > 1:
            key, value = (_GatherKeys.apply(one, form.context_ranks) for one in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return _row(form, mixed.transpose(1, 2).contiguous().flatten(2), self.out)


class _FeedForward(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.form, hidden = form, form.hidden // form.tensor_ranks
        self.up, self.down = linear(form.width, hidden), linear(hidden, form.width)
        self.gate = None if form.is_gpt else linear(form.width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return _row(self.form, F.gelu(_columns(self.form, x, self.up)[0]), self.down)
        gate, up = _columns(self.form, x, self.gate, self.up)
        return _row(self.form, F.silu(gate) * up, self.down)


class Block(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.attention, self.feed_forward = _Attention(form), _FeedForward(form)
        self.norm1, self.norm2 = _norm(form, form.width), _norm(form, form.width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.feed_forward(self.norm2(x))


class Embedding(nn.Embedding):
    pass


class Head(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.norm, self.ranks = _norm(form, form.width), form.tensor_ranks
        self.out = nn.Linear(form.width, form.vocab // form.tensor_ranks, bias=False)
        self.computes_loss = form.loss == "chunked head"

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = _GatherSequence.apply(x, self.ranks) if self.ranks > 1 else x
        return _ChunkedHead.apply(x, self.out.weight) if self.computes_loss else self.out(x)


class Decoder(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.embedding = Embedding(form.vocab // form.tensor_ranks, form.width)
        if form.is_gpt:
            self.positions = nn.Embedding(form.length, form.width)
        self.blocks = nn.ModuleList(Block(form) for _ in range(form.layers))
        _checkpoint(list(self.blocks)[:: form.checkpoint_every], form)
        self.head = Head(form)
        if form.is_gpt:
            self.head.out.weight = self.embedding.weight
        half = form.head_size // 2
        rotation = (
            torch.empty(form.length, 1, 2 * half, dtype=torch.bfloat16)
            if form.rotates_halves or form.is_gpt
            else torch.empty(form.length, 1, half, dtype=torch.complex64)
        )
        if form.rotates_by_matrices:
            rotation = torch.empty(form.length, 1, half, 2, 2)
        self.register_buffer("rotation", rotation, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        form = self.form
        x = self.embedding(tokens)
        if form.is_gpt:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        if form.tensor_ranks > 1:
            x = _ScatterSequence.apply(x, form.tensor_ranks)
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
    if form.loss == "chunked head":
        return logits  # this is the loss, which the model's head has computed
    if form.loss == "compiled":
        return _CompiledLoss.apply(logits)
    targets = tokens % (form.vocab // form.tensor_ranks)
    entropy = F.cross_entropy if form.tensor_ranks == 1 else _ParallelLoss.apply
    if form.loss == "chunked":
        parts = zip(logits.chunk(8, 1), targets.chunk(8, 1), strict=True)
        losses = [entropy(a.flatten(0, 1).float(), b.flatten()) for a, b in parts]
        return torch.stack(losses).mean()
    # `logits` stay allocated until this function returns, or until the end of backward ("held").
    loss = entropy(logits.flatten(0, 1).float(), targets.flatten())
    if form.loss.endswith("held"):
        loss.logits = logits
    return loss


# ---------------------------------------------------------------- checkpointing


def _selective_contexts(kind: str) -> Any:
    """Return contexts that save attention, matrix products and reduce-scatters.

    Source: torchtitan's selective activation checkpointing. Backward recomputes the rest.
    ``kind``: "op": every second matrix product is saved. "op, all products": all are saved.
    "op without attention": attention is not saved.
    """
    counts: Counter[bool] = Counter()

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = func.__name__
        if name.startswith(("mm", "addmm", "float8_mm")):
            counts[context.is_recompute] += 1
            saves = counts[context.is_recompute] % 2 == 1 or kind == "op, all products"
        else:
            saves = "attention" in name and kind != "op without attention"
            saves = saves or name.startswith("scatter.")
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _checkpoint(blocks: list[nn.Module], form: Form) -> None:
    keywords: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    keywords["early_stop"] = form.stops_early
    if form.checkpoint.startswith("op"):
        keywords["context_fn"] = partial(_selective_contexts, form.checkpoint)
    if form.checkpoint != "none":
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, **keywords)  # type: ignore[method-assign]
