"""Compares the memory that `flatshard plan` predicts with the measured memory of CPU ranks.

    python scripts/measure/planned.py --json planned.json

The script trains small models on CPU ranks with gloo, and measures the bytes of all tensors. A
library that is preloaded into the ranks (tensor_bytes.c; needs a C compiler) counts each block that
torch's allocator hands out on any thread, temporary tensors inside of kernels included. A rank's
peak is the highest number of bytes in the third step, minus the number before the model was made.
The column `measured` is the median over the ranks, and `highest` is the maximum over the ranks. The
two differ because gloo's threads make temporary tensors, and free them later if other ranks are
late. The column `predicted` is the peak of the plan. flatshard's page pool is off, because its
memory does not come from torch's allocator.

The script fails if the median error is above 2 %, or if the largest error is above 5 %.

With `--links`, the script compares times instead. Two ranks in two network namespaces train over a
link with a limited rate, under each strategy (this needs root). The plan gets the link's rate, and
the processor's speeds, which `calibrate` measures on both ranks at the same time. The strategy with
the shortest predicted step is called chosen. The column `behind` says how much longer the chosen
strategy's step takes than the step of the fastest strategy, both measured. The script fails if more
than one training run in ten is behind by more than 3 %.

Each round measures all strategies once, in random order, and divides the times by their mean. So a
machine that is slower for a while changes no comparison. The measured time is the median over the
rounds. The column `noise` compares every second round with the other rounds: by how much a strategy
differs from itself (root mean square over the strategies). The column `ties` counts the strategies
that are slower than the fastest by at most the noise.
"""

import argparse
import ctypes
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import measuring  # import first: may end the script
import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import Parser, spawn, write_json
from rich import print as rich_print
from torch import Tensor, nn

from flatshard import MixedPrecision, ShardedWrapper
from flatshard.extras.plan.hardware import Device, Machine, calibrate
from flatshard.extras.plan.models import Llama, Step, language_step
from flatshard.extras.plan.planning import TracedModel
from flatshard.extras.plan.replay import Outcome, Replay
from flatshard.extras.plan.trace import checkpoint_blocks
from flatshard.memory import mapped_files
from flatshard.wrap import ModuleWrapPolicy

MEDIAN, LARGEST = 0.02, 0.05  # allowed errors of the predicted memory
BEHIND = 0.03  # how much longer the chosen strategy's step may take than the fastest
LENGTH, VOCABULARY = 128, 4096

# ----------------------------------------------------------------------------------------- models


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
        mixed = F.scaled_dot_product_attention(
            *(one.transpose(1, 2) for one in parts), is_causal=True
        )
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


class MlpBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


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


def llama() -> nn.Module:
    return Llama(
        layers=4, width=384, heads=8, kv_heads=4, hidden=1024, vocab=VOCABULARY, seq=LENGTH
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), *(MlpBlock(512) for _ in range(6)), nn.Linear(512, 10))


def convnet() -> nn.Module:
    widths = (32, 64, 128, 256, 256)
    blocks = [ConvBlock(a, b) for a, b in pairwise(widths)]
    parts = [part for block in blocks for part in (block, nn.MaxPool2d(2))]
    stem = nn.Conv2d(3, 32, 3, padding=1)
    return nn.Sequential(stem, *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def hugging_face() -> nn.Module:
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=320,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")  # type: ignore[no-any-return]


def rows_step(batch: int) -> Step:
    def step(model: nn.Module) -> Tensor:
        found = model(torch.ones(batch, 64)).float()
        return F.cross_entropy(found, torch.zeros(batch, dtype=torch.long))

    return step


def images_step(batch: int) -> Step:
    def step(model: nn.Module) -> Tensor:
        found = model(torch.ones(batch, 3, 32, 32)).float()
        return F.cross_entropy(found, torch.zeros(batch, dtype=torch.long))

    return step


@dataclass(frozen=True)
class Kind:
    """A model, its training step, and the names of the module classes that become units."""

    build: Callable[[], nn.Module]
    step: Callable[[int], Step]
    units: frozenset[str]

    def policy(self, model: nn.Module) -> ModuleWrapPolicy:
        return ModuleWrapPolicy(
            {type(m) for m in model.modules() if type(m).__name__ in self.units}
        )


language = partial(language_step, seq=LENGTH)
MODELS = {
    "llama": Kind(llama, language, frozenset({"LlamaBlock"})),
    "gpt": Kind(Gpt, language, frozenset({"GptBlock"})),
    "tied": Kind(partial(Gpt, is_tied=True), language, frozenset({"GptBlock"})),
    "frozen": Kind(partial(Gpt, num_frozen=4), language, frozenset({"GptBlock"})),
    "embedding": Kind(Gpt, language, frozenset({"GptBlock", "Embedding"})),
    "mlp": Kind(mlp, rows_step, frozenset({"MlpBlock"})),
    "convnet": Kind(convnet, images_step, frozenset({"ConvBlock"})),
    "hf": Kind(hugging_face, language, frozenset({"Qwen2DecoderLayer"})),
}

PRECISIONS = {
    "fp32": MixedPrecision(),
    "mixed": MixedPrecision(torch.bfloat16, torch.float32),
    "bf16": MixedPrecision(torch.bfloat16),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}
STATE_BYTES = {"sgd": 0, "momentum": 4, "adamw": 8}

# ---------------------------------------------------------------------------------- configurations


@dataclass(frozen=True)
class Case:
    """One training run: a model and its settings."""

    model: str
    strategy: str
    world: int
    batch: int
    checkpoint: Any = "none"
    precision: str = "fp32"
    collectives: str = "native"
    accumulate: int = 1
    optimizer: str = "adamw"
    keywords: dict[str, Any] = field(default_factory=dict)  # other keywords of `ShardedWrapper`

    @property
    def name(self) -> str:
        return " ".join(
            str(one)
            for one in (self.model, self.strategy, f"x{self.world}", f"b{self.batch}")
            + (self.checkpoint, self.precision, self.collectives, self.optimizer)
            + ((f"accumulate={self.accumulate}",) if self.accumulate > 1 else ())
            + tuple(f"{key}={value}" for key, value in self.keywords.items())
        )


C = Case
CASES = [
    C("llama", "FULL_SHARD", 2, 4),
    C("llama", "FULL_SHARD", 4, 2),
    C("llama", "FULL_SHARD", 2, 8, "block"),
    C("llama", "FULL_SHARD", 2, 4, "selective"),
    C("llama", "FULL_SHARD", 2, 4, precision="mixed"),
    C("llama", "FULL_SHARD", 2, 4, precision="bf16"),
    C("llama", "FULL_SHARD", 2, 4, accumulate=2),
    C("llama", "FULL_SHARD", 2, 4, collectives="sockets"),
    C("llama", "FULL_SHARD", 4, 1, "block", "mixed", "sockets"),
    C("llama", "FULL_SHARD", 2, 4, collectives="auto"),
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
    C("gpt", "SHARD_GRAD_OP", 4, 2, collectives="sockets"),
    C("gpt", "SHARD_OP", 2, 4, accumulate=2),
    C("gpt", "NO_SHARD", 2, 4, optimizer="sgd"),
    C("gpt", "HYBRID_SHARD", 4, 1, precision="mixed"),
    C("gpt", "FULL_SHARD", 2, 4, collectives="sockets", accumulate=2),
    C("tied", "FULL_SHARD", 2, 4),
    C("tied", "NO_SHARD", 2, 4, precision="bf16"),
    C("tied", "SHARD_GRAD_OP", 2, 4, collectives="sockets"),
    C("frozen", "FULL_SHARD", 2, 4),
    C("frozen", "SHARD_GRAD_OP", 2, 8, "block"),
    C("frozen", "NO_SHARD", 2, 4, optimizer="momentum"),
    C("embedding", "FULL_SHARD", 2, 4),
    C("embedding", "FULL_SHARD", 4, 2, collectives="sockets"),
    C("mlp", "FULL_SHARD", 2, 256),
    C("mlp", "FULL_SHARD", 4, 512, precision="bf16", optimizer="sgd"),
    C("mlp", "SHARD_GRAD_OP", 2, 256, collectives="auto"),
    C("mlp", "SHARD_OP", 3, 256, optimizer="momentum"),
    C("mlp", "HYBRID_SHARD_OP", 4, 256, collectives="sockets"),
    C("mlp", "NO_SHARD", 2, 1024, "block"),
    C("convnet", "FULL_SHARD", 2, 16),
    C("convnet", "FULL_SHARD", 2, 16, precision="mixed"),
    C("convnet", "SHARD_GRAD_OP", 3, 8, optimizer="momentum"),
    C("convnet", "NO_SHARD", 2, 32, optimizer="sgd"),
    C("convnet", "SHARD_OP", 2, 16, collectives="sockets"),
    C("hf", "FULL_SHARD", 2, 4),
    C("hf", "FULL_SHARD", 2, 4, "block", "mixed"),
    C("hf", "SHARD_GRAD_OP", 4, 2, collectives="sockets"),
    C("hf", "NO_SHARD", 2, 4),
]
QUICK = [37]

# ------------------------------------------------------------------------------------- prediction


def predict(case: Case, machine: Machine | None = None) -> Outcome:
    """Predict memory and time. ``machine`` None: a machine with rough speeds."""
    kind = MODELS[case.model]
    with torch.device("meta"):
        policy = kind.policy(kind.build())
    traced = TracedModel.of(
        kind.build,
        kind.step(case.batch),
        checkpoint=case.checkpoint,
        on_gpu=False,
        auto_wrap_policy=policy,
        mixed_precision=PRECISIONS[case.precision],
    )
    flats = traced.flats(
        case.world,
        sharding_strategy=case.strategy,
        ranks_per_node=2,
        optimizer_bytes=STATE_BYTES[case.optimizer],
        **case.keywords,
    )
    if machine is None:
        device = Device(4e10, 4e10, 4e9, 0.0, is_gpu=False)
        # The page pool is off, so ranks cannot read each other's memory, and "auto" chooses
        # sockets.
        transport = "native" if case.collectives == "native" else "sockets"
        machine = Machine(device, 2, 1e9, 1e9, transport=transport)
    return Replay(traced.trace, flats, machine, case.accumulate).run()


# ------------------------------------------------------------------------------------ measurement


@contextmanager
def counting_tensors() -> Iterator[None]:
    """Preload the library that counts tensors' bytes into all processes that start in the block."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "tensor_bytes.so")
        source = Path(__file__).with_name("tensor_bytes.c")
        compiler = shutil.which("cc") or "cc"
        command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
        subprocess.run(command, check=True)
        os.environ["LD_PRELOAD"] = str(library)
        try:
            yield
        finally:
            del os.environ["LD_PRELOAD"]


def counters() -> tuple[Callable[[], int], Callable[[int], int]]:
    library = ctypes.CDLL(None)
    library.tensor_bytes.restype = library.peak_tensor_bytes.restype = ctypes.c_int64
    return library.tensor_bytes, library.peak_tensor_bytes


def measure_rank(cases: list[Case]) -> dict[str, Any]:
    mapped_files.CAN_MAP = False
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return {case.name: measure_case(case) for case in cases}


def measure_case(case: Case) -> int:
    """Return the peak bytes of all tensors in the third step."""
    gc.collect()
    now, peak = counters()
    before = now()
    kind = MODELS[case.model]
    torch.manual_seed(0)
    model, optimizer = make(case)
    step = kind.step(case.batch)
    for _ in range(3):
        peak(1)
        optimizer.zero_grad()
        for backward in range(case.accumulate):
            if backward < case.accumulate - 1:
                with model.no_sync():
                    step(model).backward()
            else:
                step(model).backward()
        optimizer.step()
    return peak(0) - before


def make(case: Case) -> tuple[ShardedWrapper, torch.optim.Optimizer]:
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
        collectives=case.collectives,
        **case.keywords,
    )
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, OPTIMIZERS[case.optimizer](trained)


def compare(cases: list[Case]) -> list[dict[str, Any]]:
    """Measure and predict each case."""
    measured: dict[str, list[int]] = {}
    with counting_tensors():
        for world in sorted({case.world for case in cases}):
            some = [case for case in cases if case.world == world]
            ranks = measuring.figures_of_ranks(measure_rank, world, some)
            measured.update({c.name: [figures[c.name] for figures in ranks] for c in some})
    rows = []
    for case in cases:
        outcome = predict(case)
        error = outcome.peak_bytes / statistics.median(measured[case.name]) - 1
        rows.append(
            asdict(case)
            | {"name": case.name, "measured": measured[case.name], "error": error}
            | {"predicted": outcome.peak_bytes, "peak_at": outcome.peak_at}
        )
    return rows


# ------------------------------------------------------------------------------------------- links

# In the order of `flatshard plan`, which chooses the first of all strategies whose predicted speeds
# differ by less than 1 % from the highest. HYBRID_SHARD is NO_SHARD with one rank in each node.
STRATEGIES = ("NO_SHARD", "SHARD_OP", "SHARD_GRAD_OP", "FULL_SHARD")
# Model, batch and megabits per second.
LINKS = [
    ("llama", 1, 1000),
    ("llama", 8, 1000),
    ("llama", 4, 4000),
    ("gpt", 2, 1000),
    ("gpt", 8, 4000),
    ("mlp", 256, 1000),
    ("mlp", 2048, 4000),
    ("convnet", 16, 1000),
    ("frozen", 4, 1000),
    ("tied", 4, 4000),
]
WARM_UP, LEAST_ROUNDS = 2, 5  # rounds that do not count, and minimum number of rounds that count
# Seconds of measured steps for each training run. Strategies are close if the times of the fastest
# two differ by less than 5 %.
SECONDS, CLOSE_SECONDS, CLOSE = 10.0, 22.0, 0.05
TCP = 0.94  # fraction of a link's rate that is left for data, without the headers of packets
LATENCY = 3e-4  # seconds of a message between two processes on this machine


@contextmanager
def limited_link(megabits: int) -> Iterator[list[str]]:
    """Connect two network namespaces by a link. Yields the names of the namespaces."""
    names = [f"planned{os.getpid()}-{rank}" for rank in range(2)]

    def run(command: str) -> None:
        subprocess.run(command.split(), check=True)

    run("ip link add plan0 type veth peer name plan1")
    try:
        for rank, name in enumerate(names):
            run(f"ip netns add {name}")
            run(f"ip link set plan{rank} netns {name} name plan")
            run(f"ip -n {name} addr add 10.231.8.{rank + 1}/24 dev plan")
            run(f"ip -n {name} link set plan up")
            run(f"ip -n {name} link set lo up")
            limit = f"tbf rate {megabits}mbit burst 256kb latency 100ms"
            run(f"ip netns exec {name} tc qdisc add dev plan root {limit}")
        yield names
    finally:
        for name in names:
            run(f"ip netns del {name}")


def enter_namespace(name: str) -> None:
    namespace = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    os.environ["GLOO_SOCKET_IFNAME"] = "plan"


def time_rank(rank: int, names: list[str], cases: list[list[Case]], folder: str) -> None:
    enter_namespace(names[rank])
    # All tokens are equal, so the tied model predicts the next token with a probability of almost
    # 1. Its gradients are then below the smallest normal number, and CPUs compute 40 times longer.
    torch.set_flush_denormal(True)
    measuring.join(rank, 2, folder)
    device = asdict(calibrate("cpu", seconds=0.5, collectives="sockets"))
    rounds = [time_cases(some) for some in cases]
    Path(folder, f"{rank}.json").write_text(json.dumps({"device": device, "rounds": rounds}))
    dist.barrier()
    dist.destroy_process_group()


def time_cases(cases: list[Case]) -> list[list[float]]:
    """For each round, return the seconds of one step of each case: the maximum over the ranks."""
    torch.manual_seed(0)
    made = [make(case) for case in cases]
    step = MODELS[cases[0].model].step(cases[0].batch)
    shuffled, rounds = random.Random(0), list[list[float]]()
    while len(rounds) < WARM_UP + LEAST_ROUNDS or not is_enough(rounds[WARM_UP:]):
        seconds = torch.zeros(len(made), dtype=torch.float64)
        for index in shuffled.sample(range(len(made)), len(made)):
            seconds[index] = time_step(*made[index], step)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)  # ranks then measure the same number of rounds
        rounds.append(seconds.tolist())
    return rounds[WARM_UP:]


def is_enough(rounds: list[list[float]]) -> bool:
    first, second, *_ = sorted(relative(rounds))
    return sum(map(sum, rounds)) > (CLOSE_SECONDS if second / first < 1 + CLOSE else SECONDS)


def relative(rounds: list[list[float]]) -> list[float]:
    """Return each strategy's time as a fraction of the mean time: the median over the rounds."""
    fractions = [[one / statistics.mean(times) for one in times] for times in rounds]
    return [statistics.median(some) for some in zip(*fractions, strict=True)]


def noise_of(rounds: list[list[float]]) -> float:
    """Return how much strategies' times differ between even and odd rounds, as a fraction.

    This is the root mean square over the strategies.
    """
    halves = zip(relative(rounds[::2]), relative(rounds[1::2]), strict=True)
    return statistics.mean((one / other - 1) ** 2 for one, other in halves) ** 0.5


def time_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> float:
    dist.barrier()
    began = time.perf_counter()
    step(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    return time.perf_counter() - began


def compare_links() -> list[dict[str, Any]]:
    """Measure and predict the times of each training run in ``LINKS`` under each strategy."""
    rows = []
    for rate in sorted({rate for *_, rate in LINKS}):
        cases = [
            [Case(model, one, 2, batch, collectives="sockets") for one in STRATEGIES]
            for model, batch, megabits in LINKS
            if megabits == rate
        ]
        with limited_link(rate) as names, tempfile.TemporaryDirectory() as folder:
            spawn(time_rank, (names, cases, folder), 2)
            figures = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
        speeds = [one["device"] for one in figures]
        device = Device(**{key: statistics.mean(one[key] for one in speeds) for key in speeds[0]})
        link = TCP * rate * 1e6 / 8
        machine = Machine(device, 1, link, link, LATENCY, "sockets")
        for some, rounds in zip(cases, figures[0]["rounds"], strict=True):
            mean = statistics.median(map(statistics.mean, rounds))
            measured = [mean * one for one in relative(rounds)]
            predicted = [predict(case, machine).seconds for case in some]
            chosen = next(i for i, one in enumerate(predicted) if 0.99 * one < min(predicted))
            noise = noise_of(rounds)
            ties = sum(one < min(measured) * (1 + noise) for one in measured)
            rows.append(
                {
                    "name": f"{some[0].model} b{some[0].batch} {rate} Mbit/s",
                    "device": asdict(device),
                }
                | {"measured": measured, "predicted": predicted, "chosen": STRATEGIES[chosen]}
                | {"behind": measured[chosen] / min(measured) - 1, "rounds": rounds}
                | {"noise": noise, "ties": ties}
            )
    return rows


def show_links(rows: list[dict[str, Any]]) -> None:
    title = "Seconds of a step, predicted / measured"
    table = measuring.table(title, "training", *STRATEGIES, "chosen", "behind", "noise", "ties")
    for row in rows:
        pairs = zip(row["predicted"], row["measured"], strict=True)
        cells = [f"{a:.3f} / {b:.3f}" for a, b in pairs]
        shares = (f"{row[key]:.1%}" for key in ("behind", "noise"))
        table.add_row(row["name"], *cells, row["chosen"], *shares, str(row["ties"]))
    rich_print(table)
    near = sum(row["behind"] <= BEHIND for row in rows)
    print(
        f"In {near} of {len(rows)} training runs, a step of the chosen strategy takes at most "
        f"{BEHIND:.0%} longer than a step of the fastest strategy."
    )


# -------------------------------------------------------------------------------------------- main


def show(rows: list[dict[str, Any]]) -> None:
    table = measuring.table(
        "Peak of tensors", "training", "predicted", "measured", "highest", "error", "at"
    )
    for row in rows:
        found = row["predicted"], statistics.median(row["measured"]), max(row["measured"])
        sizes = (f"{nbytes / 2**20:.1f}" for nbytes in found)
        table.add_row(row["name"], *sizes, f"{row['error']:+.1%}", row["peak_at"])
    rich_print(table)


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="measure only a few training runs")
    parser.add_argument(
        "--only", default="", help="measure training runs whose name contains this text"
    )
    parser.add_argument("--links", action="store_true", help="compare times on limited links")
    parser.add_json()
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.links:
        rows = compare_links()
        show_links(rows)
        if args.json:
            write_json(args.json, rows)
        if sum(row["behind"] > BEHIND for row in rows) > len(rows) // 10:
            sys.exit("the strategies that the plan chose are slower than allowed")
        return
    cases = [CASES[i] for i in QUICK] if args.quick else CASES
    rows = compare([case for case in cases if args.only in case.name])
    show(rows)
    errors = [abs(row["error"]) for row in rows]
    median, largest = statistics.median(errors), max(errors)
    print(f"{len(rows)} training runs: median error {median:.1%}, largest {largest:.1%}")
    if args.json:
        write_json(args.json, rows)
    if median > MEDIAN or largest > LARGEST:
        sys.exit("the errors are larger than allowed")


if __name__ == "__main__":
    main()
