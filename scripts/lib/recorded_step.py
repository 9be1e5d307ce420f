"""Memory and times of one training step, for tutorials/mnist.py."""

import contextlib
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import TensorDataset

from flatshard import ShardedWrapper
from lib.rank_memory import held_bytes, memory_report

Sample = tuple[float, int, int]
"""Seconds since the step began; from then on, bytes of unsharded parameters and of gradients."""


class GradientSamples:
    """Samples the memory of a DDP model's gradients whenever a gradient is ready.

    DistributedDataParallel keeps the memory of gradients in buckets, also while `.grad` is None.
    So the samples count memory, not `.grad`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.samples: list[Sample] = []
        self._params = list(model.parameters())
        self._memory: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, int] = {}
        self._began = 0.0
        for param in self._params:
            param.register_post_accumulate_grad_hook(self.look)

    def begin(self) -> None:
        self.samples = []
        self._began = time.perf_counter()
        self.look()

    def look(self, *_: Any) -> None:
        for storage in (p.grad.untyped_storage() for p in self._params if p.grad is not None):
            self._memory[storage.data_ptr()] = StorageWeakRef(storage)
            self._sizes[storage.data_ptr()] = storage.nbytes()
        alive = (at for at, memory in self._memory.items() if not memory.expired())
        held = sum(self._sizes[at] for at in alive)
        self.samples.append((time.perf_counter() - self._began, 0, held))


def record_step(
    model: nn.Module,
    dataset: TensorDataset,
    optimizer: torch.optim.Optimizer,
    batch_size: int,
    device: torch.device,
) -> dict[str, Any]:
    """Trains a few more steps, and returns memory and times of this rank's fastest step.

    `samples` has bytes over time. `ranges` has the times of computing and of collectives.
    """
    images, labels = (part[:batch_size].to(device) for part in dataset.tensors)
    sharded = isinstance(model, ShardedWrapper)
    gradients = None if sharded else GradientSamples(model)
    steps: list[dict[str, Any]] = []
    model.train()
    with model.record_steps() if sharded else contextlib.nullcontext() as reports:
        for _ in range(8):
            optimizer.zero_grad()
            start = time.perf_counter()
            if gradients is not None:
                gradients.begin()
            output = model(images)
            forward_end = time.perf_counter() - start
            F.nll_loss(output, labels, reduction="sum").backward()
            backward_end = time.perf_counter() - start
            optimizer.step()
            step_end = time.perf_counter() - start
            ends = {"forward_end": forward_end, "backward_end": backward_end, "step_end": step_end}
            steps.append({**ends, "samples": [] if gradients is None else gradients.samples})
    # Choose the fastest step, in which other programs used the machine least. Skip the first step,
    # which also fills caches.
    number = min(range(1, len(steps)), key=lambda number: steps[number]["step_end"])
    step, memory = steps[number], memory_report(model, optimizer)
    if not sharded:
        return {**memory, **step, "ranges": [], "moved_bytes": 2 * held_bytes(model.parameters())}
    report = reports[number]
    samples = [tuple(one) for one in report.memory if one.seconds <= step["backward_end"]]
    # After their reduction, the gradients are in `.grad`, and no longer in the recorded samples.
    reduced = samples.pop()[0] if samples[-1][1:] == (0, 0) else step["backward_end"]
    samples.append((reduced, 0, memory["gradient_bytes"]))
    ranges = [
        (one.kind.value, "" if one.unit is None else report.units[one.unit].name, *one[2:])
        for one in report.ranges
    ]
    moved = {"samples": samples, "ranges": ranges, "moved_bytes": report.moved_bytes}
    return {**memory, **step, **moved}
