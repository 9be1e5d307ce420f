"""Parts `nccl` and `gloo`: training on real ranks gives the results of the unwrapped model."""

import argparse
import contextlib
import dataclasses
import os
import tempfile
import time
import traceback
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from benchmark import make_batch
from lib.gpt import GPT, Block, Preset, loss_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import CPUOffload, MixedPrecision, ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from gpu_checks.places import FAIL, PASS, Outcome, Place, in_ranks, one_line
from gpu_checks.training import SMALL

STEPS = 5
LEARNING_RATE = 1e-3
# AdamW's epsilon, larger than rounding errors. Some gradients, such as the gradient of a key's
# bias, are zero except for rounding. With a smaller epsilon, AdamW would scale these gradients up
# to whole steps, and results would depend on the order of summation.
EPSILON = 1e-5
MAX_NORM = 0.5  # smaller than the gradients' norms, so that clipping has an effect


@dataclass(frozen=True)
class Limits:
    """Largest difference allowed between a training run and the unwrapped model's run."""

    loss: float  # relative difference of the losses
    norm: float  # relative difference of the gradients' norms
    distance: float  # distance of the parameters, relative to their change in training


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
"""Variants that run only on accelerators."""


def cases(ranks: int, quick: bool, is_cuda: bool) -> list[Case]:
    strategies = ["FULL_SHARD"] if quick else ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    if ranks >= 4 and ranks % 2 == 0:
        strategies += ["HYBRID_SHARD"]
    variants = VARIANTS + OFFLOAD if is_cuda else VARIANTS
    return [Case(s, p, v) for s in strategies for p in LIMITS for v in variants]


class Model(GPT):
    """The benchmark's GPT, with activation checkpoints and a layer that a rank may leave unused."""

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


@dataclass
class Trained:
    losses: list[Tensor]
    norms: list[Tensor]
    parameters: dict[str, Tensor]


def train_plain(case: Case, ranks: int, device: torch.device) -> Trained:
    """Train the unwrapped model on the batches of all ranks.

    In fp32, if all ranks use the same layers, the batches are joined into one. In bf16, each rank's
    batch has a separate backward, because rounding depends on which gradients are added up first.
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
    """Train the wrapped model on this rank's batches. Returned losses are averages over ranks."""
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
    """Differences between two runs, as ``Limits``."""

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
    """Whether ``is_so`` is True on any rank. Collective."""
    told = torch.tensor(float(is_so), device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told.item())


def check_cases(
    rank: int, device: torch.device, place: Place, quick: bool, seconds: float
) -> list[list[Any]]:
    """Train the cases that can begin within ``seconds``.

    Returns name, precision and outcome of each case. The outcome is the deviations on rank 0, or
    the text of an error. After a case that fails on all ranks, the next case runs.
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(max(place.ranks // 2, 1))  # two nodes for HYBRID_SHARD
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
        # If only some ranks failed, the other ranks wait until the group's timeout ends this part.
        if any_rank(problem is not None, device):
            outcome: Any = problem or "another rank failed"
        elif rank == 0 and actual is not None:
            start = {name: p.detach() for name, p in make_model(device).named_parameters()}
            deviations = compare(actual, train_plain(case, place.ranks, device), start)
            outcome = dataclasses.asdict(deviations)
        else:
            outcome = {}
        if rank == 0:  # if the part is killed, the log shows the finished cases
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
        # `not x <= limit` also finds NaN.
        wrong += [f"{name}: {k} {x:.1e}" for k, x in deviations.items() if not x <= limits[k]]
        worst[precision] = Limits(**{k: max(x, so_far[k]) for k, x in deviations.items()})
    late = "" if len(found) == all_of_them else f" of {all_of_them}, no time for the others"
    text = f"{place.describe()}: {len(found)} cases{late}; " + "; ".join(
        f"{precision} loss {one.loss:.0e}, norm {one.norm:.0e}, parameters {one.distance:.0e}"
        for precision, one in worst.items()
    )
    figures = [{"case": name, "outcome": outcome} for name, _, outcome in found]
    if wrong:
        return Outcome(FAIL, "\n".join([f"{len(wrong)} cases or figures; {text}", *wrong]), figures)
    return Outcome(PASS, text, figures)
