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
import random
import resource
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves, tree_map

from flatshard.extras.trial_run.user_line import current_line
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_grad
from flatshard.units.layout import memory_order

Key = tuple[int, str, str]  # step, kind of tensor, name
_Named = Iterable[tuple[str, Any, Any]]
_SIZE, _CHUNK = 256, 1 << 16
_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__  # surrounds each step


class Enough(SystemExit):
    """Raised out of the last optimizer step, to end the script."""


class Sketch(NamedTuple):
    """A sketch of this rank's range of a tensor, see [Note: sketch].

    The range of an unsharded tensor is the whole tensor. ``shape`` is the full tensor's.
    """

    shape: tuple[int, ...]
    eps: float  # of the dtype; 0 for integers
    offset: int  # of the range, in memory order
    numel: int  # of the range
    sums: Tensor


@dataclass
class Record:
    """What a rank has recorded, and how its run ended."""

    events: dict[Key, Sketch | None] = field(default_factory=dict)  # None: no gradient
    lines: dict[Key, str] = field(default_factory=dict)  # of the program
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)  # (line, what is called)
    warned: dict[tuple[str, str], None] = field(default_factory=dict)  # (line, warning)
    wrapped: dict[str, str] = field(default_factory=dict)  # line: name of the wrapper
    times: list[float] = field(default_factory=list)  # of steps, without the time of recording
    memory: int = 0  # peak
    written: int = 0  # bytes per step
    failure: str = ""
    line: str = ""  # at which the run failed
    # If several ranks fail, the first one is the cause. 0: a process that ended by itself; inf: a
    # process that had to be killed.
    failed_at: float = 0.0


@torch.no_grad()
def sketch(tensor: Tensor, param: Tensor | None = None) -> Sketch:
    """Return the sketch of a tensor. ``param``: the parameter, if the tensor is a gradient."""
    owner = tensor if param is None else param
    if isinstance(owner, FlatShardTensor):
        shape, offset = owner.spec.shape, owner.spec.offset
        flat = owner.local.detach() if param is None else local_grad(tensor, owner.spec)
    else:
        if tensor.is_sparse:  # an input may be too large as a dense tensor
            tensor = tensor.coalesce().values() if param is None else tensor.to_dense()
        shape, offset = tuple(tensor.shape), 0
        order = memory_order(tensor if param is None else param)
        flat = tensor.detach().permute(order).reshape(-1)
    if flat.is_complex():
        shape, offset, flat = (*shape, 2), 2 * offset, torch.view_as_real(flat).reshape(-1)
    sums, at = torch.zeros(_SIZE, dtype=torch.float64, device=flat.device), offset
    for part in flat.split(_CHUNK):
        index = torch.arange(at, at := at + part.numel(), device=part.device)
        signs = 1 - 2 * ((index * 0x9E3779B97F4A7C1 >> 40) & 1)
        sums.index_add_(0, index % _SIZE, part.double().nan_to_num(1e4, 3e4, -3e4) * signs)
    eps = torch.finfo(flat.dtype).eps if flat.is_floating_point() else 0.0
    return Sketch(shape, eps, offset, flat.numel(), sums.cpu())


class Recorder:
    """Records the steps of one rank."""

    def __init__(
        self,
        options: argparse.Namespace,
        record: Record,
        end: Callable[[], object],
        *,
        perturbs: bool,
    ) -> None:
        """Record ``options.steps`` steps of each optimizer in ``record``, then end the script.

        ``end``: writes the record, and ends the process. ``perturbs``: change the weights by one
        unit in the last place before the first forward.
        """
        self.options, self.record, self._end, self._perturbs = options, record, end, perturbs
        self.names: dict[Tensor, str] = {}  # of parameters of wrapped models
        self._models: list[Any] = []
        self._counts: dict[torch.optim.Optimizer, int] = {}
        self._aside, self._began, self._written = 0.0, 0.0, 0
        self._baseline = _peak()
        if perturbs:
            _compute_norms_in_float64()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        torch.autograd.backward = self._recording_loss(torch.autograd.backward)

    def _recording_loss(self, backward: Any) -> Any:
        @functools.wraps(backward)
        def recorded(tensors: Any, *args: Any, **kwargs: Any) -> None:
            is_inner = torch._C._current_graph_task_id() >= 0  # checkpointing, in a backward
            losses = [one for one in tree_leaves(tensors) if isinstance(one, Tensor)]
            if len(losses) == 1 and losses[0].numel() == 1 and not is_inner:
                self._add("loss", [("loss", losses[0], None)])
            backward(tensors, *args, **kwargs)
            # Record averaged gradients before the program clips or scales them, the last first.
            if not is_inner and all(one.require_backward_grad_sync for one in self._models):
                named = reversed(self.names.items())
                self._add("gradient", [(name, one.grad, one) for one, name in named])

        return recorded

    def add_model(self, model: Any, replaced: str) -> None:
        """Record the initial values of a wrapped model, whose wrapper was called ``replaced``."""
        prefix = f"model {len(self._models) + 1}: " if self._models else ""
        model.__dict__["_prefix_in_trial"] = prefix
        self._models.append(model)
        self.record.wrapped[current_line()] = replaced
        params = _named(model, model.named_parameters())
        self.names |= {one: name for name, one, _ in params}
        self._add("initial value", params, step=0)

    def forward(self, model: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a wrapped model's forward; record inputs and outputs."""
        if self._perturbs and not model.__dict__.setdefault("_was_perturbed", False):
            model.__dict__["_was_perturbed"] = True
            _perturb(model)
        if self.options.exact:
            args, kwargs = tree_map(_as_double, (args, kwargs))
        self._add_all("input", model, (args, kwargs))
        out = forward(*args, **kwargs)
        self._add_all("output", model, out)
        return out

    def _add_all(self, kind: str, model: Any, values: Any) -> None:
        prefix = model.__dict__.get("_prefix_in_trial", "a copy: ")
        where = "" if torch.is_grad_enabled() else f", {current_line()}"  # for lone calls
        tensors = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
        named = ((f"{prefix}{kind} {n}{where}", one, None) for n, one in enumerate(tensors))
        self._add(kind, named)

    def _add(self, kind: str, tensors: _Named, *, step: int = -1) -> None:
        """Record tensors of one kind: their names, the tensors, and parameters of gradients."""
        began, line = time.perf_counter(), current_line()
        step = max(self._counts.values(), default=0) + 1 if step < 0 else step
        for name, tensor, param in tensors:
            key, count = (step, kind, name), 1
            while key in self.record.events:
                count += 1
                key = (step, kind, f"{name} ({count})")
            self.record.events[key] = None if tensor is None else sketch(tensor, param)
            self.record.lines[key] = line
        self._aside += time.perf_counter() - began

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_over:
            self._end()  # the program has caught `Enough`, and goes on
        if not (_is_nested() or len(args) > 1 or kwargs):  # a closure will compute the gradients
            step = self._counts.get(optimizer, 0) + 1
            grads = [(name, one.grad, one) for name, one, _ in self._params(optimizer)]
            self._add("gradient at the step", grads, step=step)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _is_nested():
            return
        params, last = self._params(optimizer), max(self._counts.values(), default=0)
        step = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        self._add("value", params, step=step)
        for model in self._models:
            self._add("buffer", _named(model, model.named_buffers()), step=step)
        self._add("random generator", _generators(), step=step)
        if step > last:  # the first optimizer that makes this step
            now, written = time.perf_counter(), _written()
            if self._began:
                self.record.times.append(now - self._began - self._aside)
            self.record.written, self._written = written - self._written, written
            self.record.memory = _peak() - self._baseline
            self._began, self._aside = now, 0.0
        if self._is_over:
            raise Enough(0)

    @property
    def _is_over(self) -> bool:
        counts, most = self._counts.values(), self.options.steps
        return min(counts, default=0) >= most or max(counts, default=0) >= 3 * most

    def _params(self, optimizer: Any) -> _Named:
        index = [*self._counts, optimizer].index(optimizer) + 1
        params = [param for group in optimizer.param_groups for param in group["params"]]
        unnamed = f"optimizer {index}, parameter"
        return [(self.names.get(one, f"{unnamed} {n}"), one, None) for n, one in enumerate(params)]


def _named(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> list[Any]:
    """Return tensors with their names in the unwrapped model."""
    prefix = model.__dict__["_prefix_in_trial"]
    return [
        (prefix + ".".join(part for part in name.split(".") if part != "module"), tensor, None)
        for name, tensor in tensors
    ]


@torch.no_grad()
def _perturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        if param.is_floating_point():
            signs = torch.randint(0, 2, param.shape, generator=generator) * 2.0 - 1
            step = signs * torch.finfo(param.dtype).eps
            param.mul_(1 + step.to(param.device, param.dtype))


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


def _generators() -> Iterator[tuple[str, Tensor, None]]:
    states = {"torch": torch.get_rng_state().tolist(), "random": random.getstate()}
    if torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state().tolist()
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    for name, state in states.items():
        yield name, torch.tensor(zlib.crc32(repr(state).encode()), device="cpu"), None


def _is_nested() -> bool:
    """Whether the running hook belongs to a step that another optimizer's step called."""
    return sum(frame.f_code is _STEP for frame, _ in traceback.walk_stack(None)) > 1


def _peak() -> int:
    """Return the peak memory of this process, in bytes: torch's on a GPU, otherwise all."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _written() -> int:
    """Return how many bytes this process has written to files and sockets."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])
    return 0
