"""Measures flatshard beside DDP, FSDP1, FSDP2 and the unwrapped model.

    python scripts/benchmark.py --preset gpt-20m --world-size 2 --rounds 5

Trains a small GPT on this machine. If there is a GPU for every rank, the ranks use GPUs and NCCL.
Otherwise they use the CPU and gloo.

Each implementation has its own ranks, and all ranks run at the same time. In a round, each
implementation trains `--steps` steps while the others sleep. So other load on the machine affects
all implementations equally. The time of a step is the time of the slowest rank. Times are medians
over the rounds, and ratios are medians of the rounds' ratios. `compute` trains the model on each
rank without communication, which is the lower bound.
"""

import argparse
import ctypes
import functools
import gc
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lib.command_line import Parser
from lib.gpt import GPT, Block, Preset, loss_of
from lib.output import show, write_json
from torch import Tensor, nn

PHASES = ("forward", "backward", "optimizer")
# Largest relative difference from the loss of the unwrapped float32 model.
TOLERANCES = {"none": 1e-4, "bf16": 2e-2}


class MuonAndAdamW:
    """Muon for the matrices, AdamW for embeddings and vectors, as Muon is meant to be used."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        found = list(params)
        # Tell embeddings from blocks by shape. In the gpt presets, a block's matrices are at most 4
        # times as long as wide, and the vocabulary is more than 4 times the width.
        blocks = {id(p) for p in found if p.dim() == 2 and max(p.shape) <= 4 * min(p.shape)}
        self.both = (
            torch.optim.Muon([p for p in found if id(p) in blocks], lr=1e-2),
            torch.optim.AdamW([p for p in found if id(p) not in blocks], lr=1e-3),
        )

    def step(self) -> None:
        for one in self.both:
            one.step()

    def zero_grad(self) -> None:
        for one in self.both:
            one.zero_grad()


OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-3),
    "adamw-fused": functools.partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "muon": MuonAndAdamW,
}

# -------------------------------------------------------------------------------------- the model


PRESETS = {
    "tiny": Preset(layers=2, width=32, heads=2, vocabulary=64, sequence=16),
    "gpt-20m": Preset(layers=8, width=384, heads=6, vocabulary=8192, sequence=128),
    "gpt-120m": Preset(layers=12, width=768, heads=12, vocabulary=22528, sequence=128),
    # The fixed cost of a unit dominates.
    "many-small": Preset(layers=48, width=64, heads=2, vocabulary=512, sequence=32),
    # One unit has nearly all parameters, so there is nothing to overlap its communication with.
    "one-big": Preset(layers=1, width=1024, heads=16, vocabulary=512, sequence=128, expansion=16),
}


def make_model(preset: Preset, device: torch.device) -> GPT:
    torch.manual_seed(0)
    return GPT(preset).to(device)


def make_batch(preset: Preset, rank: int, device: torch.device) -> Tensor:
    """The rank's tokens of shape (batch, sequence + 1). Labels are the inputs shifted by one."""
    numbers = torch.Generator().manual_seed(1 + rank)
    shape = (preset.batch, preset.sequence + 1)
    return torch.randint(preset.vocabulary, shape, generator=numbers).to(device)


# -------------------------------------------------------------------------------- implementations


def wrap_flatshard(model: GPT, args: argparse.Namespace, **more: Any) -> nn.Module:
    from flatshard import MixedPrecision, ShardedWrapper
    from flatshard.wrap import ModuleWrapPolicy

    return ShardedWrapper(
        model,
        sharding_strategy=args.strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if args.bf16 else None,
        **more,
    )


def wrap_fsdp1(model: GPT, args: argparse.Namespace) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[args.strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if args.bf16 else None,
        device_id=next(model.parameters()).device,
        use_orig_params=True,
    )


def wrap_fsdp2(model: GPT, args: argparse.Namespace) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if args.bf16 else {}
    for module in (*model.blocks, model):
        fully_shard(
            module,
            reshard_after_forward=args.strategy == "FULL_SHARD",
            mp_policy=MixedPrecisionPolicy(**half),
        )
    return model


IMPLEMENTATIONS: dict[str, Callable[[GPT, argparse.Namespace], nn.Module]] = {
    "flatshard": wrap_flatshard,
    "ddp": lambda model, args: nn.parallel.DistributedDataParallel(model),
    "fsdp1": wrap_fsdp1,
    "fsdp2": wrap_fsdp2,
    "compute": lambda model, args: model,
    # Transports that flatshard does not choose by itself if all ranks are on one host.
    "flatshard-sockets": functools.partial(wrap_flatshard, collectives="sockets"),
    "flatshard-native": functools.partial(wrap_flatshard, collectives="native"),
}
USUAL = ("flatshard", "ddp", "fsdp1", "fsdp2", "compute")
# These implementations have no mixed precision of their own, and train under torch.autocast.
AUTOCAST = ("ddp", "compute")

# ------------------------------------------------------------------------------------- what trains


class Clock:
    """Takes times on the device. On CUDA it records events, which do not delay the step."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1000 if self.is_cuda else second - first

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


class Trainer:
    def __init__(self, model: nn.Module, batch: Tensor, optimizer: str, autocast: bool) -> None:
        self.model, self.batch, self.clock = model, batch, Clock(batch.device)
        self.optimizer = OPTIMIZERS[optimizer](model.parameters())
        self.autocast = torch.autocast(batch.device.type, torch.bfloat16, enabled=autocast)

    def train(self, steps: int) -> dict[str, Any]:
        """Train; returns seconds per step and per phase, and the loss of the first step."""
        self.clock.wait()
        begin = time.perf_counter()
        marks, losses = zip(*(self.step() for _ in range(steps)), strict=True)
        self.clock.wait()
        seconds = (time.perf_counter() - begin) / steps
        phases = {
            phase: sum(self.clock.seconds(*mark[i : i + 2]) for mark in marks) / steps
            for i, phase in enumerate(PHASES)
        }
        return {"seconds": seconds, **phases, "loss": losses[0].item()}

    def step(self) -> tuple[list[Any], Tensor]:
        """Train one step; returns the times between its phases, and the loss."""
        marks = [self.clock.now()]
        with self.autocast:
            logits = self.model(self.batch[:, :-1])
        loss = loss_of(logits, self.batch)
        marks.append(self.clock.now())
        loss.backward()
        marks.append(self.clock.now())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(self.clock.now())
        return marks, loss.detach()


def plain_loss(args: argparse.Namespace) -> float:
    """The unwrapped float32 model's loss on the whole batch, after the warm-up steps."""
    device = torch.device("cuda", 0) if args.cuda else torch.device("cpu")
    ranks = range(args.world_size)
    batch = torch.cat([make_batch(args.shape, rank, device) for rank in ranks])
    trainer = Trainer(make_model(args.shape, device), batch, args.optimizer, autocast=False)
    trainer.train(args.warmup)
    return trainer.train(1)["loss"]


# ------------------------------------------------------------------------------------------ memory


def resident_bytes(which: str) -> int:
    """Value of ``VmRSS`` (the current RSS) or ``VmHWM`` (peak RSS since the last reset)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {which}")


class Memory:
    """Peak memory above the memory of the process without a model; known on CUDA and on Linux."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.linux = cuda, Path("/proc/self/clear_refs").exists()
        self.reset()
        self.bare = 0 if cuda or not self.linux else resident_bytes("VmRSS")

    def reset(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        elif self.linux:
            # Return freed memory to the system, so that the peak counts only memory in use.
            if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
                trim(0)
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int | None:
        if self.cuda:
            return torch.cuda.max_memory_allocated()
        return resident_bytes("VmHWM") - self.bare if self.linux else None


# ------------------------------------------------------------------------------------------- ranks


def run_rank(index: int, args: argparse.Namespace, folder: str, turns: Barrier) -> None:
    """Trains one rank of an implementation in its turns, and writes the figures to the folder.

    ``turns``: all ranks of all implementations wait there before each turn.
    """
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")  # deprecation warnings of other wrappers
    name, rank = args.impl[index // args.world_size], index % args.world_size
    device = torch.device("cuda", rank) if args.cuda else torch.device("cpu")
    if args.cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if args.cuda else "gloo",
        store=dist.FileStore(f"{folder}/{name}", args.world_size),
        rank=rank,
        world_size=args.world_size,
    )

    def build(preset: Preset) -> Trainer:
        model = IMPLEMENTATIONS[name](make_model(preset, device), args)
        batch = make_batch(preset, rank, device)
        return Trainer(model, batch, args.optimizer, args.bf16 and name in AUTOCAST)

    # Train a tiny model first, so that imports and threads do not count.
    build(PRESETS["tiny"]).train(1)
    memory = Memory(args.cuda)
    trainer = build(args.shape)
    figures: list[dict[str, Any]] = []
    for first in range(-1, args.rounds):  # the first round is a warm-up
        for turn in range(len(args.impl)):
            turns.wait()
            # Rotate the order, because an implementation may be slower after a busy one.
            if name == args.impl[(first + turn) % len(args.impl)]:
                found = trainer.train(args.warmup if first < 0 else args.steps)
                figures.append({**found, "peak_bytes": memory.peak()})
                if first < 0:
                    memory.reset()
    Path(folder, f"{name}.{rank}").write_text(json.dumps(figures[1:]))
    turns.wait()  # the first rank that ends removes the store's file


# ----------------------------------------------------------------------------------------- figures


def run(args: argparse.Namespace) -> dict[str, list[list[dict[str, Any]]]]:
    """Run all rounds; returns the figures by implementation, round and rank."""
    num_ranks = len(args.impl) * args.world_size
    turns = mp.get_context("spawn").Barrier(num_ranks)
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(run_rank, (args, folder, turns), nprocs=num_ranks)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            name, rank = divmod(error.error_index, args.world_size)
            sys.exit(f"error: {args.impl[name]}, rank {rank} failed: {error}")
        found = {}
        for name in args.impl:
            files = [Path(folder, f"{name}.{rank}") for rank in range(args.world_size)]
            of_ranks = [json.loads(file.read_text()) for file in files]
            found[name] = [list(of_round) for of_round in zip(*of_ranks, strict=True)]
        return found


def summarize(
    rounds: dict[str, list[list[dict[str, Any]]]], plain: float, args: argparse.Namespace
) -> dict[str, Any]:
    slowest = {
        name: [max(ranks, key=lambda figures: figures["seconds"]) for ranks in of_name]
        for name, of_name in rounds.items()
    }
    baseline = "fsdp1" if "fsdp1" in slowest else args.impl[0]
    rows = {}
    for name, steps in slowest.items():
        pairs = zip(steps, slowest[baseline], strict=True)
        ratios = [step["seconds"] / other["seconds"] for step, other in pairs]
        phases = [statistics.median(step[phase] for step in steps) for phase in PHASES]
        peaks = [figures["peak_bytes"] for figures in rounds[name][-1]]
        # Without communication, each rank trains a separate model, and there is no common loss.
        loss = None if name == "compute" else statistics.fmean(r["loss"] for r in rounds[name][0])
        rows[name] = {
            "seconds": statistics.median(step["seconds"] for step in steps),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "shares": {p: share / sum(phases) for p, share in zip(PHASES, phases, strict=True)},
            "peak_bytes": None if None in peaks else max(peaks),
            "loss": loss,
            "loss_difference": None if loss is None else abs(loss - plain),
            "rounds": rounds[name],
        }
    settings = {key: value for key, value in vars(args).items() if key not in DERIVED}
    settings |= {"device": "cuda" if args.cuda else "cpu", "torch": torch.__version__}
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in GPT(args.shape).parameters())
    return {
        "settings": settings,
        "parameters": numel,
        "baseline": baseline,
        "plain_loss": plain,
        "implementations": rows,
    }


def rows_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the table. The phases are shares of a step in percent."""
    rows = []
    for name, row in figures["implementations"].items():
        peak, loss = row["peak_bytes"], row["loss_difference"]
        ratio = f"{row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
        rows.append(
            {
                "": name,
                "ms/step": f"{1000 * row['seconds']:,.1f}",
                f"x {figures['baseline']} (min-max)": ratio,
                "fwd/bwd/opt": "/".join(f"{100 * one:.0f}" for one in row["shares"].values()),
                "peak MiB": None if peak is None else f"{peak / 2**20:,.1f}",
                "loss diff": None if loss is None else f"{loss:.1e}",
            }
        )
    return rows


# ------------------------------------------------------------------------------------ command line

# Options that are not settings: the output path, and values derived from other options.
DERIVED = ("json", "shape", "bf16", "cuda")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OP", "NO_SHARD")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line. Exits with status 2 if an option is wrong."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="gpt-20m", help="model to train (default: gpt-20m)")
    parser.add_names("--impl", IMPLEMENTATIONS, "implementations", USUAL)
    parser.add_number("--world-size", 2, "ranks of each implementation")
    parser.add_number("--rounds", 5, "number of rounds")
    parser.add_number("--steps", 5, "steps of each implementation per round")
    parser.add_number("--warmup", 3, "steps before the first round")
    add("--strategy", choices=STRATEGIES, default="FULL_SHARD", help="(default: FULL_SHARD)")
    precision = "dtype of computation; gradients are reduced in float32 (default: none)"
    add("--mixed-precision", choices=TOLERANCES, default="none", help=precision)
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="optimizer (default: adamw)")
    parser.add_number("--threads", 1, "CPU threads of each rank")
    parser.add_json()
    args = parser.parse_args(arguments)
    lack = {"SHARD_OP": {"fsdp1", "fsdp2"}, "NO_SHARD": {"fsdp2"}}
    if others := lack.get(args.strategy, set()) & set(args.impl):
        names = ", ".join(sorted(others))
        parser.error(f"--strategy {args.strategy}: remove {names} from --impl, which lack it")
    if importlib.util.find_spec("rich") is None:
        parser.error("rich is not installed: pip install rich")
    args.shape, args.bf16 = PRESETS[args.preset], args.mixed_precision == "bf16"
    args.cuda = torch.cuda.is_available() and torch.cuda.device_count() >= args.world_size
    return args


def main() -> None:
    args = parse_args()
    # The ranks inherit this variable, and their libraries read it at import.
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    plain = plain_loss(args)
    figures = summarize(run(args), plain, args)
    where = f"{args.world_size} ranks on {'cuda' if args.cuda else 'cpu'}, {args.strategy}"
    show(f"{args.preset}: {figures['parameters']:,} parameters, {where}", rows_of(figures))
    write_json(args.json, figures)
    most = TOLERANCES[args.mixed_precision] * abs(plain)
    for name, row in figures["implementations"].items():
        if row["loss"] is not None and not row["loss_difference"] <= most:
            losses = f"{row['loss']:.6f}, the unwrapped model's {plain:.6f}"
            sys.exit(f"error: {name}'s loss is {losses}")


if __name__ == "__main__":
    main()
