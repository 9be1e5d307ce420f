"""``Stepper``: puts other parameters into an optimizer's groups while the optimizer steps.

Running an optimizer's operations directly on ``FlatShardTensor`` is right but slow, because each
operation is dispatched in Python. During a step of an element-wise optimizer, ``BucketStepper``
therefore puts ``ParamBucket``s into the groups: plain 1-D parameters that share the shard's memory.
The extra ``whole_tensors`` steps all other optimizers.

[Note: buckets]
A bucket is one 1-D parameter that the optimizer steps in place of several parameters. The
parameters belong to one group, are neighbours in a shard, and have gradients that are neighbours in
one flat gradient. So one kernel steps a flat parameter, instead of one kernel per original
parameter. Between steps each original parameter has its own state: views of the bucket's state.
"""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.memory.offload_target import OffloadTarget
from flatshard.options.extras import extra
from flatshard.plan.layout import ALIGNMENT_BYTES
from flatshard.plan.module_tree import unit_text
from flatshard.precision import set_grad
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_range

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
# For narrower dtypes the fused kernel computes in fp32, while the single operations round after
# each operation: the results would differ.
_FUSED_DTYPES = torch.float32, torch.float64

_steppers: weakref.WeakKeyDictionary[Optimizer, Stepper] = weakref.WeakKeyDictionary()
# Optimizers in the middle of a step, or whose last step raised: their groups may still hold the
# stepper's parameters.
stepping: weakref.WeakKeyDictionary[Optimizer, Stepper] = weakref.WeakKeyDictionary()


class OptimizerExtension:
    """Hooks of an extra into the steps of all optimizers, active while in ``extensions``."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before the checks, at the start of ``step()`` and after each closure call."""

    def step_first(self, optimizer: Optimizer) -> Iterable[int]:
        """Step some parameters before ``step()`` steps the others; returns the ids of the former.

        Called for element-wise optimizers only.
        """
        return ()

    def after_part(self, optimizer: Optimizer, params: Sequence[Any]) -> None:
        """Called after ``step.step_parts`` has stepped ``params``."""

    def before_backward(self, optimizer: Optimizer) -> None:
        """Called before a backward in which the optimizer steps (``step_in_backward``)."""


extensions: list[OptimizerExtension] = []


def declare_elementwise(optimizer_class: type[Optimizer]) -> None:
    """Declare that an optimizer updates every element from that element's own gradient and state.

    The optimizer's ``step`` then gets plain 1-D tensors, as torch's own optimizers do. Without the
    declaration, flatshard tries at the first step whether the optimizer works on true-shape sharded
    parameters or needs full parameters.

    Example:
        ```python
        class SignSGD(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for param in group["params"]:
                        param.sub_(param.grad.sign(), alpha=group["lr"])

        flatshard.declare_elementwise(SignSGD)
        ```
    """
    _ELEMENTWISE.add(inspect.unwrap(optimizer_class.step))
    for optimizer in [one for one in _steppers if is_elementwise(one)]:
        if not isinstance(_steppers[optimizer], BucketStepper):
            del _steppers[optimizer]


def is_elementwise(optimizer: Optimizer) -> bool:
    return inspect.unwrap(type(optimizer).step) in _ELEMENTWISE


unhooked: list[Optimizer] = []
"""The optimizers whose ``step`` runs without hooks now, innermost last."""


def step_unhooked(optimizer: Optimizer, *arguments: Any) -> None:
    """Call ``step()`` without torch's wrapper, which would call the hooks."""
    step: Any = type(optimizer).step
    # `super().step()` inside the step may have a wrapper that calls hooks, too
    unhooked.append(optimizer)
    try:
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer, *arguments)
    finally:
        unhooked.pop()


def step_groups(optimizer: Optimizer, groups: list[dict[str, Any]], *arguments: Any) -> str | None:
    """Step the parameters of ``groups`` instead of the optimizer's own groups, without hooks.

    Returns a key of a group if the step has changed the key's value, otherwise None.
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
    """The stepper of an optimizer; the same one in each step.

    An element-wise optimizer gets its stepper at the first step. Another optimizer gets one at the
    first step with sharded parameters.

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
    """The element-wise optimizers that have begun a step."""
    return [one for one, stepper in _steppers.items() if isinstance(stepper, BucketStepper)]


def shared_state(optimizer: Optimizer) -> dict[FlatShardTensor, State]:
    """State that only single ranks hold, collected on all ranks.

    State per element is sharded, all other state is full. Empty for an optimizer whose state
    already lies with the shards of each rank.

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
    """A closure for an optimizer; the first call returns the loss from before the step."""

    def __init__(self, run: Callable[[], Any], optimizer: Optimizer) -> None:
        """Call ``run``, which calls the user's closure, before the step.

        All optimizers call their closures first. Here the closure runs even earlier: flatshard must
        know which parameters have gradients to decide how the optimizer steps.
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


def put_others(undo: ExitStack, params: list[Any], others: Sequence[Any]) -> None:
    """Replace the parameters in a group's list by ``others``, until ``undo`` is closed."""
    undo.callback(params.__setitem__, slice(None), list(params))
    params[:] = others  # in place, because some optimizers (LBFGS) keep a reference to the list


class Stepper:
    """Steps an optimizer that has no sharded parameters, and changes nothing.

    A stepper outlives steps, so a stepper must not keep the optimizer alive.
    """

    def begin(self, optimizer: Optimizer, closure: Closure | None) -> Optimizer:
        """Called before ``step()``; returns the optimizer to step, or a dummy if it has stepped.

        May change the closure's ``loss``.
        """
        return optimizer

    def pause(self, optimizer: Optimizer) -> None:
        """Called before another call of the closure: restore sharded parameters until ``begin``."""
        self.undo(optimizer)

    def end(self, optimizer: Optimizer) -> None:
        """Called after a step that did not raise."""
        self.undo(optimizer)

    def undo(self, optimizer: Optimizer) -> None:
        """Put the parameters and their state back, if they were replaced."""

    def shared_state(self, optimizer: Optimizer) -> dict[FlatShardTensor, State]:
        """See the function ``shared_state``."""
        return {}

    def report(self, ids: Collection[int]) -> str | None:
        """Text on how parameters with these ids were stepped as full tensors; None if none was."""
        return None


class BucketStepper(Stepper):
    """Steps an element-wise optimizer: buckets stand in for its sharded parameters."""

    def __init__(self) -> None:
        # Buckets of the last step, keyed by the id of the first member.
        self._known: dict[int, ParamBucket] = {}
        self._buckets: list[ParamBucket] = []  # buckets of the current step
        self._undo = ExitStack()  # restores the groups

    def begin(self, optimizer: Optimizer, closure: Closure | None) -> Optimizer:
        stepped = {ident for one in extensions for ident in one.step_first(optimizer)}
        self.swap_in(optimizer, optimizer.param_groups, stepped)
        return optimizer

    def swap_in(
        self,
        optimizer: Optimizer,
        groups: Sequence[dict[str, Any]],
        stepped: Collection[int] = (),
    ) -> None:
        """Put buckets into the groups, move the state to them, and choose the fastest kernel.

        Parameters with ids in ``stepped`` were stepped already.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for group in groups:
                before, new = group["params"], []
                left = [one for one in before if id(one) not in stepped] if stepped else before
                for found in find_buckets(left, self._known):
                    if not isinstance(found, ParamBucket):
                        new.append(found)
                        continue
                    for bucket in found.swap_in(optimizer.state):
                        self._buckets.append(bucket)
                        new.append(bucket.param)
                if len(new) == len(before) and all(map(operator.is_, new, before)):
                    continue  # the group has no sharded parameter with a gradient
                put_others(self._undo, before, new)
                if _suits_fused(optimizer, group):
                    self._undo.callback(group.__setitem__, "fused", None)
                    group["fused"] = True

    def undo(self, optimizer: Optimizer) -> None:
        self._undo.close()
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self._buckets:
                bucket.swap_out(optimizer.state)
        self._buckets = []


def _suits_fused(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the user chose no kernel for a group, and the fused kernel can step the group."""
    # On a CPU, Adam and AdamW run many operations, and each operation reads all parameters,
    # gradients or state. The fused kernel reads everything only once, in a fifth of the time. The
    # fused kernel rounds differently: about 1 of 100,000 parameters differs in the last bit after a
    # step.
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


State = dict[str, Any]

# Names of state that has one number per parameter, not per element, even if the parameter is 0-d.
ONE_PER_PARAMETER = frozenset({"step", "eta", "mu", "mu_product"})


class BucketState(dict[str, Any]):
    """A bucket's state, or a member's view of it."""

    # All members share one count of steps. The shared count must not leave the bucket: whoever
    # raises the count for one member would raise it for all members. See `apart`.

    def __init__(self, values: State) -> None:
        super().__init__(values)
        self._made_of = tuple(self.values())

    def is_unchanged(self, state: object) -> bool:
        """Whether ``state`` is this object, and still holds the objects from its construction."""
        same = map(operator.is_, self.values(), self._made_of)
        return state is self and len(self) == len(self._made_of) and all(same)


def apart(state: State) -> State:
    """A state that shares no count of steps with another parameter's state."""
    if not isinstance(state, BucketState):
        return state
    return {
        key: value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value
        for key, value in state.items()
    }


class BucketView(Tensor):
    """A member's state in ``optimizer.state_dict()``; a deep copy is as small as the member.

    A deep copy of a plain tensor copies the whole storage, here the whole bucket.
    ``dataclasses.asdict`` copies each tensor separately, so it would copy the bucket once per
    member.
    """

    # Results of operations are plain tensors.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # files hold plain tensors


def shown(state: State) -> State:
    """State for ``optimizer.state_dict()``; shares a bucket's elements, but no count of steps."""
    if not isinstance(state, BucketState):
        return state
    return {key: _shown(value) for key, value in apart(state).items()}


def _shown(value: Any) -> Any:
    is_part = isinstance(value, Tensor) and value.nbytes < value.untyped_storage().nbytes()
    return value.as_subclass(BucketView) if is_part else value


def all_params(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """The parameters of all groups, in order."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def find_buckets(
    params: Sequence[Any], known: dict[int, ParamBucket]
) -> Iterator[ParamBucket | nn.Parameter]:
    """Divide a group's parameters into buckets and single parameters, in order.

    ``known`` has buckets of earlier steps, keyed by the id of the first member; new buckets are
    added.
    """
    position = 0
    while position < len(params):
        first = params[position]
        if not isinstance(first, FlatShardTensor) or first.grad is None:
            # A parameter without a gradient is not stepped and gets no bucket: its state may be
            # part of another bucket's state.
            yield first
            position += 1
            continue
        members = _neighbours(params, position)
        bucket = known.get(id(first))
        # Reuse the bucket of the last step: its views of state are then still right.
        if bucket is None or not bucket.is_of(members):
            bucket = known[id(first)] = ParamBucket(members)
        yield bucket
        position += len(members)


def _neighbours(params: Sequence[Any], position: int) -> list[Any]:
    """The parameters from ``position`` on that are contiguous, and so are their gradients."""
    first = params[position]
    found, grad = [first], _flat_grad(first)
    if grad is None:
        return found
    end = first.spec.start + first.spec.numel
    # An index, because a slice would be copied for each bucket.
    for number in range(position + 1, len(params)):
        param = params[number]
        if _flat_grad(param) is not grad or param.flat is not first.flat:
            break
        # Aligned parameters have padding between them. The optimizer steps the padding too.
        if not 0 <= (param.spec.start - end) * first.dtype.itemsize < ALIGNMENT_BYTES:
            break
        end = param.spec.start + param.spec.numel
        found.append(param)
    return found


def _flat_grad(param: Any) -> Tensor | None:
    """The flat gradient that holds a parameter's gradient at the parameter's place in the shard."""
    if isinstance(param, FlatShardTensor):
        grad = param.grad
        if isinstance(grad, FlatShardTensor) and grad.spec is param.spec:
            return grad.flat
    return None  # the user assigned the gradient, or there is no gradient


def local_grad(param: FlatShardTensor) -> Tensor:
    """This rank's range of a parameter's gradient, 1-D."""
    grad = param.grad
    assert grad is not None
    if isinstance(grad, FlatShardTensor):
        return grad.local.detach()
    return param.spec.slice(grad.detach())  # the user assigned a full tensor


@dataclass(eq=False, slots=True)
class _Member:
    """A parameter in a bucket."""

    param: FlatShardTensor
    part: slice  # range of the member in the bucket's elements
    state: BucketState  # views of the bucket's state


class ParamBucket:
    """One or more neighbours that an optimizer steps as one 1-D parameter, ``param``."""

    def __init__(self, params: Sequence[FlatShardTensor]) -> None:
        first = params[0]
        self._params, self._flat, self._start = list(params), first.flat, first.spec.start
        self._members: list[_Member] = []
        for param in params:
            start = param.spec.start - self._start
            part = slice(start, start + param.spec.numel)
            self._members.append(_Member(param, part, BucketState({})))
        local = local_range(first).detach()
        if len(params) > 1:
            assert self._flat is not None, "neighbours share a shard"
            end = self._start + self._members[-1].part.stop
            local = self._flat.detach()[self._start : end]
        self.param = nn.Parameter(local, first.requires_grad)
        self._shared = BucketState({})

    def is_of(self, params: Sequence[Any]) -> bool:
        """Whether the bucket has exactly these parameters, over the memory of the parameters."""
        return (
            len(params) == len(self._params)
            and all(map(operator.is_, params, self._params))
            and params[0].requires_grad == self.param.requires_grad
            and params[0].flat is self._flat
        )

    @cached_property
    def divided(self) -> list[ParamBucket]:
        """One bucket per member, used if the members' states cannot be joined."""
        return [ParamBucket([param]) for param in self._params]

    def swap_in(self, states: MutableMapping[Any, State]) -> list[ParamBucket]:
        """Set the bucket's gradient, and move the members' states into the bucket.

        ``states`` is the state of the optimizer. Returns this bucket, or a bucket for each member
        if the members' states cannot be joined: one bucket cannot hold members with different
        counts of steps.
        """
        shared: State | None = self._shared
        # The optimizer holds another state than the member's views: this is the first step, or
        # someone has assigned or loaded state since the last step.
        if not all(one.state.is_unchanged(states.get(one.param)) for one in self._members):
            shared = self._join(states)
            if shared is None:
                return [bucket for member in self.divided for bucket in member.swap_in(states)]
            # The joined state is a copy, so the members' states are dropped before the step
            # allocates temporaries.
            for param in self._params:
                states.pop(param, None)
        if shared:
            states[self.param] = shared
        first = self._params[0]
        flat = _flat_grad(first)
        end = self._start + self.param.numel()
        set_grad(
            self.param, local_grad(first) if flat is None else flat.detach()[self._start : end]
        )
        # An optimizer that writes to `p.data` would not raise the version counter, and unsharded
        # buffers from before the step would be taken for up to date.
        torch.autograd.graph.increment_version(self.param)
        return [self]

    def swap_out(self, states: MutableMapping[Any, State]) -> None:
        """Give the members views of the bucket's state; drop gradients that the step dropped."""
        if self.param.grad is None:
            for param in self._params:
                param.grad = None
        self.param.grad = None
        shared = states.pop(self.param, None)
        if shared is None:
            return
        # Most optimizers update the same objects in place. Then the members' views from before are
        # still right.
        if not self._shared.is_unchanged(shared):
            self._split(shared)
        if states.get(self._params[0]) is not self._members[0].state:
            states.update({member.param: member.state for member in self._members})

    def _join(self, states: MutableMapping[Any, State]) -> State | None:
        """The bucket's state, joined from its members' local state; None if they cannot be joined.

        Zeros fill the padding between members: the optimizer steps the padding too, and zeros stay
        finite.
        """
        own = {
            member: _local_state(member.param, states[member.param])
            for member in self._members
            if states.get(member.param) is not None
        }
        if not own:
            return {}
        first = next(iter(own.values()))
        if len(self._members) == 1:
            return apart(first)
        if len(own) < len(self._members):
            return None
        if any(state.keys() != first.keys() for state in own.values()):
            return None
        shared: State = {}
        for key, value in first.items():
            if all(_has_elements(state[key], member) for member, state in own.items()):
                shared[key] = value.new_zeros(self.param.numel())
                for member, state in own.items():
                    shared[key][member.part] = state[key]
            elif _all_equal([state[key] for state in own.values()]):
                shared[key] = value.clone() if isinstance(value, Tensor) else value
            else:
                return None
        return shared

    def _split(self, shared: State) -> None:
        """Give each member views of the bucket's state."""
        target = self._params[0].spec.state_target
        if target is not None:
            state_to_target(shared, self.param.shape, target)
        self._shared = BucketState(shared)
        for member in self._members:
            views = {key: self._view(value, member.part) for key, value in shared.items()}
            member.state = BucketState(views)

    def _view(self, value: Any, part: slice) -> Any:
        is_divided = isinstance(value, Tensor) and value.dim() and len(self._members) > 1
        return value[part] if is_divided else value


def state_to_target(state: State, shape: torch.Size, target: OffloadTarget) -> None:
    """Move state per element, of this shape, to the target that stores state between steps."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape == shape:
            state[key] = target.take_in(value)


def _has_elements(value: Any, member: _Member) -> bool:
    return isinstance(value, Tensor) and value.shape == (member.param.spec.numel,)


def _all_equal(values: Sequence[Any]) -> bool:
    first = values[0]
    if isinstance(first, Tensor):
        return all(isinstance(v, Tensor) and torch.equal(v, first) for v in values)
    return all(type(value) is type(first) and value == first for value in values)


def _local_state(param: FlatShardTensor, state: State) -> State:
    """This rank's part of state from before wrapping or from an unwrapped model."""
    spec = param.spec
    for key, value in state.items():
        # State may be sharded already: Adagrad makes its state when it is constructed.
        part = part_per_element(spec, key, value)
        if part is not None:
            state[key] = part
        elif isinstance(value, Tensor) and value.numel() > 1 and key not in ONE_PER_PARAMETER:
            raise RuntimeError(
                f"optimizer state {key!r} of parameter {spec.name!r}: expected shape "
                f"({spec.numel},) (this rank's part) or {spec.shape} (full), got "
                f"{tuple(value.shape)}. A plain optimizer.state_dict() holds one "
                "rank's part: save ShardedWrapper.optim_state_dict(model, optimizer) instead."
            )
    return state


def part_per_element(spec: ShardSpec, key: str, value: Any) -> Tensor | None:
    """This rank's range of full, sharded or local state per element, 1-D; None for other state.

    Raises:
        ValueError: the state is sharded, with another range for this rank than the parameter's.
    """
    if not isinstance(value, Tensor) or key in ONE_PER_PARAMETER:
        return None
    if isinstance(value, FlatShardTensor):
        if value.spec.place != spec.place:
            raise ValueError(
                f"sharded state of parameter {spec.name!r} ({unit_text(spec.unit)}) is of another "
                f"layout: expected elements [{spec.offset}, {spec.offset + spec.numel}), got "
                f"[{value.spec.offset}, {value.spec.offset + value.spec.numel}). Load it through "
                "torch.distributed.checkpoint into the state that this model has."
            )
        return value.local
    if tuple(value.shape) == (spec.numel,):
        return value
    # A clone: a view would keep the full tensor alive.
    return spec.slice(value).clone() if tuple(value.shape) == spec.shape else None
