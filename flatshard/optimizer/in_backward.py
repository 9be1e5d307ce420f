"""``SteppedInBackward``: optimizers that step each unit as soon as its gradients are reduced.

The gradients of the whole model then never exist together, and the work of the step is done while
other units' reductions are under way.

[Note: early or at the end]
A step needs no other rank, and updates elements one by one: a rank may step its part of a unit
early and another rank later, with the same result. So each decides for itself, and steps early only
where it knows that

- no more is added to the gradients: all the unit's parameters have theirs (so the unit counts as
  used, whatever other ranks used), from the outermost graph, and the last forward has no run of the
  unit whose backward is still to begin;
- nobody needs the parameters of before: the gradients of the unit's inputs are there, so that what
  computed in it has run backwards, and other ranks have received the shards sent to them;
- nobody wants to see the gradients: no parameter has a post-accumulate hook.

Everything else is stepped at the end of backward, when all ranks have agreed on what was used.
A unit must not be unsharded again after its step, by a prefetch that guessed wrong for one: shards
of before and after would mix. Prefetching therefore leaves out units that are not awaited.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flatshard.engine.context import RunContext
from flatshard.engine.events import StepObserver, profiled
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.step_state import StepState
from flatshard.engine.unit import Unit
from flatshard.optimizer import local_state_guard
from flatshard.optimizer import step as optimizer_step
from flatshard.optimizer.consumed_grad import ConsumedGrad, drop_consumed
from flatshard.tensor.flat_parameter import FlatParameter
from flatshard.tensor.reduction_ops import OutsideUses


class StepInBackward:
    """Returned by ``ShardedWrapper.step_in_backward``, to undo it."""

    def __init__(self, of: SteppedInBackward, optimizer: torch.optim.Optimizer) -> None:
        """``of`` has the optimizer."""
        self._of, self._optimizer = of, optimizer

    def remove(self) -> None:
        """Leave the optimizer's parameters to ``optimizer.step()`` again; between steps.

        On all ranks alike; no communication. Does nothing the second time.

        Raises:
            RuntimeError: a backward is running.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("step_in_backward: remove() was called in a backward. Call it after")
        self._of.remove(self._optimizer)


@dataclass(frozen=True)
class _Part:
    """Parameters of one unit that follow one another in one group of an optimizer."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    params: list[nn.Parameter]


class SteppedInBackward(StepObserver):
    """The optimizers that step in the backwards of one model, and what they have stepped."""

    def __init__(self, state: StepState) -> None:
        """No optimizers yet; ``state`` is the model's."""
        self._state, self._units = state, state.units
        self._optimizers: list[torch.optim.Optimizer] = []
        self._parts: dict[int, list[_Part]] = {}
        self._reduced: list[Unit] = []
        self._stepped: set[int] = set()
        self._stepped_anywhere: list[int] = []  # per unit, whether any rank did
        self._waits_for_end = False
        self._problem: Exception | None = None
        self._has_accumulated = False
        self._outside_uses = OutsideUses.count
        self._consumed: dict[int, ConsumedGrad] = {}
        self._showing: list[nn.Parameter] = []

    # ------------------------------------------------------------ which optimizers

    @property
    def is_active(self) -> bool:
        """Whether there are optimizers; alike on all ranks."""
        return bool(self._optimizers)

    def register(self, optimizer: torch.optim.Optimizer, scaler: Any) -> StepInBackward:
        """Step this optimizer, too; see ``ShardedWrapper.step_in_backward``. Collective."""
        world = self._state.world
        problem, numbers = None, self._numbers(optimizer)
        try:
            _check_not_scaled(scaler)
            self._check(optimizer, numbers)
        except (TypeError, ValueError) as error:
            problem = error
        kind = type(optimizer).__qualname__
        everyone = world.gather_objects((problem, kind, numbers), op_name="step_in_backward()")
        if problem is not None:
            raise problem
        for rank, (their_problem, *theirs) in zip(world.ranks, everyone, strict=True):
            if their_problem is not None:
                raise type(their_problem)(f"on rank {rank}: {their_problem}")
            if theirs != [everyone[0][1], everyone[0][2]]:
                raise ValueError(
                    f"step_in_backward: rank {world.ranks[0]} passes a {everyone[0][1]}, rank "
                    f"{rank} a {theirs[0]}, or one over other parameters. Pass the same optimizer "
                    "on every rank."
                )
        self._optimizers.append(optimizer)
        return StepInBackward(self, optimizer)

    def _numbers(self, optimizer: Any) -> list[list[int]]:
        """Per group, which of the model's parameters it holds."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            return []
        params = [p for unit in self._units for handle in unit.handles for p in handle.sharded]
        known = {id(param): number for number, param in enumerate(params)}
        return [
            [known[id(param)] for param in group["params"] if id(param) in known]
            for group in optimizer.param_groups
        ]

    def _check(self, optimizer: Any, numbers: list[list[int]]) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"step_in_backward: expected a torch.optim.Optimizer, got {optimizer!r}"
            )
        kind = type(optimizer).__name__
        if not optimizer_step.is_elementwise(optimizer):
            raise ValueError(
                f"step_in_backward: {kind} may look at all parameters together, which are never "
                "there together in backward. Use an optimizer that updates every element from "
                "that element's own gradient and state (for one of your own: "
                "flatshard.declare_elementwise), or optimizer.step() after backward."
            )
        if not any(numbers):
            raise ValueError(
                f"step_in_backward: {kind} holds no parameter of the model. Make it from "
                "model.parameters()."
            )
        taken = {
            number for one in self._optimizers for group in self._numbers(one) for number in group
        }
        if any(number in taken for group in numbers for number in group):
            raise ValueError(
                f"step_in_backward: {kind} holds parameters that are stepped in backward already. "
                "Call remove() on what step_in_backward() returned before."
            )

    def remove(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer go, if it is there."""
        self._optimizers = [one for one in self._optimizers if one is not optimizer]
        self.drop_consumed()

    # ------------------------------------------------------------ a backward

    def recover(self) -> None:
        """See ``StepObserver``."""
        self.drop_consumed()

    def begin_backward(self) -> None:
        """Look at the optimizers' groups. The gradients of this backward are still to come."""
        self.drop_consumed()
        self._stepped_anywhere = []
        self._parts, self._reduced, self._stepped, self._problem = {}, [], set(), None
        if not self._optimizers:
            return
        if self._state.accumulates:
            self._has_accumulated = True
            return
        self._waits_for_end = OutsideUses.count != self._outside_uses
        owner = {
            id(param): unit.index
            for unit in self._units
            for handle in unit.handles
            for param in handle.sharded
        }
        for optimizer in self._optimizers:
            try:
                local_state_guard.check_state(optimizer)
                optimizer_step.reserve(optimizer)
            except RuntimeError as error:
                self._parts, self._problem = {}, error
                return
            for group in optimizer.param_groups:
                # Runs of one unit's parameters, which a step can update as one bucket.
                by_unit = itertools.groupby(group["params"], lambda param: owner.get(id(param)))
                for index, params in by_unit:
                    if index is not None:
                        part = _Part(optimizer, group, list(params))
                        self._parts.setdefault(index, []).append(part)

    def begin_inner_backward(self) -> None:
        """Step no more units early: autograd runs graphs inside this one, which may add."""
        self._waits_for_end = True

    def reduced(self, unit: Unit) -> None:
        """A unit's gradients are reduced."""
        if unit.index in self._parts:
            self._reduced.append(unit)

    def between_units(self) -> None:
        """Step the units whose gradients are reduced and whose parameters nobody needs any more."""
        if not self._reduced or self._waits_for_end:
            return
        ready = [unit for unit in self._reduced if self._may_step(unit)]
        for unit in ready:
            self._reduced.remove(unit)
            for handle in unit.handles:
                used = set(handle.grad_buffer.used_by_rank)
                handle.publish([index in used for index in range(len(handle.full))])
                # the other ranks are told at the end of backward
                handle.grad_buffer.used_by_rank |= used
            self._stepped.add(unit.index)
            try:
                with profiled("step", unit.name):
                    self._step(self._parts[unit.index])
            except Exception as error:
                # Raised now, at another moment on each rank, it would leave the others waiting for
                # reductions that this one does not begin.
                error.add_note(f"in step_in_backward(), stepping unit {unit.name!r}")
                self._problem, self._waits_for_end = error, True
                return

    def _may_step(self, unit: Unit) -> bool:
        return unit.is_done and all(
            not (handle.is_reducing or handle.grad_buffer.accumulated)
            and self._knows_all_used(handle)
            and not self._state.pending_sends.is_sending(handle.shard)
            and not _has_hooks(handle)
            for handle in unit.handles
        )

    def _knows_all_used(self, handle: FlatParamHandle) -> bool:
        """Whether no other rank used more of a unit whose gradients have all come here."""
        # Of frozen ones, others may have accumulated gradients before they were frozen.
        return not self._has_accumulated or handle.params.num_trainable() == len(handle.full)

    def votes(self) -> list[int]:
        """Per unit, whether it was stepped here."""
        return [unit.index in self._stepped for unit in self._units] if self._optimizers else []

    def tally(self, maxima: list[int]) -> None:
        """See ``StepObserver``."""
        self._stepped_anywhere = maxima

    def reduced_late(self, units: Sequence[Unit]) -> None:
        """See ``StepObserver``.

        Raises:
            RuntimeError: one of them was stepped before, on any rank.
        """
        stepped = self._stepped_anywhere
        names = [unit.name for unit in units if stepped and stepped[unit.index]]
        if names:
            self._raise_late(f"unit {names[0]!r}" if names[0] else "the root unit")

    def _raise_late(self, what: str) -> None:
        raise RuntimeError(
            f"{what} got more gradient after step_in_backward() had stepped it: it is used both "
            "inside and outside of a checkpoint with use_reentrant=True, or outside of forward. "
            "Use use_reentrant=False, or optimizer.step() after backward. The parameters are "
            "wrong now: load a checkpoint."
        )

    def published(self, has_gradients: bool) -> None:
        """Step what is left, once gradients are published and users' hooks have run.

        Raises:
            RuntimeError: a parameter got more gradient after its step.
            Exception: what an optimizer's step raised, when it was.
        """
        parts, self._parts = self._parts, {}
        has_outside, self._outside_uses = OutsideUses.count != self._outside_uses, OutsideUses.count
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        if not parts:
            return
        self._has_accumulated = False
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self._units:
                for part in parts.get(unit.index, ()) if unit.index in self._stepped else ():
                    if any(param.grad is not None for param in part.params):
                        self._raise_late(f"a parameter of unit {unit.name!r}")
        rest = [
            part
            for index, of_unit in parts.items()
            if index not in self._stepped
            for part in of_unit
        ]
        if has_gradients or has_outside:
            with profiled("step", "all units that are left"):
                self._step(rest)
        self._show_consumed()

    def drop_backward(self) -> None:
        """The backward failed."""
        if self._stepped and self._parts:
            warnings.warn(
                f"a backward failed when {len(self._stepped)} of {len(self._parts)} units had been "
                "stepped in it: they are a step ahead of the others, on this rank perhaps alone. "
                "Load a checkpoint.",
                stacklevel=5,
            )
        self._parts, self._reduced, self._stepped = {}, [], set()

    # ------------------------------------------------------------ the step

    def _step(self, parts: Sequence[_Part]) -> None:
        for optimizer in self._optimizers:
            own = [(part.group, part.params) for part in parts if part.optimizer is optimizer]
            if own:
                optimizer_step.step_parts(optimizer, own)
                # Schedulers warn where no step came before theirs.
                optimizer._opt_called = True  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            for part in parts:
                for param in part.params:
                    if param.grad is not None:
                        param.grad = None
                        self._showing.append(param)

    def _show_consumed(self) -> None:
        """Let ``.grad`` say that the gradient was used; after backward, which may bring more."""
        with torch._C.DisableTorchFunctionSubclass():
            for param in self._showing:
                consumed = self._consumed.get(id(param))
                if consumed is None or not consumed.fits(param):
                    self._consumed = self._consumed_grads()
                param.grad = self._consumed[id(param)]

    def _consumed_grads(self) -> dict[int, ConsumedGrad]:
        return {
            id(param): ConsumedGrad(param, name)
            for unit in self._units
            for handle in unit.handles
            for param, name in zip(handle.sharded, _names(handle), strict=True)
        }

    def drop_consumed(self) -> None:
        """Let ``.grad`` be None where it says that the gradient was used."""
        showing, self._showing = self._showing, []
        with torch._C.DisableTorchFunctionSubclass():
            for param in showing:
                drop_consumed(param)


def register(context: RunContext, optimizer: torch.optim.Optimizer, scaler: Any) -> StepInBackward:
    """See ``ShardedWrapper.step_in_backward``. Collective."""
    stepped = context.observers.find(SteppedInBackward)
    if stepped is None:
        stepped = SteppedInBackward(context.state)
        context.observers.add(stepped)
    return stepped.register(optimizer, scaler)


def is_active(context: RunContext) -> bool:
    """Whether optimizers step in the backwards of a model; alike on all ranks."""
    stepped = context.observers.find(SteppedInBackward)
    return stepped is not None and stepped.is_active


def refuse(context: RunContext, what: str) -> None:
    """Raise for what needs all gradients after backward; alike on all ranks.

    Raises:
        RuntimeError: optimizers step in backward.
    """
    if is_active(context):
        raise RuntimeError(
            f"{what} needs all gradients after backward, but an optimizer of the model steps "
            "in backward, which drops them unit by unit. Call remove() on what "
            "step_in_backward() returned, and optimizer.step() after this."
        )


def _check_not_scaled(scaler: Any) -> None:
    if scaler is not None and scaler.is_enabled():
        raise ValueError(
            "step_in_backward: an enabled GradScaler unscales gradients after backward, where they "
            "are gone. Train in bf16, which needs no scaler, or call optimizer.step() after "
            "backward."
        )


def _names(handle: FlatParamHandle) -> list[str]:
    if isinstance(handle.sharded[0], FlatParameter):
        return [f"{handle.unit_name or 'the root'}'s flat parameter"]
    return [spec.name for spec in handle.params.specs]


def _has_hooks(handle: FlatParamHandle) -> bool:
    """Whether users want to see the reduced gradients."""
    flat = handle.sharded[0]
    if isinstance(flat, FlatParameter):
        return bool(flat.post_accumulate_hooks)
    return any(spec.post_accumulate_hooks for spec in handle.params.specs)
