"""Models, training steps and clocks that several parts use."""

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmark import GPT, Block, Preset, make_batch
from torch import Tensor

from flatshard import MixedPrecision, ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy

SMALL = Preset(layers=2, width=64, heads=4, vocabulary=128, sequence=16)
BILLION = Preset(layers=24, width=1792, heads=14, vocabulary=32768, sequence=1024, batch=4)
MEDIUM = Preset(layers=8, width=2048, heads=16, vocabulary=8192, sequence=1024, batch=4)
WARMUP = 2


def build_gpt(preset: Preset, device: torch.device) -> GPT:
    """Build the model directly on `device`: a CPU would take long to draw a billion numbers."""
    torch.manual_seed(0)
    with device:
        return GPT(preset)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


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


class Stepper:
    """A wrapped GPT, trained one step per call of `step`."""

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
