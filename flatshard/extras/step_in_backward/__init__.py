"""Extra: optimizers that step each unit in backward, as soon as its gradients are reduced.

The gradients of the whole model then never exist together, and the work of the step is done while
the reductions of other units are under way.

A step needs no other rank, and updates elements one by one: a rank may step its part of a unit
early and another rank later, with the same result. So each rank decides for itself, and leaves the
remaining units to the end of backward, when all ranks have agreed on which parameters were used.

Without this folder, ``ShardedWrapper.step_in_backward()`` raises an error that names it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.comm.consistency import Facts, agreed
from flatshard.engine.context import RunContext
from flatshard.engine.events import StepExtension, profiled
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Unit
from flatshard.optimizer import state_dicts
from flatshard.optimizer.step import StepPart, step_parts
from flatshard.optimizer.stepper import OptimizerExtension, extensions, is_elementwise
from flatshard.plan.module_tree import unit_text
from flatshard.precision import tensors_in
from flatshard.tensor.unsharded import OutsideUse

__all__ = ["register"]


class StepInBackward:
    """Returned by ``ShardedWrapper.step_in_backward``, to undo it."""

    def __init__(self, of: SteppedInBackward, optimizer: torch.optim.Optimizer) -> None:
        self._of, self._optimizer = of, optimizer

    def remove(self) -> None:
        """Leave the optimizer's parameters to ``optimizer.step()`` again; between steps.

        On all ranks alike; no communication. Does nothing the second time.

        Raises:
            RuntimeError: a backward is running.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("step_in_backward: remove() was called in a backward. Call it after")
        self._of.optimizers = [one for one in self._of.optimizers if one is not self._optimizer]
        self._of.recover()
        if not self._of.optimizers:
            self._of.state.drop(self._of)


class _DropConsumed(OptimizerExtension):
    """What backward has stepped is not stepped again."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            _drop_consumed(group["params"])


class SteppedInBackward(StepExtension):
    """The optimizers that step in the backwards of one model, and what they have stepped."""

    name = "step_in_backward"

    def __init__(self, state: RunState) -> None:
        self.state, self._units = state, state.units
        self.optimizers: list[torch.optim.Optimizer] = []
        # Of the backward that runs, by the unit's index: what to step, and whether it was.
        self._owned: dict[int, tuple[Unit, str]] = {}
        self._parts: dict[int, list[StepPart]] = {}
        self._stepped: set[int] = set()
        self._stepped_anywhere = b""  # per unit, whether any rank did
        self._reduced: list[Unit] = []  # and not stepped yet
        self._waits_for_end = False
        self._problem: Exception | None = None
        # Since the last step:
        self._has_accumulated = False
        self._outside_uses = OutsideUse.count
        self._showing: list[nn.Parameter] = []  # those whose gradient was consumed

    def check(self, optimizer: Any, scaler: Any) -> tuple[bool, Facts]:
        """Raise for what cannot be stepped in backward; else what ranks must agree on."""
        if scaler is not None and scaler.is_enabled():
            raise ValueError(
                "an enabled GradScaler unscales gradients after backward, where they are gone. "
                "Train in bf16, which needs no scaler, or call optimizer.step() after backward."
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"step_in_backward: expected a torch.optim.Optimizer, got {optimizer!r}"
            )
        kind = type(optimizer).__name__
        if not is_elementwise(optimizer):
            raise ValueError(
                f"{kind} may look at all parameters together, which are never there together in "
                "backward. Use an optimizer that updates every element from that element's own "
                "gradient and state (for one of your own: flatshard.declare_elementwise), or "
                "optimizer.step() after backward."
            )
        owned = _find_owned(self._units)
        groups = _groups_of(optimizer)
        found = groups.keys() & owned.keys()
        if not found:
            raise ValueError(
                f"{kind} holds no parameter of the model. Make it from model.parameters()."
            )
        if any(found & _groups_of(one).keys() for one in self.optimizers):
            raise ValueError(
                f"{kind} holds parameters that are stepped in backward already. Call remove() on "
                "what step_in_backward() returned before."
            )
        places = {f"parameter {owned[key][1]!r}": f"in group {groups[key]}" for key in found}
        return True, {"the optimizer": type(optimizer).__qualname__, **places}

    # ------------------------------------------------------------ a backward

    def recover(self) -> None:
        """Forget a backward that failed; let ``.grad`` be None where its gradient was used."""
        if torch._C._current_graph_task_id() == -1:
            self._drop_failed()
        showing, self._showing = self._showing, []
        _drop_consumed(showing)

    def begin_backward(self) -> None:
        """Look at the optimizers' groups. The gradients of this backward are still to come."""
        self._drop_failed()
        self.recover()
        self._problem = None
        self._stepped_anywhere = b""
        if self.state.accumulates:
            self._has_accumulated = True
            return
        self._waits_for_end = OutsideUse.count != self._outside_uses
        try:
            for optimizer in self.optimizers:
                state_dicts.check_state(optimizer)
                for extension in extensions:
                    extension.before_backward(optimizer)
        except RuntimeError as error:
            self._problem = error  # other ranks may have none: raised when backward is over
        else:
            self._parts = self._plan_parts()

    def _plan_parts(self) -> dict[int, list[StepPart]]:
        """By unit, stretches of its parameters that a step can update as one bucket."""
        self._owned = owned = _find_owned(self._units)
        parts: dict[int, list[StepPart]] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                known = [param for param in group["params"] if id(param) in owned]
                for unit, params in itertools.groupby(known, lambda one: owned[id(one)][0]):
                    parts.setdefault(unit.index, []).append(
                        StepPart(optimizer, group, list(params))
                    )
        return parts

    def reduced(self, unit: Unit) -> None:
        if unit.index in self._parts:
            self._reduced.append(unit)

    def between_units(self) -> None:
        """Step the units whose gradients are reduced and whose parameters nobody needs any more."""
        # Graphs that autograd runs inside this backward may add gradients.
        if not self._reduced or self._waits_for_end or self.state.has_inner_backward:
            return
        for unit in [unit for unit in self._reduced if self._may_step(unit)]:
            self._reduced.remove(unit)
            for handle in unit.handles:
                used = set(handle.grad_buffer.used_by_rank)
                handle.publish([index in used for index in range(len(handle.params))])
                # Publishing cleared it; the other ranks are told at the end of backward.
                handle.grad_buffer.used_by_rank |= used
            self._stepped.add(unit.index)
            try:
                with profiled("step", unit.name):
                    self._step(self._parts[unit.index])
            except Exception as error:
                # Raised now, at another moment on each rank, it would leave the others waiting for
                # reductions that this one does not begin.
                error.add_note(f"in step_in_backward(), stepping {unit_text(unit.name)}")
                self._problem, self._waits_for_end = error, True
                return

    def _may_step(self, unit: Unit) -> bool:
        # A unit is done if all its parameters have their gradients (so that it counts as used,
        # whatever other ranks used), the last forward has no run of it whose backward is still to
        # begin, and its inputs have their gradients, so that nothing computes in it any more.
        # It must not be unsharded again after its step, for one by a prefetch that guessed wrong:
        # shards of before and after would mix. Prefetching leaves out units that are not awaited.
        return unit.is_done and all(
            not (handle.is_reducing or handle.grad_buffer.accumulated or handle.lingers)
            # Of frozen ones, others may have accumulated gradients before they were frozen.
            and (not self._has_accumulated or all(p.full.requires_grad for p in handle.params))
            # Other ranks may be receiving the shard of before.
            and not self.state.pending_sends.is_sending(handle.flat_param)
            # Users' hooks see gradients when backward is over.
            and not any(param.post_accumulate_hooks for param in handle.params)
            for handle in unit.handles
        )

    def votes(self) -> bytes:
        """Per unit, whether it was stepped here."""
        return bytes(unit.index in self._stepped for unit in self._units)

    def tally(self, maxima: bytes) -> None:
        self._stepped_anywhere = maxima

    def reduced_late(self, units: Sequence[Unit]) -> None:
        """Raise, on all ranks, if one of them was stepped before on any rank."""
        for unit in units:
            if self._stepped_anywhere and self._stepped_anywhere[unit.index]:
                raise _got_more(unit_text(unit.name))

    def end_backward(self, has_gradients: bool) -> None:
        """Step what is left; users' hooks have run. Raises what an early step raised, too."""
        # This backward runs inside a forward, whose own backward will step what is left.
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
        with torch._C.DisableTorchFunctionSubclass():
            for index in self._stepped:
                if any(param.grad is not None for part in parts[index] for param in part.params):
                    raise _got_more(f"a parameter of {unit_text(self._units[index].name)}")
        if has_gradients or has_outside:
            rest = [of_unit for index, of_unit in parts.items() if index not in self._stepped]
            with profiled("step", "all units that are left"):
                self._step(list(itertools.chain(*rest)))
        with torch._C.DisableTorchFunctionSubclass():
            # After backward, which may bring more gradients: `.grad` says that it was used.
            for param in self._showing:
                param.grad = ConsumedGrad(param, self._owned[id(param)][1])

    def _drop_failed(self) -> None:
        """Forget a backward that did not come to its end; warn if it has stepped some units."""
        num_stepped, num_units = len(self._stepped), len(self._parts)
        self._parts, self._reduced, self._stepped = {}, [], set()
        if num_stepped and num_units:
            warnings.warn(
                f"a backward failed when {num_stepped} of {num_units} units had been stepped in "
                "it: they are a step ahead of the others, on this rank perhaps alone. Load a "
                "checkpoint.",
                stacklevel=5,
            )

    def needs_gradients(self, caller: str) -> None:
        raise RuntimeError(
            f"{caller} needs all gradients after backward, but an optimizer of the model steps "
            "in backward, which drops them unit by unit. Call remove() on what "
            "step_in_backward() returned, and optimizer.step() after this."
        )

    # ------------------------------------------------------------ the step

    def _step(self, parts: Sequence[StepPart]) -> None:
        for optimizer in self.optimizers:
            own = [part for part in parts if part.optimizer is optimizer]
            if own:
                step_parts(optimizer, own)
                # Schedulers warn where no step came before theirs.
                optimizer._opt_called = True  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            for param in (param for part in parts for param in part.params):
                if param.grad is not None:
                    param.grad = None
                    self._showing.append(param)


def _drop_consumed(params: Iterable[nn.Parameter]) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        for param in params:
            if isinstance(param.grad, ConsumedGrad):
                param.grad = None


def _groups_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """By the parameter's id, the number of its group."""
    groups = enumerate(optimizer.param_groups)
    return {id(param): number for number, group in groups for param in group["params"]}


def register(context: RunContext, optimizer: torch.optim.Optimizer, scaler: Any) -> StepInBackward:
    """See ``ShardedWrapper.step_in_backward``. Collective."""
    found = context.extension(SteppedInBackward.name)
    stepped = SteppedInBackward(context) if found is None else found
    remedy = "Pass the same optimizer on every rank."
    check = partial(stepped.check, optimizer, scaler)
    agreed(check, [context.world], "step_in_backward", remedy)
    stepped.optimizers.append(optimizer)
    if found is None:
        context.extend(stepped)
    return StepInBackward(stepped, optimizer)


def _got_more(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} got more gradient after step_in_backward() had stepped it: it is used both "
        "inside and outside of a checkpoint with use_reentrant=True, or outside of forward. "
        "Use use_reentrant=False, or optimizer.step() after backward. The parameters are "
        "wrong now: load a checkpoint."
    )


def _find_owned(units: Sequence[Unit]) -> dict[int, tuple[Unit, str]]:
    """By id, the unit and the name of each parameter that optimizers can have."""
    return {
        id(param.sharded): (unit, param.name)
        for unit in units
        for handle in unit.handles
        for param in handle.params
    }


_ZEROING = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class ConsumedGrad(torch.Tensor):
    """A gradient that is gone, of the parameter's shape, dtype and device.

    It has no memory, can be dropped and set to zero like a gradient, and raises for anything else.
    """

    _of: str

    @staticmethod
    def __new__(cls, param: Tensor, name: str) -> ConsumedGrad:
        self = torch.Tensor._make_wrapper_subclass(
            cls, tuple(param.shape), dtype=param.dtype, device=param.device
        )
        self._of = name
        return self  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ConsumedGrad({self._of!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    # Dispatch, below, sees every operation; reading an attribute is to cost nothing.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ZEROING:
            # Such a list mixes consumed gradients with others, which are to become zero.
            for tensor in args[0] if isinstance(args[0], list) else []:
                if not isinstance(tensor, cls):
                    tensor.zero_()
            return args[0] if isinstance(args[0], Tensor) else None
        tensors = tensors_in((*args, *(kwargs or {}).values()))
        consumed = next(t for t in tensors if isinstance(t, cls))
        raise RuntimeError(
            f"parameter {consumed._of!r}: {func._schema.name} on a gradient that "
            "ShardedWrapper.step_in_backward() has used and dropped: the parameter is stepped "
            "already. Clipping by a norm, GradScaler, and whatever else needs the gradients after "
            "backward needs an ordinary optimizer.step(): call remove() on what "
            "step_in_backward() returned. To read or change one parameter's gradient before its "
            "step, use p.register_post_accumulate_grad_hook."
        )


# From the first model on that steps in backward, in the steps of all optimizers.
extensions.append(_DropConsumed())
