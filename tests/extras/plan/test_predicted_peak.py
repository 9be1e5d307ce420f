"""The peak of tensors that a plan predicts is the peak that ranks have.

Small models train on CPU ranks with gloo. A library that is preloaded into the ranks
(`tensor_bytes.c`) counts each block that torch's allocator hands out on any thread, temporary
tensors inside of kernels included. A rank's peak is the highest number of bytes in the third step,
minus the number before the model was made. Of the ranks, the (low) median counts, because gloo's
threads free temporary tensors later where other ranks are late.

THOROUGH=1 trains all `CASES`, and `scripts/evidence.py peaks` prints the errors.
"""

import ctypes
import gc
import os
import shutil
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatshard import MixedPrecision, ShardedWrapper
from flatshard.extras.plan.hardware import Device, Machine
from flatshard.extras.plan.replay import TracedModel
from flatshard.extras.plan.report import language_step
from flatshard.extras.plan.trace import Step, checkpoint_blocks
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import THOROUGH
from tests.extras.plan import Block
from tests.harness import allow_warnings, run_ranks
from tests.oracle import trainable

MEDIAN, LARGEST = 0.02, 0.05  # allowed errors
LENGTH, VOCABULARY = 128, 4096

# ---------------------------------------------------------------- models


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        query, key, value = (one.transpose(1, 2) for one in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self, *, is_tied: bool = False, num_frozen: int = 0) -> None:
        super().__init__()
        width = 320
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(GptBlock(width, 8) for _ in range(5))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.tokens.weight
        for module in [self.tokens, *self.blocks][:num_frozen]:
            module.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvBlock(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.skip = nn.Conv2d(width, out, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.skip(x))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), *(Block(512) for _ in range(6)), nn.Linear(512, 10))


def convnet() -> nn.Module:
    widths = (32, 64, 128, 256, 256)
    blocks = [ConvBlock(a, b) for a, b in pairwise(widths)]
    parts = [part for block in blocks for part in (block, nn.MaxPool2d(2))]
    stem = nn.Conv2d(3, 32, 3, padding=1)
    return nn.Sequential(stem, *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def hugging_face(kind: str, width: int) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": width}
    sizes |= {"intermediate_size": 1024, "max_position_embeddings": LENGTH, "use_cache": False}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}
    config = AutoConfig.for_model(kind, **sizes, **heads)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")  # type: ignore[no-any-return]


def rows_step(batch: int, *shape: int) -> Step:
    def step(model: nn.Module) -> Tensor:
        found = model(torch.ones(batch, *shape)).float()
        return F.cross_entropy(found, torch.zeros(batch, dtype=torch.long))

    return step


@dataclass(frozen=True)
class Kind:
    """A model, its training step, and the names of the module classes that become units."""

    build: Callable[[], nn.Module]
    step: Callable[[int], Step]
    units: frozenset[str]

    def policy(self, model: nn.Module) -> ModuleWrapPolicy:
        kinds = {type(module) for module in model.modules()}
        return ModuleWrapPolicy({kind for kind in kinds if kind.__name__ in self.units})


language = partial(language_step, seq=LENGTH)
MODELS = {
    "llama": Kind(partial(hugging_face, "llama", 384), language, frozenset({"LlamaDecoderLayer"})),
    "gpt": Kind(Gpt, language, frozenset({"GptBlock"})),
    "tied": Kind(partial(Gpt, is_tied=True), language, frozenset({"GptBlock"})),
    "frozen": Kind(partial(Gpt, num_frozen=4), language, frozenset({"GptBlock"})),
    "embedding": Kind(Gpt, language, frozenset({"GptBlock", "Embedding"})),
    "mlp": Kind(mlp, lambda batch: rows_step(batch, 64), frozenset({"Block"})),
    "convnet": Kind(convnet, lambda batch: rows_step(batch, 3, 32, 32), frozenset({"ConvBlock"})),
    "qwen": Kind(partial(hugging_face, "qwen2", 320), language, frozenset({"Qwen2DecoderLayer"})),
}

PRECISIONS = {
    "fp32": MixedPrecision(),
    "mixed": MixedPrecision(torch.bfloat16, torch.float32),
    "bf16": MixedPrecision(torch.bfloat16),
}

OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "sgd": (partial(torch.optim.SGD, lr=1e-3), 0),
    "momentum": (partial(torch.optim.SGD, lr=1e-3, momentum=0.9), 4),
    "adamw": (partial(torch.optim.AdamW, lr=1e-3), 8),
}
"""How to make an optimizer, and the bytes of state that it has for each element."""

# ---------------------------------------------------------------- trainings


@dataclass(frozen=True)
class Case:
    """One training run: a model and its settings."""

    model: str
    strategy: str
    world: int
    batch: int
    checkpoint: Any = "none"
    precision: str = "fp32"
    accumulate: int = 1
    optimizer: str = "adamw"
    keywords: dict[str, Any] = field(default_factory=dict)  # other keywords of `ShardedWrapper`


C = Case
CASES = [
    C("llama", "FULL_SHARD", 2, 4),
    C("llama", "FULL_SHARD", 4, 2),
    C("llama", "FULL_SHARD", 2, 8, "block"),
    C("llama", "FULL_SHARD", 2, 4, "selective"),
    C("llama", "FULL_SHARD", 2, 4, precision="mixed"),
    C("llama", "FULL_SHARD", 2, 4, precision="bf16"),
    C("llama", "FULL_SHARD", 2, 4, accumulate=2),
    C("llama", "FULL_SHARD", 4, 1, "block", "mixed"),
    C("llama", "SHARD_GRAD_OP", 2, 4),
    C("llama", "SHARD_GRAD_OP", 3, 2, optimizer="momentum"),
    C("llama", "SHARD_OP", 2, 4),
    C("llama", "SHARD_OP", 2, 2, precision="mixed", optimizer="sgd"),
    C("llama", "NO_SHARD", 2, 4),
    C("llama", "NO_SHARD", 2, 4, precision="mixed"),
    C("llama", "NO_SHARD", 1, 8),
    C("llama", "FULL_SHARD", 1, 4),
    C("llama", "HYBRID_SHARD", 4, 2),
    C("llama", "HYBRID_SHARD_OP", 4, 2),
    C("llama", "FULL_SHARD", 4, 2, keywords={"reshard_after_forward": 2}),
    C("gpt", "FULL_SHARD", 2, 4),
    C("gpt", "FULL_SHARD", 3, 4, "block", optimizer="momentum"),
    C("gpt", "FULL_SHARD", 2, 4, "selective", "mixed"),
    C("gpt", "SHARD_GRAD_OP", 4, 2),
    C("gpt", "SHARD_OP", 2, 4, accumulate=2),
    C("gpt", "NO_SHARD", 2, 4, optimizer="sgd"),
    C("gpt", "HYBRID_SHARD", 4, 1, precision="mixed"),
    C("gpt", "FULL_SHARD", 2, 4, accumulate=2),
    C("tied", "FULL_SHARD", 2, 4),
    C("tied", "NO_SHARD", 2, 4, precision="bf16"),
    C("tied", "SHARD_GRAD_OP", 2, 4),
    C("frozen", "FULL_SHARD", 2, 4),
    C("frozen", "SHARD_GRAD_OP", 2, 8, "block"),
    C("frozen", "NO_SHARD", 2, 4, optimizer="momentum"),
    C("embedding", "FULL_SHARD", 2, 4),
    C("embedding", "FULL_SHARD", 4, 2),
    C("mlp", "FULL_SHARD", 2, 256),
    C("mlp", "FULL_SHARD", 4, 512, precision="bf16", optimizer="sgd"),
    C("mlp", "SHARD_GRAD_OP", 2, 256),
    C("mlp", "SHARD_OP", 3, 256, optimizer="momentum"),
    C("mlp", "HYBRID_SHARD_OP", 4, 256),
    C("mlp", "NO_SHARD", 2, 1024, "block"),
    C("convnet", "FULL_SHARD", 2, 16),
    C("convnet", "FULL_SHARD", 2, 16, precision="mixed"),
    C("convnet", "SHARD_GRAD_OP", 3, 8, optimizer="momentum"),
    C("convnet", "NO_SHARD", 2, 32, optimizer="sgd"),
    C("convnet", "SHARD_OP", 2, 16),
    C("qwen", "FULL_SHARD", 2, 4),
    C("qwen", "FULL_SHARD", 2, 4, "block", "mixed"),
    C("qwen", "SHARD_GRAD_OP", 4, 2),
    C("qwen", "NO_SHARD", 2, 4),
]
QUICK = [C("mlp", "FULL_SHARD", 2, 256)]


# ---------------------------------------------------------------- prediction and measurement


def predict(case: Case) -> int:
    """The peak in bytes."""
    kind = MODELS[case.model]
    with torch.device("meta"):
        policy = kind.policy(kind.build())
    traced = TracedModel(
        kind.build,
        kind.step(case.batch),
        checkpoint=case.checkpoint,
        on_gpu=False,
        auto_wrap_policy=policy,
        mixed_precision=PRECISIONS[case.precision],
    )
    machine = Machine(Device(4e10, 4e10, 4e9, 0.0, is_gpu=False), 2, 1e9, 1e9)
    return traced.replay(
        machine,
        case.world,
        case.accumulate,
        sharding_strategy=case.strategy,
        ranks_per_node=2,
        optimizer_bytes=OPTIMIZERS[case.optimizer][1],
        **case.keywords,
    ).peak_bytes


def errors(cases: list[Case]) -> list[float]:
    """Relative errors of the predicted peaks."""
    with TemporaryDirectory() as folder:
        library = Path(folder, "tensor_bytes.so")
        source = Path(__file__).with_name("tensor_bytes.c")
        command = ["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
        subprocess.run(command, check=True)
        measured: dict[int, list[int]] = {}
        with mock.patch.dict(os.environ, LD_PRELOAD=str(library)):
            for world in sorted({case.world for case in cases}):
                some = [index for index, case in enumerate(cases) if case.world == world]
                arguments = _measure, world, [cases[index] for index in some]
                # The server of ranks that preloads this module has the library.
                ranks = run_ranks(*arguments, fresh=True, preload=(__name__,), timeout=280)
                measured |= dict(zip(some, zip(*ranks, strict=True), strict=True))
    medians = [statistics.median_low(measured[index]) for index in range(len(cases))]
    return [predict(case) / median - 1 for case, median in zip(cases, medians, strict=True)]


def _measure(rank: int, world_size: int, cases: list[Case]) -> list[int]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    with allow_warnings():
        return [_peak(case) for case in cases]


def _peak(case: Case) -> int:
    """The peak bytes of all tensors in the third step."""
    library = ctypes.CDLL(None)
    library.tensor_bytes.restype = library.peak_tensor_bytes.restype = ctypes.c_int64
    gc.collect()
    before = library.tensor_bytes()
    torch.manual_seed(0)
    model, optimizer = _make(case)
    step = MODELS[case.model].step(case.batch)
    for _ in range(3):
        library.peak_tensor_bytes(1)
        optimizer.zero_grad()
        with model.no_sync():
            for _ in range(case.accumulate - 1):
                step(model).backward()
        step(model).backward()
        optimizer.step()
    return library.peak_tensor_bytes(0) - before


def _make(case: Case) -> tuple[ShardedWrapper, torch.optim.Optimizer]:
    kind = MODELS[case.model]
    plain = kind.build()
    policy = kind.policy(plain)
    blocks = [module for module in plain.modules() if type(module).__name__ in kind.units]
    checkpoint_blocks([one for one in blocks if any(True for _ in one.children())], case.checkpoint)
    model = ShardedWrapper(
        plain,
        auto_wrap_policy=policy,
        sharding_strategy=case.strategy,
        mixed_precision=PRECISIONS[case.precision],
        collectives="native",
        **case.keywords,
    )
    return model, OPTIMIZERS[case.optimizer][0](trainable(model))


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_predicted_peak_is_measured() -> None:
    cases = CASES if THOROUGH else QUICK
    found = dict(zip(map(str, cases), map(abs, errors(cases)), strict=True))
    assert max(found.values()) <= LARGEST, found
    assert statistics.median(found.values()) <= MEDIAN, found
