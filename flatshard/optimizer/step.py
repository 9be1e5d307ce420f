"""Optimizers see plain tensors: local twins stand in for sharded parameters during ``step()``.

Dispatching every operation of an optimizer on ``FlatShardTensor`` is right but slow. For optimizers
that treat every element alike, hooks around ``step()`` therefore put plain 1-D parameters that
share the shard's memory into the parameter groups, one for all neighbours, and move the state
along. The hooks are global, so they also serve optimizers that were built before the model was
wrapped.

Users' own step hooks see the sharded parameters: the exchange happens after the last of them before
``step()``, and is undone before the first of them after it.

[Note: one rank's state]
``optimizer.state_dict()`` holds this rank's parts alone, so it says whose they are: its first
group carries a stamp. There rather than at the top, because torch keeps the keys of groups that it
loads: if that happens before the optimizer's first step, when it has no hook of ours, that step
finds the stamp.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
import re
import warnings
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import hooks as torch_hooks

from flatshard.optimizer import fused_step, offload
from flatshard.optimizer.buckets import Part, Run, apart, find_runs
from flatshard.optimizer.consumed_grad import drop_consumed
from flatshard.precision.casts import check_dtype, set_grad
from flatshard.tensor.flat_parameter import FlatParameter
from flatshard.tensor.param_swap import FlattenedParameter
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_range

_ELEMENTWISE: set[Any] = {
    inspect.unwrap(kind.step)
    for kind in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    )
}

_TORCHS_OWN = frozenset(_ELEMENTWISE)

# State of one number per parameter, not per element: also where the parameter is 0-d itself.
ONE_PER_PARAMETER = frozenset({"step", "eta", "mu", "mu_product"})

_STAMP = "flatshard"

_swapped: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Exchange] = weakref.WeakKeyDictionary()
_runs: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, Run]] = (
    weakref.WeakKeyDictionary()
)
"""Per optimizer its runs of the last step, by the id of their first member."""
_installed = False


def declare_elementwise(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Say that an optimizer updates every element from that element's own gradient and state.

    Its ``step`` then works on plain 1-D tensors, as torch's own do. Without this it sees
    true-shape sharded parameters, where an operation is right or raises.
    """
    _ELEMENTWISE.add(inspect.unwrap(optimizer_class.step))


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer works on plain 1-D tensors instead of sharded parameters."""
    return inspect.unwrap(type(optimizer).step) in _ELEMENTWISE


def install() -> None:
    """Register the hooks with torch, once in a process."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _installed = True


def restore_all() -> None:
    """Undo the exchange where ``step()`` raised and its post hook never ran."""
    for optimizer in list(_swapped):
        _swap_out(optimizer)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Global hook: let the exchange be the optimizer's innermost hooks."""
    restore_all()
    _check_params(optimizer)
    check_state(optimizer)
    if not is_elementwise(optimizer):
        return
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    for table, hook in ((before, _exchange), (after, _undo)):
        if hook not in table.values():
            table[torch_hooks.RemovableHandle(table).id] = hook
    before.move_to_end(next(key for key, hook in before.items() if hook is _exchange))
    after.move_to_end(next(key for key, hook in after.items() if hook is _undo), last=False)


def check_state(optimizer: torch.optim.Optimizer) -> None:
    """See before a step that state which was loaded is this rank's.

    Raises:
        RuntimeError: it is another rank's, or another layout's.
    """
    watch(optimizer)
    for group in optimizer.param_groups:
        if _STAMP in group:
            _check_stamp(optimizer, group[_STAMP])
            del group[_STAMP]


def _check_params(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step on gradients that only this rank has, or that the optimizer can't take."""
    takes_sparse_alone = isinstance(optimizer, torch.optim.SparseAdam)
    with torch._C.DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            for param in group["params"]:
                is_ours = isinstance(param, FlatShardTensor | FlatParameter)
                if takes_sparse_alone and is_ours:
                    raise RuntimeError(
                        "SparseAdam: gradients of sharded parameters are dense, also those of "
                        "nn.Embedding(sparse=True). Use one that takes them: Adam, SGD, Adagrad."
                    )
                if isinstance(param, FlattenedParameter):
                    raise RuntimeError(
                        f"step(): the optimizer was made before wrapping, and its parameters "
                        f"became a part of the flat parameter of unit {param.unit_name!r}. "
                        "Make it from model.parameters() after wrapping, or wrap with "
                        "use_orig_params=True."
                    )
                drop_consumed(param)  # what backward has stepped is not stepped again
                grad = param.grad
                if grad is None:
                    continue
                if grad.dtype is not param.dtype:
                    check_dtype(optimizer, group, param, _name_of(param))
                # An earlier, reduced gradient is marked too while more waits for its reduction.
                unit = getattr(grad, "_unreduced_of", None)
                if unit is not None:
                    raise RuntimeError(
                        f"unit {unit!r}: step() on gradients that were accumulated under no_sync "
                        "and not reduced. Run the last backward before a step outside of no_sync."
                    )


def _drop_spent(optimizer: torch.optim.Optimizer) -> None:
    """What backward has stepped is not stepped again."""
    with torch._C.DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            for param in group["params"]:
                drop_consumed(param)


def _exchange(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    # args[0] is the optimizer itself.
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _swap_in(optimizer, _step_in_parts(optimizer))
        return None
    _swap_in(optimizer)

    def with_sharded_parameters() -> Any:
        _swap_out(optimizer)
        result = closure()  # where it raises, the step is over
        _drop_spent(optimizer)
        _swap_in(optimizer, _step_in_parts(optimizer))
        return result

    if len(args) > 1:
        return (args[0], with_sharded_parameters, *args[2:]), kwargs
    return args, {**kwargs, "closure": with_sharded_parameters}


def _step_in_parts(optimizer: torch.optim.Optimizer) -> set[int]:
    """Step what is stepped a part at a time; returns the ids, which the step leaves out."""
    if inspect.unwrap(type(optimizer).step) not in _TORCHS_OWN:
        return set()  # others may count their steps somewhere
    return offload.step(optimizer, step_parts)


def reserve(optimizer: torch.optim.Optimizer) -> None:
    """Before a backward that steps: keep room on the disk for state that is still to be made.

    Raises:
        OffloadError: the disk is full.
    """
    if inspect.unwrap(type(optimizer).step) in _TORCHS_OWN:
        offload.reserve(optimizer, before_backward=True)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Global hook: give back the pages of what other optimizers than element-wise have used."""
    if not is_elementwise(optimizer):
        for group in optimizer.param_groups:
            offload.rest(optimizer, group["params"])


def _undo(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _swap_out(optimizer)
    for group in optimizer.param_groups:
        offload.rest(optimizer, group["params"])


def step_parts(
    optimizer: torch.optim.Optimizer, parts: Sequence[tuple[dict[str, Any], list[Any]]]
) -> None:
    """Step some parameters of an element-wise optimizer, to the bit as ``step()`` would.

    Hooks of the optimizer are not called.

    Args:
        optimizer: whose.
        parts: of a parameter group, some parameters that follow one another in it; disjoint.

    Raises:
        NotImplementedError: the optimizer keeps something per group that changes with every step.
    """
    # Groups of their own, so that what is not neighbours in ``step()`` is not joined here either.
    narrow = [{**group, "params": list(params)} for group, params in parts]
    step = inspect.unwrap(type(optimizer).step)
    whole, optimizer.param_groups = optimizer.param_groups, narrow
    try:
        with torch.no_grad():
            for group, params in parts:
                for param in params:
                    check_dtype(optimizer, group, param, _name_of(param))
            _swap_in(optimizer)
            step(optimizer)
    finally:
        _swap_out(optimizer)
        optimizer.param_groups = whole
        for _, params in parts:
            offload.rest(optimizer, params)
    for (group, _), after in zip(parts, narrow, strict=True):
        changed = [key for key in after if key != "params" and after[key] is not group.get(key)]
        if changed:
            raise NotImplementedError(
                f"{type(optimizer).__name__}.step() changes {changed[0]!r} of a parameter group, "
                "and would do so once per unit. Step it after backward."
            )


class _Exchange:
    """What stands in for one optimizer's sharded parameters while it steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, left_out: Collection[int]) -> None:
        """Nothing is exchanged yet; ``left_out``: ids of parameters that are not to be stepped."""
        self._optimizer, self._state = optimizer, optimizer.state
        self._left_out = left_out
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._twins: list[tuple[nn.Parameter, FlatShardTensor | FlatParameter]] = []
        self._runs: list[tuple[Run, list[Part] | None]] = []  # and the state its members kept
        self._fused: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Put twins into the groups, move the state along, and have the fastest kernel step it."""
        known = _runs.setdefault(self._optimizer, {})
        for group in self._optimizer.param_groups:
            params = group["params"]
            if self._left_out:
                self._lists.append((params, list(params)))
                params[:] = [param for param in params if id(param) not in self._left_out]
            seen = 0
            shown: list[nn.Parameter] = []  # what the optimizer is to see
            for position, run in find_runs(params, known):
                shown += map(self._replaced, params[seen:position])
                seen = position + len(run.members)
                shown += self._join(run) or map(self._replaced, run.members)
            shown += map(self._replaced, params[seen:])
            if len(shown) != len(params) or not all(map(operator.is_, shown, params)):
                self._lists.append((params, list(params)))
                params[:] = shown
                if fused_step.suits(self._optimizer, group):
                    self._fused.append(group)
                    group["fused"] = True

    def _join(self, run: Run) -> list[nn.Parameter]:
        """What stands for neighbours; nothing where their states differ in more than values."""
        own = [self._state.get(param) for param in run.members]
        whole, parts = run.known_state(own) or (None, None)
        if parts is None:
            states = [
                state if state is None else _local_state(param, state)
                for param, state in zip(run.members, own, strict=True)
            ]
            whole = run.join(states)
            if whole is None:
                return []
            for param in run.members:
                self._state.pop(param, None)
        if whole:
            self._state.update(zip(run.pieces, run.hand_out(whole), strict=True))
        run.show_grads()
        # An optimizer that writes to `p.data` would leave no trace of it, and what was gathered
        # before would be taken for current.
        torch.autograd.graph.increment_version(run.pieces[0])
        self._runs.append((run, parts))
        return run.pieces

    def _replaced(self, param: Any) -> Any:
        """What stands for a parameter that is stepped alone."""
        # What has no gradient is left alone: its state may be part of a run's.
        if isinstance(param, FlatShardTensor | FlatParameter) and param.grad is not None:
            return self._replace(param)
        return param

    def _replace(self, param: FlatShardTensor | FlatParameter) -> nn.Parameter:
        if isinstance(param, FlatShardTensor):
            twin = param.local_parameter()
            set_grad(twin, _local_grad(param))
        else:
            # Plain already, only its gradient is not.
            twin = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
            grad = param.grad
            set_grad(twin, None if grad is None else local_range(grad))
        torch.autograd.graph.increment_version(twin)
        if param in self._state:
            self._state[twin] = apart(_local_state(param, self._state.pop(param)))
        self._twins.append((twin, param))
        return twin

    def undo(self) -> None:
        """Put the parameters back, and their state."""
        for group in self._fused:
            group["fused"] = None
        for params, before in reversed(self._lists):
            params[:] = before
        for twin, param in self._twins:
            if twin.grad is None:
                # The optimizer, or a step that failed, dropped it.
                param.grad = None
            twin.grad = None
            if twin in self._state:
                home = offload.state_home(param)
                self._state[param] = offload.take_in(home, self._state.pop(twin), twin)
        for run, kept in self._runs:
            if run.pieces[0].grad is None:
                for param in run.members:
                    param.grad = None
            for piece in run.pieces:
                piece.grad = None
            states = [self._state.pop(piece) for piece in run.pieces if piece in self._state]
            if len(states) == len(run.pieces):  # else a step failed at the first
                whole = run.collect(states, offload.state_home(run.members[0]))
                parts = run.split(whole)
                if parts is not kept:
                    self._state.update(zip(run.members, parts, strict=True))


def _swap_in(optimizer: torch.optim.Optimizer, left_out: Collection[int] = ()) -> None:
    """Let twins stand in; see ``_Exchange``."""
    _swapped[optimizer] = _Exchange(optimizer, left_out)  # first, so that a failure is undone
    with torch._C.DisableTorchFunctionSubclass():
        _swapped[optimizer].begin()


def _swap_out(optimizer: torch.optim.Optimizer) -> None:
    exchange = _swapped.pop(optimizer, None)
    if exchange is not None:
        with torch._C.DisableTorchFunctionSubclass():
            exchange.undo()


def _local_state(param: FlatShardTensor | FlatParameter, state: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of state from before wrapping, or loaded from an unwrapped model.

    Raises:
        RuntimeError: a state tensor has neither the parameter's shape nor this rank's.
    """
    held = param.local if isinstance(param, FlatShardTensor) else param
    for key, value in state.items():
        if isinstance(value, FlatShardTensor):
            # Made at construction, as Adagrad does; also where this rank holds all of it.
            state[key] = value.local
            continue
        if not isinstance(value, torch.Tensor) or value.shape == held.shape:
            continue
        if key in ONE_PER_PARAMETER:
            continue
        if isinstance(param, FlatShardTensor) and value.shape == param.shape:
            state[key] = param.spec.slice(value).clone()
        elif value.numel() > 1:
            name = param.spec.name if isinstance(param, FlatShardTensor) else repr(param)
            raise RuntimeError(
                f"optimizer state {key!r} of parameter {name!r}: expected shape "
                f"{tuple(held.shape)} (this rank's part) or {tuple(param.shape)} (the whole), got "
                f"{tuple(value.shape)}. A plain optimizer.state_dict() holds one rank's part: "
                "save ShardedWrapper.optim_state_dict(model, optimizer) instead."
            )
    return state


def _name_of(param: Any) -> str | None:
    return param.spec.name if isinstance(param, FlatShardTensor) else None


def _local_grad(param: FlatShardTensor) -> torch.Tensor | None:
    grad = param.grad
    if grad is None:
        return None
    if isinstance(grad, FlatShardTensor):
        return grad.local
    # Assigned by the user as a full tensor.
    return param.spec.slice(grad.detach())


# ---------------------------------------------------------------- one rank's state


def watch(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer's plain state dicts say whose they are, and check those it loads."""
    saving: Any = optimizer._optimizer_state_dict_post_hooks
    loading: Any = optimizer._optimizer_load_state_dict_pre_hooks
    if _add_stamp not in saving.values():
        optimizer.register_state_dict_post_hook(_add_stamp)
    if unstamped not in loading.values():
        optimizer.register_load_state_dict_pre_hook(unstamped)


def _add_stamp(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    state_dict["state"] = {key: apart(state) for key, state in state_dict["state"].items()}
    stamp = _stamp(optimizer)
    if stamp is not None and state_dict["state"]:
        state_dict["param_groups"][0][_STAMP] = stamp
        if stamp["rank"] == 0:
            # Otherwise who saves it finds out when it is to be loaded, and the rest is lost.
            warnings.warn(_ONE_RANKS, stacklevel=5)  # who calls state_dict()


_ONE_RANKS = (
    "optimizer.state_dict() holds this rank's parts of sharded parameters alone, and loads nowhere "
    "else. ShardedWrapper.optim_state_dict(model, optimizer), called on every rank, is the state "
    "to save."
)


def parts(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()``, for who knows that it is one rank's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=re.escape(_ONE_RANKS))
        return optimizer.state_dict()


def is_stamped(state_dict: dict[str, Any]) -> bool:
    """Whether a state dict holds one rank's parts."""
    return any(_STAMP in group for group in state_dict["param_groups"])


def unstamped(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A plain state dict for this optimizer, checked, without the stamp; nothing is copied.

    Raises:
        RuntimeError: it holds another rank's parts, or those of another layout.
    """
    if not is_stamped(state_dict):
        return state_dict
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        if _STAMP in group:
            _check_stamp(optimizer, group.pop(_STAMP))
    return {**state_dict, "param_groups": groups}


def _check_stamp(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    own = _stamp(optimizer)
    if own is not None and own["layout"] == saved["layout"]:
        return
    where = "parameters that are not sharded"
    if own is not None:
        where = f"rank {own['rank']} of {own['world_size']}, which holds other parts"
    raise RuntimeError(
        f"optimizer.state_dict() of rank {saved['rank']} of {saved['world_size']} holds that "
        f"rank's parts alone, and was loaded for {where}. Save "
        "ShardedWrapper.optim_state_dict(model, optimizer), which loads anywhere."
    )


def _stamp(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Whose parts the optimizer's state holds; None where every rank has all of it."""
    places: list[Any] = []
    rank = None
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, FlatShardTensor):
                rank, size = param.spec.comm.rank, param.spec.comm.size
                places.append(param.spec.place)
            elif isinstance(param, FlatParameter):
                layout = param.flat_layout
                rank, size = param.rank, layout.world_size
                spans = [(span.shape, span.start, span.order) for span in layout.spans]
                places.append((spans, layout.shard_range(rank)))
    if rank is None:
        return None
    digest = hashlib.sha256(repr(places).encode()).hexdigest()
    return {"rank": rank, "world_size": size, "layout": digest}
