"""Blocks of code in documents and docstrings, and the names that they find: what a reader has."""

import ast
import contextlib
import copy
import functools
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import flatshard
from flatshard import CPUOffload, MixedPrecision, ShardedWrapper, wrap
from tests.models import Residual


class Fence(NamedTuple):
    """A block of code in a document."""

    document: str
    language: str
    heading: str
    text: str


def fences(path: Path) -> list[Fence]:
    found = []
    heading = ""
    for title, language, text in re.findall(
        r"^#+ ([^\n]*)$|^```(\w*)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL
    ):
        heading = title or heading
        if not title:
            found.append(Fence(path.name, language, heading, text))
    return found


def examples(path: Path) -> list[Fence]:
    """The examples in the docstrings of a module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            blocks = re.findall(r"^Example:\n    ```python\n(.*?)^    ```$", text, re.M | re.S)
            # A section with another title, or without a block, would not be rendered or not run.
            num_sections = len(re.findall(r"^Examples?:+$", text, re.M))
            name = getattr(node, "name", path.stem)
            assert len(blocks) == num_sections == text.count("```") / 2, (path, name)
            found += [Fence(path.name, "python", name, textwrap.dedent(block)) for block in blocks]
    return found


def before_and_after(diff: str) -> tuple[str, str]:
    """The two sides of a block with changes."""
    lines = [line or " " for line in diff.splitlines()]
    before = [line[1:] for line in lines if line[0] != "+"]
    after = [line[1:] for line in lines if line[0] != "-"]
    return "\n".join(before), "\n".join(after)


class Block(Residual):
    def __init__(self) -> None:
        super().__init__(8, 16)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).mean(dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def data(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    draw = functools.partial(torch.randint, generator=generator)
    return [(draw(11, (3, 4)), draw(5, (3,))) for _ in range(3)]


class Engine:
    """As much of an inference engine as takes weights."""

    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.loaded[name] = tensor.clone()


PUBLIC = (ShardedWrapper, MixedPrecision, CPUOffload, wrap.CustomPolicy, wrap.ModuleWrapPolicy)


def surroundings(text: str, rank: int) -> dict[str, Any]:
    """The names that a block finds."""
    model: nn.Module = build()
    if "leave_empty" in text:
        if rank == 0:
            torch.save(model.state_dict(), "model.pt")
            save_file(model.state_dict(), "model.safetensors")
        dist.barrier()
        with torch.device("meta"):
            model = Model()
    elif not re.search(r"ShardedWrapper\(\s*(model|planned)\b", text):
        model = ShardedWrapper(model, auto_wrap_policy=wrap.ModuleWrapPolicy({Block}))
    batches = data(rank)
    mesh = functools.partial(_mesh, init_device_mesh)
    return {
        **{one.__name__: one for one in (contextlib, copy, flatshard, functools, torch)},
        **{one.__name__: one for one in (Block, Model, *PUBLIC)},
        "nn": nn,
        "dist": dist,
        "rank": rank,
        "device": torch.device("cpu"),
        "init_device_mesh": mesh,
        **dict.fromkeys(("batches", "micro_batches"), batches),
        **dict.fromkeys(("group", "shard"), dist.group.WORLD),
        **dict.fromkeys(("loss_fn", "loss_of"), nn.functional.cross_entropy),
        "inputs": batches[0][0],
        "labels": batches[0][1],
        "engine": Engine(),
        "replicate": _alone(rank),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
    }


def _mesh(make: Callable[..., Any], device: str, shape: tuple[int, ...], **names: Any) -> Any:
    """The mesh that a document asks for, as far as two ranks on a CPU go."""
    return make("cpu", tuple(2 if size == max(shape) else 1 for size in shape), **names)


def _alone(rank: int) -> Any:
    return [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
