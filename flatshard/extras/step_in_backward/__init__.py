"""Extra: optimizers step each unit in backward, as soon as the unit's gradients are reduced.

A unit's gradients are freed after the unit's step, so the gradients of the whole model never exist
at the same time. A unit's step overlaps with the reductions of other units.

The supported optimizers update each element separately, without communication. So ranks may step
their shards of a unit at different times, with the same result. Each rank decides for itself which
units to step early (before the end of backward). At the end of backward, when the ranks have
exchanged which parameters were used, each rank steps the remaining units.

Without this folder, ``ShardedWrapper.step_in_backward()`` raises ``MissingExtraError``.
"""

import itertools
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.comm.consistency import Facts, agreed
from flatshard.comm.work import PendingSends
from flatshard.engine.events import StepExtension, profiled
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Unit
from flatshard.extras.partial_steps import step_parts
from flatshard.optimizer import state_dicts
from flatshard.optimizer.adapter import OptimizerExtension, at_step, extensions, is_elementwise
from flatshard.precision import tensors_in
from flatshard.tensor.unsharded import OutsideUse
from flatshard.units.module_tree import unit_text

# An optimizer, and a copy of one of its parameter groups with only some of the parameters.
_Part = tuple[torch.optim.Optimizer, dict[str, Any]]


class StepInBackward:
    """Result of ``ShardedWrapper.step_in_backward``; ``remove()`` undoes the call."""

    def __init__(self, of: "SteppedInBackward", optimizer: torch.optim.Optimizer) -> None:
        self._of, self._optimizer = of, optimizer

    def remove(self) -> None:
        """Stop stepping in backward: from now on ``optimizer.step()`` steps the parameters.

        Call between steps, on all ranks. No communication. A second call does nothing.

        Raises:
            RuntimeError: a backward is running.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "step_in_backward: remove() was called in a backward. Call remove() between steps."
            )
        self._of.optimizers = [one for one in self._of.optimizers if one is not self._optimizer]
        self._of.recover()
        if not self._of.optimizers:
            self._of.state.drop(self._of)


class _DropConsumed(OptimizerExtension):
    """Lets ``optimizer.step()`` skip parameters that were stepped in backward."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            _drop_consumed(group["params"])


class SteppedInBackward(StepExtension):
    """Steps the units of one model in backward, for all optimizers passed to ``register``."""

    name = "step_in_backward"

    def __init__(self, state: RunState) -> None:
        self.state, self._units = state, state.units
        self.optimizers: list[torch.optim.Optimizer] = []
        # The attributes from `_owned` to `_problem` describe the current backward. `_owned` is a
        # result of `_find_owned`: the unit and the name of each parameter, keyed by id.
        self._owned: dict[int, tuple[Unit, str]] = {}
        self._parts: dict[int, list[_Part]] = {}  # parts to step, keyed by the unit's index
        self._stepped: set[int] = set()  # indices of the units that this rank has stepped
        self._stepped_anywhere = b""  # for each unit, whether any rank has stepped the unit

        # Units with reduced gradients (of at least one flat parameter), which this backward has not
        # stepped yet.
        self._reduced: dict[Unit, None] = {}
        self._waits_for_end = False  # whether this backward steps no further unit before its end
        self._problem: Exception | None = None  # error to raise at the end of the backward

        # Whether gradients were accumulated under no_sync since the last step.
        self._has_accumulated = False
        # Value of `OutsideUse.count` (uses of parameters outside of forward) at the last step.
        self._outside_uses = OutsideUse.count
        # Parameters stepped in this backward, into whose `.grad` `end_backward` puts a placeholder.
        self._showing: list[nn.Parameter] = []

    def check(self, optimizer: Any, scaler: Any) -> tuple[bool, Facts]:
        """Raise if ``optimizer`` cannot step in backward.

        Returns True, and texts about the parameter groups for ``agreed`` to compare between ranks.
        """
        if scaler is not None and scaler.is_enabled():
            raise ValueError(
                "an enabled GradScaler unscales gradients after backward, but step_in_backward() "
                "frees gradients in backward. Train in bf16, which needs no scaler, or call "
                "optimizer.step() after backward."
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            text = f"step_in_backward: expected a torch.optim.Optimizer, got {optimizer!r}."
            raise TypeError(text)
        kind = type(optimizer).__name__
        if not is_elementwise(optimizer):
            raise ValueError(
                f"{kind} may need the gradients of all parameters at once, but step_in_backward() "
                "steps one unit at a time. Use an optimizer that updates every element from the "
                "element's own gradient and state (declare your own optimizer with "
                "flatshard.declare_elementwise), or call optimizer.step() after backward."
            )
        owned, groups = _find_owned(self.state), _groups_of(optimizer)
        found = groups.keys() & owned.keys()
        if not found:
            text = f"{kind} holds no parameter of the model. Make it from model.parameters()."
            raise ValueError(text)
        if any(found & _groups_of(one).keys() for one in self.optimizers):
            raise ValueError(
                f"{kind} holds parameters that another optimizer already steps in backward. First "
                "call remove() on the handle that step_in_backward() returned."
            )
        places = {f"parameter {owned[key][1]!r}": f"in group {groups[key]}" for key in found}
        return True, {"the optimizer": type(optimizer).__qualname__, **places}

    # ------------------------------------------------------------ a backward

    def recover(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._forget_backward()

    def begin_backward(self) -> None:
        """Plan the steps of this backward from the optimizers' groups."""
        self._forget_backward()
        self._problem, self._stepped_anywhere = None, b""
        if self.state.accumulates:
            self._has_accumulated = True
            return
        self._waits_for_end = OutsideUse.count != self._outside_uses
        try:
            for optimizer in self.optimizers:
                state_dicts.check_state(optimizer)
                for extension in extensions:
                    extension.before_backward(optimizer)
                for record in at_step:
                    record(optimizer)
        except RuntimeError as error:
            # Raise this error only at the end of backward. If this rank raised now, other ranks
            # would wait for it in the collectives of this backward.
            self._problem = error
        else:
            self._parts = self._plan_parts()

    def _plan_parts(self) -> dict[int, list[_Part]]:
        """Return the parts (of one parameter group each) to step, keyed by the unit's index."""
        self._owned = owned = _find_owned(self.state)
        parts: dict[int, list[_Part]] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                known = [param for param in group["params"] if id(param) in owned]
                for unit, params in itertools.groupby(known, lambda one: owned[id(one)][0]):
                    of_unit = parts.setdefault(unit.index, [])
                    of_unit.append((optimizer, {**group, "params": list(params)}))
        return parts

    def reduced(self, unit: Unit) -> None:
        if unit.index in self._parts:
            self._reduced[unit] = None

    def between_units(self) -> None:
        """Step units with reduced gradients that the rest of this backward does not need."""
        # Step no unit early if another backward (of a reentrant checkpoint) ran inside of this
        # backward, because the inner backward may add gradients to any unit.
        if not self._reduced or self._waits_for_end or self.state.has_inner_backward:
            return
        for unit in [unit for unit in self._reduced if self._may_step(unit)]:
            del self._reduced[unit]
            for handle in unit.handles:
                used = set(handle.grads.used_by_rank)
                handle.grads.publish([n in used for n in range(len(handle.params))])
                # Restore the set that `publish` has cleared: the end of backward sends the set.
                handle.grads.used_by_rank |= used
            self._stepped.add(unit.index)
            try:
                self._step(self._parts[unit.index], unit.name)
            except Exception as error:
                # Raise this error only at the end of backward. If this rank raised now, other ranks
                # would wait for its reductions.
                error.add_note(f"in step_in_backward(), stepping {unit_text(unit.name)}")
                self._problem, self._waits_for_end = error, True
                return

    def _may_step(self, unit: Unit) -> bool:
        # A unit may be stepped early only if the rest of this backward cannot use the unit. So (1)
        # all parameters of the unit must have gradients, (2) the backwards of all forwards of the
        # unit must have begun, and (3) the gradients of the unit's inputs must be computed. After
        # the step, nothing may unshard the unit in this backward, because some ranks would send old
        # shards, and other ranks new shards. So prefetching skips units whose backward has begun.
        return unit.is_done and all(
            (handle.grads.reduction is None or handle.grads.reduction.is_finished)
            and not (handle.grads.accumulated or handle.is_free_deferred)
            # A rank may have accumulated a gradient for a parameter that the user froze later.
            and (not self._has_accumulated or all(p.full.requires_grad for p in handle.params))
            # Other ranks may still be receiving the shard, which the step would change.
            and not is_sending(self.state.pending_sends, handle.flat_param)
            # Post-accumulate hooks of users run at the end of backward, and need the gradients.
            and not any(param.post_accumulate_hooks for param in handle.params)
            for handle in unit.handles
        )

    def votes(self) -> bytes:
        return bytes(unit.index in self._stepped for unit in self._units)

    def tally(self, maxima: bytes) -> None:
        self._stepped_anywhere = maxima

    def reduced_late(self, units: Sequence[Unit]) -> None:
        """Raise, on all ranks, if a rank stepped one of ``units`` before late gradients came."""
        for unit in units:
            if self._stepped_anywhere and self._stepped_anywhere[unit.index]:
                raise _got_more(unit_text(unit.name))

    def end_backward(self, has_gradients: bool) -> None:
        """Step the units that were not stepped early. Raises the first error of this backward.

        Called after users' post-accumulate hooks, because the step drops the gradients.
        """
        # If this backward ran inside of a forward, only the backward after the forward steps units.
        if self.state.depth > 0:
            return
        parts, self._parts = self._parts, {}
        has_outside, self._outside_uses = OutsideUse.count != self._outside_uses, OutsideUse.count
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        if not parts:
            return
        self._has_accumulated = False
        for index in self._stepped:
            if any(p.grad is not None for _, part in parts[index] for p in part["params"]):
                raise _got_more(f"a parameter of {unit_text(self._units[index].name)}")
        if has_gradients or has_outside:
            rest = [of_unit for index, of_unit in parts.items() if index not in self._stepped]
            self._step([*itertools.chain(*rest)], "all remaining units")
        with torch._C.DisableTorchFunctionSubclass():
            # Put the placeholders into `.grad` only now, when backward adds no further gradients.
            for param in self._showing:
                param.grad = ConsumedGrad(param, self._owned[id(param)][1])

    def _forget_backward(self) -> None:
        """Forget the last backward; warn if it has failed after it had stepped some units.

        Also remove the placeholders (``ConsumedGrad``) from ``.grad``. Otherwise autograd would add
        the next gradient to a placeholder.
        """
        showing, self._showing = self._showing, []
        _drop_consumed(showing)
        num_stepped, num_units = len(self._stepped), len(self._parts)
        self._parts, self._reduced, self._stepped = {}, {}, set()
        if num_stepped and num_units:
            warnings.warn(
                f"a backward failed after step_in_backward() had stepped {num_stepped} of "
                f"{num_units} units. These units are a step ahead of the other units, perhaps only "
                "on this rank. Load a checkpoint.",
                stacklevel=5,
            )

    def needs_gradients(self, caller: str) -> None:
        raise RuntimeError(
            f"{caller} needs all gradients after backward, but an optimizer of the model steps in "
            "backward, which drops the gradients unit by unit. Call remove() on the handle that "
            "step_in_backward() returned, and call optimizer.step() after backward."
        )

    # ------------------------------------------------------------ the step

    def _step(self, parts: Sequence[_Part], label: str) -> None:
        for optimizer in self.optimizers:
            if own := [part for one, part in parts if one is optimizer]:
                with profiled("step", label):
                    step_parts(optimizer, own)
                # Without this mark, a learning rate scheduler would warn that it was stepped before
                # the optimizer.
                optimizer._opt_called = True  # type: ignore[attr-defined]
        for param in (param for _, part in parts for param in part["params"]):
            if param.grad is not None:
                param.grad = None
                self._showing.append(param)


def _drop_consumed(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        if isinstance(param.grad, ConsumedGrad):
            param.grad = None


def _groups_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    groups = enumerate(optimizer.param_groups)
    return {id(param): number for number, group in groups for param in group["params"]}


def register(context: RunState, optimizer: torch.optim.Optimizer, scaler: Any) -> StepInBackward:
    """Let ``optimizer`` step in backward; see ``ShardedWrapper.step_in_backward``. Collective."""
    found = context.extension(SteppedInBackward.name)
    stepped = SteppedInBackward(context) if found is None else found
    remedy = "Pass the same optimizer on every rank."
    check = partial(stepped.check, optimizer, scaler)
    agreed(check, [context.world.host], "step_in_backward", remedy)
    stepped.optimizers.append(optimizer)
    if found is None:
        context.extend(stepped)
    return StepInBackward(stepped, optimizer)


def _got_more(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} got more gradient after step_in_backward() had stepped its parameters. They are "
        "used both inside and outside of an activation checkpoint with use_reentrant=True, or "
        "outside of forward. Pass use_reentrant=False, or call optimizer.step() after backward. "
        "The parameters are wrong now: load a checkpoint."
    )


def _find_owned(state: RunState) -> dict[int, tuple[Unit, str]]:
    """Return the unit and the name of each sharded parameter, keyed by id."""
    return {id(p.sharded): (one.unit, p.name) for one in state.handles for p in one.params}


_ZEROING = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class ConsumedGrad(torch.Tensor):
    """Placeholder in ``.grad`` for a gradient used and freed by a step in backward.

    The placeholder has the parameter's shape, dtype and device, and no memory. ``zero_grad()``
    works, with ``set_to_none`` and without. Every other operation on the placeholder raises.
    """

    _of: str

    @staticmethod
    def __new__(cls, param: Tensor, name: str) -> "ConsumedGrad":
        self = torch.Tensor._make_wrapper_subclass(
            cls, tuple(param.shape), dtype=param.dtype, device=param.device
        )
        self._of = name
        return self  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ConsumedGrad({self._of!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    # Disable `__torch_function__`, which would make every attribute access slow.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ZEROING:
            # The list for `_foreach_zero_` may also contain ordinary gradients.
            for tensor in args[0] if isinstance(args[0], list) else []:
                if not isinstance(tensor, cls):
                    tensor.zero_()
            return args[0] if isinstance(args[0], Tensor) else None
        tensors = tensors_in((*args, *(kwargs or {}).values()))
        consumed = next(t for t in tensors if isinstance(t, cls))
        raise RuntimeError(
            f"parameter {consumed._of!r}: {func._schema.name} cannot read the gradient, "
            "because step_in_backward() has stepped the parameter and dropped the gradient. "
            "Clipping by a norm, GradScaler and other code that needs gradients after "
            "backward needs an ordinary optimizer.step(): call remove() on the handle that "
            "step_in_backward() returned. To read or change one parameter's gradient before the "
            "step, use p.register_post_accumulate_grad_hook."
        )


# This module is imported at the first call of `step_in_backward()`.
extensions.append(_DropConsumed())


def is_sending(sends: PendingSends, shard: Tensor) -> bool:
    """Whether other ranks may still be reading the memory of ``shard``."""
    sends.drop_sent()
    storage = shard.untyped_storage()._cdata
    kept = [one for work in sends.pending for one in work.kept if isinstance(one, Tensor)]
    return any(one.untyped_storage()._cdata == storage for one in kept)
