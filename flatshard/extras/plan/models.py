"""``read_spec``: makes a model from the name of a preset, a configuration or a function."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[nn.Module], Tensor]
Checkpointing = Literal["none", "block", "selective"]


class LlamaBlock(nn.Module):
    """One block of `Llama`."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.size, self.groups = width // heads, heads // kv_heads
        linear = partial(nn.Linear, bias=False)
        self.query, self.out = (linear(width, width) for _ in range(2))
        self.key, self.value = (linear(width, kv_heads * self.size) for _ in range(2))
        self.gate, self.up = (linear(width, hidden) for _ in range(2))
        self.down = linear(hidden, width)
        self.norm1, self.norm2 = (nn.RMSNorm(width, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self._attend(self.norm1(x), rotation)
        return x + self._feed_forward(self.norm2(x))

    def _attend(self, x: Tensor, rotation: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(x).unflatten(-1, (-1, self.size)) for layer in layers)
        query, key = _rotate(query, rotation), _rotate(key, rotation)
        if self.groups > 1:
            key, value = (one.repeat_interleave(self.groups, 2) for one in (key, value))
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().flatten(2))  # type: ignore[no-any-return]

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).type_as(x)


class Llama(nn.Module):
    """A decoder with grouped-query attention, rotary positions and SwiGLU (arXiv 2407.21783).

    ``forward`` takes token ids, ``(batch, length)``. It returns logits, ``(batch, length, vocab)``.
    """

    def __init__(
        self, layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocab: int, seq: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        blocks = (LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        self.blocks, self.norm = nn.ModuleList(blocks), nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab, bias=False)
        rotation = torch.empty(seq, 1, width // heads // 2, dtype=torch.complex64)
        self.rotation: Tensor
        self.register_buffer("rotation", rotation, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotation[: tokens.shape[1]])
        return self.head(self.norm(x))  # type: ignore[no-any-return]


# For each preset: number of layers, width, number of attention heads, number of heads of keys and
# values, width of the feed-forward layer, size of the vocabulary.
PRESETS = {
    "llama2-7b": (32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": (40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": (80, 8192, 64, 8, 28672, 32000),
    "llama3-1b": (16, 2048, 32, 8, 8192, 128256),
    "llama3-3b": (28, 3072, 24, 8, 8192, 128256),
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": (80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": (126, 16384, 128, 8, 53248, 128256),
}


def language_step(batch: int, seq: int) -> Step:
    """Return the step of a language model, which predicts ``batch`` times ``seq`` tokens."""

    def step(model: nn.Module) -> Tensor:
        tokens = torch.zeros(batch, seq, dtype=torch.long)
        logits = model(tokens)
        logits = getattr(logits, "logits", logits)
        if not (isinstance(logits, Tensor) and logits.dim() == 3):
            raise TypeError(
                "plan: expected logits of shape (batch, length, vocabulary) from the model, got "
                f"{getattr(logits, 'shape', type(logits).__name__)}. Give `plan` a `step` that "
                "runs your forward and returns the loss."
            )
        flat = logits.flatten(0, 1).float()
        del logits  # free the logits in the compute dtype: usual training loops free them here
        return F.cross_entropy(flat, tokens.flatten())

    return step


def read_spec(spec: str, seq: int) -> Callable[[], Any]:
    """Return the function that builds the model that ``spec`` names.

    ``spec`` is the name of a preset, the path of a Hugging Face ``config.json``, or
    ``package.module:function``. The function returns a model, or a tuple of a model and its step.
    """
    if spec in PRESETS:
        return partial(Llama, *PRESETS[spec], seq=seq)
    path = Path(spec, "config.json") if Path(spec).is_dir() else Path(spec)
    if path.suffix == ".json":
        return partial(_from_config, path)
    try:
        found = pkgutil.resolve_name(spec)
        if not callable(found):
            raise TypeError(f"{spec} is a {type(found).__name__}")
        return found  # type: ignore[no-any-return]
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(
            f"{spec!r} is neither a preset ({', '.join(PRESETS)}), nor a config.json, nor a "
            f"function such as package.module:build. The import failed: {error}"
        ) from error


def _from_config(path: Path) -> nn.Module:
    try:
        text = json.loads(path.read_text())
        # Turn off the cache of keys and values: when backward recomputes a forward, the cache would
        # grow.
        kind, text["use_cache"] = text.setdefault("model_type"), False
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: cannot be read as a configuration: {error}") from error
    try:
        transformers = importlib.import_module("transformers")
        config = transformers.AutoConfig.for_model(**text)
        return transformers.AutoModelForCausalLM.from_config(config)
    except ModuleNotFoundError as error:
        raise ValueError(f"{path} needs transformers. Run: pip install transformers") from error
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: transformers {transformers.__version__} has no language model for model_type "
            f"{kind!r}. Pass package.module:function. {f'{error}'.partition(chr(10))[0]}"
        ) from error
