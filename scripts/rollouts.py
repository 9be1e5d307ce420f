"""Trains a sharded policy while a separate process generates with its newest weights.

    torchrun --standalone --nproc-per-node 2 scripts/rollouts.py

This is the loop of reinforcement learning with an inference engine. The engine is another process
that runs the same model unwrapped. After each optimizer step the trainer hands all weights to the
engine, some tensors at a time, through shared memory, and checks that the engine has the trainer's
weights bit for bit. By default rank 0 has an engine; with --engines all, every rank has its own.
"""

import argparse
import hashlib
from collections.abc import Iterable, Mapping
from itertools import islice
from multiprocessing.managers import BaseManager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lib.command_line import Parser
from torch import Tensor, nn

import flatshard
from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy

VOCABULARY, WIDTH, LENGTH, GOOD = 16, 32, 12, 3


class Block(nn.Sequential):
    def __init__(self) -> None:
        wide = 4 * WIDTH
        layers = nn.Linear(WIDTH, wide), nn.ReLU(), nn.Linear(wide, WIDTH)
        super().__init__(nn.LayerNorm(WIDTH), *layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def policy() -> nn.Sequential:
    """Scores each next token by the last one."""
    blocks = Block(), Block()
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of all bytes of all tensors."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


# ---------------------------------------------------------------- the process that generates


class Engine:
    """Generates with the unwrapped model; has the ``load_weights`` of inference engines."""

    def __init__(self) -> None:
        self.model = policy().requires_grad_(False)
        self.state = self.model.state_dict()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.state[name].copy_(tensor)

    def generate(self, prompt: Tensor) -> Tensor:
        """Append tokens to the prompts, ``(batch, 1)``, until they have ``LENGTH`` tokens."""
        tokens = prompt
        while tokens.shape[1] < LENGTH:
            chances = self.model(tokens[:, -1]).softmax(dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
        return tokens

    def digest(self) -> str:
        return digest(self.state)


class Engines(BaseManager):
    """Starts a process with an engine. Tensors go there and back in shared memory."""


Engines.register("Engine", Engine)


def prepare(seed: int) -> None:
    """In the process of an engine."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)


# ---------------------------------------------------------------- the trainer


def hand_over(model: nn.Module, engine: Any, args: argparse.Namespace) -> None:
    """Give the engine all weights. Collective: all ranks, also those without an engine."""
    ranks = "all" if args.engines == "all" else 0
    weights = flatshard.full_tensors(model, ranks=ranks)
    while message := list(islice(weights, args.message)):
        # The call returns when the engine has copied the tensors, so no tensor is kept.
        engine.load_weights(message)


def train(args: argparse.Namespace) -> list[float]:
    """Train by REINFORCE; returns the mean reward of each step."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = ShardedWrapper(policy(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    engine: Any = None
    if rank == 0 or args.engines == "all":
        engines: Any = Engines(ctx=mp.get_context("spawn"))
        engines.start(prepare, (rank,))
        engine = engines.Engine()
    rewards = []
    for step in range(args.steps):
        hand_over(model, engine, args)
        state = model.state_dict()  # on all ranks
        tokens = torch.zeros(args.batch, LENGTH, dtype=torch.long)
        if engine is not None:
            assert engine.digest() == digest(state), "the engine has other weights"
            tokens = engine.generate(torch.zeros(args.batch, 1, dtype=torch.long))
        if args.engines == "one":
            dist.broadcast(tokens, src=0)
        reward = (tokens[:, 1:] == GOOD).float()
        chances = model(tokens[:, :-1]).log_softmax(dim=-1)
        chosen = chances.gather(2, tokens[:, 1:, None]).squeeze(2)
        loss = -((reward - reward.mean()) * chosen).mean()
        optimizer.zero_grad()
        loss.backward()
        norms = model.norms("grad")
        optimizer.step()
        rewards.append(float(reward.mean()))
        if rank == 0 and (step + 1) % 10 == 0:
            largest = max(norms, key=norms.__getitem__)
            gradient = f"largest gradient {norms[largest]:.3f} ({largest})"
            print(f"step {step + 1}: reward {rewards[-1]:.2f}, {gradient}")
    if rank == 0:
        print(f"before each of {args.steps} steps the engine had the trainer's weights")
    return rewards


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_number("--steps", 50, "optimizer steps")
    parser.add_number("--batch", 32, "sequences per step")
    parser.add_number("--message", 8, "tensors per message to the engine")
    which = "an engine on rank 0, or on every rank (default: one)"
    parser.add_argument("--engines", choices=("one", "all"), default="one", help=which)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse_args()
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()
