"""What an optimizer needs to see, found out by trying a copy of it before its first step.

No list of names could say it of other people's optimizers, nor of what their options change.
"""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatshard.tensor.sharded_tensor import FlatShardTensor

Params = Sequence[Any]


class Manner(enum.Enum):
    """How an optimizer that is not known to be element-wise steps sharded parameters."""

    ON_SHARDS = "on the sharded parameters"
    IN_PARTS = "some full parameters at a time, each on one rank"
    ON_OWNERS = "its full parameters at once, each on one rank"
    ON_EVERY_RANK = "all full parameters on every rank"


# Longest dimension of a parameter in a trial, and factors of its gradients: some norms are large
# enough to be clipped, and some are not.
_LONGEST = 6
_SCALES = (1.0, 1e-3, 1e3)
_NOT_COPIED = ("state", "param_groups", "step", "profile_hook_step")


def manner_of(optimizer: torch.optim.Optimizer) -> Manner:
    """What the optimizer needs; its state and its parameters do not change.

    Collective: the ranks of its sharded parameters, which try the same operations.
    """
    with _undisturbed():
        if _works_on_shards(optimizer):
            return Manner.ON_SHARDS
        # That shows averaged weights, from state which one rank must not have alone.
        shows_averages = callable(getattr(optimizer, "eval", None))
        return Manner.ON_EVERY_RANK if shows_averages else _manner_with_full(optimizer)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Inside, random numbers that are drawn change nothing outside, and nothing is compiled."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
        yield


def step_of(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """``step`` without the wrapper of torch's that calls the hooks."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def twin_of(optimizer: torch.optim.Optimizer, groups: Sequence[Params]) -> torch.optim.Optimizer:
    """A copy of an optimizer without state and hooks, over other parameters.

    Whatever else in it held its parameters holds those in their place.
    """
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo: dict[int, Any] = {}
    own = optimizer.param_groups
    for group, params in zip(own, groups, strict=True):
        memo.update({id(old): new for old, new in zip(group["params"], params, strict=False)})
        memo[id(group["params"])] = list(params)
    # Those for which there is nothing in their place.
    memo.update({id(old): old for old in all_params(optimizer) if id(old) not in memo})
    twin_groups = copy.deepcopy(own, memo)
    for group, params in zip(twin_groups, groups, strict=True):
        group["params"][:] = params
    attributes = {
        name: value
        for name, value in optimizer.__dict__.items()
        if name not in _NOT_COPIED and not name.startswith("_optimizer_")
    }
    twin.__dict__.update(copy.deepcopy(attributes, {**memo, id(own): twin_groups}))
    hooks = (name for name in optimizer.__dict__ if name.startswith("_optimizer_"))
    twin.__dict__.update({name: OrderedDict() for name in hooks})
    twin.state, twin.param_groups = defaultdict(dict), twin_groups
    return twin


def inert(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What takes a step in an optimizer's place that has been made already: it has no groups."""
    stand_in: torch.optim.Optimizer = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    stand_in.state, stand_in.param_groups = defaultdict(dict), []
    return stand_in


# ------------------------------------------------------------ on sharded parameters


def _works_on_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of copies of the sharded parameters goes well, with state like them."""
    groups = [[_copied(param) for param in group["params"]] for group in optimizer.param_groups]
    try:
        twin = twin_of(optimizer, groups)
        for old, new in zip(all_params(optimizer), all_params(twin), strict=True):
            if old in optimizer.state:
                twin.state[new] = copy.deepcopy(optimizer.state[old])
        step_of(twin)(twin)
    except Exception:
        return False
    # What the optimizer made for as many elements as the full parameter has (8-bit states), or to
    # multiply it by later (factors), was not made of all of them.
    return all(
        _is_sharded_or_number(value)
        for param in all_params(twin)
        if isinstance(param, FlatShardTensor)
        for value in pytree.tree_leaves(twin.state.get(param, {}))
    )


def _is_sharded_or_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return isinstance(value, FlatShardTensor) or value.numel() == 1
    return value is None or isinstance(value, int | float | str)


def _copied(param: Tensor) -> Tensor:
    with torch.no_grad():
        if not isinstance(param, FlatShardTensor):
            twin: Tensor = nn.Parameter(param.detach().clone(), param.requires_grad)
        else:
            spec = replace(param.spec.detached(), start=0)
            local = param.local.detach().clone()
            twin = FlatShardTensor.parameter(local, spec, param.requires_grad)
        twin.grad = None if param.grad is None else param.grad.detach().clone()
    return twin


# ------------------------------------------------------------ on full ones


def _manner_with_full(optimizer: torch.optim.Optimizer) -> Manner:
    """Whether full parameters (small ones try it) are stepped apart as they are together."""
    try:
        return _tried(optimizer)
    except Exception:
        return Manner.ON_EVERY_RANK  # where nothing can differ from the unwrapped model


def _tried(optimizer: torch.optim.Optimizer) -> Manner:
    shapes = [_some(group["params"]) for group in optimizer.param_groups]
    first = [[index % 2 == 0 for index, _ in enumerate(group)] for group in shapes]
    second = [[not one for one in group] for group in first]
    every = [[True] * len(group) for group in shapes]
    together, *apart = (_Trial(optimizer, shapes, kept) for kept in (every, first, second))
    empty = _Trial(optimizer, shapes, [[] for _ in shapes])
    step_of(optimizer)(inert(twin_of(optimizer, [[] for _ in shapes])))
    manner = Manner.IN_PARTS
    for scale in _SCALES:
        before = together.outside()
        for trial in (together, *apart, empty):
            trial.step(scale)
        if any(not together.agrees_with(trial) for trial in apart):
            return Manner.ON_EVERY_RANK
        if together.outside() != before:  # numbers for the step, such as a count of steps
            if any(trial.outside() != together.outside() for trial in (*apart, empty)):
                return Manner.ON_EVERY_RANK
            manner = Manner.ON_OWNERS
    return manner


def _some(params: Params) -> list[tuple[tuple[int, ...], Tensor]]:
    """Small shapes like those of a group's parameters, and the parameters; two of each kind."""
    found: dict[int, list[tuple[tuple[int, ...], Tensor]]] = {}
    for param in params:
        shape = tuple(min(size, _LONGEST) for size in param.shape)
        found.setdefault(len(shape), []).append((shape, param))
    return [one for some in found.values() for one in (some * 2)[:2]]


class _Trial:
    """A copy of an optimizer over small full parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shapes: Sequence[Sequence[tuple[tuple[int, ...], Tensor]]],
        kept: Sequence[Sequence[bool]],
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self._grads: dict[nn.Parameter, Tensor] = {}
        self.params: dict[tuple[int, int], nn.Parameter] = {}
        groups: list[list[nn.Parameter]] = []
        for number, group in enumerate(shapes):
            groups.append([])
            for index, (shape, like) in enumerate(group):
                value, grad = (torch.randn(shape, generator=generator) for _ in range(2))
                if not kept[number] or not kept[number][index]:
                    continue
                param = nn.Parameter(value.to(like.device, like.dtype))
                self._grads[param] = grad.to(param)
                self.params[number, index] = param
                groups[-1].append(param)
        self._twin = twin_of(optimizer, groups)

    def step(self, scale: float) -> None:
        for param, grad in self._grads.items():
            param.grad = grad * scale
        torch.manual_seed(1)  # one that draws numbers draws others for fewer parameters
        step_of(self._twin)(self._twin)

    def outside(self) -> str:
        """What it keeps that belongs to no parameter."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self._twin.param_groups]
        hidden = {"state", "param_groups", "defaults"}
        rest = {k: v for k, v in self._twin.__dict__.items() if k not in hidden}
        leaves = (one for one in pytree.tree_leaves(rest) if not isinstance(one, nn.Parameter))
        return repr((groups, [one for one in leaves if isinstance(one, int | float | Tensor)]))

    def agrees_with(self, other: _Trial) -> bool:
        """Whether what ``other`` has is, bit for bit, what this one has of it."""
        return all(torch.equal(self.params[key], param) for key, param in other.params.items())


def all_params(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Those of all groups, in their order."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)
