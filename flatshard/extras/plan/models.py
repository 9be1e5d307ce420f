"""``read_spec``: returns the function that builds a model, from a path or a function's name."""

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


def language_step(batch: int, seq: int) -> Step:
    """Return a ``step`` for language models, which computes the loss of ``(batch, seq)`` tokens."""

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


def read_spec(spec: str) -> Callable[[], Any]:
    """Return the function that builds the model named by ``spec``.

    ``spec`` is the path of a Hugging Face ``config.json``, or ``package.module:function``. The
    function returns a model, or a tuple of a model and its step.
    """
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
            f"{spec!r} is neither a config.json nor a function such as package.module:build. The "
            f"import failed: {error}"
        ) from error


def _from_config(path: Path) -> nn.Module:
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ValueError(f"{path} needs transformers. Run: pip install transformers") from error
    try:
        # Turn off the cache of keys and values: when backward recomputes a forward, the cache would
        # grow.
        options = json.loads(path.read_text()) | {"use_cache": False}
        config = transformers.AutoConfig.for_model(**options)
        return transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: transformers {transformers.__version__} cannot make a language model of this "
            f"configuration. Pass package.module:function. {f'{error}'.partition(chr(10))[0]}"
        ) from error
