"""Checks and times flatshard on this machine's GPUs, in one call of at most eight minutes.

    python scripts/gpu_check.py --json figures.json --trace trace.json

nccl     training on real ranks equals the unwrapped model: NCCL, a rank per GPU, or, where there is
         one GPU, several ranks on it if this NCCL can do that
gloo     the same with gloo, which moves the GPU's tensors, or the CPU's where there is no GPU
fake     a billion parameters in bf16 as one of eight ranks whose collectives move nothing: time and
         memory of a step beside FSDP1, FSDP2 and the plain model
sync     no operation of a step makes the host wait for the GPU
streams  collectives of one pretended rank that take their time on a stream of their own, as NCCL's
         do, or a computation that takes its time, change nothing
single   the same with NCCL's own collectives over one rank, which every GPU can have, behind the
         pretended ones: their streams, works and dtypes are the real ones
overlap  how much of the collectives' time the GPU computes meanwhile, from a profile of one step

Each part has processes of its own and a time limit: one that hangs or crashes is a line of the
table. On a machine without a GPU the parts run as far as they can, on tiny models, and say what is
left out. Exits with 0 if no part failed.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import benchmark
import prerequisites  # noqa: F401  (first: it may end this)
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from benchmark import GPT, Block, Preset, make_batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import CPUOffload, MixedPrecision, ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy

SMALL = Preset(layers=2, width=64, heads=4, vocabulary=128, sequence=16)
BILLION = Preset(layers=24, width=1792, heads=14, vocabulary=32768, sequence=1024, batch=4)
MEDIUM = Preset(layers=8, width=2048, heads=16, vocabulary=8192, sequence=1024, batch=4)

PASS, FAIL, SKIP = "pass", "FAIL", "skip"
NO_GPU = "there is no GPU"


@dataclass
class Outcome:
    """A part's line in the table, and its figures in the JSON file."""

    result: str
    text: str
    figures: Any = None


@dataclass(frozen=True)
class Place:
    """Where a part runs: how many ranks, on which kind of device, over which backend."""

    device: str
    backend: str
    ranks: int

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def shares_gpu(self) -> bool:
        return self.is_cuda and self.ranks > torch.cuda.device_count()

    def describe(self) -> str:
        shared = " on one GPU" if self.shares_gpu else ""
        return f"{self.ranks} ranks{shared}, {self.backend} on {self.device}"


def join(place: Place, rank: int, store: str) -> torch.device:
    """Make this process a rank; returns its device."""
    device = torch.device(place.device)
    if place.is_cuda:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        place.backend,
        store=dist.FileStore(store, place.ranks),
        rank=rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=60),
    )
    return device


def pretend(device: torch.device, world_size: int) -> None:
    """Make this process rank 0 of several whose collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Its name is registered by that import. A store that works is for real groups beside it.
    assert FakeStore is not None
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)


def build_gpt(preset: Preset, device: torch.device) -> GPT:
    """Made where it trains: a CPU would take long to draw a billion numbers."""
    torch.manual_seed(0)
    with device:
        return GPT(preset)


def group_without_cpu(device: torch.device) -> dist.ProcessGroup:
    """A pretended group that cannot send what lies on the CPU, like one of NCCL."""
    group = dist.new_group(backend=f"{device.type}:fake")
    assert isinstance(group, dist.ProcessGroup)
    return group


def in_ranks(run: Callable[..., Any], place: Place, *args: Any) -> list[Any]:
    """What ``run(rank, device, place, *args)`` returns on every rank, as JSON carries it."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        mp.spawn(_one_rank, (run, place, store, args), nprocs=place.ranks)
        return [json.loads(Path(f"{store}.{r}").read_text()) for r in range(place.ranks)]


def _one_rank(
    rank: int, run: Callable[..., Any], place: Place, store: str, args: tuple[Any, ...]
) -> None:
    device = join(place, rank, store)
    Path(f"{store}.{rank}").write_text(json.dumps(run(rank, device, place, *args)))
    dist.destroy_process_group()


# ------------------------------------------------------------------ nccl, gloo: equal to the model

STEPS = 5
LEARNING_RATE = 1e-3
# Larger than rounding: AdamW would scale gradients that are zero but for that, such as those of a
# key's bias, up to whole steps, and no two summation orders would agree.
EPSILON = 1e-5
MAX_NORM = 0.5  # smaller than the norms here, so that clipping changes something


@dataclass(frozen=True)
class Limits:
    """How far a training run may be from the unwrapped model's."""

    loss: float  # relative
    norm: float  # of the gradients, relative
    distance: float  # of the parameters, relative to how far training moved them


LIMITS = {"fp32": Limits(1e-5, 1e-4, 1e-3), "bf16": Limits(2e-3, 1e-2, 5e-2)}


@dataclass(frozen=True)
class Case:
    strategy: str
    precision: str
    variant: str

    def __str__(self) -> str:
        return f"{self.strategy} {self.precision} {self.variant}"

    @property
    def micro_batches(self) -> int:
        return 2 if self.variant == "no_sync" else 1

    def uses_extra(self, rank: int) -> bool:
        return self.variant != "unused" or rank == 0


VARIANTS = ("plain", "no_sync", "checkpoint", "unused", "fixed_order", "disk")
OFFLOAD = ("offload", "offload_optimizer")
"""Variants for accelerators alone."""


def cases(ranks: int, quick: bool, is_cuda: bool) -> list[Case]:
    strategies = ["FULL_SHARD"] if quick else ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    if ranks >= 4 and ranks % 2 == 0:
        strategies += ["HYBRID_SHARD"]
    variants = VARIANTS + OFFLOAD if is_cuda else VARIANTS
    return [Case(s, p, v) for s in strategies for p in LIMITS for v in variants]


class Model(GPT):
    """The benchmark's GPT, with checkpoints, and a layer that not every rank needs."""

    def __init__(self, preset: Preset, checkpointed: bool = False) -> None:
        super().__init__(preset)
        self.extra = nn.Linear(preset.width, preset.width)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor, uses_extra: bool = True) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        if uses_extra:
            x = x + self.extra(x)
        return self.head(self.norm(x))


def make_model(device: torch.device, checkpointed: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(SMALL, checkpointed).to(device)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)


def tokens_of(case: Case, step: int, micro: int, rank: int, device: torch.device) -> Tensor:
    return make_batch(SMALL, 1000 * (case.micro_batches * step + micro) + rank, device)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class Trained:
    losses: list[Tensor]
    norms: list[Tensor]
    parameters: dict[str, Tensor]


def train_plain(case: Case, ranks: int, device: torch.device) -> Trained:
    """Train the unwrapped model on the batches of all ranks.

    At once, where no rank differs from the others and rounding to bf16 does not depend on whose
    gradients are added up before it.
    """
    model = make_model(device)
    optimizer = make_optimizer(model)
    dtype = torch.float32 if case.precision == "fp32" else torch.bfloat16
    at_once = case.precision == "fp32" and case.variant != "unused"
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros((), device=device)
        for micro in range(case.micro_batches):
            of_ranks = [tokens_of(case, step, micro, rank, device) for rank in range(ranks)]
            parts = [torch.cat(of_ranks)] if at_once else of_ranks
            for rank, tokens in enumerate(parts):
                weights = {name: p.to(dtype) for name, p in model.named_parameters()}
                inputs = (tokens[:, :-1], case.uses_extra(rank))
                loss = loss_of(torch.func.functional_call(model, weights, inputs), tokens)
                loss = loss / (len(parts) * case.micro_batches)
                loss.backward()
                total += loss.detach()
        losses.append(total)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {n: p.detach() for n, p in model.named_parameters()})


def train_sharded(case: Case, rank: int, device: torch.device) -> Trained:
    """Train the wrapped model on this rank's batches; losses are averaged over the ranks."""
    mode = "fixed_order" if case.variant == "fixed_order" else "auto"
    dtype = None if case.precision == "fp32" else torch.bfloat16
    model = ShardedWrapper(
        make_model(device, checkpointed=case.variant == "checkpoint"),
        sharding_strategy=case.strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(dtype, torch.float32, reduce_mode=mode),
        cpu_offload={
            "offload": CPUOffload(offload_params=True),
            "offload_optimizer": CPUOffload(offload_optimizer=True),
            "disk": CPUOffload(path=tempfile.gettempdir()),
        }.get(case.variant),
        device_id=device if device.type == "cuda" else None,
    )
    optimizer = make_optimizer(model)
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros((), device=device)
        for micro in range(case.micro_batches):
            tokens = tokens_of(case, step, micro, rank, device)
            is_last = micro == case.micro_batches - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = loss_of(model(tokens[:, :-1], case.uses_extra(rank)), tokens)
                loss = loss / case.micro_batches
                loss.backward()
            total += loss.detach()
        losses.append(total)
        norms.append(model.clip_grad_norm_(MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    averaged = torch.stack(losses)
    dist.all_reduce(averaged)
    return Trained(list(averaged / dist.get_world_size()), norms, model.state_dict())


def compare(actual: Trained, expected: Trained, start: dict[str, Tensor]) -> Limits:
    """How far a run is from another one, in the terms of ``Limits``."""

    def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
        ours_, theirs_ = (torch.stack([x.cpu() for x in one]).double() for one in (ours, theirs))
        return float(((ours_ - theirs_) / theirs_).abs().max())

    assert list(actual.parameters) == list(expected.parameters), list(actual.parameters)
    apart = moved = 0.0
    for name, value in expected.parameters.items():
        apart += float((actual.parameters[name].to(value.device) - value).double().square().sum())
        moved += float((value - start[name]).double().square().sum())
    return Limits(
        furthest(actual.losses, expected.losses),
        furthest(actual.norms, expected.norms),
        (apart / moved) ** 0.5,
    )


def any_rank(is_so: bool, device: torch.device) -> bool:
    """Whether it is so on some rank."""
    told = torch.tensor(float(is_so), device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told.item())


def check_cases(
    rank: int, device: torch.device, place: Place, quick: bool, seconds: float
) -> list[list[Any]]:
    """The names of all cases that begin within so many seconds, and on rank 0 their deviations.

    Or what went wrong: a case that fails on all ranks is no reason to leave out the others.
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(max(place.ranks // 2, 1))  # HYBRID_SHARD: two nodes
    found = []
    end = time.monotonic() + seconds
    for case in cases(place.ranks, quick, device.type == "cuda"):
        if any_rank(time.monotonic() > end, device):
            break
        actual, problem = None, None
        try:
            actual = train_sharded(case, rank, device)
        except Exception as error:
            traceback.print_exc()
            problem = one_line(error)
        # Where some ranks failed alone, the others wait until the group's timeout ends this part.
        if any_rank(problem is not None, device):
            outcome: Any = problem or "another rank failed"
        elif rank == 0 and actual is not None:
            start = {name: p.detach() for name, p in make_model(device).named_parameters()}
            deviations = compare(actual, train_plain(case, place.ranks, device), start)
            outcome = dataclasses.asdict(deviations)
        else:
            outcome = {}
        if rank == 0:  # for the log: a part that is ended has got so far
            print(f"{case}: {outcome}", flush=True)
        found.append([str(case), case.precision, outcome])
    return found


def part_ranks(place: Place, args: argparse.Namespace) -> Outcome:
    found = in_ranks(check_cases, place, args.quick, 0.6 * args.limit)[0]
    if not found:
        return Outcome(FAIL, f"{place.describe()}: no case began in time")
    all_of_them = len(cases(place.ranks, args.quick, place.is_cuda))
    wrong, worst = [], {precision: Limits(0, 0, 0) for precision in LIMITS}
    for name, precision, deviations in found:
        if isinstance(deviations, str):
            wrong.append(f"{name}: {deviations}")
            continue
        limits, so_far = dataclasses.asdict(LIMITS[precision]), dataclasses.asdict(worst[precision])
        # Written so that NaN is wrong, too.
        wrong += [f"{name}: {k} {x:.1e}" for k, x in deviations.items() if not x <= limits[k]]
        worst[precision] = Limits(**{k: max(x, so_far[k]) for k, x in deviations.items()})
    late = "" if len(found) == all_of_them else f" of {all_of_them}, the others would be late"
    text = f"{place.describe()}: {len(found)} cases{late}; " + "; ".join(
        f"{precision} loss {one.loss:.0e}, norm {one.norm:.0e}, parameters {one.distance:.0e}"
        for precision, one in worst.items()
    )
    figures = [{"case": name, "outcome": outcome} for name, _, outcome in found]
    if wrong:
        return Outcome(FAIL, "\n".join([f"{len(wrong)} cases or figures; {text}", *wrong]), figures)
    return Outcome(PASS, text, figures)


# --------------------------------------------------------------------- fake: time and memory

FAKE_RANKS = 8
ROUNDS, STEPS_PER_TURN, WARMUP = 5, 3, 2


def wrap_without_cpu(model: GPT, args: argparse.Namespace) -> nn.Module:
    device = next(model.parameters()).device
    return ShardedWrapper(
        model,
        process_group=group_without_cpu(device),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
    )


CONTENDERS: dict[str, Callable[[GPT, argparse.Namespace], nn.Module]] = {
    "flatshard": benchmark.wrap_flatshard,
    # What ranks tell each other at the end of backward lies on the GPU, as with NCCL alone.
    "flatshard, no CPU group": wrap_without_cpu,
    "fsdp1": benchmark.wrap_fsdp1,
    "fsdp2": benchmark.wrap_fsdp2,
    "plain": benchmark.leave_plain,
}


class Clock:
    """Moments of a step on the device; on CUDA events, which do not hold the step up."""

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


class Contender:
    """One implementation in training; knows its time and memory, others may be in the process."""

    def __init__(self, name: str, preset: Preset, device: torch.device) -> None:
        before = allocated(device)
        options = argparse.Namespace(strategy="FULL_SHARD", bf16=True, collectives="auto")
        self.device, self.clock = device, Clock(device)
        self.model = CONTENDERS[name](build_gpt(preset, device), options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = make_batch(preset, 0, device)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=name == "plain")
        for _ in range(WARMUP):
            self.step()
        self.clock.wait()
        gc.collect()
        self.bytes_between_steps = allocated(device) - before

    def step(self) -> None:
        with self.autocast:
            logits = self.model(self.batch[:, :-1])
        loss_of(logits, self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self) -> dict[str, Any]:
        """Seconds of a step on the device and on the host, and the peak of memory."""
        gc.collect()
        at_start = allocated(self.device)
        if self.clock.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        self.clock.wait()
        first = self.clock.now()
        for _ in range(STEPS_PER_TURN):
            self.step()
        last = self.clock.now()
        self.clock.wait()
        begin = time.perf_counter()
        self.step()  # alone: a full queue of kernels would hold the host up
        host_seconds = time.perf_counter() - begin
        self.clock.wait()
        peak = None
        if self.clock.is_cuda:
            of_others = at_start - self.bytes_between_steps
            peak = torch.cuda.max_memory_allocated() - of_others
        return {
            "seconds": self.clock.seconds(first, last) / STEPS_PER_TURN,
            "host_seconds": host_seconds,
            "peak_bytes": peak,
        }


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def preset_for(device: torch.device) -> Preset:
    if device.type == "cpu":
        return benchmark.PRESETS["tiny"]
    # All contenders are there at once, the plain one whole.
    fits = torch.cuda.get_device_properties(device).total_memory > 60 << 30
    return BILLION if fits else benchmark.PRESETS["gpt-120m"]


def part_fake(place: Place, args: argparse.Namespace) -> Outcome:
    device = torch.device("cuda", 0) if place.is_cuda else torch.device("cpu")
    preset = preset_for(device)
    deadline = time.monotonic() + 0.8 * args.limit
    pretend(device, FAKE_RANKS)
    warnings.simplefilter("ignore")  # the other wrappers' deprecations
    contenders, missing = build_contenders(preset, device)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for first in range(ROUNDS):
        # Each takes each place in the order: whoever follows a busy one may be slowed by it.
        names = list(contenders)
        for name in names[first % len(names) :] + names[: first % len(names)]:
            turns[name].append(contenders[name].turn())
        if time.monotonic() > deadline:
            break
    rows = summarize(turns, units=preset.layers + 1)
    lines = [f"{preset.layers} layers of width {preset.width}, rank 0 of {FAKE_RANKS}"]
    lines += [describe_row(name, row) for name, row in rows.items()]
    lines += [f"{name}: {why}" for name, why in missing.items()]
    # Only the plain model may be too large.
    failed = set(missing) - {"plain"}
    return Outcome(FAIL if failed else PASS, "\n".join(lines), {"rows": rows, "missing": missing})


def build_contenders(
    preset: Preset, device: torch.device
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Those that run, and why the others do not. The largest one comes last."""
    contenders, missing = {}, {}
    for name in CONTENDERS:
        try:
            contenders[name] = Contender(name, preset, device)
        except torch.cuda.OutOfMemoryError:
            missing[name] = "does not fit"
        except Exception as error:
            traceback.print_exc()
            missing[name] = one_line(error)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return contenders, missing


def summarize(turns: dict[str, list[dict[str, Any]]], units: int) -> dict[str, dict[str, Any]]:
    baseline = turns.get("fsdp1")
    rows = {}
    for name, of_name in turns.items():
        host = statistics.median(turn["host_seconds"] for turn in of_name)
        row = {
            "seconds": statistics.median(turn["seconds"] for turn in of_name),
            "host_seconds": host,
            "host_seconds_per_unit": host / units,
            "peak_bytes": of_name[-1]["peak_bytes"],
            "ratio": None,
        }
        if baseline:
            pairs = zip(of_name, baseline, strict=True)
            row["ratio"] = statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
        rows[name] = row
    return rows


def describe_row(name: str, row: dict[str, Any]) -> str:
    text = f"{name}: {1000 * row['seconds']:.1f} ms"
    if row["ratio"] is not None:
        text += f", {row['ratio']:.2f} x fsdp1"
    text += f", host {1000 * row['host_seconds']:.1f} ms"
    text += f" ({1e6 * row['host_seconds_per_unit']:.0f} us per unit)"
    return text + (f", {row['peak_bytes'] / 2**30:.2f} GiB" if row["peak_bytes"] else "")


# ----------------------------------------------------------------------- sync: the host runs ahead


class Stepper:
    """A wrapped GPT that can be trained a step at a time."""

    def __init__(
        self, preset: Preset, rank: int, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self.model = ShardedWrapper(
            build_gpt(preset, device),
            process_group=group,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = make_batch(preset, rank, device)

    def step(self) -> None:
        loss_of(self.model(self.batch[:, :-1]), self.batch).backward()
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextlib.contextmanager
def sync_debug_mode(device: torch.device, mode: str) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def places_of_warnings(containing: str) -> Iterator[list[str]]:
    """Where in the code such warnings come from, each place once."""
    places: list[str] = []

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        place = place_of(traceback.extract_stack()[:-1])
        if containing in str(message) and place not in places:
            places.append(place)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        yield places


def place_of(stack: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line of flatshard's; without one, the innermost of all."""
    frames = [frame for frame in stack if Path(frame.filename).name != "warnings.py"]
    package = Path(flatshard.__file__).parent
    ours = [frame for frame in frames if package in Path(frame.filename).parents]
    frame = (ours or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"


def find_syncs(rank: int, device: torch.device, place: Place, pretended: bool) -> list[str]:
    """Where a step made the host wait: every place that warned, and the one that raised."""
    stepper = Stepper(SMALL, rank, device, group_without_cpu(device) if pretended else None)
    for _ in range(WARMUP + 1):
        stepper.step()
    with (
        sync_debug_mode(device, "warn"),
        places_of_warnings("called a synchronizing") as found,
    ):
        stepper.step()
        stepper.step()
    try:
        with sync_debug_mode(device, "error"):
            stepper.step()
    except RuntimeError as error:
        if "called a synchronizing" not in str(error):
            raise
        found.append(f"raised at {place_of(traceback.extract_tb(error.__traceback__))}")
    return found


def part_sync(place: Place, args: argparse.Namespace) -> Outcome:
    pretended = place.ranks == 1
    if pretended:
        device = torch.device("cuda", 0) if place.is_cuda else torch.device("cpu")
        pretend(device, FAKE_RANKS)
        found, where = find_syncs(0, device, place, True), "collectives that move nothing"
    else:
        found, where = in_ranks(find_syncs, place, False)[0], place.describe()
    if not place.is_cuda:
        return Outcome(SKIP, f"{NO_GPU} to wait for; the steps themselves ran")
    if found:
        return Outcome(FAIL, f"{where}: the host waits at " + "; ".join(found), found)
    return Outcome(PASS, f"{where}: the host waits nowhere in forward, backward, clip and step")


# ------------------------------------------------- streams: who waits for whom, without other ranks

SLEEP_CYCLES = 2_000_000  # about a millisecond


def sleep(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)


class Queued:
    """What NCCL returns of a collective: streams wait for it, the host does not."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def is_completed(self) -> bool:
        return self.event.query()


class Finished:
    """A collective that was over when it began."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


class Together:
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


class PretendedCollectives:
    """Collectives over ranks that all have what this one, rank 0, has; on a stream of their own."""

    def __init__(self, device: torch.device, slow: bool = False) -> None:
        self.slow = slow
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.really_reduce = dist.all_reduce

    def queue(self, work: Callable[[], object]) -> Queued | Finished:
        if self.stream is None:
            work()
            return Finished()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if self.slow:
                sleep(self.stream.device)
            work()
        if not self.slow:
            torch.cuda.synchronize()
            return Finished()
        return Queued(self.stream)

    def all_gather(
        self, out: Tensor, shard: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        parts = out.chunk(group.size())
        work = self.queue(lambda: [part.copy_(shard) for part in parts])
        if not async_op:
            work.wait()
        return work

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: dist.ProcessGroup, **_: Any) -> Any:
        return self.queue(lambda: out.copy_(whole.chunk(group.size())[0]))

    def all_reduce(self, tensor: Tensor, *args: Any, **keywords: Any) -> Any:
        if not keywords.get("async_op"):
            return self.really_reduce(tensor, *args, **keywords)
        return self.queue(lambda: tensor.mul_(2).div_(2))  # the average, and it is written

    def exchange(self, out: Tensor, whole: Tensor, **keywords: Any) -> Any:
        return self.all_gather(out, whole.chunk(keywords["group"].size())[0], **keywords)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In the place of torch's, which move nothing."""
        inside = flatshard.collectives
        with contextlib.ExitStack() as stack:
            for owner, name, function in (
                (inside, "_all_gather_single", self.all_gather),
                (inside, "_reduce_scatter_single", self.reduce_scatter),
                (dist, "all_reduce", self.all_reduce),
                (dist, "all_to_all_single", self.exchange),
                (inside.Communicator, "_under_way", lambda _, work: [work]),
            ):
                stack.enter_context(mock.patch.object(owner, name, function))
            yield


class SingleRankCollectives(PretendedCollectives):
    """The same of a backend's own, in each of which this rank is the only one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        group = dist.new_group([0], backend=backend)
        assert isinstance(group, dist.ProcessGroup)
        self.alone, self.device = group, device
        self.gather = flatshard.collectives._all_gather_single
        self.reduce = flatshard.collectives._reduce_scatter_single
        # Of one rank both are the same, and gloo has no average.
        self.op = dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM

    def all_gather(
        self, out: Tensor, shard: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        if out.device != self.device:  # what ranks say to one another
            return super().all_gather(out, shard, group, async_op)
        parts = out.chunk(group.size())
        works = [self.gather(part, shard, group=self.alone, async_op=async_op) for part in parts]
        return self.begun(works) if async_op else None

    def begun(self, works: Sequence[Any]) -> Any:
        together = Together(works)
        if self.stream is None:  # gloo's works do not say that they are over
            together.wait()
            return Finished()
        return together

    def reduce_scatter(
        self,
        out: Tensor,
        whole: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
        **_: Any,
    ) -> Any:
        part = whole.chunk(group.size())[0]
        work = self.reduce(out, part, op=self.op, group=self.alone, async_op=async_op)
        return self.begun([work]) if async_op else None

    def all_reduce(self, tensor: Tensor, *args: Any, **keywords: Any) -> Any:
        if not keywords.get("async_op"):
            return self.really_reduce(tensor, *args, **keywords)
        keywords |= {"group": self.alone, "op": self.op}
        return self.begun([self.really_reduce(tensor, *args, **keywords)])


class Sleep(torch.autograd.Function):
    """The GPU pauses, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        sleep(x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        sleep(gradient.device)
        return gradient


class Layer(nn.Module):
    def __init__(self, width: int, slow: bool) -> None:
        super().__init__()
        self.linear, self.slow = nn.Linear(width, width), slow

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.linear(x))
        return Sleep.apply(x) if self.slow else x


STREAM_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OP", "HYBRID_SHARD")


def train_pretended(
    device: torch.device,
    strategy: str,
    offload: CPUOffload | None,
    collectives: PretendedCollectives,
    slow_computation: bool = False,
    mode: str = "auto",
) -> list[Tensor]:
    """This rank's shards before and after some steps."""
    width = 1024 if device.type == "cuda" else 8
    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer(width, slow_computation) for _ in range(6))).to(device)
    batch = torch.randn(64, width, generator=torch.Generator().manual_seed(1)).to(device)
    with collectives.installed():
        model = ShardedWrapper(
            layers,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, reduce_mode=mode),
            cpu_offload=offload,
            device_id=device if device.type == "cuda" else None,
            coalesce_bytes=0,
        )
        start = parts_of(model)
        # Steps that bfloat16 does not round away: parameters of before must make a difference.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for _ in range(4):
            (model(batch).float().square().sum() / len(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        end = parts_of(model)
    return [torch.cat([x.cpu().double() for x in one]) for one in (start, end)]


def parts_of(model: nn.Module) -> list[Tensor]:
    """Copies of what this rank holds; with NO_SHARD, parameters are plain ones."""
    return [
        getattr(p, "to_local", p.detach)().detach().flatten().clone() for p in model.parameters()
    ]


def offloads(place: Place) -> list[CPUOffload | None]:
    if not place.is_cuda:
        return [None]
    return [None, CPUOffload(offload_params=True), CPUOffload(offload_optimizer=True)]


def pretend_two_nodes(place: Place) -> torch.device:
    device = torch.device("cuda", 0) if place.is_cuda else torch.device("cpu")
    pretend(device, FAKE_RANKS)
    os.environ["LOCAL_WORLD_SIZE"] = str(FAKE_RANKS // 2)  # for HYBRID_SHARD
    return device


def name_of(strategy: str, offload: CPUOffload | None, *more: str) -> str:
    return ", ".join([strategy, *([] if offload is None else [offload.describe()]), *more])


def judge(figures: dict[str, float | str], place: Place) -> Outcome:
    """What became of training runs: how far each came from where it should be, or what failed."""
    wrong = [
        f"{case}: {x}" if isinstance(x, str) else f"{case}: {x:.1e} apart"
        for case, x in figures.items()
        if isinstance(x, str) or not x < 1e-3
    ]
    if wrong:
        text = "\n".join([f"{len(wrong)} of {len(figures)} differ or failed", *wrong])
        return Outcome(FAIL, text, figures)
    if not place.is_cuda:
        return Outcome(SKIP, f"{NO_GPU} with streams; the steps themselves ran", figures)
    worst = max(float(x) for x in figures.values())
    return Outcome(PASS, f"{len(figures)} cases, the worst {worst:.0e} apart", figures)


def distance(reference: Callable[[], list[Tensor]], run: Callable[[], list[Tensor]]) -> float | str:
    """How far a run ends from where another one ended, in terms of how far that went."""
    try:
        (start, expected), (_, actual) = reference(), run()
        return float((actual - expected).norm() / (expected - start).norm())
    except Exception as error:
        traceback.print_exc()
        return one_line(error)


def part_streams(place: Place, args: argparse.Namespace) -> Outcome:
    device = pretend_two_nodes(place)
    figures: dict[str, float | str] = {}
    for strategy in STREAM_STRATEGIES:
        for offload in offloads(place):
            train = functools.partial(train_pretended, device, strategy, offload)
            for kind, slow, slow_computation in (
                ("collectives", PretendedCollectives(device, slow=True), False),
                ("computation", PretendedCollectives(device), True),
            ):
                case = name_of(strategy, offload, f"slow {kind}")
                reference = functools.partial(train, PretendedCollectives(device))
                run = functools.partial(train, slow, slow_computation)
                figures[case] = distance(reference, run)
                print(f"{case}: {figures[case]}", flush=True)
    return judge(figures, place)


def part_single(place: Place, args: argparse.Namespace) -> Outcome:
    device = pretend_two_nodes(place)
    real = SingleRankCollectives(device)
    figures: dict[str, float | str] = {}
    for strategy in (*STREAM_STRATEGIES, "NO_SHARD"):
        for offload in offloads(place):
            for mode in ("auto", "fixed_order"):
                case = name_of(strategy, offload, mode)
                train = functools.partial(train_pretended, device, strategy, offload, mode=mode)
                reference = functools.partial(train, PretendedCollectives(device))
                figures[case] = distance(reference, functools.partial(train, real))
                print(f"{case}: {figures[case]}", flush=True)
    return judge(figures, place)


# ----------------------------------------------------------------- overlap: of kernels in a profile

Span = tuple[float, float]


def profile_step(rank: int, device: torch.device, place: Place, path: str) -> None:
    stepper = Stepper(MEDIUM if place.is_cuda else SMALL, rank, device, None)
    clock = Clock(device)
    for _ in range(WARMUP + 1):
        stepper.step()
    clock.wait()
    dist.barrier()
    if rank > 0:
        stepper.step()
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    if place.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        stepper.step()
        clock.wait()
    profiler.export_chrome_trace(path)


def kernels(trace: dict[str, Any]) -> tuple[list[Span], list[Span]]:
    """When, in microseconds, the collectives' kernels ran, and when all others did."""
    collectives, others = [], []
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            start = float(event["ts"])
            of_kind = collectives if "nccl" in event["name"].lower() else others
            of_kind.append((start, start + float(event["dur"])))
    return collectives, others


def union(spans: Iterable[Span]) -> list[Span]:
    """The same times in spans that do not touch, sorted."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in spans)


def overlap(first: Sequence[Span], second: Sequence[Span]) -> float:
    """How long both go on at once."""
    first, second = union(first), union(second)
    return length(first) + length(second) - length(union([*first, *second]))


def part_overlap(place: Place, args: argparse.Namespace) -> Outcome:
    if place.ranks == 1:
        return Outcome(SKIP, args.why_no_nccl)
    with tempfile.TemporaryDirectory() as folder:
        path = str(args.trace or f"{folder}/trace.json")
        in_ranks(profile_step, place, path)
        collectives, others = kernels(json.loads(Path(path).read_text()))
    if not place.is_cuda:
        return Outcome(SKIP, f"{NO_GPU} whose kernels overlap; the profiled step itself ran")
    if not collectives or not others:
        return Outcome(FAIL, f"{len(collectives)} kernels of NCCL, {len(others)} others in a step")
    busy, shared = length(union(collectives)), overlap(collectives, others)
    figures = {
        "collectives_us": busy,
        "compute_us": length(union(others)),
        "overlap_us": shared,
        "fraction": shared / busy,
        "ranks_share_gpu": place.shares_gpu,
    }
    text = (
        f"{place.describe()}: {100 * shared / busy:.0f} % of {busy / 1000:.1f} ms of NCCL overlap "
        f"with computation ({figures['compute_us'] / 1000:.1f} ms)"
    )
    if place.shares_gpu:
        text += "; the ranks take turns on the GPU, so NCCL's time holds waiting"
    return Outcome(PASS if shared > 0 else FAIL, text, figures)


# ------------------------------------------------------------------------------------------- parts


def add_up(rank: int, device: torch.device, place: Place) -> float:
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    return one.item()


def part_probe(place: Place, args: argparse.Namespace) -> Outcome:
    """Whether ranks can talk at all."""
    sums = in_ranks(add_up, place)
    return Outcome(PASS if sums == [place.ranks] * place.ranks else FAIL, f"sums {sums}")


PARTS: dict[str, Callable[[Place, argparse.Namespace], Outcome]] = {
    "nccl": part_ranks,
    "gloo": part_ranks,
    "fake": part_fake,
    "sync": part_sync,
    "streams": part_streams,
    "single": part_single,
    "overlap": part_overlap,
}
# Seconds; on a GPU most of them go into starting processes and loading libraries.
LIMITS_OF_PARTS = {
    "probe": 45,
    "nccl": 110,
    "gloo": 110,
    "fake": 150,
    "sync": 60,
    "streams": 75,
    "single": 75,
    "overlap": 75,
}


def one_line(error: BaseException) -> str:
    """The last line: of a rank's failure the message follows its traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    said = lines[-1] if isinstance(error, mp.ProcessRaisedException) else lines[0]
    return f"{type(error).__name__}: {said.strip()}"[:400]


def work(args: argparse.Namespace) -> None:
    """Run one part in this process, for the parent."""
    part = part_probe if args.worker == "probe" else PARTS[args.worker]
    place = Place(args.device, args.backend, args.ranks)
    try:
        outcome = part(place, args)
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(FAIL, one_line(error))
    args.out.write_text(json.dumps(dataclasses.asdict(outcome)))


def run_part(name: str, place: Place, args: argparse.Namespace, seconds: float) -> Outcome:
    """Run a part in processes of its own, none of which outlives its limit."""
    limit = min(LIMITS_OF_PARTS[name], seconds)
    if limit < 5:
        return Outcome(SKIP, "the --minutes are over")
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "outcome.json"), Path(folder, "log")
        command = [sys.executable, __file__, "--worker", name, "--out", str(out)]
        command += ["--device", place.device, "--backend", place.backend]
        command += ["--ranks", str(place.ranks), "--limit", str(limit)]
        command += ["--why-no-nccl", args.why_no_nccl, *(["--quick"] if args.quick else [])]
        command += ["--trace", str(args.trace)] if args.trace else []
        # All ranks are here, and the host's name may lead nowhere.
        loopback = "lo" if sys.platform == "linux" else "lo0"
        environment = {"GLOO_SOCKET_IFNAME": loopback, **os.environ}
        if place.backend == "nccl" and place.shares_gpu:
            environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, stdout=stream, stderr=stream, env=environment, start_new_session=True
            )
            try:
                process.wait(limit)
                ended = f"ended with exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                ended = f"not over after {limit:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
                process.wait()
        outcome = Outcome(**json.loads(out.read_text())) if out.exists() else Outcome(FAIL, ended)
        if outcome.result == FAIL:
            print(f"--- {name}, its log's end:\n{log.read_text()[-4000:]}", file=sys.stderr)
        return outcome


def place_of_part(name: str, args: argparse.Namespace) -> Place | None:
    """Where to run a part; None where it cannot."""
    device = "cuda" if args.gpus else "cpu"
    if name == "gloo":
        return Place(device, "gloo", args.ranks or (4 if args.gpus else 2))
    if name in ("fake", "streams", "single"):
        return Place(device, "fake", 1)
    if args.nccl_ranks:
        return Place("cuda", "nccl", args.nccl_ranks)
    if name == "nccl":
        return None
    if not args.gpus:
        return Place("cpu", "gloo", 2)
    return Place("cuda", "fake", 1)


def find_nccl(args: argparse.Namespace, left: Callable[[], float]) -> None:
    """Find out how many ranks NCCL can have here, and if none, why."""
    args.nccl_ranks, args.why_no_nccl = 0, NO_GPU
    if not args.gpus or not {"nccl", "sync", "overlap"} & set(args.parts):
        return
    if not dist.is_nccl_available():
        args.why_no_nccl = "this torch has no NCCL"
    elif args.gpus >= 2:
        args.nccl_ranks = args.ranks or min(args.gpus, 8)
    else:
        ranks = args.ranks or 4
        outcome = run_part("probe", Place("cuda", "nccl", ranks), args, left())
        if outcome.result == PASS:
            args.nccl_ranks = ranks
        else:
            args.why_no_nccl = f"NCCL cannot have {ranks} ranks on one GPU: {outcome.text}"


def show(outcomes: dict[str, Outcome]) -> None:
    print(f"\n{'part':8}  {'result':6}  figures")
    for name, outcome in outcomes.items():
        first, *others = outcome.text.splitlines() or [""]
        print(f"{name:8}  {outcome.result:6}  {first}")
        for line in others:
            print(f"{'':8}  {'':6}  {line}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; exits with 2 on a bad one."""
    parser = benchmark.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help="which, with commas between (all)")
    add("--minutes", type=float, default=8, help="for everything (8)")
    add("--ranks", type=int, default=0, help="on one GPU or the CPU (4, 2)")
    add("--quick", action="store_true", help="nccl, gloo: FULL_SHARD alone")
    add("--json", type=Path, metavar="PATH", help="write all figures there")
    add("--trace", type=Path, metavar="PATH", help="write the profile of `overlap` there")
    # How the script starts itself for a part.
    for name, kind in (("worker", str), ("device", str), ("backend", str), ("limit", float)):
        add(f"--{name}", type=kind, help=argparse.SUPPRESS)
    add("--out", type=Path, help=argparse.SUPPRESS)
    add("--why-no-nccl", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if args.minutes <= 0:
        parser.error(f"--minutes must be positive, got {args.minutes}")
    if not args.worker and (args.ranks < 0 or args.ranks == 1):
        parser.error(f"--ranks must be at least 2, got {args.ranks}")
    for path in (args.json, args.trace):
        if path and not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}")
    args.gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return args


def main() -> None:
    args = parse_args()
    if args.worker:
        work(args)
        return
    end = time.monotonic() + 60 * args.minutes

    def left() -> float:
        return end - time.monotonic()

    find_nccl(args, left)
    outcomes: dict[str, Outcome] = {}
    for name in [part for part in PARTS if part in args.parts]:
        place = place_of_part(name, args)
        begin = time.monotonic()
        if place is None:
            outcomes[name] = Outcome(SKIP, args.why_no_nccl)
        else:
            outcomes[name] = run_part(name, place, args, left())
        seconds = time.monotonic() - begin
        print(f"{name}: {outcomes[name].result} ({seconds:.0f} s)", flush=True)
    show(outcomes)
    if args.json:
        machine = {"torch": torch.__version__, "gpus": args.gpus, "nccl_ranks": args.nccl_ranks}
        if args.gpus:
            machine["gpu"] = torch.cuda.get_device_name(0)
        parts = {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()}
        args.json.write_text(json.dumps({"machine": machine, "parts": parts}, indent=2) + "\n")
    if any(outcome.result == FAIL for outcome in outcomes.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
