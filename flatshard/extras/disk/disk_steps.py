"""Optimizer steps a part at a time, over what lives on a disk.

An optimizer steps all its parameters in one call. Before that call, those whose state is kept on a
disk are stepped by themselves, some megabytes at a time; each time, state that the optimizer has
made goes to the disk, and the pages are given back. The call itself steps the others.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatshard.extras.disk import disk
from flatshard.extras.disk.disk import state_disk
from flatshard.optimizer.step import StepPart, step_parts
from flatshard.optimizer.stepper import (
    TORCHS_OWN,
    OptimizerExtension,
    extensions,
    state_to_target,
    step_groups,
)
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_range, untraced

# Parameter bytes from which a part is full. With Adam, four times as much is in memory.
_PART_BYTES = 8 << 20


def _has_grad(param: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return param.grad is not None


class DiskSteps(OptimizerExtension):
    """Steps parameters with state on a disk before the call that steps the other parameters."""

    def step_first(self, optimizer: torch.optim.Optimizer) -> Iterable[int]:
        parts = _plan_parts(optimizer)
        for part in parts:
            disk.fetch(*_tensors(optimizer, part.params))
            step_parts(optimizer, [part])
        return {id(param) for part in parts for param in part.params}

    def after_part(self, optimizer: torch.optim.Optimizer, params: Sequence[Any]) -> None:
        _page_out(optimizer, params)

    def before_backward(self, optimizer: torch.optim.Optimizer) -> None:
        _reserve(optimizer, before_backward=True)


@untraced
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        _page_out(optimizer, group["params"])


def _plan_parts(optimizer: torch.optim.Optimizer) -> list[StepPart]:
    """Parts to step one at a time, before the call that steps the other parameters.

    Raises ``OffloadError`` if there is no room for state; nothing was stepped.
    """
    parts: list[StepPart] = []
    for group in optimizer.param_groups:
        shard, nbytes = None, 0
        for param in group["params"]:
            if state_disk(param) is None or not _has_grad(param):
                continue
            # Neighbours stay together: they are stepped as one.
            own = getattr(param, "flat", param)
            if shard is None or (own is not shard and nbytes >= _PART_BYTES):
                parts.append(StepPart(optimizer, group, []))
                nbytes = 0
            shard = own
            parts[-1].params.append(param)
            nbytes += local_range(param).nbytes
    return parts if parts and _reserve(optimizer) else []


# ------------------------------------------------------------ pages


def _page_out(optimizer: torch.optim.Optimizer, params: Sequence[Any]) -> None:
    """Put the state of parameters that were stepped where it is kept, and give pages back."""
    for param in params:
        storage = state_disk(param)
        if storage is not None and not isinstance(param, FlatShardTensor):
            # That of a sharded parameter is there since it was made.
            state_to_target(optimizer.state.get(param, {}), param.shape, storage)
    disk.release(*_tensors(optimizer, params))


def _tensors(optimizer: torch.optim.Optimizer, params: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors that a step of ``params`` touches; only of those with state on the disk."""
    for param in params:
        if state_disk(param) is None:
            continue
        with torch._C.DisableTorchFunctionSubclass():
            grad = param.grad
        values = [param, *optimizer.state.get(param, {}).values()]
        if type(grad) in (Tensor, FlatShardTensor):  # a consumed gradient has no memory
            values.append(grad)
        yield from (local_range(value) for value in values if isinstance(value, Tensor))


# ------------------------------------------------------------ room for state


def _reserve(optimizer: torch.optim.Optimizer, *, before_backward: bool = False) -> bool:
    """Reserve room for state that is still to be made; says whether steps can be in parts.

    Before a backward, parameters count that are still to get a gradient. Raises ``OffloadError``
    if the disk is full; nothing was stepped.
    """
    if inspect.unwrap(type(optimizer).step) not in TORCHS_OWN:
        return False  # others may count their steps somewhere
    # What an optimizer keeps is known when it has made it, which is too late to find that a disk
    # is full: some parameters would be stepped and others not.
    needed: Counter[Any] = Counter()
    for group in optimizer.param_groups:
        kept = [param for param in group["params"] if state_disk(param) is not None]
        stepped = [
            one for one in kept if (one.requires_grad if before_backward else _has_grad(one))
        ]
        new = [param for param in stepped if param not in optimizer.state]
        per_element = _bytes_per_element(optimizer, group, new[0]) if new else 0
        if per_element is None:
            return False
        for param in stepped:
            needed[state_disk(param)] += _bytes_to_come(optimizer, param, per_element)
    name = type(optimizer).__name__
    for storage, nbytes in needed.items():
        storage.reserve(max(0, nbytes - storage.reserved_bytes), f"the state of {name}")
    return True


def _bytes_to_come(optimizer: torch.optim.Optimizer, param: Any, per_element: int) -> int:
    """Bytes of the files that one parameter's state still needs."""
    if param not in optimizer.state:
        nbytes = local_range(param).numel() * per_element
        return disk.rounded(nbytes) if per_element else 0
    # State that was loaded is in memory until the next step.
    values = optimizer.state[param].values()
    loaded = [local_range(value) for value in values if isinstance(value, Tensor) and value.dim()]
    return sum(disk.rounded(value.nbytes) for value in loaded if not disk.is_on_disk(value))


def _bytes_per_element(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor
) -> int | None:
    """Bytes of state per element; None: a step changes the group, so it cannot be divided."""
    probe = nn.Parameter(torch.zeros(2, dtype=param.dtype))
    probe.grad = torch.zeros_like(probe)
    # The optimizer itself steps the probe: how to construct a second one is not known.
    try:
        with torch.no_grad():
            changed = step_groups(optimizer, [{**group, "params": [probe]}])
    finally:
        state = optimizer.state.pop(probe, {})
    if changed is not None:
        return None
    return sum(
        value.element_size()
        for value in state.values()
        if isinstance(value, Tensor) and value.shape == probe.shape
    )


# From the first model on that keeps something on a disk, in the steps of all optimizers.
extensions.append(DiskSteps())
register_optimizer_step_post_hook(_after_step)  # after users' hooks
