"""Measures the accuracy and the bytes of all-gathers and reduce-scatters in bf16.

    python scripts/measure/precision.py --world-sizes 2,3,4 --steps 30 --json figures.json

Starts ranks on this machine's CPU (gloo), and trains a small transformer from the same weights and
on the same batches in several precisions: the unwrapped fp32 model in one process on all ranks'
rows, and flatshard and torch's FSDP2 in fp32 and with bf16 policies. Prints the difference of each
loss from the unwrapped model's loss, and the bytes that a step all-gathers and reduces. Also prints
whether two runs, and runs over different transports, end bitwise equal. Measures no times.
"""

import argparse
import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import measuring  # first, because this import may end the script
import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import table
from rich import print as rich_print
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from train_transformer import Block, Transformer

from flatshard import MixedPrecision, ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy

ROWS, LENGTH = 4, 32  # shape of a rank's batch
VOCABULARY, HEADS = 256, 4
BATCHES = 4  # number of different batches, which are repeated so that the model learns something
LEARNING_RATE = 1e-3
BF16, FP32 = torch.bfloat16, torch.float32
TRANSPORTS = ("auto", "sockets", "native")

# -------------------------------------------------------------------------------- model and data


def build(args: argparse.Namespace) -> Transformer:
    torch.manual_seed(0)  # the same weights on every rank
    return Transformer(args.width, args.depth, HEADS, LENGTH, VOCABULARY)


def text(step: int, world_size: int) -> Tensor:
    """Rows of a step for all ranks."""
    generator = torch.Generator().manual_seed(step % BATCHES)
    return torch.randint(VOCABULARY, (ROWS * world_size, LENGTH + 1), generator=generator)


# --------------------------------------------------------------------------------- implementations

POLICIES = {
    "fp32": (FP32, FP32),
    "bf16, reduced in fp32": (BF16, FP32),
    "bf16": (BF16, BF16),
}
"""``param_dtype`` and ``reduce_dtype``, keyed by the name in the tables."""


def flatshard(
    args: argparse.Namespace, policy: str, reduce_mode: str = "auto", collectives: str = "auto"
) -> ShardedWrapper:
    return ShardedWrapper(
        build(args),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(*POLICIES[policy], reduce_mode=reduce_mode),
        collectives=collectives,
    )


def fsdp2(args: argparse.Namespace, policy: str) -> nn.Module:
    model = build(args)
    dtypes = dict(zip(("param_dtype", "reduce_dtype"), POLICIES[policy], strict=True))
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(**dtypes))
    return model


IMPLEMENTATIONS: dict[str, Callable[[argparse.Namespace, str], nn.Module]] = {
    "flatshard": flatshard,
    "FSDP2": fsdp2,
}


def train(model: nn.Module, steps: int, rows: slice, world_size: int) -> list[float]:
    """Train on the given rows of each step's batch; returns the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(steps):
        tokens = text(step, world_size)[rows]
        logits = model(tokens[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_rank(model: nn.Module, steps: int) -> list[float]:
    """Train on this rank's rows; returns losses averaged over the ranks. Collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = train(model, steps, slice(ROWS * rank, ROWS * (rank + 1)), world_size)
    losses = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(losses)
    return (losses / world_size).tolist()


# --------------------------------------------------------------------------------------- measuring


def measure_losses(args: argparse.Namespace) -> list[dict[str, Any]]:
    plain = train(build(args), args.steps, slice(None), dist.get_world_size())
    rows = [{"name": "plain", "policy": "fp32", "losses": plain}]
    for name, wrap in IMPLEMENTATIONS.items():
        for policy in POLICIES:
            losses = train_rank(wrap(args, policy), args.steps)
            rows.append({"name": name, "policy": policy, "losses": losses})
    for row in rows:
        apart = [abs(mine - theirs) for mine, theirs in zip(row["losses"], plain, strict=True)]
        row |= {"largest": max(apart), "mean": sum(apart) / len(apart), "last": apart[-1]}
    return rows


def measure_bytes(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Bytes that a step all-gathers and reduces, counted by ``record_steps``."""
    rows = []
    for policy in POLICIES:
        model = flatshard(args, policy)
        train_rank(model, 1)
        with model.record_steps() as reports:
            train_rank(model, 1)
        units = reports[-1].units
        gathered = sum(one.gathered_forward_bytes + one.gathered_backward_bytes for one in units)
        reduced = sum(one.reduced_bytes for one in units)
        rows.append({"policy": policy, "gathered": gathered, "reduced": reduced})
    return rows


def measure_determinism(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Digests of the weights after two trainings over each transport."""
    rows = []
    for policy in POLICIES:
        for reduce_mode in ("auto", "fixed_order"):
            runs = {}
            for transport in TRANSPORTS:
                runs[transport] = [
                    digest(args, flatshard(args, policy, reduce_mode, transport)) for _ in range(2)
                ]
            rows.append({"policy": policy, "reduce_mode": reduce_mode, "digests": runs})
    return rows


def digest(args: argparse.Namespace, model: ShardedWrapper) -> str:
    train_rank(model, args.steps)
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(bytes(value.contiguous().view(-1).view(torch.uint8).tolist()))
    return found.hexdigest()


# ------------------------------------------------------------------------------------------ tables


def losses_table(figures: dict[str, Any]) -> Table:
    steps = len(figures["losses"][0]["losses"])
    made = table(
        f"Loss over {steps} steps, {figures['world_size']} ranks; difference from unwrapped fp32",
        *("Implementation", "Policy", "First", "Last", "Largest", "Mean", "Of the last"),
    )
    for row in figures["losses"]:
        first, last = row["losses"][0], row["losses"][-1]
        made.add_row(
            *(row["name"], row["policy"], f"{first:.4f}", f"{last:.4f}"),
            *(f"{row[column]:.1e}" for column in ("largest", "mean", "last")),
        )
    return made


def bytes_table(figures: dict[str, Any]) -> Table:
    made = table(
        f"Bytes of the collectives of a step, {figures['world_size']} ranks",
        *("Policy", "All-gathered", "Of fp32", "Reduced", "Of fp32"),
    )
    full = figures["bytes"][0]
    for row in figures["bytes"]:
        cells = []
        for kind in ("gathered", "reduced"):
            cells += [f"{row[kind]:,}", f"{row[kind] / full[kind]:.3f}"]
        made.add_row(row["policy"], *cells)
    return made


def determinism_table(figures: dict[str, Any]) -> Table:
    made = table(
        f"Weights after training, {figures['world_size']} ranks",
        *("Policy", "reduce_mode", *(f"{one}: two runs" for one in TRANSPORTS), "All transports"),
    )
    for row in figures["determinism"]:
        runs = row["digests"]
        everything = {one for pair in runs.values() for one in pair}
        made.add_row(
            *(row["policy"], row["reduce_mode"]),
            *(told(len(set(runs[one])) == 1) for one in TRANSPORTS),
            told(len(everything) == 1),
        )
    return made


def told(equal: bool) -> str:
    return "equal" if equal else "differ"


TABLES = (losses_table, bytes_table, determinism_table)

# --------------------------------------------------------------------------------------------- job


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; returns all figures. Collective."""
    warnings.simplefilter("ignore")  # deprecation warnings of FSDP2
    return {
        "world_size": dist.get_world_size(),
        "losses": measure_losses(args),
        "bytes": measure_bytes(args),
        "determinism": measure_determinism(args),
    }


def world_sizes(value: str) -> list[int]:
    sizes = [int(one) for one in value.split(",")]
    if min(sizes) < 2 or max(sizes) > 16:
        raise ValueError
    return sizes


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = measuring.Parser(__doc__)
    add = parser.add_argument
    add(
        "--world-sizes",
        default="2",
        metavar="N,...",
        help="numbers of ranks, separated by commas; each has a run (default: 2)",
    )
    add("--width", type=int, default=64, help="width of the model, a multiple of 4 (default: 64)")
    add("--depth", type=int, default=2, help="number of blocks (default: 2)")
    add("--steps", type=int, default=30, help="steps to train (default: 30)")
    parser.add_json()
    args = parser.parse_args(arguments)
    try:
        args.world_sizes = world_sizes(args.world_sizes)
    except ValueError:
        parser.error(f"--world-sizes must be numbers from 2 to 16, got {args.world_sizes!r}")
    if args.width < 4 or args.width % 4 or args.depth < 1 or args.steps < 1:
        parser.error("--width must be a multiple of 4, --depth and --steps at least 1")
    return args


def main() -> None:
    args = parse_args()
    everything = []
    for world_size in args.world_sizes:
        everything.append(measuring.figures_of_ranks(measure, world_size, args)[0])
        for make in TABLES:
            rich_print(make(everything[-1]))
    measuring.write_json(args.json, {"torch": torch.__version__, "runs": everything})


if __name__ == "__main__":
    main()
