"""``find_step_mode``: finds an optimizer's ``StepMode`` by trying copies of the optimizer.

A table of known optimizers would not be enough: users bring new optimizers, and the mode may depend
on an optimizer's options.
"""

import contextlib
import copy
import enum
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from flatshard.extras.partial_steps import step_unhooked
from flatshard.optimizer.adapter import Optimizer, all_params, with_inner
from flatshard.tensor.sharded_tensor import FlatShardTensor, copied_attributes

Params = Sequence[Any]


class StepMode(enum.Enum):
    """How an optimizer steps parameters: on shards or full parameters, and on which ranks."""

    ON_SHARDS = "on the sharded parameters"
    IN_PARTS = "some full parameters at a time, each on one rank"
    ON_OWNERS = "its full parameters at once, each on one rank"
    ON_EVERY_RANK = "all full parameters on every rank"


# Maximum size of each dimension of a full parameter in trials.
_LONGEST = 6
# Trials make a step with gradients multiplied by each of these factors, because an optimizer may
# clip only gradients that are larger than before (StableSPAM).
_SCALES = (1.0, 1e-3, 1e3)


class _NoCollectives(TorchFunctionMode):
    """Raises RuntimeError if an optimizer's own code calls a collective in a trial step.

    Such an optimizer (distributed Muon, for example) itself divides the parameters among the ranks.
    So every rank must step all parameters: otherwise the collective would mix values of different
    parameters. flatshard's own collectives do not raise, because they run inside operations on
    sharded tensors, in which torch turns this mode off.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in str(getattr(func, "__module__", "")):
            raise RuntimeError("the optimizer calls a collective of torch.distributed")
        return func(*args, **(kwargs or {}))


def find_step_mode(optimizer: Optimizer) -> StepMode:
    """Find an optimizer's ``StepMode``, without changing its state and parameters. Collective."""
    # Trials must not take time for compilation.
    with _kept_generators(), torch.compiler.set_stance("force_eager"):
        with _NoCollectives():
            with _same_gradients(optimizer):
                if _works_on_shards(optimizer):
                    return StepMode.ON_SHARDS
            _check_attributes(optimizer)
            # An optimizer with `eval()` (ScheduleFree) replaces the weights by averages, for which
            # every rank needs the full state. An optimizer that contains another optimizer
            # (Lookahead) may also need the full state on every rank.
            if callable(getattr(optimizer, "eval", None)) or len(with_inner(optimizer)) > 1:
                return StepMode.ON_EVERY_RANK
            try:
                return _try_full_params(optimizer)
            except Exception:
                # If the trial fails, let every rank step all parameters, as in an unwrapped model.
                return StepMode.ON_EVERY_RANK


@contextlib.contextmanager
def _kept_generators() -> Iterator[None]:
    """Restore the random number generators of torch, Python and numpy after trials."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    numpy = sys.modules.get("numpy")
    kept = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(kept[0])
        if numpy:
            numpy.random.set_state(kept[1])


@contextlib.contextmanager
def _same_gradients(optimizer: Optimizer) -> Iterator[None]:
    """Undo a trial's writes to gradients, made through modules that an optimizer keeps (K-FAC)."""
    kept = []
    with torch.no_grad():
        if any(_modules_of(optimizer)):
            grads = ((param, param.grad) for param in all_params(optimizer))
            kept = [(param, grad, grad.clone()) for param, grad in grads if grad is not None]
        try:
            yield
        finally:
            for param, grad, values in kept:
                param.grad = grad.copy_(values)


def _modules_of(optimizer: Optimizer) -> Iterator[nn.Module]:
    hidden = ("state", "param_groups")
    values = [v for one in with_inner(optimizer) for k, v in vars(one).items() if k not in hidden]
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, nn.Module))


def copy_with_params(
    optimizer: Optimizer, groups: Sequence[Params], *, with_state: bool = False
) -> Optimizer:
    """Return a copy of ``optimizer`` for the parameters in ``groups``, without hooks.

    ``with_state``: whether the new parameters get copies of the old parameters' state.
    """
    # Do not copy by `deepcopy`, which calls `Optimizer.__setstate__`: this method wraps the class's
    # `step`. In optimizers that do not call `super().__init__()`, the wrapped `step` fails.
    twins = {one: object.__new__(type(one)) for one in with_inner(optimizer)}
    memo: dict[int, Any] = {id(one): twin for one, twin in twins.items()}
    if not with_state:
        memo |= {id(one.state): defaultdict(dict) for one in twins}
    # Parameters without a replacement in `groups` are not copied: the optimizer's copy refers to
    # the same parameters as the optimizer.
    memo |= {id(old): old for one in twins for old in all_params(one)}
    # Do not copy modules: the copy of a unit would take the new parameters as its own.
    memo |= {id(one): one for kept in _modules_of(optimizer) for one in kept.modules()}
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        memo |= {id(old): new for old, new in zip(group["params"], params, strict=False)}
        memo[id(group["params"])] = list(params)
    for params in [group["params"] for one in twins for group in one.param_groups]:
        # Leave old parameters out of the groups of inner optimizers, because a trial must not
        # change them.
        memo.setdefault(id(params), [memo[id(p)] for p in params if memo[id(p)] is not p])
    for one, twin in twins.items():
        attributes = {
            name: OrderedDict() if name.startswith("_optimizer_") else value  # without hooks
            for name, value in vars(one).items()
            if name not in ("step", "profile_hook_step")
        }
        vars(twin).update(copy.deepcopy(attributes, memo))
    return twins[optimizer]


def without_params(optimizer: Optimizer) -> Optimizer:
    """Return a shallow copy without parameter groups, whose ``step()`` changes nothing."""
    empty: Optimizer = object.__new__(type(optimizer))
    empty.__dict__.update(optimizer.__dict__)
    empty.state, empty.param_groups = defaultdict(dict), []
    return empty


# ------------------------------------------------------------ on sharded parameters


def _works_on_shards(optimizer: Optimizer) -> bool:
    """Whether the optimizer gives correct results on sharded parameters. Tried with copies."""
    groups = [[*map(_copied_param, group["params"])] for group in optimizer.param_groups]
    try:
        twin = copy_with_params(optimizer, groups, with_state=True)
        grads = [(param, param.grad) for param in all_params(twin) if param.grad is not None]
        for scale in _SCALES:
            for param, grad in grads:
                param.grad = grad * scale
            step_unhooked(twin)
    except Exception:
        return False
    # Sharded state (one value per element) is correct, and so is a single number. But a plain
    # tensor of several elements (means of rows in Adafactor, 8-bit values in blocks) is wrong,
    # because it was computed as if this rank's elements were the full parameter.
    return all(
        isinstance(value, FlatShardTensor | int | float | str | None)
        or (isinstance(value, Tensor) and value.numel() == 1)
        for param in all_params(twin)
        if isinstance(param, FlatShardTensor)
        for one in with_inner(twin)
        for value in pytree.tree_leaves(one.state.get(param, {}))
    )


def _copied_param(param: Tensor) -> Tensor:
    with torch.no_grad():
        if not isinstance(param, FlatShardTensor):
            twin: Tensor = nn.Parameter(param.detach().clone(), param.requires_grad)
        else:
            spec = replace(param.spec.detached(), local=param.spec.local._replace(start=0))
            twin = FlatShardTensor.parameter(param.local.clone(), spec, param.requires_grad)
        if isinstance(grad := param.grad, FlatShardTensor):
            # `twin.spec` belongs to no model, so an operation that needs the full gradient raises.
            twin.grad = FlatShardTensor(grad.local.clone(), twin.spec, role=grad.shard_role)  # type: ignore[attr-defined]
        elif grad is not None:
            twin.grad = grad.detach().clone()
        twin.__dict__.update(copied_attributes(param))
    return twin


# ------------------------------------------------------------ on full parameters


def _check_attributes(optimizer: Optimizer) -> None:
    """Raise NotImplementedError if the optimizer keeps sharded parameters in an attribute.

    A step replaces only the parameters in ``param_groups`` by full parameters.
    """
    found = with_inner(optimizer)
    known = {id(group["params"]) for one in found for group in one.param_groups}
    known |= {id(kept) for one in found for kept in (one.param_groups, one.state)}
    for name, value in chain.from_iterable(vars(one).items() for one in found):
        for kept in pytree.tree_leaves(value, is_leaf=lambda one: id(one) in known):
            params = kept.parameters() if isinstance(kept, nn.Module) else [kept]
            param = next((one for one in params if isinstance(one, FlatShardTensor)), None)
            if param is not None:
                raise NotImplementedError(
                    f"{type(optimizer).__name__} keeps parameter {param.spec.name!r} in attribute "
                    f"{name!r}, or in a module in this attribute. There the parameter would stay "
                    "sharded during a step: flatshard puts full parameters only into param_groups. "
                    "Let step() read parameters and gradients from param_groups."
                )


def _try_full_params(optimizer: Optimizer) -> StepMode:
    """Find the ``StepMode`` by trial steps of small full parameters.

    Different ranks may step the parameters if two optimizers, each with half of the parameters,
    compute the same values as one optimizer with all parameters.
    """
    shapes = [_small_shapes(group["params"]) for group in optimizer.param_groups]
    kinds = ((0, 1), (0,), (1,), ())
    together, *apart, empty = (_Trial(optimizer, shapes, parities) for parities in kinds)
    step_unhooked(without_params(copy_with_params(optimizer, [[] for _ in shapes])))
    mode = StepMode.IN_PARTS
    for scale in _SCALES:
        before = together.shared_values()
        for trial in (together, *apart, empty):
            trial.step(scale)
        halves = chain.from_iterable(trial.params.items() for trial in apart)
        if not all(torch.equal(together.params[key], param) for key, param in halves):
            return StepMode.ON_EVERY_RANK
        if together.shared_values() != before:
            if any(trial.shared_values() != together.shared_values() for trial in (*apart, empty)):
                return StepMode.ON_EVERY_RANK
            mode = StepMode.ON_OWNERS
    return mode


def _small_shapes(params: Params) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return small shapes for trials, two for each number of dimensions among the parameters."""
    found: dict[int, list[tuple[tuple[int, ...], Tensor]]] = {}
    for param in params:
        shape = tuple(min(size, _LONGEST) for size in param.shape)
        found.setdefault(len(shape), []).append((shape, param))
    return [one for some in found.values() for one in (some * 2)[:2]]


class _Trial:
    """A copy of an optimizer with small full parameters, for trial steps.

    Each group has only the parameters whose index modulo 2 is in ``parities``: all parameters with
    (0, 1), and half of them with (0,) or (1,).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shapes: Sequence[Sequence[tuple[tuple[int, ...], Tensor]]],
        parities: Collection[int],
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self._grads: dict[nn.Parameter, Tensor] = {}
        self.params: dict[tuple[int, int], nn.Parameter] = {}
        groups: list[list[nn.Parameter]] = []
        for number, group in enumerate(shapes):
            groups.append([])
            for index, (shape, like) in enumerate(group):
                value, grad = (torch.randn(shape, generator=generator) for _ in range(2))
                if index % 2 not in parities:
                    continue
                param = nn.Parameter(value.to(like.device, like.dtype))
                param.__dict__.update(copied_attributes(like))
                self._grads[param] = grad.to(param)
                self.params[number, index] = param
                groups[-1].append(param)
        self._twin = copy_with_params(optimizer, groups)

    def step(self, scale: float) -> None:
        for param, grad in self._grads.items():
            param.grad = grad * scale
        # Use the same seed in all trials. If the optimizer draws random numbers, the results with
        # all parameters and with half of them still differ, so every rank steps all parameters.
        torch.manual_seed(1)
        step_unhooked(self._twin)

    def shared_values(self) -> str:
        """Return the optimizer's values that belong to no parameter (a step count), as a text."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self._twin.param_groups]
        hidden = {"state", "param_groups", "defaults"}
        rest = {k: v for k, v in self._twin.__dict__.items() if k not in hidden}
        rest["state"] = [v for k, v in self._twin.state.items() if not isinstance(k, Tensor)]
        leaves = (one for one in pytree.tree_leaves(rest) if not isinstance(one, nn.Parameter))
        return repr((groups, [one for one in leaves if isinstance(one, int | float | Tensor)]))
