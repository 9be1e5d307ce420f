"""``Recorder``: what one rank computes in each step, small enough to keep for every tensor.

[Note: facts]
Of a tensor are kept: a sum of squares, a sum with pseudo-random signs (a checksum that notices
swapped elements), and elements at fixed positions, all of them if the tensor is small. Each rank
records only the range that it holds. Sums over ranges add up, so the launcher can compare a sharded
tensor with a full one, and recording needs no communication: an optimizer that only one rank steps
cannot make the others wait.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from flatshard.extras.trial_run.program import current_line
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_grad
from flatshard.units.layout import memory_order

_DDP: Any = nn.parallel.DistributedDataParallel  # before any name is replaced
_SAMPLES, _WHOLE, _CHUNK = 512, 2048, 1 << 20


class Enough(SystemExit):
    """Raised out of the last optimizer step, to end the script."""


class Facts(NamedTuple):
    """A tensor's range on one rank: see the note above."""

    shape: tuple[int, ...]
    eps: float  # of the dtype; 0 for integers
    offset: int  # the range in memory order: [offset, stop)
    stop: int
    sums: Tensor
    positions: Tensor  # of the recorded elements, in the full tensor
    values: Tensor


def facts_of(tensor: Tensor, like: Tensor | None = None) -> Facts:
    """Return the facts of a tensor. ``like``: the parameter, for a gradient."""
    like = tensor if like is None else like
    if isinstance(like, FlatShardTensor):
        shape, offset = like.spec.shape, like.spec.offset
        flat = like.local.detach() if like is tensor else local_grad(tensor, like.spec)
    else:
        tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        shape, offset = tuple(tensor.shape), 0
        flat = tensor.permute(memory_order(like)).reshape(-1)
    eps = torch.finfo(flat.dtype).eps if flat.is_floating_point() or flat.is_complex() else 0.0
    if flat.is_complex():
        shape, offset, flat = (*shape, 2), 2 * offset, torch.view_as_real(flat).reshape(-1)
    numel, stop = torch.Size(shape).numel(), offset + flat.numel()
    chosen = _positions(numel)
    chosen = chosen[(chosen >= offset) & (chosen < stop)]
    values = flat[(chosen - offset).to(flat.device)].to("cpu", torch.float64)
    sums = torch.zeros(2, dtype=torch.float64)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].double()
        index = torch.arange(offset + start, offset + start + part.numel(), device=part.device)
        signs = 1 - 2 * ((index * 0x9E3779B97F4A7C1 >> 40) & 1)
        sums += torch.stack([part.square().sum(), (part * signs).sum()]).cpu()
    return Facts(shape, eps, offset, stop, sums, chosen, values)


@functools.cache
def _positions(numel: int) -> Tensor:
    if numel <= _WHOLE:
        return torch.arange(numel)
    return (torch.arange(_SAMPLES) * 2_654_435_761 % numel).sort().values


class Recorder:
    """Records the steps of one rank."""

    def __init__(self, num_steps: int, *, perturbs: bool, exact: bool) -> None:
        """Record ``num_steps`` steps of each optimizer, then end the script.

        ``perturbs``: change the weights by one unit in the last place before the first forward.
        ``exact``: cast floating point inputs to float64.
        """
        self.num_steps, self.perturbs, self.exact = num_steps, perturbs, exact
        self.events: dict[tuple[int, str, str], Any] = {}
        self.lines: dict[tuple[int, str, str], str] = {}
        self.findings: list[tuple[str, str, str]] = []  # line, what happened, what to write
        self.wrapped: list[tuple[str, str]] = []  # line, and the name of the replaced wrapper
        self.models: list[Any] = []
        self.times: list[float] = []
        self.peak, self.baseline = 0, _resident("VmRSS")
        self.sent_before = self.sent = 0
        self._counts: dict[torch.optim.Optimizer, int] = {}
        self._names: dict[int, str] = {}
        self._aside, self._began, self._is_over = 0.0, 0.0, False

    def install(self) -> None:
        """Register hooks of all optimizers, and of the outermost backward."""
        from torch.optim import optimizer as torch_optim

        torch_optim.register_optimizer_step_pre_hook(self._before_step)
        torch_optim.register_optimizer_step_post_hook(self._after_step)
        backward: Any = torch.autograd.backward

        @functools.wraps(backward)
        def recorded(tensors: Any, *args: Any, **kwargs: Any) -> None:
            losses = [one for one in tree_leaves(tensors) if isinstance(one, Tensor)]
            if len(losses) == 1 and losses[0].numel() == 1:
                with self._paused():
                    self._add("loss", "loss", losses[0])
            backward(tensors, *args, **kwargs)

        torch.autograd.backward = recorded

    @property
    def step(self) -> int:
        """The number of the step that runs, from 1."""
        return max(self._counts.values(), default=0) + 1

    def add_model(self, model: Any, replaced: str) -> None:
        """Record the initial values of a wrapped model, whose wrapper was called ``replaced``."""
        with self._paused():
            self.models.append(model)
            self.wrapped.append((current_line(), replaced))
            for name, param in named(model, "parameters"):
                self._add("initial value", self._prefix(model) + name, param, step=0)

    def forward(self, model: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a wrapped model's forward; record inputs and outputs."""
        if self.perturbs and not model.__dict__.setdefault("_was_perturbed", False):
            model.__dict__["_was_perturbed"] = True
            _perturb(model)
        if self.exact:
            args, kwargs = tree_map(_as_double, (args, kwargs))
        with self._paused():
            self._add_all("input", model, (args, kwargs))
        out = forward(*args, **kwargs)
        with self._paused():
            self._add_all("output", model, out)
        return out

    def _add_all(self, kind: str, model: Any, values: Any) -> None:
        tensors = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
        for index, one in enumerate(tensors):
            self._add(kind, f"{self._prefix(model)}{kind} {index}", one)

    def _prefix(self, model: Any) -> str:
        index = next(i for i, one in enumerate(self.models) if one is model)
        return f"model {index + 1}: " if index else ""

    def _add(self, kind: str, name: str, tensor: Any, *, like: Any = None, step: int = -1) -> None:
        key = (self.step if step < 0 else step, kind, name)
        count = 1
        while key in self.events:
            count += 1
            key = (*key[:2], f"{name} ({count})")
        if isinstance(tensor, Tensor):
            tensor = tuple(facts_of(tensor, like)) if tensor.device.type != "meta" else None
        self.events[key] = tensor
        self.lines[key] = current_line() if kind in ("input", "output", "loss") else ""

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_over:
            os._exit(0)  # the program has caught `Enough`
        if _is_nested() or len(args) > 1 or kwargs:
            return
        with self._paused(is_step=True):
            self._add_step(optimizer, "gradient")

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _is_nested():
            return
        with self._paused(is_step=True):
            if len(args) > 1 or kwargs:  # a closure has computed the gradients
                self._add_step(optimizer, "gradient")
            self._add_step(optimizer, "value")
            step = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
            for model in self.models:
                for name, buffer in named(model, "buffers"):
                    self._add("buffer", self._prefix(model) + name, buffer, step=step)
            for name, state in _generators():
                self._add("random generator", name, zlib.crc32(state), step=step)
        if step == max(self._counts.values()):
            now = time.perf_counter()
            if self._began:
                self.times.append(now - self._began - self._aside)
            self._began, self._aside = now, 0.0
            sent = _written()
            self.sent, self.sent_before = sent - self.sent_before, sent
        counts = self._counts.values()
        if min(counts) >= self.num_steps or max(counts) >= 3 * self.num_steps:
            self._is_over = True
            raise Enough(0)

    def _add_step(self, optimizer: Any, kind: str) -> None:
        step = self._counts.get(optimizer, 0) + 1
        index = [*self._counts, optimizer].index(optimizer)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if any(id(param) not in self._names for param in params):
            self._names = {
                id(param): self._prefix(model) + name
                for model in reversed(self.models)
                for name, param in named(model, "parameters")
            }
        line = current_line()
        # Backward computes the gradient of the last parameter first.
        for number, param in list(enumerate(params))[:: -1 if kind == "gradient" else 1]:
            name = self._names.get(id(param))
            if name is None:
                name = self._names[id(param)] = f"optimizer {index + 1}, parameter {number}"
            tensor = param.grad if kind == "gradient" else param
            self._add(kind, name, tensor, like=param, step=step)
            self.lines[step, kind, name] = line

    @contextlib.contextmanager
    def _paused(self, *, is_step: bool = False) -> Iterator[None]:
        """Leave the time and memory of recording out of the figures."""
        began = time.perf_counter()
        if is_step:
            self.peak = max(self.peak, _peak())
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
        if is_step:
            _reset_peak()
        self._aside += time.perf_counter() - began


def named(model: Any, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Yield ``parameters`` or ``buffers`` with their names in the unwrapped model."""
    parallel = [name for name, one in model.named_modules() if isinstance(one, _DDP)]
    for name, tensor in getattr(model, f"named_{kind}")():
        for prefix in reversed([f"{one}." if one else "" for one in parallel]):
            if name.startswith(f"{prefix}module."):
                name = prefix + name[len(prefix) + len("module.") :]
        yield name, tensor


def _perturb(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
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
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield "torch.cuda", torch.cuda.get_rng_state().numpy().tobytes()
    yield "random", repr(random.getstate()).encode()
    if "numpy" in sys.modules:
        yield "numpy", repr(sys.modules["numpy"].random.get_state(legacy=False)).encode()


def _is_nested() -> bool:
    """Whether the step whose hooks run is a part of another optimizer's step."""
    frame, count = sys._getframe(2), 0
    while frame is not None:
        is_step = frame.f_code.co_name == "wrapper"
        count += is_step and frame.f_globals.get("__name__") == "torch.optim.optimizer"
        frame = frame.f_back  # type: ignore[assignment]
    return count > 1


def _resident(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


def _peak() -> int:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return _resident("VmHWM")


def _reset_peak() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _written() -> int:
    """Return how many bytes this process has written to files and sockets."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])
    return 0
