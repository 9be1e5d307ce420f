"""``Recorder``: what one rank computes in each step, small enough to keep for every tensor.

[Note: sketch]
A rank records a *sketch* of each tensor: each element is multiplied by a pseudo-random sign, and
the element with index i is added to number i modulo 256. So a tensor of up to 256 elements is
recorded whole. The sketch of a difference is the difference of the sketches, and the norm of this
difference is close to the norm of the tensors' difference. Signs notice swapped elements. The
sketches of ranges add up: a sharded tensor, of which each rank records its own range, can be
compared with a full one. So recording needs no communication: if only one rank steps an optimizer,
it does not wait for the others.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import random
import resource
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import optimizer as steps
from torch.utils._pytree import tree_leaves, tree_map

from flatshard.extras import program_line
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_grad
from flatshard.units.layout import memory_order

Key = tuple[int, str, str]  # step, kind of tensor, name
_Named = Iterable[tuple[str, Tensor]]
_SIZE, _CHUNK = 256, 1 << 16


class Sketch(NamedTuple):
    """A sketch of this rank's range of a tensor, see [Note: sketch].

    The range of an unsharded tensor is the whole tensor. ``shape`` is the full tensor's.
    """

    shape: tuple[int, ...]
    eps: float  # of the dtype; 0 for integers
    range: tuple[int, int]  # first index and number of elements, in memory order
    sums: Tensor


@dataclass
class Record:
    """What a rank has recorded, and how its run ended."""

    failure: str = ""
    failed_at: float = math.inf  # if several ranks fail, the first one is the cause
    events: dict[Key, Sketch | None] = field(default_factory=dict)  # None: no gradient
    lines: dict[Key, str] = field(default_factory=dict)  # of the program
    remarks: Counter[tuple[str, str]] = field(default_factory=Counter)  # line, what it does
    costs: list[tuple[float, int, int]] = field(default_factory=list)  # see `Recorder._add_costs`

    def write(self, file: Path) -> None:
        """Write the record into a file, of which nobody reads a part."""
        torch.save(self, part := file.with_suffix(".part"))
        part.rename(file)


@torch.no_grad()
def sketch(tensor: Tensor, owner: Tensor) -> Sketch:
    """Return the sketch of a tensor. ``owner``: the parameter if it is a gradient, or itself."""
    if isinstance(owner, FlatShardTensor):
        shape, offset = owner.spec.shape, owner.spec.offset
        flat = owner.local.detach() if tensor is owner else local_grad(tensor, owner.spec)
    else:
        if tensor.is_sparse:  # an input may be too large as a dense tensor
            tensor = tensor.coalesce().values() if tensor is owner else tensor.to_dense()
        shape, offset = tuple(tensor.shape), 0
        order = memory_order(tensor if owner.is_sparse else owner)
        flat = tensor.detach().permute(order).reshape(-1)
    if flat.is_complex():
        shape, offset, flat = (*shape, 2), 2 * offset, torch.view_as_real(flat).reshape(-1)
    sums, at = torch.zeros(_SIZE, dtype=torch.float64, device=flat.device), offset
    for part in flat.split(_CHUNK):
        index = torch.arange(at, at := at + part.numel(), device=part.device)
        signs = 1 - 2 * ((index * 0x9E3779B97F4A7C1 >> 40) & 1)
        sums.index_add_(0, index % _SIZE, part.double().nan_to_num(1e4, 3e4, -3e4) * signs)
    eps = torch.finfo(flat.dtype).eps if flat.is_floating_point() else 0.0
    return Sketch(shape, eps, (offset, flat.numel()), sums.cpu())


class Recorder:
    """Records the steps of one rank."""

    def __init__(self, options: argparse.Namespace, file: Path, *, perturbs: bool) -> None:
        """Record ``options.steps`` steps of each optimizer, then end the process.

        ``perturbs``: change the weights by one unit in the last place before the first forward.
        """
        self.options, self._file, self._perturbs, self.record = options, file, perturbs, Record()
        self.names: dict[Tensor, str] = {}  # of parameters of wrapped models
        self._models: dict[Any, str] = {}  # and beginnings of their tensors' names
        self._fresh: list[nn.Module] = []  # models whose weights will be changed
        self._counts: Counter[Any] = Counter()  # of optimizers' steps
        self._step = 1  # that runs now
        self._depth = 0  # of optimizer steps that call another optimizer's step
        self._aside, self._baseline = 0.0, _resident()
        self._add_costs()
        if perturbs:
            _compute_norms_in_float64()
        steps.register_optimizer_step_pre_hook(self._before_step)
        steps.register_optimizer_step_post_hook(self._after_step)
        torch.autograd.backward = functools.partial(self._backward, torch.autograd.backward)

    def end(self, failure: str = "", frame: FrameType | None = None) -> NoReturn:
        """Write the record, and end the process. ``frame``: the innermost frame of a failure."""
        if failure:
            line = program_line(frame)
            self.record.failure = failure + f"\n  at {line}" * bool(line)
            self.record.failed_at = time.time()
        self.record.write(self._file)
        sys.stdout.flush()
        os._exit(bool(failure))  # exit handlers may wait for other ranks

    def remark(self, what: str) -> None:
        """Count what the program does in its current line."""
        self.record.remarks[program_line(sys._getframe()), what] += 1

    def add_model(self, model: Any) -> None:
        """Record the initial values of a wrapped model."""
        self._models[model] = f"model {len(self._models) + 1}: " if self._models else ""
        params = self._named(model, model.named_parameters())
        self.names |= {param: name for name, param in params}
        self._add("initial value", params, 0)
        self._fresh += [model] * self._perturbs

    def forward(self, model: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a wrapped model's forward; record inputs and outputs."""
        while self._fresh:
            _perturb(self._fresh.pop())
        if self.options.exact:
            args, kwargs = tree_map(_as_double, (args, kwargs))
        self._add_all("input", model, (args, kwargs))
        out = forward(*args, **kwargs)
        self._add_all("output", model, out)
        return out

    def _backward(self, backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        is_inner = torch._C._current_graph_task_id() >= 0  # checkpointing, in a backward
        losses = [one for one in tree_leaves(tensors) if isinstance(one, Tensor)]
        if len(losses) == 1 and losses[0].numel() == 1 and not is_inner:
            self._add("loss", [("loss", losses[0])])
        backward(tensors, *args, **kwargs)
        # Record averaged gradients before the program clips or scales them, the last first.
        if not is_inner and all(one.require_backward_grad_sync for one in self._models):
            self._add("gradient", [(name, one) for one, name in reversed(self.names.items())])

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth == len(args) == 1 and not kwargs:  # a closure will compute the gradients
            self._add("gradient at the step", self._params(optimizer), self._counts[optimizer] + 1)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        params, most = self._params(optimizer), self.options.steps
        self._counts[optimizer] += 1
        step = self._counts[optimizer]
        self._add("value", params, step)
        for model in self._models:
            self._add("buffer", self._named(model, model.named_buffers()), step)
        self._add("random generator", _generators(), step)
        if step == self._step:  # the first optimizer that makes this step
            self._step += 1
            self._add_costs()
        if min(self._counts.values()) >= most or step >= 3 * most:
            self.end()

    def _params(self, optimizer: Any) -> list[tuple[str, Tensor]]:
        kind = type(optimizer).__name__
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return [(self.names.get(p, f"{kind}, parameter {n}"), p) for n, p in enumerate(params)]

    def _named(self, model: nn.Module, tensors: _Named) -> list[tuple[str, Tensor]]:
        """Return tensors with their names in the unwrapped model."""
        named = [([part for part in name.split(".") if part != "module"], t) for name, t in tensors]
        return [(self._models[model] + ".".join(parts), tensor) for parts, tensor in named]

    def _add_all(self, kind: str, model: Any, values: Any) -> None:
        where = (
            "" if torch.is_grad_enabled() else f", {program_line(sys._getframe())}"
        )  # for lone calls
        tensors = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
        prefix = self._models.get(model, "a copy: ")
        self._add(kind, [(f"{prefix}{kind} {n}{where}", one) for n, one in enumerate(tensors)])

    def _add(self, kind: str, tensors: _Named, step: int | None = None) -> None:
        """Record tensors of one kind, or if these are gradients, the gradients of parameters."""
        began, line = time.perf_counter(), program_line(sys._getframe())
        step = self._step if step is None else step
        for name, owner in tensors:
            key, count = (step, kind, name), 1
            while key in self.record.events:
                key = (step, kind, f"{name} ({(count := count + 1)})")
            tensor = owner.grad if kind.startswith("gradient") else owner
            self.record.events[key] = None if tensor is None else sketch(tensor, owner)
            self.record.lines[key] = line
        self._aside += time.perf_counter() - began

    def _add_costs(self) -> None:
        """Record the time without recording, the peak memory, and the bytes written until now.

        Memory is torch's on a GPU, otherwise that of the process, without imports. Bytes are
        written to files and sockets.
        """
        memory = _resident() - self._baseline
        if torch.cuda.is_initialized():
            memory = torch.cuda.max_memory_allocated()
        written = 0
        with contextlib.suppress(OSError):  # only Linux counts them
            written = int(Path("/proc/self/io").read_text().split()[3])
        self.record.costs.append((time.perf_counter() - self._aside, memory, written))


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@torch.no_grad()
def _perturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for param in filter(torch.is_floating_point, model.parameters()):
        signs = 2 * torch.randint(0, 2, param.shape, generator=generator) - 1
        param.mul_(1 + signs.to(param) * torch.finfo(param.dtype).eps)


def _compute_norms_in_float64() -> None:
    """Show the rounding of torch's norms, which other weights do not change.

    On CPUs, the norm of four million elements in float32 is wrong by 2e-4, with and without
    flatshard, which sums other ranges.
    """
    norm: Any = torch.linalg.vector_norm

    def exact(x: Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
        result: Tensor = norm(_as_double(x), *args, **kwargs)
        return result.to(dtype or x.dtype) if x.is_floating_point() else result

    torch.linalg.vector_norm = exact
    torch._foreach_norm = lambda tensors, ord=2, **_: [exact(one, ord) for one in tensors]  # type: ignore


def _as_double(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def _generators() -> _Named:
    states = {"torch": torch.get_rng_state().tolist(), "random": random.getstate()}
    if torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state().tolist()
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    for name, state in states.items():
        yield name, torch.tensor(zlib.crc32(repr(state).encode()), device="cpu")
