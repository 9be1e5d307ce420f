"""``WholeStep``: an optimizer steps full parameters, of which the ranks hold parts.

What looks at a whole tensor (Muon's Newton-Schulz, Adafactor's rows and columns, a norm of each
layer, blocks of 8-bit states) steps each parameter on one rank, its owner, which brings the parts
together, has the state, and gives the new values back. What looks at several parameters at once
(LBFGS) steps all of them on every rank. See ``Manner`` for who needs what.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import Facts, agreed, raise_everywhere
from flatshard.optimizer.buckets import ONE_PER_PARAMETER
from flatshard.optimizer.trial import Manner, all_params, manner_of, step_of
from flatshard.optimizer.whole_tensors import Held, Piece, Whole, collect, spread
from flatshard.plan.owners import choose_owners
from flatshard.precision.casts import set_grad
from flatshard.tensor.shard_spec import first_of_dtensor
from flatshard.tensor.sharded_tensor import FlatShardTensor, attributes_of, check_data, wrote

# About how many bytes of parameters and gradients come together at a time on each rank.
PART_BYTES = 32 << 20

_logger = logging.getLogger("flatshard")

_OP = "optimizer.step()"
_REMEDY = "Every rank must step the same optimizer, with gradients of the same parameters."

_manners: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Manner, set[int]]] = (
    weakref.WeakKeyDictionary()
)
_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, WholeStep] = weakref.WeakKeyDictionary()


def manner_for(optimizer: torch.optim.Optimizer) -> Manner:
    """How an optimizer that is not element-wise steps the parameters that have gradients now.

    Collective: all ranks of its sharded parameters.
    """
    with_grads = {id(param) for param in _sharded(optimizer) if param.grad is not None}
    manner, tried = _manners.get(optimizer, (Manner.ON_SHARDS, set()))
    if manner is Manner.ON_SHARDS and not with_grads <= tried:
        # For other parameters it may do something else. All ranks try the same.
        some = [param for param in _sharded(optimizer) if param.grad is not None]
        facts = {f"parameter {param.spec.name!r}": "with a gradient" for param in some}
        comms = dict.fromkeys(param.spec.comm for param in _sharded(optimizer))
        agreed(lambda: (True, facts), comms, _OP, _REMEDY)
        manner = manner_of(optimizer)
        split = first_of_dtensor(param.spec for param in _sharded(optimizer))
        if split is not None and manner is not Manner.ON_SHARDS:
            raise NotImplementedError(
                f"parameter {split!r} was a DTensor, and {type(optimizer).__name__} "
                "needs full parameters: of those this rank's group holds a part. Use an "
                "element-wise optimizer, such as AdamW, for it."
            )
        if with_grads:
            # A model that is sharded because it does not fit is then full on each device.
            level = logging.WARNING if manner is Manner.ON_EVERY_RANK else logging.INFO
            _logger.log(level, "%s steps %s", type(optimizer).__name__, manner.value)
        _manners[optimizer] = manner, tried | with_grads
    return manner


def step_for(optimizer: torch.optim.Optimizer, manner: Manner) -> WholeStep:
    """Collective at the first call, and after parameters were added."""
    step = _steps.get(optimizer)
    if step is None or not step.is_of(optimizer):
        step = _steps[optimizer] = WholeStep(optimizer, manner)
    return step


def reports(params: Iterable[nn.Parameter]) -> list[str]:
    """A line for each optimizer of some of the parameters that has stepped them whole."""
    ids = {id(param) for param in params}
    return [
        f"{type(optimizer).__name__} steps {step.manner.value}: at most {step.extra_bytes():,} "
        "bytes beside this rank's shards, gradients and state"
        for optimizer, step in _steps.items()
        if any(id(param) in ids for param in step.owned)
    ]


def _sharded(optimizer: torch.optim.Optimizer) -> list[FlatShardTensor]:
    return [param for param in all_params(optimizer) if isinstance(param, FlatShardTensor)]


def _others(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [param for param in all_params(optimizer) if not isinstance(param, FlatShardTensor)]


class Shown:
    """Inside, an optimizer has full parameters in the place of sharded ones, and their state."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shown: dict[FlatShardTensor, nn.Parameter],
        others: Collection[Any] | None,
    ) -> None:
        """Of its parameters without a full one it has only those in ``others``."""
        self._optimizer, self._groups, self._shown = optimizer, optimizer.param_groups, shown
        self._before = [list(group["params"]) for group in self._groups]
        self._others = {id(param) for param in others or ()}
        self._states = [one.state for one in _family(optimizer)]

    def __enter__(self) -> list[dict[str, Any]]:
        for group in self._groups:
            # In place: LBFGS, say, keeps the list.
            group["params"][:] = [
                self._shown.get(param, param)
                for param in group["params"]
                if param in self._shown or id(param) in self._others
            ]
        self._move_state((sharded, full) for sharded, full in self._shown.items())
        return self._groups

    def __exit__(self, *_: object) -> None:
        self._optimizer.param_groups = self._groups
        for group, params in zip(self._groups, self._before, strict=True):
            group["params"][:] = params
        self._move_state((full, sharded) for sharded, full in self._shown.items())

    def _move_state(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for old, new in pairs:
            for state in self._states:
                if old in state:
                    state[new] = state.pop(old)


@dataclass(frozen=True)
class Owned:
    """A sharded parameter, what it is while it is whole, and the bytes that come together."""

    param: FlatShardTensor
    whole: Whole

    @property
    def nbytes(self) -> int:
        grad = self.param.grad
        return self.param.nbytes + (0 if grad is None else grad.nbytes)


class WholeStep:
    """Steps one optimizer's sharded parameters whole."""

    def __init__(self, optimizer: torch.optim.Optimizer, manner: Manner) -> None:
        """Collective: all ranks of the optimizer's sharded parameters."""
        self.manner = manner
        self._optimizer = weakref.ref(optimizer)
        self._params = _sharded(optimizer)
        _check_attributes(optimizer)
        self.owned: dict[FlatShardTensor, Whole] = {}
        by_comm: dict[Communicator, list[FlatShardTensor]] = {}
        for param in self._params:
            by_comm.setdefault(param.spec.comm, []).append(param)
        self.comms = list(by_comm)
        for comm, params in by_comm.items():
            mine = [Held(param.spec.offset, param.spec.numel) for param in params]
            held = list(zip(*comm.gather_objects(mine, op_name=f"{_OP}: owners"), strict=True))
            shapes = [param.spec.shape for param in params]
            owners: Sequence[int | None] = [None] * len(params)
            if manner is not Manner.ON_EVERY_RANK:
                owners = choose_owners(shapes, [[one.numel for one in parts] for parts in held])
            for param, parts, owner in zip(params, held, owners, strict=True):
                self.owned[param] = Whole(param.spec, parts, owner)

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether these are the optimizer's parameters still."""
        params = _sharded(optimizer)
        return len(params) == len(self._params) and all(
            mine is theirs and mine.spec is self.owned[theirs].spec
            for mine, theirs in zip(self._params, params, strict=True)
        )

    def extra_bytes(self) -> int:
        """Of full tensors, and of what is on its way, at the peak of a step on this rank."""
        values = sum(p.local.element_size() * p.numel() for p, w in self.owned.items() if w.is_here)
        # Of a part the gradients, or both while they come: sent, received and put together.
        part = 2 * values
        if self.manner is Manner.IN_PARTS:
            largest = max((Owned(*pair).nbytes for pair in self.owned.items()), default=0)
            part = min(part, PART_BYTES + largest)
        return values + 4 * part

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "it is stepping"
        return optimizer

    # ------------------------------------------------------------ on owners

    def step(self, arguments: Sequence[Any]) -> None:
        """Step each parameter that has a gradient on its owner.

        Collective. Where a rank's step raises, all raise that, and no parameter has changed.
        """
        optimizer = self.optimizer
        owned = self.agree_on_gradients()
        parts = (self._parts(owned) if self.manner is Manner.IN_PARTS else None) or [owned]
        others = _others(optimizer)
        error: Exception | None = None
        done: dict[FlatShardTensor, Tensor] = {}
        # The next part is under way while one is stepped.
        coming = self.bring(parts[0])
        for number, _ in enumerate(parts):
            shown = coming()
            if number + 1 < len(parts):
                coming = self.bring(parts[number + 1])
            if error is not None:
                continue  # the other ranks wait for this one's parts
            try:
                with Shown(optimizer, shown, others if number == 0 else None) as groups:
                    if self.manner is Manner.IN_PARTS:  # some optimizers take no empty group
                        optimizer.param_groups = [group for group in groups if group["params"]]
                    before = repr([_options(group) for group in groups])
                    if optimizer.param_groups:
                        step_of(optimizer)(optimizer, *arguments)
                    is_changed = repr([_options(group) for group in groups]) != before
                    if is_changed and self.manner is Manner.IN_PARTS:
                        raise NotImplementedError(
                            f"{type(optimizer).__name__}.step() has begun to change its parameter "
                            "groups, and would do so once for each part of the parameters."
                        )
                for param, full in shown.items():
                    check_data(f"{_OP}: parameter {param.spec.name!r}", param, full.data)
                    done[param] = full.detach()
            except Exception as raised:
                error = raised
        self._raise_everywhere(error)
        for part in parts:
            self.give_back(part, done)

    def agree_on_gradients(self) -> list[Owned]:
        """The parameters that have gradients, in the optimizer's order. Collective.

        Raises:
            ValueError: on all ranks, where they differ in these.
        """
        optimizer = self.optimizer

        def prepare() -> tuple[list[Owned], Facts]:
            some = [Owned(p, whole) for p, whole in self.owned.items() if p.grad is not None]
            facts: Facts = {"the manner": self.manner.value}
            for one in some:
                loaded = sorted(_sharded_state(optimizer.state.get(one.param)))
                grad: Any = one.param.grad
                facts[f"parameter {one.param.spec.name!r}"] = f"gradient {grad.dtype}, {loaded}"
            return some, facts

        return agreed(prepare, self.comms, _OP, _REMEDY)

    def _parts(self, owned: Sequence[Owned]) -> list[list[Owned]]:
        """Divided so that each rank gets some bytes at a time."""
        filled: dict[tuple[Communicator, int | None], int] = {}
        parts: dict[int, list[Owned]] = {}
        for one in owned:
            key = one.whole.spec.comm, one.whole.owner
            filled[key] = filled.get(key, 0) + one.nbytes
            parts.setdefault((filled[key] - 1) // PART_BYTES, []).append(one)
        return [parts[number] for number in sorted(parts)]

    def bring(self, owned: Sequence[Owned]) -> Callable[[], dict[FlatShardTensor, nn.Parameter]]:
        """Begin to bring values, gradients and loaded state together; what is returned waits."""
        optimizer = self.optimizer
        waits = []
        for comm in self.comms:
            here = [one for one in owned if one.whole.spec.comm is comm]
            places: list[tuple[FlatShardTensor, str | None, bool]] = []
            pieces: list[Piece] = []
            for param, whole in ((one.param, one.whole) for one in here):
                pieces.append((whole, param.local.detach()))
                places.append((param, None, False))
                if param.grad is not None:
                    pieces.append((whole, _local_grad(param)))
                    places.append((param, None, True))
                for key, value in sorted(_sharded_state(optimizer.state.get(param)).items()):
                    pieces.append((whole, value.local))
                    places.append((param, key, False))
            pairs = zip(places, pieces, strict=True)
            mine = [place for place, (whole, _) in pairs if whole.is_here]
            waits.append((mine, collect(comm, pieces, f"{_OP}: to the owners")))

        def finish() -> dict[FlatShardTensor, nn.Parameter]:
            shown: dict[FlatShardTensor, nn.Parameter] = {}
            for mine, wait in waits:
                for (param, key, is_grad), full in zip(mine, wait(), strict=True):
                    if key is not None:
                        optimizer.state[param][key] = full
                    elif is_grad:
                        set_grad(shown[param], full)
                    else:
                        shown[param] = nn.Parameter(full, param.requires_grad)
                        shown[param].__dict__.update(attributes_of(param))
            for one in owned:
                if not one.whole.is_here:
                    # The owner has it. Without any, torch's get_state_dict would make a step.
                    optimizer.state[one.param] = {}
            return shown

        return finish

    def average(self, loss: Any) -> Any:
        """The mean of the ranks' losses, which is that of all their inputs. Collective."""
        # From different losses the ranks would draw different conclusions.
        if not isinstance(loss, Tensor | float) or not self._params:
            return loss
        value = torch.as_tensor(loss).detach().to(torch.float64, copy=True).cpu()
        for comm in (self._params[0].spec.comm, self._params[0].spec.replicas):
            value = comm.reduce_scalars(value.to(comm.control_device), "SUM", op_name=_OP).cpu()
            value /= comm.size
        return value.to(loss) if isinstance(loss, Tensor) else value.item()

    def _raise_everywhere(self, error: Exception | None) -> None:
        for comm in self.comms:
            raise_everywhere(error, comm)
        for replicas in {param.spec.replicas: None for param in self._params}:
            raise_everywhere(error, replicas)

    def give_back(self, owned: Sequence[Owned], done: dict[FlatShardTensor, Tensor]) -> None:
        for comm in self.comms:
            here = [one for one in owned if one.whole.spec.comm is comm]
            pieces = [(one.whole, done.get(one.param, one.param.local)) for one in here]
            parts = [one.param.local.detach() for one in here]
            if pieces:
                spread(comm, pieces, parts, f"{_OP}: to the shards")
        wrote([one.param for one in owned])


class _PerElement(NamedTuple):
    """State that its owner has in the parameter's shape."""

    dtype: torch.dtype


def shared_state(
    optimizer: torch.optim.Optimizer,
) -> dict[FlatShardTensor, dict[str, Any]]:
    """State that owners have, on all ranks: per element sharded, all else (factors, say) full.

    Empty for an optimizer that has no owners.

    Collective: all ranks of its sharded parameters.
    """
    step = _steps.get(optimizer)
    if step is None or step.manner is Manner.ON_EVERY_RANK:
        return {}
    shared: dict[FlatShardTensor, dict[str, Any]] = {}
    for comm in step.comms:
        params = [param for param in step.owned if param.spec.comm is comm]
        mine = [_described(param, optimizer.state.get(param, {})) for param in params]
        everyone = comm.gather_objects(mine, op_name="optimizer state")
        pieces: list[Piece] = []
        parts: list[Tensor] = []
        for number, param in enumerate(params):
            whole = step.owned[param]
            # Loaded, and not stepped since: it is shared as it is.
            if _sharded_state(optimizer.state.get(param)):
                continue
            assert whole.owner is not None
            state = everyone[whole.owner][number]
            for key, value in state.items():
                if not isinstance(value, _PerElement):
                    continue
                like = param.local.detach().new_empty(0, dtype=value.dtype)
                pieces.append((whole, optimizer.state[param][key] if whole.is_here else like))
                parts.append(like.new_empty(param.spec.numel))
                state[key] = FlatShardTensor(parts[-1], param.spec)
            shared[param] = state
        if pieces:
            spread(comm, pieces, parts, "optimizer state: to the shards")
    return shared


def with_owners(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    shared: dict[FlatShardTensor, dict[str, Any]],
) -> dict[str, Any]:
    """A state dict of the optimizer with ``shared`` state in the place of what this rank has."""
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    key_of = {id(param): key for key, param in zip(keys, all_params(optimizer), strict=False)}
    theirs = {key_of[id(param)]: state for param, state in shared.items() if id(param) in key_of}
    state = {key: value for key, value in {**state_dict["state"], **theirs}.items() if value != {}}
    return {**state_dict, "state": state}


def _described(param: FlatShardTensor, state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _PerElement(value.dtype)
        if type(value) is Tensor and value.shape == param.shape and key not in ONE_PER_PARAMETER
        else value
        for key, value in state.items()
        if not isinstance(value, FlatShardTensor)
    }


class Closure:
    """A closure that has been called once: its first result is there, others are made."""

    def __init__(self, again: Callable[[], Any], loss: Any) -> None:
        self._again, self._first = again, [loss]

    def __call__(self) -> Any:
        return self._first.pop() if self._first else self._again()


class EveryRank:
    """All full parameters in place of the sharded ones while an optimizer steps on every rank.

    Collective: all ranks of its parameters, whose steps are the same.
    """

    def __init__(self, step: WholeStep) -> None:
        self._step = step
        self._owned = [Owned(param, whole) for param, whole in step.owned.items()]
        self._full: dict[FlatShardTensor, nn.Parameter] = {}
        self._show()

    def _show(self) -> None:
        step = self._step
        with torch.no_grad():
            step.agree_on_gradients()
            for param, full in step.bring(self._owned)().items():
                # The objects stay: the optimizer may have noted them.
                known = self._full.setdefault(param, full)
                known.data = full.data
                set_grad(known, full.grad)
            self._shown = Shown(step.optimizer, self._full, _others(step.optimizer))
            self._shown.__enter__()

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """The mean of what the ranks' closures return for the values of now."""
        with torch.no_grad():
            self.write_back()
        self.undo()
        with torch.enable_grad():
            loss = closure()
        self._show()
        return self._step.average(loss)

    def write_back(self) -> None:
        """Write the new values to the shards."""
        done = {param: full.detach() for param, full in self._full.items()}
        self._step.give_back(self._owned, done)

    def undo(self) -> None:
        """Put the sharded parameters back."""
        self._shown.__exit__()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _sharded_state(state: dict[str, Any] | None) -> dict[str, FlatShardTensor]:
    """State of which this rank holds a part: a checkpoint's."""
    return {k: v for k, v in (state or {}).items() if isinstance(v, FlatShardTensor)}


def _check_attributes(optimizer: torch.optim.Optimizer) -> None:
    """Raise NotImplementedError for parameters that cannot be replaced for a step."""
    groups = optimizer.param_groups
    known = {id(group["params"]) for group in groups} | {id(groups), id(optimizer.state)}
    for name, value in optimizer.__dict__.items():
        for kept in pytree.tree_leaves(value, is_leaf=lambda one: id(one) in known):
            if isinstance(kept, FlatShardTensor):
                raise NotImplementedError(
                    f"{type(optimizer).__name__} keeps parameter {kept.spec.name!r} in its "
                    f"attribute {name!r}, and would not see the full one that it needs. Let it "
                    "take parameters from param_groups."
                )


def _local_grad(param: FlatShardTensor) -> Tensor:
    grad = param.grad
    assert grad is not None
    if isinstance(grad, FlatShardTensor):
        return grad.local.detach()
    return param.spec.slice(grad.detach())  # the user assigned it, a full one


def _family(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizer, and those inside it, as Lookahead has one."""
    inner = (v for v in optimizer.__dict__.values() if isinstance(v, torch.optim.Optimizer))
    return [optimizer, *inner]
