"""A training script for DistributedDataParallel. ``FAULT`` plants a fault into flatshard.

The faults are those of FAULTS: the test that reads this list runs the script once with each.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatshard.comm.communicator import Communicator
from flatshard.engine.buffer_sync import BufferSync
from flatshard.engine.forward import Forward
from flatshard.engine.gather import ParamGather
from flatshard.engine.grad_reduce import GradReduce
from flatshard.optimizer.adapter import BucketAdapter

STEPS = 2


def _replace(owner: Any, name: str, by: Callable[..., Any]) -> None:
    """Replace a method by a function, whose first argument is the method."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: by(method, *args, **kwargs))


def _reduced(change: Callable[[Tensor], Any]) -> None:
    """Change the result of each reduction of gradients."""

    @torch.no_grad()
    def changed(finish: Any, self: Any) -> Any:
        out = finish(self)
        return out.copy_(change(out))

    _replace(GradReduce, "finish", changed)


def _gathered(change: Callable[[Tensor], Any]) -> None:
    """Change the buffer of each all-gather."""

    @torch.no_grad()
    def changed(finish: Any, self: Any, buffer: Tensor) -> None:
        finish(self, buffer)
        buffer.copy_(change(buffer.clone()))

    _replace(ParamGather, "finish", changed)


class _Late:
    """Returns the tensor of the last call with the same size."""

    def __init__(self) -> None:
        self.last: dict[int, Tensor] = {}

    def __call__(self, new: Tensor) -> Tensor:
        old = self.last.get(new.numel(), new)
        self.last[new.numel()] = new.clone()
        return old


def _on_rank_1(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: change(tensor) if dist.get_rank() == 1 else tensor


def _zero_1_percent(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[::100] = 0
    return changed


def _local_norm() -> None:
    def local(reduce: Any, self: Any, values: Tensor, op: str, *, op_name: str) -> Any:
        return values if "norm" in op_name else reduce(self, values, op, op_name=op_name)

    _replace(Communicator, "reduce_scalars", local)


def _draw_before_forward() -> None:
    _replace(Forward, "before_module", lambda before, *args: (torch.rand(1), before(*args))[1])


def _decay_everything() -> None:
    def decayed(swap_in: Any, self: Any, optimizer: Any, groups: Any, *args: Any) -> Any:
        for group in groups:
            group["weight_decay"] = 0.1
        return swap_in(self, optimizer, groups, *args)

    _replace(BucketAdapter, "swap_in", decayed)


def _no_broadcast() -> None:
    BufferSync.is_due = property(lambda self: False, lambda self, value: None)  # type: ignore


FAULTS: dict[str, tuple[str, Callable[[], None]]] = {
    # name: kind of the first tensor that differs, function that plants the fault
    "gradients are sums": ("gradient", lambda: _reduced(lambda out: out * 2)),
    "gradients are averaged twice": ("gradient", lambda: _reduced(lambda out: out / 2)),
    "gradients of the last step": ("gradient", lambda: _reduced(_Late())),
    "gradients summed in bfloat16": ("gradient", lambda: _reduced(lambda out: out.bfloat16())),
    "one per cent of a message lost": ("gradient", lambda: _reduced(_zero_1_percent)),
    "shard shifted by one": ("gradient", lambda: _reduced(lambda out: out.roll(1))),
    "one rank's shard is scaled": ("gradient", lambda: _reduced(_on_rank_1(lambda x: x * 1.001))),
    "weights of the last step": ("output", lambda: _gathered(_Late())),
    "shards swapped": ("output", lambda: _gathered(lambda x: x.roll(x.numel() // 2))),
    "weights in bfloat16": ("output", lambda: _gathered(lambda x: x.bfloat16())),
    "buffers not broadcast": ("buffer", _no_broadcast),
    "other random numbers": ("output", _draw_before_forward),
    "weight decay on biases": ("value", _decay_everything),
    "clipped by a local norm": ("gradient at the step", _local_norm),
}


def main() -> None:
    if fault := os.environ.get("FAULT"):
        FAULTS[fault][1]()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        *(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)),
    )
    model = DistributedDataParallel(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
    torch.manual_seed(100 + rank)
    for _ in range(STEPS):
        numbers = torch.rand(8, 16)
        loss = (model(numbers) - numbers.sort().values).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
