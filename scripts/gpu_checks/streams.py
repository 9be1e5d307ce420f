"""Parts `streams` and `single`: whether streams wait for one another correctly, on one rank."""

import argparse
import functools
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard import CPUOffload, MixedPrecision, ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from gpu_checks.places import (
    FAIL,
    FAKE_RANKS,
    NO_GPU,
    PASS,
    SKIP,
    Outcome,
    Place,
    one_line,
    simulate,
)
from gpu_checks.simulated import SimulatedCollectives, SingleRankCollectives, sleep


class Sleep(torch.autograd.Function):
    """Makes the GPU pause in forward and in backward."""

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


def train_simulated(
    device: torch.device,
    strategy: str,
    offload: CPUOffload | None,
    collectives: SimulatedCollectives,
    slow_computation: bool = False,
    mode: str = "auto",
) -> list[Tensor]:
    """Train some steps; returns this rank's shards before and after."""
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
        # With this learning rate, bfloat16 does not round the steps away. So a forward that used
        # parameters from before a step would give other results.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for _ in range(4):
            (model(batch).float().square().sum() / len(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        end = parts_of(model)
    return [torch.cat([x.cpu().double() for x in one]) for one in (start, end)]


def parts_of(model: nn.Module) -> list[Tensor]:
    """Copies of this rank's shards; with NO_SHARD, of the plain parameters."""
    return [
        getattr(p, "to_local", p.detach)().detach().flatten().clone() for p in model.parameters()
    ]


def offloads(place: Place) -> list[CPUOffload | None]:
    if not place.is_cuda:
        return [None]
    return [None, CPUOffload(offload_params=True), CPUOffload(offload_optimizer=True)]


def simulate_two_nodes(place: Place) -> torch.device:
    device = torch.device("cuda", 0) if place.is_cuda else torch.device("cpu")
    simulate(device, FAKE_RANKS)
    os.environ["LOCAL_WORLD_SIZE"] = str(FAKE_RANKS // 2)  # for HYBRID_SHARD
    return device


def name_of(strategy: str, offload: CPUOffload | None, *more: str) -> str:
    return ", ".join([strategy, *([] if offload is None else [offload.describe()]), *more])


def judge(figures: dict[str, float | str], place: Place) -> Outcome:
    """Outcome of a part from each case's relative distance or error text."""
    wrong = [
        f"{case}: {x}" if isinstance(x, str) else f"{case}: {x:.1e} apart"
        for case, x in figures.items()
        if isinstance(x, str) or not x < 1e-3
    ]
    if wrong:
        text = "\n".join([f"{len(wrong)} of {len(figures)} differ or failed", *wrong])
        return Outcome(FAIL, text, figures)
    if not place.is_cuda:
        return Outcome(
            SKIP, f"{NO_GPU} with streams; the steps ran, with threads instead of streams", figures
        )
    worst = max(float(x) for x in figures.values())
    return Outcome(PASS, f"{len(figures)} cases, the worst {worst:.0e} apart", figures)


def distance(reference: Callable[[], list[Tensor]], run: Callable[[], list[Tensor]]) -> float | str:
    """Distance between the results of two runs, relative to the change that `reference` made.

    Returns the text of the error if a run raises.
    """
    try:
        (start, expected), (_, actual) = reference(), run()
        return float((actual - expected).norm() / (expected - start).norm())
    except Exception as error:
        traceback.print_exc()
        return one_line(error)


def part_streams(place: Place, args: argparse.Namespace) -> Outcome:
    device = simulate_two_nodes(place)
    figures: dict[str, float | str] = {}
    for strategy in STREAM_STRATEGIES:
        for offload in offloads(place):
            train = functools.partial(train_simulated, device, strategy, offload)
            for kind, slow, slow_computation in (
                ("collectives", SimulatedCollectives(device, slow=True), False),
                ("computation", SimulatedCollectives(device), True),
            ):
                if slow_computation and not place.is_cuda:
                    continue  # on the CPU, nothing runs in parallel to the computation
                case = name_of(strategy, offload, f"slow {kind}")
                reference = functools.partial(train, SimulatedCollectives(device))
                run = functools.partial(train, slow, slow_computation)
                figures[case] = distance(reference, run)
                print(f"{case}: {figures[case]}", flush=True)
    return judge(figures, place)


def part_single(place: Place, args: argparse.Namespace) -> Outcome:
    device = simulate_two_nodes(place)
    real = SingleRankCollectives(device)
    figures: dict[str, float | str] = {}
    for strategy in (*STREAM_STRATEGIES, "NO_SHARD"):
        for offload in offloads(place):
            for mode in ("auto", "fixed_order"):
                case = name_of(strategy, offload, mode)
                train = functools.partial(train_simulated, device, strategy, offload, mode=mode)
                reference = functools.partial(train, SimulatedCollectives(device))
                figures[case] = distance(reference, functools.partial(train, real))
                print(f"{case}: {figures[case]}", flush=True)
    # Destroy the group, because the process would wait for the group's threads at its end.
    dist.destroy_process_group(real.alone)
    return judge(figures, place)
