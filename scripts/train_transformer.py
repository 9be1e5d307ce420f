"""Trains a small decoder-only transformer on text, its parameters sharded over the ranks.

    torchrun --standalone --nproc-per-node 2 scripts/train_transformer.py

With a GPU for every local rank, the ranks use GPUs and NCCL. Otherwise they use the CPU and gloo.
The text is Python's own documentation (pydoc_data.topics), or the file of `--text`. A token is a
byte. Batches depend only on `--seed` and the step, and the test always uses the same rows. So the
losses are the same for any world size.

With `--checkpoint-dir D`, the job saves every `--checkpoint-every` steps and on SIGTERM. `--resume`
continues from the last checkpoint in D, if there is one, on any number of ranks, also after a
restart by torchrun (`--max-restarts`).
"""

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lib import training_job
from lib.gpt import GPT, Block, Preset
from lib.training_job import mean_over_ranks, rows_per_rank, say, share_of_rank
from torch import Tensor, nn

from flatshard import MixedPrecision, ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy

VOCABULARY = 256  # bytes
TEST_ROWS = 64
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = training_job.make_parser(__doc__)
    add_model_and_steps(parser)
    add = parser.add_argument
    add("--bf16", action="store_true", help="compute in bfloat16; reduce gradients in float32")
    args = parser.parse_args(arguments)
    if args.ddp and args.bf16:
        parser.error("--bf16 is for sharded parameters: remove --ddp")
    return args


def add_model_and_steps(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="default: Python's documentation")
    add("--steps", type=int, default=200, help="total number of steps")
    add("--batch-size", type=int, default=16, help="rows per step, over all ranks")
    add("--accumulate", type=int, default=1, metavar="N", help="micro-batches per step")
    add("--clip", type=float, metavar="NORM", help="clip gradients to this norm")
    add("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    add("--seed", type=int, default=1, help="seed of weights and batches")
    add("--width", type=int, default=128, help="width of the model")
    add("--depth", type=int, default=4, help="number of blocks")
    add("--heads", type=int, default=4, help="heads of attention")
    add("--context", type=int, default=128, help="bytes per row")


def read_text(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Returns the bytes to train on, and the last tenth of the text to test on."""
    from pydoc_data.topics import topics

    documentation = "\n".join(topics[name] for name in sorted(topics))
    data = args.text.read_bytes() if args.text else documentation.encode()
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def rows_of(text: Tensor, seed: int, count: int, context: int) -> Tensor:
    """Returns `count` random pieces of the text. The same seed gives the same pieces."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context, (count, 1), generator=generator)
    return text[starts + torch.arange(context + 1)]


def Transformer(
    width: int, depth: int, heads: int, context: int, vocabulary: int = VOCABULARY
) -> GPT:
    """The model that trains.

    Without a bias of queries and keys: the gradient of a key's bias is zero except for rounding.
    AdamW would scale this gradient up to whole steps, and the losses would depend on the order of
    summation.
    """
    return GPT(Preset(depth, width, heads, vocabulary, context, qkv_bias=False))


def build(args: argparse.Namespace) -> GPT:
    torch.manual_seed(args.seed)  # the same weights on every rank
    return Transformer(args.width, args.depth, args.heads, args.context)


def wrap_model(model: nn.Module, args: argparse.Namespace, device: torch.device) -> nn.Module:
    if args.ddp:
        return nn.parallel.DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
    return ShardedWrapper(
        model,
        sharding_strategy=args.strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),  # each block is a unit
        mixed_precision=BF16 if args.bf16 else None,
        collectives=args.collectives,
        device_id=device if device.type == "cuda" else None,
    )


def loss_of(model: nn.Module, rows: Tensor, reduction: str = "mean") -> Tensor:
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction=reduction)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor, args: argparse.Namespace
) -> Tensor:
    """Returns this rank's loss."""
    losses = []
    for number, micro_batch in enumerate(rows.chunk(args.accumulate)):
        # Only the last backward reduces gradients. Until then, they accumulate in this rank's
        # memory.
        is_last = number == args.accumulate - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = loss_of(model, micro_batch) / args.accumulate
            loss.backward()
        losses.append(loss.detach())
    if args.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


def rows_of_step(text: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """Returns this rank's rows of a step. All ranks' rows depend only on the seed and the step."""
    rank, count = dist.get_rank(), rows_per_rank(args.batch_size, args.accumulate)
    rows = rows_of(text, 1000 * args.seed + step, args.batch_size, args.context)
    return rows[rank * count : (rank + 1) * count]


@torch.no_grad()
def test_loss(model: nn.Module, text: Tensor, args: argparse.Namespace, device: Any) -> float:
    """Returns the mean loss on fixed rows, which do not depend on the world size. Collective."""
    model.eval()
    rows = rows_of(text, 0, TEST_ROWS, args.context)
    total = torch.zeros((), dtype=torch.double, device=device)
    size = rows_per_rank(args.batch_size) // args.accumulate
    for batch, is_counted in share_of_rank(TEST_ROWS, size):
        mine = rows[batch].to(device)
        losses = loss_of(model, mine, reduction="none").view(len(mine), args.context)
        total += losses[is_counted.to(device)].double().sum()
    dist.all_reduce(total)
    model.train()
    return total.item() / (TEST_ROWS * args.context)


def train(args: argparse.Namespace, device: torch.device) -> None:
    plain = build(args)
    numel = sum(param.numel() for param in plain.parameters())
    train_text, test_text = read_text(args)
    model = wrap_model(plain, args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    checkpoints = training_job.Checkpoints(args, model, optimizer)
    how = "DDP" if args.ddp else f"{args.strategy}{', bf16' if args.bf16 else ''}"
    say(f"{numel:,} parameters, {dist.get_world_size()} ranks, {device.type}, {how}")
    losses = checkpoints.resume().get("losses", [])

    start = time.perf_counter()
    while (step := len(losses)) < args.steps:
        rows = rows_of_step(train_text, step, args).to(device)
        losses.append(mean_over_ranks(train_step(model, optimizer, rows, args)))
        if (step + 1) % max(1, args.steps // 4) == 0:
            say(f"step {step + 1}: loss {losses[-1]:.4f}")
        checkpoints.after_step(step + 1, {"losses": losses})
    seconds = time.perf_counter() - start

    tested = test_loss(model, test_text, args, device)
    say(f"Test loss: {tested:.4f}")
    results = {"parameters": numel, "losses": losses, "test_loss": tested, "seconds": seconds}
    training_job.write_json(args, **results)


if __name__ == "__main__":
    train(parse_args(), training_job.connect())
    dist.destroy_process_group()
