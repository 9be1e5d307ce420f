"""Trains a small decoder-only transformer on text, its parameters sharded over the ranks.

    torchrun --standalone --nproc-per-node 2 scripts/train_transformer.py
    python scripts/train_transformer.py --world-size 2

The second form starts the ranks itself, on this machine. If there is a GPU for every local rank,
the ranks use GPUs and NCCL. Otherwise they use the CPU and gloo.

The text is Python's own documentation (pydoc_data.topics), or the file of `--text`. A token is a
byte. Batches depend only on `--seed` and the step, and the test always uses the same rows. So the
losses are the same for any world size, also after `--save` and `--resume` with another world size.

With `--checkpoint-dir D`, the job saves every `--checkpoint-every` steps and on SIGTERM. `--resume`
without a path continues from the last checkpoint in D, if there is one, also after a restart by
torchrun (`--max-restarts`).

`--compare` trains a few steps under every strategy, and prints a table of time, memory and
communication volume.
"""

import argparse
import contextlib
import importlib.util
import os
import statistics
import time
from pathlib import Path
from typing import Any

import lib.prerequisites  # noqa: F401  (first, because this import may end the script)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lib import training_job
from lib.command_line import Parser, at_least, input_file, positive_number, stop
from lib.output import COLOURS, PEAK, output_file, write_json, writing
from lib.training_job import held_bytes, say
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatshard import MixedPrecision, ShardedWrapper, collectives
from flatshard.wrap import ModuleWrapPolicy

VOCABULARY = 256  # bytes
TEST_ROWS = 64
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

# ---------------------------------------------------------------------------------------- settings


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    job = parser.add_argument_group("the job").add_argument
    job(
        "--text",
        type=input_file,
        metavar="FILE",
        help="file to train on (default: Python's documentation)",
    )
    job("--steps", type=at_least(0), default=200, help="total number of steps (default: 200)")
    job(
        "--batch-size",
        type=at_least(1),
        default=16,
        help="rows per step, over all ranks (default: 16)",
    )
    job(
        "--accumulate",
        type=at_least(1),
        default=1,
        metavar="N",
        help="accumulate gradients over N micro-batches per step (default: 1)",
    )
    job("--clip", type=positive_number, metavar="NORM", help="clip gradients to this norm")
    job("--lr", type=positive_number, default=1e-3, help="AdamW's learning rate (default: 0.001)")
    job("--seed", type=at_least(0), default=1, help="seed of weights and batches (default: 1)")
    model = parser.add_argument_group("the model").add_argument
    model("--width", type=at_least(1), default=128, help="width of the model (default: 128)")
    model("--depth", type=at_least(1), default=4, help="number of blocks (default: 4)")
    model("--heads", type=at_least(1), default=4, help="heads of attention (default: 4)")
    model("--context", type=at_least(2), default=128, help="bytes per row (default: 128)")
    spread = parser.add_argument_group("parallelism").add_argument
    training_job.add_ways(spread)
    spread(
        "--bf16",
        action="store_true",
        help="compute in bfloat16; keep parameters and reduce gradients in float32",
    )
    files = parser.add_argument_group("files").add_argument
    training_job.add_files(files)
    files(
        "--sample",
        type=at_least(0),
        default=0,
        metavar="N",
        help="after training, let the model continue --prompt by N bytes, and print the text",
    )
    files("--prompt", default="The ", help="first words of the sample (default: 'The ')")
    compared = parser.add_argument_group("comparison").add_argument
    compared(
        "--compare", action="store_true", help="train --steps steps under every strategy instead"
    )
    compared("--json", type=output_file, metavar="PATH", help="write the comparison to PATH")
    compared("--plot", type=output_file, metavar="PATH", help="draw the compared memory to PATH")
    args = parser.parse_args(arguments)
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Ends the script if the options do not fit together, before any rank starts."""
    training_job.set_world_size(args)
    if args.batch_size % (args.world_size * args.accumulate):
        stop(
            f"--batch-size {args.batch_size} cannot be split over {args.world_size} ranks with "
            f"--accumulate {args.accumulate}"
        )
    if args.width % args.heads:
        stop(f"--width {args.width} cannot be split into --heads {args.heads}")
    if args.ddp and args.bf16:
        stop("--bf16 is for sharded parameters: remove --ddp")
    for name in ("json", "plot"):
        if getattr(args, name) and not args.compare:
            stop(f"--{name} needs --compare")
    if args.plot and args.plot.suffix not in (".pdf", ".png", ".svg"):
        stop(f"--plot: {args.plot} must end in .pdf, .png or .svg")
    if args.compare and args.steps < 2:
        stop(f"--compare needs --steps of at least 2, got {args.steps}")
    if not args.prompt:
        stop("--prompt: must not be empty")
    needed = {"tqdm": not args.compare, "matplotlib": args.plot}
    for package, is_needed in needed.items():
        if is_needed and importlib.util.find_spec(package) is None:
            stop(f'{package} is not installed: pip install ".[examples]"')


# -------------------------------------------------------------------------------------------- data


def read_text(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Returns the bytes to train on, and the last tenth of the text to test on. Collective."""
    data = training_job.on_all_ranks(lambda: read_bytes(args))
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def read_bytes(args: argparse.Namespace) -> bytes:
    if args.text:
        data = args.text.read_bytes()
    else:
        from pydoc_data.topics import topics

        data = "\n".join(topics[name] for name in sorted(topics)).encode()
    if len(data) < 20 * (args.context + 1):
        raise training_job.Refused(
            f"--text: {len(data)} bytes are too few for --context {args.context}"
        )
    return data


def rows_of(text: Tensor, seed: int, count: int, context: int) -> Tensor:
    """Returns `count` random pieces of the text. The same seed gives the same pieces."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context, (count, 1), generator=generator)
    return text[starts + torch.arange(context + 1)]


# ------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # No bias: the gradient of a key's bias is zero except for rounding. AdamW would scale this
        # gradient up to whole steps, and the losses would depend on the order of summation.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(
        self, width: int, depth: int, heads: int, context: int, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


SIZES = ("width", "depth", "heads", "context")


def build(args: argparse.Namespace) -> Transformer:
    torch.manual_seed(args.seed)  # the same weights on every rank
    return Transformer(**{name: getattr(args, name) for name in SIZES})


def wrap_model(model: nn.Module, args: argparse.Namespace, device: torch.device) -> nn.Module:
    if args.ddp:
        return DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
    return ShardedWrapper(
        model,
        sharding_strategy=args.strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),  # each block is a unit
        mixed_precision=BF16 if args.bf16 else None,
        collectives=args.collectives,
        device_id=device if device.type == "cuda" else None,
    )


# ---------------------------------------------------------------------------------------- training


def loss_of(model: nn.Module, rows: Tensor, reduction: str = "mean") -> Tensor:
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction=reduction)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Tensor,
    accumulate: int,
    clip: float | None,
) -> tuple[Tensor, float | None]:
    """Returns this rank's loss, and the norm of the gradients if they are clipped."""
    losses = []
    for number, micro_batch in enumerate(rows.chunk(accumulate)):
        # Only the last backward reduces gradients. Until then, they accumulate in this rank's
        # memory.
        is_last = number == accumulate - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = loss_of(model, micro_batch) / accumulate
            loss.backward()
        losses.append(loss.detach())
    norm = None
    if clip is not None:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item()
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum(), norm


def mean_over_ranks(value: Tensor) -> float:
    total = value.double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def test_loss(model: nn.Module, text: Tensor, args: argparse.Namespace, device: Any) -> float:
    """Returns the mean loss on fixed rows, which do not depend on the world size. Collective."""
    model.eval()
    rows = rows_of(text, 0, TEST_ROWS, args.context)
    # A sharded forward is collective, so every rank must call forward equally often, even if the
    # rows do not divide evenly. All ranks take a share of the largest size. Indices past the end
    # are not counted.
    share = -(-TEST_ROWS // args.world_size)
    places = torch.arange(share) * args.world_size + dist.get_rank()
    total = torch.zeros((), dtype=torch.double, device=device)
    for batch in places.split(args.batch_size // (args.world_size * args.accumulate)):
        is_counted = (batch < TEST_ROWS).to(device)
        mine = rows[batch.clamp(max=TEST_ROWS - 1)].to(device)
        losses = loss_of(model, mine, reduction="none").view(len(mine), args.context)
        total += losses[is_counted].double().sum()
    dist.all_reduce(total)
    model.train()
    return total.item() / (TEST_ROWS * args.context)


@torch.no_grad()
def sample(model: nn.Module, args: argparse.Namespace, device: torch.device) -> str:
    """Returns the prompt and the model's continuation. Collective: all ranks draw the same."""
    model.eval()
    generator = torch.Generator().manual_seed(args.seed)
    text = list(args.prompt.encode())
    for _ in range(args.sample):
        tokens = torch.tensor([text[-args.context :]], device=device)
        chances = model(tokens)[0, -1].float().div(0.8).softmax(0).cpu()
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text).decode(errors="replace")


# --------------------------------------------------------------------------------------------- job


def build_resumed(args: argparse.Namespace) -> tuple[Transformer, dict[str, Any]]:
    """Returns the unwrapped model and the checkpoint. The checkpoint's sizes override options."""
    state = training_job.read_checkpoint(args.resume, "step", "sizes")
    sizes = state["sizes"]
    are_sizes = sizes.keys() == set(SIZES) and all(type(n) is int and n > 0 for n in sizes.values())
    if not are_sizes or sizes["width"] % sizes["heads"]:
        raise training_job.Refused(f"--resume: {args.resume}: not the sizes of a model: {sizes}")
    vars(args).update(sizes)
    plain = build(args)
    training_job.check_fits(args.resume, state, plain)
    return plain, state


def train(args: argparse.Namespace, device: torch.device) -> None:
    from tqdm import tqdm

    state = None
    if args.resume not in (None, training_job.LATEST):
        plain, state = training_job.on_all_ranks(lambda: build_resumed(args))
    else:
        plain = build(args)
    first = state["step"] if state else 0
    train_text, test_text = read_text(args)
    numel = sum(param.numel() for param in plain.parameters())
    model = wrap_model(plain, args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if state:
        training_job.resume(args.resume, model, optimizer, state)
    checkpoints = training_job.Checkpoints(args, model, optimizer)
    first = checkpoints.resume().get("step", first)
    how = "DDP" if args.ddp else f"{args.strategy}{', bf16' if args.bf16 else ''}"
    say(f"{numel:,} parameters, {args.world_size} ranks, {device.type}, {how}")
    if first:
        say(f"Resumed after step {first}")

    rank, rows_per_rank = dist.get_rank(), args.batch_size // args.world_size
    hide = rank != 0 or (False if args.progress else None)  # None: shown in a terminal only
    bar = tqdm(total=args.steps, initial=first, disable=hide)
    with training_job.log_to(args) as log, bar:
        log({"settings": vars(args), "parameters": numel, "torch": torch.__version__})
        for step in range(first, args.steps):
            start = time.perf_counter()
            rows = rows_of(train_text, 1000 * args.seed + step, args.batch_size, args.context)
            rows = rows[rank * rows_per_rank : (rank + 1) * rows_per_rank].to(device)
            loss, norm = train_step(model, optimizer, rows, args.accumulate, args.clip)
            mean = mean_over_ranks(loss)
            seconds = time.perf_counter() - start
            log({"step": step + 1, "loss": mean, "grad_norm": norm, "seconds": seconds})
            bar.update()
            bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
            if bar.disable and (step + 1) % max(1, args.steps // 4) == 0:
                say(f"step {step + 1}: loss {mean:.4f}")
            checkpoints.after_step(step + 1)
        tested = test_loss(model, test_text, args, device)
        log({"test_loss": tested})
    say(f"Test loss: {tested:.4f}")
    if args.save:
        step, sizes = max(first, args.steps), {name: getattr(args, name) for name in SIZES}
        training_job.save(args.save, model, optimizer, step=step, sizes=sizes)
        say(f"Saved {args.save.name} after step {step}")
    if args.sample:
        say(sample(model, args, device))


# -------------------------------------------------------------------------------------- comparison

WAYS: dict[str, dict[str, Any]] = {
    "DDP": {"ddp": True},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "SHARD_OP": {"strategy": "SHARD_OP"},
    "SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP"},
    "FULL_SHARD": {"strategy": "FULL_SHARD"},
    "FULL_SHARD, bf16": {"strategy": "FULL_SHARD", "bf16": True},
    "HYBRID_SHARD": {"strategy": "HYBRID_SHARD"},
    "HYBRID_SHARD_ZERO2": {"strategy": "HYBRID_SHARD_ZERO2"},
    "HYBRID_SHARD_OP": {"strategy": "HYBRID_SHARD_OP"},
}
"""HYBRID strategies are compared if the ranks form two nodes, or can be split into two."""


WEIGHTS = {"gather": 1, "reduce": 1, "all_reduce": 2}
"""Volume as the ZeRO paper counts it: an all-reduce is a reduce-scatter and an all-gather."""


def measure(args: argparse.Namespace, text: Tensor, device: torch.device) -> dict[str, Any]:
    """Returns time, bytes and the last loss of a few steps. Collective."""
    model = wrap_model(build(args), args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    rank, count = dist.get_rank(), args.batch_size // args.world_size
    seconds, loss = [], torch.zeros(())

    def step(number: int) -> Tensor:
        rows = rows_of(text, 1000 * args.seed + number, args.batch_size, args.context)
        mine = rows[rank * count : (rank + 1) * count].to(device)
        return train_step(model, optimizer, mine, args.accumulate, args.clip)[0]

    for number in range(args.steps):
        dist.barrier()
        start = time.perf_counter()
        loss = step(number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    last_loss = mean_over_ranks(loss)
    gathered = gradients = 0
    held_at_most, moved = 0, 2 * held_bytes(model.parameters())
    if not args.ddp:
        with model.record_steps() as reports:
            step(args.steps)
        held_at_most = max(report.peak_held_bytes for report in reports)
        gathered = max(report.peak_gathered_bytes for report in reports)
        with collectives.record() as events:
            step(args.steps + 1)
        moved = sum(WEIGHTS.get(event.kind, 0) * event.nbytes for event in events)
        gathered_now = reports[-1].memory.totals()[-1][1]
    else:
        gathered_now = 0
    rows = rows_of(text, 0, args.batch_size, args.context)[rank * count : (rank + 1) * count]
    loss_of(model, rows.to(device)).backward()
    gradients = held_bytes(p.grad for p in model.parameters() if p.grad is not None)
    states = (value for state in optimizer.state.values() for value in state.values())
    optimizer_bytes = held_bytes(value for value in states if isinstance(value, Tensor))
    parameters = held_bytes(model.parameters())
    between = parameters + optimizer_bytes + gradients + gathered_now
    return {
        "seconds": statistics.median(seconds[1:]),
        "loss": last_loss,
        "parameter_bytes": parameters,
        "gradient_bytes": gradients,
        "optimizer_bytes": optimizer_bytes,
        "kept_gathered_bytes": gathered_now,
        "peak_gathered_bytes": gathered,
        "between_bytes": between,
        "peak_bytes": max(between, parameters + optimizer_bytes + held_at_most),
        "moved_bytes": moved,
    }


def compare(args: argparse.Namespace, device: torch.device) -> None:
    text, _ = read_text(args)
    world_size = args.world_size
    # HYBRID strategies take this number of ranks for a node.
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    if per_node == world_size and world_size % 2 == 0 and world_size > 2:
        per_node = 2
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    results = {}
    for name, settings in WAYS.items():
        if name.startswith("HYBRID") and not 1 < per_node < world_size:
            continue
        way = argparse.Namespace(**{**vars(args), "ddp": False, "bf16": False, **settings})
        results[name] = measure(way, text, device)
        say(f"{name}: {1000 * results[name]['seconds']:.0f} ms")
    if dist.get_rank() != 0:
        return
    numel = sum(param.numel() for param in build(args).parameters())
    about = {
        "torch": torch.__version__,
        "parameters": numel,
        "world_size": world_size,
        "per_node": per_node,
        "ways": results,
    }
    print(f"\n{numel:,} parameters, {world_size} ranks, {args.steps} steps, {device.type}")
    print(table(results))
    write_json(args.json, about)
    if args.plot:
        draw(about, args.plot)


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':20}{'ms a step':>10}{'persist. MiB':>13}{'peak':>9}{'volume':>9}{'loss':>9}"]
    for name, row in results.items():
        sizes = (row[key] / 2**20 for key in ("between_bytes", "peak_bytes", "moved_bytes"))
        held, peak, moved = sizes
        lines.append(
            f"{name:20}{1000 * row['seconds']:10.0f}{held:13.1f}{peak:9.1f}{moved:9.1f}"
            f"{row['loss']:9.4f}"
        )
    return "\n".join(lines)


def draw(about: dict[str, Any], path: Path) -> None:
    """Draws the persistent memory per rank, and the peak of a step on top of it."""
    from matplotlib.figure import Figure

    ways = about["ways"]
    figure = Figure(figsize=(8, 0.8 + 0.42 * len(ways)), layout="constrained")
    axes = figure.subplots()
    kinds = {
        "this rank's parameters": "parameter_bytes",
        "optimizer state": "optimizer_bytes",
        "gradients": "gradient_bytes",
        "unsharded parameters": "kept_gathered_bytes",
    }
    left = [0.0] * len(ways)
    names = list(ways)
    for label, key in kinds.items():
        sizes = [row[key] / 2**20 for row in ways.values()]
        if any(sizes):
            axes.barh(names, sizes, left=left, label=label, color=COLOURS[label])
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    rest = [row["peak_bytes"] / 2**20 - at for row, at in zip(ways.values(), left, strict=True)]
    axes.barh(names, rest, left=left, label="peak of a step", **PEAK)
    for index, row in enumerate(ways.values()):
        axes.text(
            row["peak_bytes"] / 2**20, index, f" {row['peak_bytes'] / 2**20:.0f}", va="center"
        )
    axes.invert_yaxis()
    size = f"{about['parameters'] / 1e6:.1f} M parameters"
    axes.set_xlabel(f"MiB on each of {about['world_size']} ranks; {size}, fp32 AdamW")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=5, fontsize=8)
    with writing(path) as part:
        figure.savefig(part, format=path.suffix[1:], dpi=110)


def run_job(args: argparse.Namespace, device: torch.device) -> None:
    (compare if args.compare else train)(args, device)


if __name__ == "__main__":
    training_job.start(run_job, parse_args())
