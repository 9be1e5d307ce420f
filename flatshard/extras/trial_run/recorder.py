"""``Recorder``: what one rank computes in each step, small enough to keep for every tensor.

[Note: sketch]
A rank records a *sketch* of each tensor: each element is multiplied by a pseudo-random sign, and
the element with index i is added to number i modulo 256. So a tensor of up to 256 elements is
recorded whole. The sketch of a difference is the difference of the sketches, and the norm of this
difference is close to the norm of the tensors' difference. Signs notice swapped elements. The
sketches of ranges add up: a sharded tensor, of which each rank records its own range, can be
compared with a full one. So recording needs no communication: if only one rank steps an optimizer,
the rank does not wait for the others.
"""

import functools
import math
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import optimizer as steps
from torch.utils._pytree import tree_leaves, tree_map_only

from flatshard.extras import program_line
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_grad
from flatshard.units.layout import memory_order

Key = tuple[int, str, str]  # step, kind of tensor, name
_SIZE, _CHUNK = 256, 1 << 16


class Sketch(NamedTuple):
    """A sketch of this rank's elements of a tensor, see [Note: sketch]."""

    line: str  # the program's line
    eps: float  # precision of the dtype; 0 for integers
    share: float  # the fraction of the elements that this rank holds; 1 for an unsharded tensor
    sums: Tensor


@dataclass
class Record:
    """The sketches, costs and remarks of a rank, and how its run ended."""

    failure: tuple[float, str] = math.inf, ""  # time, because the first failure is the cause
    events: dict[Key, Sketch] = field(default_factory=dict)  # without missing gradients
    # Numbers of calls that need every rank. Keys: the calling line of the program, and the advice.
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    # Other lines to report. Keys: the line, and its fault or the text to write instead.
    remarks: Counter[tuple[str, str]] = field(default_factory=Counter)
    costs: list[tuple[float, int, int]] = field(default_factory=list)  # see `Recorder._add_costs`


def write(file: Path, value: Any) -> None:
    """Write a value into a file. Processes that wait for the file never see a part of it."""
    torch.save(value, part := file.with_suffix(".part"))
    part.rename(file)


def read(file: Path) -> Any:
    """Wait for a file that another process writes, and return its value."""
    while not file.exists():
        time.sleep(0.1)
    return torch.load(file, weights_only=False)


@torch.no_grad()
def sketch(tensor: Tensor, owner: Tensor, line: str) -> Sketch:
    """Return the sketch of a tensor. ``owner``: the parameter if it is a gradient, or itself."""
    if isinstance(owner, FlatShardTensor):
        numel, index = owner.numel(), owner.spec.offset
        flat = local_grad(tensor, owner.spec)
    else:
        if owner.is_sparse:  # a sparse input, which may be too large as a dense tensor
            owner = tensor = owner.coalesce().values()
        numel, index = tensor.numel(), 0
        flat = tensor.detach().to_dense().permute(memory_order(owner)).reshape(-1)
    share = flat.numel() / numel if numel else 1.0
    if flat.is_complex():
        index, flat = 2 * index, torch.view_as_real(flat).reshape(-1)
    sums = torch.zeros(_SIZE, dtype=torch.float64, device=flat.device)
    for part in flat.split(_CHUNK):
        at = torch.arange(index, index := index + part.numel(), device=part.device)
        signs = 1 - 2 * ((at * 0x9E3779B97F4A7C1 >> 40) & 1)
        sums.index_add_(0, at % _SIZE, part.double().nan_to_num(1e4, 3e4, -3e4) * signs)
    eps = torch.finfo(flat.dtype).eps if flat.is_floating_point() else 0.0
    return Sketch(line, eps, share, sums.cpu())


class Recorder:
    """Records the steps of one rank."""

    def __init__(self, options: Any, file: Path) -> None:
        """Record ``options.steps`` steps, of all optimizers together, then end the process."""
        self.options, self._file, self.record = options, file, Record()
        self.names: dict[Tensor, str] = {}  # names of wrapped models' parameters
        self._models: dict[Any, str] = {}  # wrapped models, and the prefix of their tensors' names
        self._fresh: list[nn.Module] = []  # models whose weights the noise run will change
        # number of the step under way, which ends with the next step of any optimizer
        self._step = 1
        self._depth = 0  # number of nested optimizer steps (one optimizer may step another)
        self._aside = 0.0  # seconds of recording
        self._add_costs()
        if options.run == "noise":
            _compute_norms_in_float64()
        steps.register_optimizer_step_pre_hook(self._before_step)
        steps.register_optimizer_step_post_hook(self._after_step)
        torch.autograd.backward = functools.partial(self._backward, torch.autograd.backward)

    def end(self, failure: str = "") -> NoReturn:
        """Write the record, and end the process.

        If ``failure`` is empty, checks that the script has wrapped a model and taken all steps.
        """
        if not failure and not self.names:
            failure = "it used no DistributedDataParallel, FSDP or ShardedWrapper (see --wrap)"
        elif not failure and self._step <= self.options.steps:
            failure = f"it took {self._step - 1} optimizer steps, not {self.options.steps}"
            failure += " (did it resume from files of an earlier run?)"
        if failure:
            self.record.failure = time.time(), failure
        write(self._file, self.record)
        sys.stdout.flush()
        os._exit(bool(failure))  # without exit handlers, which may wait for other ranks

    def remark(self, what: str) -> None:
        """Report the program's current line, with a text."""
        self.record.remarks[program_line(sys._getframe()), what] += 1

    def add_model(self, model: Any) -> None:
        """Record the initial values of a wrapped model."""
        prefix = self._models[model] = f"model {len(self._models) + 1}: " * bool(self._models)
        params = {prefix + name: param for name, param in model.module.named_parameters()}
        self.names |= {param: name for name, param in params.items()}
        self._add("initial value", params)
        if self.options.run == "noise":
            self._fresh.append(model)

    def forward(self, model: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a wrapped model's forward; record inputs and outputs."""
        while self._fresh:
            _perturb(self._fresh.pop())
        if self.options.exact:
            args, kwargs = tree_map_only(Tensor, _as_double, (args, kwargs))
        self._add_all("input", model, (args, kwargs))
        out = forward(*args, **kwargs)
        self._add_all("output", model, out)
        return out

    def _backward(self, backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        backward(tensors, *args, **kwargs)
        # the backward of a checkpoint, inside another backward
        if torch._C._current_graph_task_id() >= 0:
            return
        losses = tree_leaves(tensors)
        if len(losses) == 1 == losses[0].numel():
            self._add("loss", {"loss": losses[0]})
        # Record averaged gradients before the program clips or scales them, last parameter first.
        if all(one.require_backward_grad_sync for one in self._models):
            self._add("gradient", {name: one for one, name in reversed(self.names.items())})

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth += 1
        # the step's closure will compute the gradients
        if self._depth == len(args) == 1 and not kwargs:
            self._add("gradient at the step", self._params(optimizer))

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._add("value", self._params(optimizer))
        for model, prefix in self._models.items():
            self._add("buffer", {prefix + n: one for n, one in model.module.named_buffers()})
        self._add("random generator", _generators())
        self._add_costs()
        self._step += 1
        if self._step > self.options.steps:
            self.end()

    def _params(self, optimizer: Any) -> dict[str, Tensor]:
        kind = type(optimizer).__name__
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return {self.names.get(p, f"{kind}, parameter {n}"): p for n, p in enumerate(params)}

    def _add_all(self, kind: str, model: Any, values: Any) -> None:
        # The line tells calls that only some ranks make from others, see [Note: lone calls].
        where = "" if torch.is_grad_enabled() else f", {program_line(sys._getframe())}"
        name = self._models.get(model, "a copy: ") + kind
        tensors = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
        self._add(kind, {f"{name} {n}{where}": one for n, one in enumerate(tensors)})

    def _add(self, kind: str, tensors: dict[str, Tensor]) -> None:
        """Record tensors of one kind, or if these are gradients, the gradients of parameters."""
        began, line = time.perf_counter(), program_line(sys._getframe())
        for name, owner in tensors.items():
            key, count = (self._step, kind, name), 1
            while key in self.record.events:
                key = (self._step, kind, f"{name} ({(count := count + 1)})")
            tensor = owner.grad if kind.startswith("gradient") else owner
            if tensor is not None:
                self.record.events[key] = sketch(tensor, owner, line)
        self._aside += time.perf_counter() - began

    def _add_costs(self) -> None:
        """Record the time without recording, the peak memory, and the bytes written until now.

        Memory is the allocator's memory on a GPU, otherwise the memory of the process. Bytes are
        written to files and sockets; only Linux counts them.
        """
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        memory = torch.cuda.max_memory_allocated() or resident
        counts = Path("/proc/self/io")
        written = int(counts.read_text().split()[3]) if counts.exists() else 0
        self.record.costs.append((time.perf_counter() - self._aside, memory, written))


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
        return norm(_as_double(x), *args, **kwargs).to(dtype or x.real.dtype)  # type: ignore

    torch.linalg.vector_norm = exact
    torch._foreach_norm = lambda tensors, ord=2, **_: [exact(one, ord) for one in tensors]  # type: ignore


def _as_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _generators() -> dict[str, Tensor]:
    states = {"torch": torch.get_rng_state(), "random": torch.tensor(random.getstate()[1])}
    if torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        _, keys, *numbers = sys.modules["numpy"].random.get_state()
        states["numpy"] = torch.tensor([*keys.tolist(), *numbers], dtype=torch.float64)
    return states
