"""``Record``: the tensors that one rank computes in each step, as small sketches.

[Note: sketch]
A rank records a *sketch* of each tensor: each element is multiplied by a pseudo-random sign, and
the element with index i is added to number i modulo 256. So a tensor of up to 256 elements is
recorded whole. The sketch of a difference is the difference of the sketches, and the norm of this
difference is close to the norm of the tensors' difference. Because of the signs, swapped elements
change the sketch. If each rank records its own range of a sharded tensor, the sum of these sketches
is the sketch of the full tensor. So recording needs no communication: if only one rank steps an
optimizer, the rank does not wait for the other ranks.
"""

import functools
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatshard.tensor.sharded_tensor import FlatShardTensor, local_grad
from flatshard.units.layout import memory_order

_SIZE, _CHUNK = 256, 1 << 16


class Sketch(NamedTuple):
    """A sketch of this rank's elements of a tensor, see [Note: sketch]."""

    line: str  # line of the program during which the tensor was recorded
    eps: float  # precision of the dtype; 0 for integers
    share: float  # the fraction of the elements that this rank holds; 1 for an unsharded tensor
    sums: Any  # a numpy array, because many arrays are pickled faster than many tensors


@dataclass
class Record:
    """The sketches, costs and notes of a rank, and how its run ended."""

    failure: tuple[float, str] = float("inf"), ""  # time, text; the earliest failure is the cause
    # Keys: step, kind of tensor, name. Missing gradients have no sketch.
    events: dict[tuple[int, str, str], Sketch] = field(default_factory=dict)
    # Number of runs of each line that needs a change. Key: the line, and the change. The run `ddp`
    # notes calls that need every rank under flatshard; the run `sharded` notes all other lines.
    notes: Counter[str] = field(default_factory=Counter)
    # Before the first step and after each step: peak memory in bytes, seconds, and bytes written.
    costs: list[tuple[int, float, int]] = field(default_factory=list)


@torch.no_grad()
def sketch(tensor: Tensor, owner: Tensor, line: str) -> Sketch:
    """Return the sketch of a tensor. ``owner``: the parameter of a gradient; or ``tensor``."""
    if isinstance(owner, FlatShardTensor):
        numel, index, flat = owner.numel(), owner.spec.offset, local_grad(tensor, owner.spec)
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
    return Sketch(line, eps, share, sums.cpu().numpy())


def as_double(tensor: Tensor) -> Tensor:
    """Return the tensor in float64 if it is a floating point tensor."""
    return tensor.double() if tensor.is_floating_point() else tensor


def generator_states() -> dict[Tensor, str]:
    """Return the states of all random number generators, as bytes."""
    states: Any = {"torch": torch.get_rng_state(), "random": random.getstate()}
    states["numpy"] = sys.modules["numpy"].random.get_state()  # `sketch` has loaded numpy
    if torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state()
    texts = {n: json.dumps(one, default=lambda data: data.tolist()) for n, one in states.items()}
    return {torch.tensor([*text.encode()]): name for name, text in texts.items()}


@functools.cache  # changes each model once
@torch.no_grad()
def add_noise(model: nn.Module) -> None:
    """Change each weight of a model by one unit in the last place."""
    generator = torch.Generator().manual_seed(0)
    for param in filter(torch.is_floating_point, model.parameters()):
        signs = 2 * torch.randint(0, 2, param.shape, generator=generator) - 1
        param.mul_(1 + signs.to(param) * torch.finfo(param.dtype).eps)


def compute_norms_in_float64() -> None:
    """Replace torch's norms by exact norms, so that the noise run shows the norms' rounding errors.

    On CPUs, torch's norm of four million elements in float32 has an error of 2e-4. flatshard has
    another error, because it adds up other ranges. Noise in the weights does not change the errors.
    """
    norm: Any = torch.linalg.vector_norm

    def exact(x: Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
        return norm(as_double(x), *args, **kwargs).to(dtype or x.real.dtype)  # type: ignore

    torch.linalg.vector_norm = exact
    torch._foreach_norm = lambda tensors, ord=2, **_: [exact(one, ord) for one in tensors]  # type: ignore
