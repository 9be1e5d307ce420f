"""Extra: steps optimizers that need whole parameters (Muon, LAMB, Adafactor, LBFGS).

Some optimizers compute with a whole tensor: Newton-Schulz in Muon, rows and columns in Adafactor,
the norm of a layer, blocks of 8-bit states. Then each parameter is stepped on a single rank, its
owner, which gathers the parts, keeps the optimizer's state, and scatters the new values. Optimizers
that combine several parameters (LBFGS) step all parameters on every rank. ``WholeTensorAdapter``
finds out how an optimizer must step (its ``StepMode``) by trials with copies of the optimizer.

Without this folder, an optimizer raises at the first step on sharded parameters, unless it is known
to be element-wise (Adam and SGD, for example) or passed to ``flatshard.declare_elementwise``.
"""

import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import Facts, agreed, raise_everywhere
from flatshard.extras.model_shards import first_of_dtensor
from flatshard.extras.partial_steps import step_groups
from flatshard.extras.whole_tensors.trial import StepMode, find_step_mode, without_params
from flatshard.optimizer import adapter as adapters
from flatshard.optimizer.adapter import Optimizer, all_params, map_state, named_values, with_inner
from flatshard.optimizer.state_dicts import check_same_state, comparable
from flatshard.precision import set_grad
from flatshard.tensor import operators, sharded_tensor, whole
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import FlatShardTensor, check_data, is_unreduced, local_grad
from flatshard.tensor.whole import Moved

_logger = logging.getLogger("flatshard")

# Approximate number of bytes of parameters and gradients that a rank gathers at a time.
PART_BYTES = 32 << 20

# Maximum share of work and memory of a rank, as a multiple of an equal share. With a factor above
# 1, more parameters can be stepped by the rank that already holds most of their elements.
ABOUT_EQUAL = 1.05

Params = Sequence[FlatShardTensor]
FullParams = dict[FlatShardTensor, nn.Parameter]  # keyed by the sharded parameters

OP = "optimizer.step()"
REMEDY = "Every rank must step the same optimizer, with gradients of the same parameters."


def sharded_params(optimizer: Optimizer) -> list[FlatShardTensor]:
    return [param for param in all_params(optimizer) if isinstance(param, FlatShardTensor)]


def _random_state(params: Params) -> Tensor:
    """Return the state of the random number generator on the parameters' device."""
    on_gpu = bool(params) and params[0].is_cuda
    return torch.cuda.get_rng_state(params[0].device) if on_gpu else torch.get_rng_state()


def swap_full_in(optimizer: Optimizer, full: FullParams, *, with_plain: bool) -> ExitStack:
    """Replace an optimizer's sharded parameters by full parameters, until the stack is closed.

    ``full`` maps sharded parameters to full parameters, which also get the optimizer's state. All
    other sharded parameters are removed from the optimizer. Unsharded parameters are removed too,
    unless ``with_plain``.
    """
    undo = ExitStack()
    lists = (group["params"] for one in with_inner(optimizer) for group in one.param_groups)
    for params in {id(params): params for params in lists}.values():
        kept = [p for p in params if p in full or (with_plain and type(p) is not FlatShardTensor)]
        adapters.put_others(undo, params, [full.get(p, p) for p in kept])
    _move_state(optimizer, full.items())
    undo.callback(_move_state, optimizer, [(new, sharded) for sharded, new in full.items()])
    return undo


def _states(optimizer: Optimizer) -> list[MutableMapping[Any, adapters.State]]:
    """Return the ``state`` of an optimizer and of the optimizers inside, without duplicates."""
    return [*{id(one.state): one.state for one in with_inner(optimizer)}.values()]


def _move_state(optimizer: Optimizer, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Move the state of the first tensor of each pair to the second tensor."""
    for old, new in pairs:
        for state in _states(optimizer):
            if old in state:
                state[new] = state.pop(old)


class WholeTensorAdapter(adapters.OptimizerAdapter):
    """Steps an optimizer that may need whole parameters. Trials find the right ``StepMode``."""

    def __init__(self) -> None:
        self.mode = StepMode.ON_SHARDS
        # Ids of the parameters that had a nonzero gradient in a trial.
        self._tried: set[int] = set()
        self._has_tried = False
        # The owner of each parameter, as a rank of the shard group. If the program removes a
        # parameter from the optimizer, the entry stays, because the program may add the parameter
        # again. There are no entries if every rank steps all parameters.
        self._owners: MutableMapping[ShardSpec, int] = weakref.WeakKeyDictionary()
        # The optimizer's sharded parameters at the last call of `_choose_owners`.
        self._params: dict[FlatShardTensor, ShardSpec] = {}
        # With `StepMode.ON_EVERY_RANK`: the full parameters, which every rank steps.
        self._full: FullParams = {}
        # When closed, undoes what `begin` has changed for the step.
        self._undo = ExitStack()

    def begin(self, optimizer: Optimizer, closure: adapters.Closure | None) -> Any:
        self._find_mode(optimizer)
        # Register this step in `stepping` again: a trial may have all-gathered parameters, and an
        # all-gather ends all registered steps.
        adapters.stepping[optimizer] = self
        if self.mode is StepMode.ON_SHARDS:
            # Do not compile the step, except with a closure, which may run a compiled model.
            if closure is None:
                stance = torch.compiler.set_stance("force_eager")
                # `undo` turns compilation on again. The finalizer does this if the step raises and
                # the program then drops the optimizer.
                self._undo.callback(weakref.finalize(self, stance.__exit__, None, None, None))
            return optimizer
        self._choose_owners(optimizer)
        if self.mode is StepMode.ON_EVERY_RANK:
            self._swap_in(optimizer)
            if closure is not None:
                closure.loss = self._average(closure.loss)
            return optimizer
        with torch.no_grad():
            self._step(optimizer, [] if closure is None else [_once(optimizer, closure.loss)])
        return without_params(optimizer)  # torch calls this copy's ``step()``: no effect

    def needs_loss(self, optimizer: Optimizer) -> bool:
        # Call the closure first in three cases: for torch's optimizers, which all begin with it; if
        # no gradient is reduced yet; and if `_step` steps on the owners, and needs the loss.
        is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        grads = [param.grad for param in sharded_params(optimizer) if param.grad is not None]
        if is_torchs or all(map(is_unreduced, grads)):
            return True
        self._find_mode(optimizer)
        return self.mode in (StepMode.IN_PARTS, StepMode.ON_OWNERS)

    @torch.no_grad()
    def pause(self, optimizer: Optimizer) -> None:
        """Write the new values to the shards, and restore the sharded parameters. Collective."""
        for param, full in self._full.items():
            if full.grad is None:  # the step has set the gradient to None, on all ranks
                param.grad = None
        if self._full:
            self._scatter([*self._params], self._full)
        self._undo.close()

    def end(self, optimizer: Optimizer) -> None:
        self.pause(optimizer)
        self.undo(optimizer)

    def undo(self, optimizer: Optimizer) -> None:
        self._undo.close()
        self._full = {}

    def _find_mode(self, optimizer: Optimizer) -> None:
        """Set ``mode`` by a trial, if some gradients were in no earlier trial. Collective."""
        sharded = sharded_params(optimizer)
        some = [p for p in sharded if p.grad is not None and id(p) not in self._tried]
        if self.mode is not StepMode.ON_SHARDS or not some:
            return
        # These parameters have a gradient for the first time, so they may need another mode.
        facts = {f"parameter {param.spec.name!r}": "with a gradient" for param in some}
        hosts = dict.fromkeys(param.spec.comm.host for param in sharded)
        agreed(lambda: (True, facts), hosts, OP, REMEDY)
        # If all gradients are zero (in a step by torch's get_state_dict), an optimizer may skip its
        # computation (DAdaptSGD). So repeat the trial when a gradient is not zero.
        grads: Any = [param.grad for param in some]
        norms = zip(some, operators.norms(grads, 1.0), strict=True)
        moving = {id(param) for param, norm in norms if norm.item() != 0}
        if self._has_tried and not moving:
            return
        self._has_tried = True
        mode = find_step_mode(optimizer)
        split = first_of_dtensor(param.spec for param in sharded)
        if split is not None and mode is not StepMode.ON_SHARDS:
            raise NotImplementedError(
                f"parameter {split!r} was a DTensor. {type(optimizer).__name__} needs full "
                "parameters, but the ranks of this model together hold only a part of the DTensor. "
                "Step the parameter with an element-wise optimizer, such as AdamW."
            )
        # Warn if every rank holds all full parameters, which may exceed the memory of a device.
        level = logging.WARNING if mode is StepMode.ON_EVERY_RANK else logging.INFO
        _logger.log(level, "%s steps %s", type(optimizer).__name__, mode.value)
        self.mode = mode
        self._tried |= moving

    # ------------------------------------------------------------ on owners

    def _comms(self) -> list[Communicator]:
        return [*dict.fromkeys(spec.comm for spec in self._params.values())]

    def _all_comms(self) -> list[Communicator]:
        replicas = (spec.replicas for spec in self._params.values())
        return [*dict.fromkeys((*self._comms(), *replicas))]

    def _choose_owners(self, optimizer: Optimizer) -> None:
        """Choose an owner, the rank that steps a parameter, for each parameter without an owner.

        Does nothing if the optimizer has the same parameters as at the last call.
        """
        params = {param: param.spec for param in sharded_params(optimizer)}
        if params == self._params:
            return
        self._params, self._full = params, {}
        for comm in self._comms() if self.mode is not StepMode.ON_EVERY_RANK else ():
            some = [param for param, spec in params.items() if spec.comm is comm]
            held = [{rank: e.stop - e.start for rank, e in p.spec.holders()} for p in some]
            # An earlier owner stays the owner, because it has the optimizer state.
            known = [self._owners.get(param.spec) for param in some]
            owners = choose_owners([p.spec.shape for p in some], held, comm.size, known)
            self._owners.update(zip((p.spec for p in some), owners, strict=True))

    def _step(self, optimizer: Optimizer, arguments: Sequence[Any]) -> None:
        """Step each parameter that has a gradient, on the parameter's owner. Collective.

        If the step raises on a rank, all ranks raise the error, and no parameter has changed.
        """
        params = self._agree_on_gradients(optimizer)
        parts = (self._parts(params) if self.mode is StepMode.IN_PARTS else None) or [params]
        random = _random_state(params)
        error: Exception | None = None
        done: dict[FlatShardTensor, Tensor] = {}
        # Gather the next part while the current part is stepped.
        finish = self._start_gather(optimizer, parts[0])
        for number, _ in enumerate(parts):
            full = finish()
            if number + 1 < len(parts):
                finish = self._start_gather(optimizer, parts[number + 1])
            if error is not None:
                continue  # step no further part, but keep gathering: other ranks need the data
            try:
                with swap_full_in(optimizer, full, with_plain=number == 0):
                    groups = optimizer.param_groups
                    # Leave out groups without parameters, because some optimizers raise for these.
                    if self.mode is StepMode.IN_PARTS:
                        groups = [group for group in groups if group["params"]]
                    changed = step_groups(optimizer, groups, *arguments) if groups else None
                if changed is not None and self.mode is StepMode.IN_PARTS:
                    raise NotImplementedError(
                        f"{type(optimizer).__name__}.step() changes its parameter groups. "
                        "flatshard calls step() once for each part of the parameters, so the "
                        "groups would change several times. Change them after step() returns."
                    )
                for param, stepped in full.items():
                    if stepped.grad is None:
                        raise NotImplementedError(
                            f"parameter {param.spec.name!r}: {type(optimizer).__name__}.step() "
                            "sets the gradient to None, but only on the rank that steps the "
                            "parameter. Call zero_grad() after step() instead."
                        )
                    check_data(f"{OP}: parameter {param.spec.name!r}", param, stepped.data)
                    done[param] = stepped.detach()
            except Exception as raised:
                error = raised
        raise_everywhere(error, *self._all_comms())
        for part in parts:
            self._scatter(part, done)
        # Check in each step whether the optimizer draws random numbers: trials have only small
        # parameters, and an optimizer may draw random numbers only for large parameters.
        if not torch.equal(random, _random_state(params)):
            warnings.warn(
                f"{type(optimizer).__name__}.step() draws random numbers. Each rank draws them "
                "only for the parameters that it steps, so the values differ from the unwrapped "
                "model's values, as they would with another seed.",
                stacklevel=2,
            )

    def _agree_on_gradients(self, optimizer: Optimizer) -> list[FlatShardTensor]:
        """Return the parameters that have gradients, in the optimizer's order. Collective."""

        def prepare() -> tuple[list[FlatShardTensor], Facts]:
            params = [param for param in self._params if param.grad is not None]
            facts: Facts = {"the step mode": self.mode.value}
            for param in params:
                loaded = [sorted(_sharded_state(one.get(param, {}))) for one in _states(optimizer)]
                grad: Any = param.grad
                facts[f"parameter {param.spec.name!r}"] = f"gradient {grad.dtype}, {loaded}"
            return params, facts

        return agreed(prepare, [comm.host for comm in self._comms()], OP, REMEDY)

    def _parts(self, params: Params) -> list[list[FlatShardTensor]]:
        """Divide parameters into lists: each owner gathers about ``PART_BYTES`` per list."""
        filled: dict[tuple[Communicator, int | None], int] = {}
        parts: dict[int, list[FlatShardTensor]] = {}
        for param in params:
            key = param.spec.comm, self._owners.get(param.spec)
            grad_bytes = 0 if param.grad is None else param.grad.nbytes
            filled[key] = filled.get(key, 0) + param.nbytes + grad_bytes
            parts.setdefault((filled[key] - 1) // PART_BYTES, []).append(param)
        return [parts[number] for number in sorted(parts)]

    def _start_gather(self, optimizer: Optimizer, params: Params) -> Callable[[], FullParams]:
        """Start to send the shards of values, gradients and loaded state to the owners."""
        divided = [(param, one) for param in params for one in _divided(optimizer, param)]
        parts = [(p.spec, local_grad(g, p.spec), self._owners.get(p.spec)) for p, g in divided]
        wait = whole.start_gather(parts, "optimizer step, to the owners")

        def finish() -> FullParams:
            gathered = {id(one): full for (_, one), full in zip(divided, wait(), strict=True)}
            full: FullParams = {}
            for param in params:
                for states in _states(optimizer):
                    if _sharded_state(state := states.get(param, {})):
                        states[param] = map_state(
                            lambda _, value: gathered.get(id(value), value), adapters.apart(state)
                        )
                if (value := gathered[id(param)]) is None:
                    # This rank is not the owner, so it has no state. Make an empty entry:
                    # otherwise, torch's get_state_dict would step the optimizer to create state.
                    optimizer.state[param] = {}
                    continue
                full[param] = nn.Parameter(value, param.requires_grad)
                full[param].__dict__ = param.__dict__  # attributes that users set
                if param.grad is not None:
                    set_grad(full[param], gathered[id(param.grad)])
            return full

        return finish

    def _average(self, loss: Any) -> Any:
        """Average the loss over the ranks, because some optimizers (LBFGS) use it. Collective."""
        if not isinstance(loss, Tensor | float) or not self._params:
            return loss
        value = torch.as_tensor(loss).detach().to(torch.float64, copy=True).cpu()
        spec = next(iter(self._params.values()))
        for comm in (spec.comm, spec.replicas):
            value = comm.reduce_scalars(value.to(comm.host.device), "SUM", op_name=OP).cpu()
            value /= comm.size
        return value.to(loss) if isinstance(loss, Tensor) else value.item()

    def _scatter(self, params: Params, done: Mapping[FlatShardTensor, Tensor]) -> None:
        """Write the full values from the owners to all shards. Collective."""
        pairs = [(p, p.spec) for p in params]
        moved = [Moved(s, p.local.detach(), done.get(p), self._owners.get(s)) for p, s in pairs]
        whole.scatter(moved, "optimizer step, to the shards")
        sharded_tensor.wrote(params)

    # ------------------------------------------------------------ on every rank

    @torch.no_grad()
    def _swap_in(self, optimizer: Optimizer) -> None:
        """Replace the optimizer's sharded parameters by full parameters. Collective."""
        self._agree_on_gradients(optimizer)
        for param, full in self._start_gather(optimizer, [*self._params])().items():
            # Reuse the parameter objects of the last call, because the optimizer may keep
            # references to them.
            known = self._full.setdefault(param, full)
            known.data = full.data
            set_grad(known, full.grad)
        self._undo = swap_full_in(optimizer, self._full, with_plain=True)

    # ------------------------------------------------------------ state

    def shared_state(self, optimizer: Optimizer) -> dict[FlatShardTensor, adapters.State]:
        """Divide the owners' optimizer state into shards on all ranks; return them. Collective."""
        if self._params and self.mode is StepMode.ON_EVERY_RANK:
            # Each rank steps the full parameters, because the optimizer calls collectives itself.
            # Raise on all ranks if the states that the ranks have computed differ.
            states = ((param.spec.name, optimizer.state.get(param, {})) for param in self._params)
            values = comparable(states, enumerate(optimizer.param_groups))
            for comm in self._all_comms():
                check_same_state(values, comm.host, type(optimizer).__name__)
            return {}
        shared: dict[FlatShardTensor, adapters.State] = {}
        moved: list[Moved] = []
        for comm in self._comms():
            params = [param for param, spec in self._params.items() if spec.comm is comm]
            own = ((i, p) for i, p in enumerate(params) if self._owners[p.spec] == comm.rank)
            state_of = optimizer.state
            described = {n: _described(p, state_of[p]) for n, p in own if p in state_of}
            everyone = comm.host.gather(described, "optimizer state")
            for number, param in enumerate(params):
                # Skip state from a checkpoint, which is sharded on all ranks until the next step.
                if _sharded_state(optimizer.state.get(param, {})):
                    continue
                owner = self._owners[param.spec]
                state = everyone[owner].get(number, {})
                mine = named_values(optimizer.state.get(param, {}))
                sharded: adapters.State = {}
                for name, value in named_values(state).items():
                    if isinstance(value, Tensor) and value.is_meta:
                        part = param.local.detach().new_empty(param.spec.numel, dtype=value.dtype)
                        full = mine[name] if owner == comm.rank else None
                        moved.append(Moved(param.spec, part, full, owner))
                        sharded[name] = FlatShardTensor(part, param.spec, role=f"{name} of")
                shared[param] = map_state(sharded.get, state)
        whole.scatter(moved, "optimizer state, to the shards")
        return shared


# ------------------------------------------------------------ owners


def step_cost(shape: Sequence[int]) -> int:
    """Return the approximate work of a parameter's step (for a matrix, of Newton-Schulz)."""
    if len(shape) < 2:
        return math.prod(shape)
    rows, columns = sorted((shape[0], math.prod(shape[1:])))
    # A Newton-Schulz iteration on a matrix X computes three products: A = X @ X.T, A @ A, and a
    # (rows, rows) matrix @ X.
    return rows * rows * (2 * columns + rows)


def choose_owners(
    shapes: Sequence[Sequence[int]],
    held: Sequence[Mapping[int, int]],
    size: int,
    known: Sequence[int | None] | None = None,
) -> list[int]:
    """Choose an owner for each parameter: the rank that steps the parameter. Returns the owners.

    Each rank gets about an equal share of the work and memory, and few elements are sent. All ranks
    choose the same owners.

    A parameter with an owner in ``known`` keeps this owner. If one rank has all elements of a
    parameter, this rank becomes the owner. Other parameters get owners by decreasing cost. Among
    ranks whose share stays below ``ABOUT_EQUAL``, the rank that holds most of the parameter (see
    ``held``) becomes the owner. If none of them holds a part, the rank with the least share becomes
    the owner.
    """
    works = [step_cost(shape) for shape in shapes]
    numels = [math.prod(shape) for shape in shapes]
    all_work, all_numel = max(sum(works), 1), max(sum(numels), 1)
    costs = [w / all_work + n / all_numel for w, n in zip(works, numels, strict=True)]
    most = ABOUT_EQUAL * sum(costs) / size
    taken = [0.0] * size
    owners: list[Any] = list(known or [None] * len(shapes))
    for index, parts in enumerate(held):
        if owners[index] is None and len(parts) == 1:
            owners[index] = next(iter(parts))
        if owners[index] is not None:
            taken[owners[index]] += costs[index]
    divided = [index for index, owner in enumerate(owners) if owner is None]
    for index in sorted(divided, key=lambda index: -costs[index]):
        least = min(range(size), key=taken.__getitem__)
        parts = {least: 0, **held[index]}
        fits = [rank for rank in parts if taken[rank] + costs[index] <= most] or [least]
        owners[index] = max(fits, key=lambda rank: (parts[rank], -taken[rank], -rank))
        taken[owners[index]] += costs[index]
    return owners


# ------------------------------------------------------------ one step


def _once(optimizer: Optimizer, loss: Any) -> Callable[[], Any]:
    """Return a closure that returns ``loss`` at its first call, and then raises an error."""
    losses = [loss]

    def closure() -> Any:
        if losses:
            return losses.pop()
        raise NotImplementedError(
            f"{type(optimizer).__name__}.step() calls its closure several times, but only one rank "
            "has each full parameter during the step. Call step() without a closure."
        )

    return closure


def _described(param: FlatShardTensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return the owner's state, with meta tensors in place of tensors that are sent separately."""

    def described(_: str, value: Any) -> Any:
        if isinstance(value, FlatShardTensor):
            return None  # state from a checkpoint, which is still sharded, is not sent
        is_per_element = type(value) is Tensor and value.shape == param.shape and value.numel() > 1
        return value.to("meta") if is_per_element else value

    return map_state(described, state)


def _divided(optimizer: Optimizer, param: FlatShardTensor) -> list[Tensor]:
    """Return the tensors to gather for a step: the parameter, its gradient, its sharded state."""
    found: list[Tensor] = [param] if param.grad is None else [param, param.grad]
    for states in _states(optimizer):
        loaded = _sharded_state(states.get(param, {}))
        found += [loaded[key] for key in sorted(loaded)]
    return found


def _sharded_state(state: adapters.State) -> dict[str, FlatShardTensor]:
    """Return the sharded values in a parameter's state.

    Such values come from a checkpoint, or from an element-wise optimizer with the same ``state``.
    """
    values = named_values(state).items()
    return {name: value for name, value in values if isinstance(value, FlatShardTensor)}
