"""Tiny models, each with one thing that a sharded model may have, and `CASES`, their registry."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy

VOCABULARY = 11
WIDTH = 8

# ---------------------------------------------------------------- plain networks


class Composed(nn.Module):
    """Modules and parameters, by name, and a forward: a function of this module and its inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.compute = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.compute(self, *inputs)


class Residual(nn.Module):
    """Adds to its input what two layers make of it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Mlp(nn.Module):
    """7-5-4-3: no size divides by the number of ranks, or by another."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(7, 5)
        self.fc2 = nn.Linear(5, 4)
        self.fc3 = nn.Linear(4, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(torch.tanh(self.fc1(x)))
        x = self.dropout(torch.tanh(self.fc2(x)))
        return self.fc3(x)


class Cnn(nn.Module):
    """Two convolutions, with or without batch norm between them."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3) if batch_norm else nn.GroupNorm(1, 3)
        self.conv2 = nn.Conv2d(3, 5, 3, stride=2)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv1(x)))
        return self.head(torch.tanh(self.conv2(x)).mean(dim=(2, 3)))


class Recurrent(nn.Module):
    """An LSTM or GRU, whose weights are also reached through a list of its own."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.rnn = kind(7, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


# ---------------------------------------------------------------- transformers


class Block(nn.Module):
    """A transformer block with causal attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, 2, width // 2)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Two blocks between an embedding and a head.

    Args:
        tied: the head uses the embedding's weight.
        tied_blocks: the second block uses the first one's ``up`` and ``norm1``.
        checkpointed: blocks are computed again in backward; "reentrant" or "saved tensors".
    """

    def __init__(
        self, tied: bool = False, tied_blocks: bool = False, checkpointed: str | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embed.weight
        if tied_blocks:
            first, second = self.blocks
            second.up.weight = first.up.weight
            second.norm1 = first.norm1

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant")
            else:
                x = block(x)
        return self.head(self.norm(x))


class Attentive(nn.Module):
    """Reads the weights of a child, ``attention.out_proj``, without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


# ---------------------------------------------------------------- unusual parameters


class Inner(nn.Module):
    """A unit with a parameter of its own beside its child's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.gain)


class Outer(nn.Module):
    """A unit with two units in it and parameters of its own around them."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(7))
        self.first = Inner(7)
        self.second = Inner(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x + self.shift)) - self.shift


class Nested(nn.Module):
    """Units three deep: this, `Outer`, `Inner`."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = Outer()
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.outer(x))


class Odd(nn.Module):
    """Parameters of no dimension, of no element, of one element and of strange strides."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 7))
        self.single = nn.Parameter(torch.ones(1, 1))
        self.transposed = nn.Parameter(torch.randn(7, 3).t())
        self.fc = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fc(x) * self.scale) + F.linear(x, self.nothing).sum()
        return F.linear(x, self.transposed) * self.single


class MixedTypes(nn.Module):
    """A complex parameter beside real ones; for float64."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 5)
        self.phase = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.fc(x)).to(torch.complex128) @ self.phase).real


class Frozen(Mlp):
    """``fc2`` is frozen as a whole, of ``fc1`` the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1.bias.requires_grad_(False)
        self.fc2.requires_grad_(False)


class Unused(Mlp):
    """``idle`` and ``fc3.idle`` take no part in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(5, 5)
        self.fc3.idle = nn.Parameter(torch.ones(3))


class Twice(Mlp):
    """``again`` runs twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fc1(x))
        x = torch.tanh(self.again(torch.tanh(self.again(x))))
        return self.fc3(torch.tanh(self.fc2(x)))


# ---------------------------------------------------------------- batches and the registry


def vectors(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 7, generator=generator), torch.randn(rows, 3, generator=generator)


def images(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(rows, 2, 6, 6, generator=generator)
    return inputs, torch.randn(rows, 3, generator=generator)


def sequences(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(rows, 4, 7, generator=generator)
    return inputs, torch.randn(rows, 3, generator=generator)


def tokens(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    text = torch.randint(VOCABULARY, (rows, 6), generator=generator)
    return text[:, :-1], text[:, 1:]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """A mean over the rows: cross entropy of tokens, else squared error."""
    if target.is_floating_point():
        return F.mse_loss(output, target.to(output.dtype))  # torch 2.11 does not promote it
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Case:
    """A model with its batches and the classes that become units.

    Attributes:
        name: for the test's id.
        build: makes the model.
        draw: makes inputs and target of some rows.
        units: classes for a `ModuleWrapPolicy`; none for one unit.
        row_wise: a row's output depends on no other row and no random number. Otherwise ranks
            compute other losses than one process does with all their rows at once.
    """

    name: str
    build: Callable[[], nn.Module] = field(repr=False)
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]] = field(repr=False)
    units: tuple[type[nn.Module], ...] = ()
    row_wise: bool = True

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The same weights at every call."""
        torch.default_generator.manual_seed(3)
        model = self.build()
        return model.double() if dtype == torch.float64 else model

    def wrap(self, model: nn.Module | None = None, **keywords: Any) -> ShardedWrapper:
        """``model``, by default a new one, with this case's units or a policy in ``keywords``."""
        if self.units:
            keywords.setdefault("auto_wrap_policy", ModuleWrapPolicy(self.units))
        return ShardedWrapper(self.model() if model is None else model, **keywords)

    def batch(
        self, step: int, rows: int, dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor]:
        """The inputs and target of a step, ``rows`` of each."""
        inputs, target = self.draw(rows, torch.Generator().manual_seed(step))
        return _cast(inputs, dtype), _cast(target, dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


_CASES = [
    Case("mlp", Mlp, vectors, (nn.Linear,)),
    Case("mlp-one-unit", Mlp, vectors),
    Case("cnn", Cnn, images, (nn.Conv2d, nn.Linear)),
    Case("cnn-channels-last", lambda: Cnn().to(memory_format=torch.channels_last), images),
    Case("batch-norm", lambda: Cnn(batch_norm=True), images, (nn.Conv2d,), row_wise=False),
    Case("dropout", lambda: Mlp(dropout=0.4), vectors, (nn.Linear,), row_wise=False),
    Case("lstm", lambda: Recurrent(nn.LSTM), sequences, (nn.LSTM,)),
    Case("gru", lambda: Recurrent(nn.GRU), sequences),
    Case("transformer", Transformer, tokens, (Block,)),
    Case("tied-in-unit", lambda: Transformer(tied=True), tokens, (Block,)),
    Case("tied-across-units", lambda: Transformer(tied=True), tokens, (nn.Embedding, nn.Linear)),
    Case("tied-blocks", lambda: Transformer(tied_blocks=True), tokens, (Block,)),
    Case(
        "checkpointed",
        lambda: Transformer(checkpointed="saved tensors"),
        tokens,
        (Block, nn.Linear),
    ),
    Case("checkpointed-reentrant", lambda: Transformer(checkpointed="reentrant"), tokens, (Block,)),
    Case("checkpointed-in-unit", lambda: Transformer(checkpointed="saved tensors"), tokens),
    Case("checkpointed-in-unit-reentrant", lambda: Transformer(checkpointed="reentrant"), tokens),
    Case("multihead", Attentive, tokens, (nn.Linear, nn.Embedding)),
    Case("nested", Nested, vectors, (Outer, Inner)),
    Case("odd-shapes", Odd, vectors, (nn.Linear,)),
    Case("mixed-types", MixedTypes, vectors),
    Case("frozen", Frozen, vectors, (nn.Linear,)),
    Case("frozen-one-unit", Frozen, vectors),
    Case("unused", Unused, vectors, (nn.Linear,)),
    Case("twice", Twice, vectors, (nn.Linear,)),
]

CASES = {case.name: case for case in _CASES}
