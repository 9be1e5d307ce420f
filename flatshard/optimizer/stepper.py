"""``Stepper``: puts other parameters into an optimizer's groups while the optimizer steps.

To dispatch every operation of an optimizer on ``FlatShardTensor`` is right but slow. During a step
of an element-wise optimizer, ``BucketStepper`` therefore puts ``ParamBucket``s into the groups:
plain 1-D parameters that share the shard's memory, one bucket for all neighbours. The state moves
along. The extra ``whole_tensors`` steps all other optimizers.
"""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flatshard.optimizer.buckets import ParamBucket, State, all_params, find_buckets
from flatshard.options.extras import extra
from flatshard.tensor.sharded_tensor import FlatShardTensor

Optimizer = torch.optim.Optimizer

TORCHS_OWN = frozenset(
    inspect.unwrap(getattr(torch.optim, name).step)
    for name in (
        *("SGD", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax"),
        *("ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"),
    )
)
"""The ``step`` functions of torch's element-wise optimizers."""
_ELEMENTWISE: set[Any] = set(TORCHS_OWN)

_FUSED_STEPS = {inspect.unwrap(kind.step) for kind in (torch.optim.Adam, torch.optim.AdamW)}
# In narrower ones the kernel computes in fp32 what the operations round again and again.
_FUSED_DTYPES = torch.float32, torch.float64

_steppers: weakref.WeakKeyDictionary[Optimizer, Stepper] = weakref.WeakKeyDictionary()
# Optimizers in the middle of a step, or whose last step raised: their groups may still hold the
# stepper's parameters.
stepping: weakref.WeakKeyDictionary[Optimizer, Stepper] = weakref.WeakKeyDictionary()


class OptimizerExtension:
    """The part of an extra in the steps of all optimizers, from its entry in ``extensions`` on."""

    def before_step(self, optimizer: Optimizer) -> None:
        """At the start of ``step()``, and after each call of the closure; then come the checks."""

    def step_first(self, optimizer: Optimizer) -> Iterable[int]:
        """Step some parameters before ``step()`` steps the others; returns the ids of the first.

        Only for element-wise optimizers.
        """
        return ()

    def after_part(self, optimizer: Optimizer, params: Sequence[Any]) -> None:
        """After ``step.step_parts`` has stepped ``params``."""

    def before_backward(self, optimizer: Optimizer) -> None:
        """Before a backward in which the optimizer steps (``step_in_backward``)."""


extensions: list[OptimizerExtension] = []


def declare_elementwise(optimizer_class: type[Optimizer]) -> None:
    """Say that an optimizer updates every element from that element's own gradient and state.

    Its ``step`` then works on plain 1-D tensors, as torch's own do. Without this flatshard tries,
    at the first step, whether it works on true-shape sharded parameters, or needs full ones.
    """
    _ELEMENTWISE.add(inspect.unwrap(optimizer_class.step))
    for optimizer in [one for one in _steppers if is_elementwise(one)]:
        if not isinstance(_steppers[optimizer], BucketStepper):
            del _steppers[optimizer]


def is_elementwise(optimizer: Optimizer) -> bool:
    return inspect.unwrap(type(optimizer).step) in _ELEMENTWISE


unhooked: list[Optimizer] = []
"""The optimizers whose ``step`` runs without hooks now, the innermost one last."""


def step_unhooked(optimizer: Optimizer, *arguments: Any) -> None:
    """``step()`` without the wrapper of torch's that calls the hooks."""
    step: Any = type(optimizer).step
    unhooked.append(optimizer)  # `super().step()` in it may have such a wrapper, too
    try:
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer, *arguments)
    finally:
        unhooked.pop()


def step_groups(optimizer: Optimizer, groups: list[dict[str, Any]], *arguments: Any) -> str | None:
    """Step the parameters of ``groups``, without hooks, in place of the optimizer's own groups.

    Returns a key of a group whose value the step has changed, if there is one.
    """
    own, optimizer.param_groups = optimizer.param_groups, groups
    before = [_options(group) for group in groups]
    try:
        step_unhooked(optimizer, *arguments)
    finally:
        optimizer.param_groups = own
    for old, new in zip(before, map(_options, groups), strict=True):
        for key in new:
            if new[key] != old.get(key):
                return key
    return None


def _options(group: dict[str, Any]) -> dict[str, str]:
    return {key: repr(value) for key, value in group.items() if key != "params"}


def stepper_of(optimizer: Optimizer) -> Stepper:
    """The stepper of an optimizer, chosen when the optimizer first steps sharded parameters.

    Raises:
        MissingExtraError: the optimizer is not element-wise, and the extra is not installed.
    """
    stepper = _steppers.get(optimizer)
    if stepper is None:
        if is_elementwise(optimizer):
            stepper = BucketStepper()
        elif any(isinstance(param, FlatShardTensor) for param in all_params(optimizer)):
            asked_for = f"{type(optimizer).__name__}.step() (not declared element-wise)"
            stepper = extra("whole_tensors", asked_for).WholeStepper()
        else:
            return Stepper()  # the optimizer may get sharded parameters later
        _steppers[optimizer] = stepper
    return stepper


def stepped_optimizers() -> list[Optimizer]:
    """The optimizers that have stepped sharded parameters as buckets."""
    return [one for one, stepper in _steppers.items() if isinstance(stepper, BucketStepper)]


def shared_state(optimizer: Optimizer) -> dict[FlatShardTensor, State]:
    """State that single ranks have, on all ranks: per element sharded, all other state full.

    Empty for an optimizer of which each rank has the state of its own shards.

    Collective: all ranks of the optimizer's sharded parameters.
    """
    stepper = _steppers.get(optimizer)
    return {} if stepper is None else stepper.shared_state(optimizer)


def reports(params: Iterable[Tensor]) -> list[str]:
    """A line for each optimizer that has stepped some of ``params`` as full tensors."""
    ids = {id(param) for param in params}
    found = [(type(one).__name__, stepper.report(ids)) for one, stepper in _steppers.items()]
    return [f"{name} {report}" for name, report in found if report is not None]


class Closure:
    """A closure as an optimizer calls it; the first call returns the loss from before the step."""

    def __init__(self, run: Callable[[], Any], optimizer: Optimizer) -> None:
        """Call ``run``, which calls the user's closure, before the step.

        All optimizers call their closures first. Here the closure runs even earlier, since which
        parameters have gradients decides how the optimizer steps.
        """
        self._run, self._optimizer = run, optimizer
        self.loss = run()
        self._is_new = True

    def __call__(self) -> Any:
        if self._is_new:
            self._is_new = False
            return self.loss
        optimizer = self._optimizer
        stepper = stepping.pop(optimizer)  # the closure's forward calls `restore_all`
        try:
            stepper.pause(optimizer)
            self.loss = self._run()
        except BaseException:
            stepper.undo(optimizer)
            raise
        stepping[optimizer] = stepper
        stepper.begin(optimizer, self)
        return self.loss


class GroupSwap:
    """Other parameters in the groups of an optimizer, until ``undo``."""

    def __init__(self) -> None:
        self._lists: list[tuple[list[Any], list[Any]]] = []

    def put(self, params: list[Any], others: Sequence[Any]) -> None:
        """Put others into the list of a group: in place, as optimizers (LBFGS) keep the list."""
        self._lists.append((params, list(params)))
        params[:] = others

    def undo(self, optimizer: Optimizer) -> None:
        """Put the parameters and their state back; without a swap there is nothing to do."""
        for params, before in self._lists:
            params[:] = before
        self._lists = []


class Stepper(GroupSwap):
    """Steps an optimizer without sharded parameters, as it is.

    A stepper outlives steps, so it must not keep the optimizer alive.
    """

    def begin(self, optimizer: Optimizer, closure: Closure | None) -> Optimizer:
        """Before ``step()``; returns what is stepped: the optimizer or, after its step, a dummy.

        May change the closure's ``loss``.
        """
        return optimizer

    def pause(self, optimizer: Optimizer) -> None:
        """Before another call of the closure: let it see sharded parameters; ``begin`` follows."""
        self.undo(optimizer)

    def end(self, optimizer: Optimizer) -> None:
        """After a step that went well."""
        self.undo(optimizer)

    def shared_state(self, optimizer: Optimizer) -> dict[FlatShardTensor, State]:
        """See the function ``shared_state``."""
        return {}

    def report(self, ids: Collection[int]) -> str | None:
        """How parameters with these ids were stepped as full tensors; None if they were not."""
        return None


class BucketStepper(Stepper):
    """Steps an element-wise optimizer: buckets stand in for its sharded parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, ParamBucket] = {}  # of the last step, by the id of the first member
        self._buckets: list[ParamBucket] = []  # of the step that runs
        self._fused: list[dict[str, Any]] = []

    def begin(self, optimizer: Optimizer, closure: Closure | None) -> Optimizer:
        stepped: Collection[int] = ()
        for extension in extensions:
            stepped = {*stepped, *extension.step_first(optimizer)}
        self.swap_in(optimizer, optimizer.param_groups, stepped)
        return optimizer

    def swap_in(
        self,
        optimizer: Optimizer,
        groups: Sequence[dict[str, Any]],
        stepped: Collection[int] = (),
    ) -> None:
        """Put buckets into the groups, move the state along, and choose the fastest kernel.

        Parameters with ids in ``stepped`` have been stepped already.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for group in groups:
                before, new = group["params"], []
                left = [one for one in before if id(one) not in stepped] if stepped else before
                for found in find_buckets(left, self._known):
                    if not isinstance(found, ParamBucket):
                        new.append(found)
                        continue
                    # If members have different counts of steps, one bucket cannot hold both.
                    parts = [found] if found.swap_in(optimizer.state) else found.divided
                    for bucket in parts:
                        if bucket is found or bucket.swap_in(optimizer.state):
                            self._buckets.append(bucket)
                            new.append(bucket.param)
                if len(new) == len(before) and all(map(operator.is_, new, before)):
                    continue  # nothing here is sharded, or has a gradient
                self.put(before, new)
                if _suits_fused(optimizer, group):
                    self._fused.append(group)
                    group["fused"] = True

    def undo(self, optimizer: Optimizer) -> None:
        super().undo(optimizer)
        with torch._C.DisableTorchFunctionSubclass():
            for group in self._fused:
                group["fused"] = None
            for bucket in self._buckets:
                bucket.swap_out(optimizer.state)
        self._buckets, self._fused = [], []


def _suits_fused(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a group's user leaves the kernel open and the fused one can step it."""
    # On a CPU Adam and AdamW make one operation after another, each of which goes over parameters,
    # gradients or state. Their fused kernel goes over all of them once, in a fifth of the time. It
    # rounds otherwise: of 100,000 parameters one differs in its last bit after a step.
    if inspect.unwrap(type(optimizer).step) not in _FUSED_STEPS:
        return False
    if group["fused"] is not None or group["foreach"] is not None:
        return False
    if group["capturable"] or group["differentiable"]:
        return False
    numbers = group["lr"], *group["betas"], group["weight_decay"], group["eps"]
    if any(isinstance(number, Tensor) for number in numbers):
        return False
    return all(
        param.device.type == "cpu"
        and param.dtype in _FUSED_DTYPES
        and param.grad.dtype == param.dtype
        and param.grad.layout is torch.strided
        for param in group["params"]
        if param.grad is not None
    )
