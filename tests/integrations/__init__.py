"""Programs of other frameworks on sharded models; each import of a framework takes seconds."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

PRELOAD = (
    "flatshard.integrations.lightning",
    "flatshard.integrations.transformers",
    "transformers.models.llama.modeling_llama",
    "trl",
)
"""What the fork server of these tests loads once. All of them run in one worker of pytest-xdist."""


QUIET = {
    "per_device_train_batch_size": 2,
    "learning_rate": 0.01,
    "logging_steps": 1,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""Options of transformers' and TRL's trainers: small batches, a log of each step, no GPU."""


@contextlib.contextmanager
def as_under_torchrun() -> Iterator[None]:
    """The environment of torchrun, without warnings: frameworks warn of much that tests lack."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    with warnings.catch_warnings(action="ignore"):
        yield


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if not find_spec(name)]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


def small_net() -> nn.Sequential:
    """The same weights at every call."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3)]
    return nn.Sequential(*layers)


def llama(**more: Any) -> Any:
    """A small Llama, with the same weights at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **more}))
