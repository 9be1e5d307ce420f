"""``Recorder``: what one rank computes in each step, small enough to keep for every tensor.

[Note: facts]
For each tensor, a rank records a sum of squares, a sum with pseudo-random signs (a checksum that
notices swapped elements), and elements at fixed positions: all elements of small tensors. A rank
records only its own range of a sharded tensor. Sums over ranges add up, so a sharded tensor can be
compared with a full one, and recording needs no communication: if only one rank steps an optimizer,
it does not wait for the others.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
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

# torch's own class: `stand_ins` later replaces the class in all modules outside of flatshard.
DDP: Any = nn.parallel.DistributedDataParallel
Key = tuple[int, str, str]  # step, kind of tensor, name
_SAMPLES, _WHOLE, _CHUNK = 512, 2048, 1 << 20


class Enough(SystemExit):
    """Raised out of the last optimizer step, to end the script."""


class Facts(NamedTuple):
    """Sums and samples of this rank's range of a tensor, see [Note: facts].

    The range of an unsharded tensor is the whole tensor. ``shape`` is the full tensor's.
    """

    shape: tuple[int, ...]
    eps: float  # of the dtype; 0 for integers
    offset: int  # of the range, in memory order
    numel: int  # of the range
    sums: Tensor  # (2,): sum of squares, sum with pseudo-random signs
    values: Tensor  # the elements at `_positions`


@dataclass
class Record:
    """What a rank has recorded, and how its run ended."""

    # The value is the state of a generator (int), or None if a parameter has no gradient.
    events: dict[Key, Any] = field(default_factory=dict)
    lines: dict[Key, str] = field(default_factory=dict)  # of the program
    findings: dict[tuple[str, str], str] = field(default_factory=dict)  # (line, problem) -> remedy
    wrapped: dict[str, str] = field(default_factory=dict)  # line: name of the wrapper
    times: list[float] = field(default_factory=list)  # of steps, without the time of recording
    memory: int = 0  # peak
    written: int = 0  # bytes per step
    failure: str = ""
    line: str = ""  # at which the run failed
    # If several ranks fail, the lowest order is the cause: 0 is an error of flatshard, 1 a process
    # that ended by itself, 2 another error, 3 a process that had to be killed. Then the time.
    order: tuple[int, float] = (2, 0.0)


def facts_of(tensor: Tensor, like: Tensor) -> Facts:
    """Return the facts of a tensor. ``like``: the tensor, or for a gradient the parameter."""
    if isinstance(like, FlatShardTensor):
        shape, offset = like.spec.shape, like.spec.offset
        flat = like.local.detach() if like is tensor else local_grad(tensor, like.spec)
    else:
        tensor, is_input = tensor.detach(), like is tensor
        if tensor.is_sparse:  # an input may be too large as a dense tensor
            tensor = tensor.coalesce().values() if is_input else tensor.to_dense()
        shape, offset = tuple(tensor.shape), 0
        flat = tensor.permute(memory_order(tensor if is_input else like)).reshape(-1)
    if flat.is_complex():
        shape, offset, flat = (*shape, 2), 2 * offset, torch.view_as_real(flat).reshape(-1)
    chosen = _positions(torch.Size(shape).numel())
    chosen = chosen[(chosen >= offset) & (chosen < offset + flat.numel())] - offset
    sums = torch.zeros(2, dtype=torch.float64)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].double()
        index = torch.arange(offset + start, offset + start + part.numel(), device=part.device)
        signs = 1 - 2 * ((index * 0x9E3779B97F4A7C1 >> 40) & 1)
        sums += torch.stack([part.square().sum(), (part * signs).sum()]).cpu()
    eps = torch.finfo(flat.dtype).eps if flat.is_floating_point() else 0.0
    values = flat[chosen.to(flat.device)].to("cpu", torch.float64)
    return Facts(shape, eps, offset, flat.numel(), sums, values)


@functools.cache
def _positions(numel: int) -> Tensor:
    if numel <= _WHOLE:
        return torch.arange(numel)
    return (torch.arange(_SAMPLES) * 2_654_435_761 % numel).sort().values


class Recorder:
    """Records the steps of one rank."""

    end: Callable[[], object]  # writes the record, and ends the process; set by `rank`

    def __init__(self, num_steps: int, *, perturbs: bool, exact: bool) -> None:
        """Record ``num_steps`` steps of each optimizer, then end the script.

        ``perturbs``: change the weights by one unit in the last place before the first forward.
        ``exact``: cast floating point inputs to float64.
        """
        self.num_steps, self.perturbs, self.exact = num_steps, perturbs, exact
        self.record, self.models = Record(), list[Any]()
        self._counts: dict[torch.optim.Optimizer, int] = {}
        self._names: dict[int, str] = {}
        self._aside, self._began, self._written = 0.0, 0.0, 0
        self._baseline, self._in_backward = _status("VmRSS"), False
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        torch.autograd.backward = self._recording_loss(torch.autograd.backward)

    def _recording_loss(self, backward: Any) -> Any:
        @functools.wraps(backward)
        def recorded(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._in_backward:  # nested: checkpointing recomputes in backward
                backward(tensors, *args, **kwargs)
                return
            losses = [one for one in tree_leaves(tensors) if isinstance(one, Tensor)]
            if len(losses) == 1 and losses[0].numel() == 1:
                with self.paused():
                    self._add("loss", "loss", losses[0])
            self._in_backward = True
            try:
                backward(tensors, *args, **kwargs)
            finally:
                self._in_backward = False
            with self.paused():  # before the program clips or scales the gradients
                self._add_gradients()

        return recorded

    def _add_gradients(self) -> None:
        """Record the gradients that a backward has averaged, the last parameter first."""
        seen = set[int]()
        for model in reversed(self.models):  # outer models come later
            params = list(named(model, "parameters")) if model.require_backward_grad_sync else []
            for name, param in reversed([one for one in params if id(one[1]) not in seen]):
                seen.add(id(param))
                self._add("gradient", self._prefix(model) + name, param.grad, like=param)

    def add_model(self, model: Any, replaced: str) -> None:
        """Record the initial values of a wrapped model, whose wrapper was called ``replaced``."""
        with self.paused():
            self.models.append(model)
            self.record.wrapped[current_line()] = replaced
            for name, param in named(model, "parameters"):
                self._add("initial value", self._prefix(model) + name, param, step=0)

    def forward(self, model: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a wrapped model's forward; record inputs and outputs."""
        if self.perturbs and not model.__dict__.setdefault("_was_perturbed", False):
            model.__dict__["_was_perturbed"] = True
            _perturb(model)
        if self.exact:
            args, kwargs = tree_map(_as_double, (args, kwargs))
        self._add_all("input", model, (args, kwargs))
        out = forward(*args, **kwargs)
        self._add_all("output", model, out)
        return out

    def _add_all(self, kind: str, model: Any, values: Any) -> None:
        with self.paused():
            tensors = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
            for index, one in enumerate(tensors):
                self._add(kind, f"{self._prefix(model)}{kind} {index}", one)

    def _prefix(self, model: Any) -> str:
        for index, one in enumerate(self.models):
            if one is model:
                return f"model {index + 1}: " if index else ""
        return "a copy: "

    def _add(self, kind: str, name: str, value: Any, *, like: Any = None, step: int = -1) -> None:
        key = (max(self._counts.values(), default=0) + 1 if step < 0 else step, kind, name)
        count = 1
        while key in self.record.events:
            count += 1
            key = (*key[:2], f"{name} ({count})")
        if isinstance(value, Tensor):
            value = facts_of(value, value if like is None else like)
        self.record.events[key] = value
        if kind not in ("buffer", "random generator"):
            self.record.lines[key] = current_line()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_over:
            self.end()  # the program has caught `Enough`, and goes on
        if not (_is_nested() or len(args) > 1 or kwargs):
            with self.paused(is_step=True):
                self._add_params(optimizer, "gradient at the step")

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _is_nested():
            return
        with self.paused(is_step=True):
            if len(args) > 1 or kwargs:  # a closure has computed the gradients
                self._add_params(optimizer, "gradient at the step")
            self._add_params(optimizer, "value")
            step = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
            for model in self.models:
                for name, buffer in named(model, "buffers"):
                    self._add("buffer", self._prefix(model) + name, buffer, step=step)
            for name, state in _generators():
                self._add("random generator", name, zlib.crc32(state), step=step)
        if step == max(self._counts.values()):
            now, written = time.perf_counter(), _written()
            if self._began:
                self.record.times.append(now - self._began - self._aside)
            self.record.written, self._written = written - self._written, written
            self._began, self._aside = now, 0.0
        if self._is_over:
            raise Enough(0)

    @property
    def _is_over(self) -> bool:
        counts = self._counts.values()
        return min(counts, default=0) >= self.num_steps or max(counts, default=0) >= (
            3 * self.num_steps
        )

    def _add_params(self, optimizer: Any, kind: str) -> None:
        step = self._counts.get(optimizer, 0) + 1
        index = [*self._counts, optimizer].index(optimizer)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if any(id(param) not in self._names for param in params):
            for model in self.models:  # outer models come later
                for name, param in named(model, "parameters"):
                    self._names[id(param)] = self._prefix(model) + name
        for number, param in enumerate(params):
            unnamed = f"optimizer {index + 1}, parameter {number}"
            tensor = param if kind == "value" else param.grad
            self._add(kind, self._names.get(id(param), unnamed), tensor, like=param, step=step)

    @contextlib.contextmanager
    def paused(self, *, is_step: bool = False) -> Iterator[None]:
        """Leave the time and memory of recording out of the figures."""
        began = time.perf_counter()
        on_gpu = torch.cuda.is_initialized()
        if is_step:
            now = torch.cuda.max_memory_allocated() if on_gpu else _status("VmHWM") - self._baseline
            self.record.memory = max(self.record.memory, now)
        with torch.no_grad():
            yield
        if is_step and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        elif is_step:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self._aside += time.perf_counter() - began


def named(model: Any, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Yield ``parameters`` or ``buffers`` with their names in the unwrapped model."""
    parallel = [f"{name}." * bool(name) for name, m in model.named_modules() if isinstance(m, DDP)]
    for name, tensor in getattr(model, f"named_{kind}")():
        for prefix in reversed(parallel):
            if name.startswith(f"{prefix}module."):
                name = prefix + name[len(f"{prefix}module.") :]
        yield name, tensor


@torch.no_grad()
def _perturb(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        if param.is_floating_point():
            signs = torch.randint(0, 2, param.shape, generator=generator, dtype=torch.int8)
            step = torch.finfo(param.dtype).eps * (2.0 * signs - 1)
            param.mul_(1 + step.to(param.device, param.dtype))


def _as_double(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def _generators() -> Iterator[tuple[str, bytes]]:
    yield "torch", torch.get_rng_state().numpy().tobytes()
    if torch.cuda.is_initialized():
        yield "torch.cuda", torch.cuda.get_rng_state().numpy().tobytes()
    yield "random", repr(random.getstate()).encode()
    if "numpy" in sys.modules:
        yield "numpy", repr(sys.modules["numpy"].random.get_state()).encode()


def _is_nested() -> bool:
    """Whether the running hook belongs to a step that another optimizer's step called."""
    frame, count = sys._getframe(2), 0
    while frame is not None:
        is_step = frame.f_code.co_name == "wrapper"
        count += is_step and frame.f_globals.get("__name__") == torch.optim.Optimizer.__module__
        frame = frame.f_back  # type: ignore[assignment]
    return count > 1


def _status(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024


def _written() -> int:
    """Return how many bytes this process has written to files and sockets."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])
    return 0
