"""``OptimizerAdapter``: replaces an optimizer's sharded parameters by plain ones during a step.

Operations on sharded parameters (``FlatShardTensor``) are slow, because torch dispatches them in
Python. So ``BucketAdapter``, the adapter of an element-wise optimizer (Adam, SGD), puts plain 1-D
parameters into the parameter groups. The extra ``whole_tensors`` has the other optimizers' adapter.

[Note: buckets]
A bucket is such a 1-D parameter, in the memory of this rank's shard. A bucket replaces one or more
sharded parameters: its members. The members are neighbours in the shard. Their gradients are
neighbours in a flat gradient. So a single kernel can step a whole flat parameter. Between steps,
each member has its own optimizer state: sharded tensors that are views of the bucket's state.
"""

from __future__ import annotations

import inspect
import math
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_map_with_path

from flatshard.options.extras import extra
from flatshard.precision import get_grad, set_grad
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import FlatShardTensor, LocalView, is_unreduced, local_grad
from flatshard.units.layout import ALIGNMENT_BYTES
from flatshard.units.module_tree import unit_text

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
# For the fused kernel: device type and dtype of parameters, dtype and layout of gradients. Not for
# narrower dtypes: the fused kernel computes in float32, and rounds unlike the default kernel.
_FUSED_KINDS = {("cpu", dtype, dtype, torch.strided) for dtype in (torch.float32, torch.float64)}

_adapters: weakref.WeakKeyDictionary[Optimizer, OptimizerAdapter] = weakref.WeakKeyDictionary()
# Optimizers that are in a step, or whose last step raised. Their groups may contain replacements
# of sharded parameters.
stepping: weakref.WeakKeyDictionary[Optimizer, OptimizerAdapter] = weakref.WeakKeyDictionary()


class OptimizerExtension:
    """Base class for an extra that acts in optimizer steps: add an instance to ``extensions``."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before ``step()`` checks gradients, and again after each call of a closure."""

    def step_first(self, optimizer: Optimizer) -> Iterable[int]:
        """Step some parameters, and return the ids of parameters for ``step()`` to omit.

        Called at the start of a step of an element-wise optimizer.
        """
        return ()

    def after_part(self, optimizer: Optimizer, params: Sequence[Any]) -> None:
        """Called after an extra has stepped ``params``, which are some parameters of a group."""

    def before_backward(self, optimizer: Optimizer) -> None:
        """Called before a backward that also steps the optimizer (``step_in_backward``)."""


extensions: list[OptimizerExtension] = []
at_step: list[Callable[[Optimizer], object]] = []
"""Functions to call with an optimizer when its step begins, if no other optimizer is stepping."""


def declare_elementwise(optimizer_class: type[Optimizer]) -> None:
    """Declare that an optimizer updates every element from that element's own gradient and state.

    The optimizer's ``step`` then gets plain 1-D tensors, like torch's own element-wise optimizers.
    Without the declaration, flatshard tries before the first step whether the optimizer works on
    sharded parameters or needs full parameters.

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
    for optimizer in {*filter(is_elementwise, _adapters)}.difference(stepped_optimizers()):
        del _adapters[optimizer]


def is_elementwise(optimizer: Optimizer) -> bool:
    return inspect.unwrap(type(optimizer).step) in _ELEMENTWISE


def is_torchs_own(optimizer: Optimizer) -> bool:
    return inspect.unwrap(type(optimizer).step) in TORCHS_OWN


unhooked: list[Optimizer] = []
"""The optimizers whose ``step()`` an extra is calling without hooks, innermost last."""


def adapter_of(optimizer: Optimizer) -> OptimizerAdapter:
    """Return the adapter of an optimizer: the same object in all steps.

    The adapter is made at the first step. If the optimizer is not element-wise, the adapter is made
    at the first step with sharded parameters.
    """
    adapter = _adapters.get(optimizer)
    if adapter is None:
        if is_elementwise(optimizer):
            adapter = BucketAdapter()
        elif any(isinstance(param, FlatShardTensor) for param in all_params(optimizer)):
            if isinstance(optimizer, torch.optim.SparseAdam):
                raise RuntimeError(
                    "SparseAdam cannot step sharded parameters: their gradients are dense, even "
                    "with nn.Embedding(sparse=True). Use an optimizer for dense gradients, such as "
                    "Adam, SGD or Adagrad."
                )
            asked_for = f"{type(optimizer).__name__}.step() (not declared element-wise)"
            adapter = extra("whole_tensors", asked_for).WholeTensorAdapter()
        else:
            # Do not store this adapter: the optimizer may get sharded parameters later.
            return OptimizerAdapter()
        _adapters[optimizer] = adapter
    return adapter


def stepped_optimizers() -> list[Optimizer]:
    """Return the element-wise optimizers that have begun at least one step."""
    return [one for one, adapter in _adapters.items() if isinstance(adapter, BucketAdapter)]


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizer, and the optimizers in its attributes (Lookahead has one)."""
    found = [optimizer]
    for one in found:  # the loop also visits the optimizers that it adds
        inner = (value for value in vars(one).values() if isinstance(value, Optimizer))
        found += [value for value in inner if value not in found]
    return found


def shared_state(optimizer: Optimizer) -> dict[FlatShardTensor, State]:
    """Send states that only one rank has to all ranks, and return these states by parameter.

    If a state has one value per element, each rank gets only the values of its range. Collective.
    """
    shared: dict[FlatShardTensor, State] = {}
    for one in with_inner(optimizer):
        if one in _adapters:
            shared |= _adapters[one].shared_state(one)
    return shared


class Closure:
    """Replaces the user's closure in ``optimizer.step(closure)``."""

    def __init__(self, run: Callable[..., Any], optimizer: Optimizer, *, is_early: bool) -> None:
        """Store ``run``, which calls the user's closure. With ``is_early``, also call ``run`` now.

        The early call shows which parameters have gradients. The optimizer's own first call returns
        the same loss, which is wrong only if the optimizer has changed parameters before (SAM).
        """
        self._run, self._optimizer = run, optimizer
        self.loss = run() if is_early else None
        self._is_new = is_early

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = self._optimizer
        if self._is_new and (args or kwargs):
            raise NotImplementedError(
                f"{type(optimizer).__name__} calls its closure with arguments. But flatshard has "
                "called closure() before the step, to see which parameters have gradients. Use an "
                "optimizer that calls closure() without arguments."
            )
        if self._is_new:
            self._is_new = False
            return self.loss
        # Remove the optimizer from `stepping`. Otherwise `restore_all`, which the forward in the
        # user's closure calls, would call `adapter.undo`.
        stepping.pop(optimizer, None)
        adapter = adapter_of(optimizer)
        try:
            adapter.pause(optimizer)
            self.loss = self._run(*args, **kwargs)
        except BaseException:
            adapter.undo(optimizer)
            raise
        stepping[optimizer] = adapter
        adapter.begin(optimizer, self)
        return self.loss


def put_others(undo: ExitStack, params: list[Any], others: Sequence[Any]) -> None:
    """Replace the contents of a group's list ``params`` by ``others``, until ``undo`` is closed."""
    undo.callback(params.__setitem__, slice(None), list(params))
    params[:] = others  # in place, because some optimizers (LBFGS) store a reference to the list


class OptimizerAdapter:
    """Prepares the steps of one optimizer. This base class is for parameters that are not sharded.

    An adapter must not refer to its optimizer: ``_adapters`` refers to the adapter, and so would
    keep the optimizer in memory forever.
    """

    def begin(self, optimizer: Optimizer, closure: Closure | None) -> Optimizer:
        """Prepare a step, and return the optimizer whose ``step()`` torch shall call.

        An adapter that steps all parameters in ``begin`` returns a dummy optimizer, whose
        ``step()`` changes nothing. ``begin`` may also replace ``closure.loss``.
        """
        return optimizer

    def needs_loss(self, optimizer: Optimizer) -> bool:
        """Whether a step with a closure needs the closure's loss before the step. Collective."""
        # If no gradient is reduced yet, `step()` raises unless the closure first runs a backward.
        grads = [param.grad for param in all_params(optimizer) if param.grad is not None]
        return bool(grads) and all(map(is_unreduced, grads))

    def pause(self, optimizer: Optimizer) -> None:
        """Put the sharded parameters back into the optimizer, before a call of the closure."""

    def end(self, optimizer: Optimizer) -> None:
        """Put the sharded parameters back into the optimizer, after a step that did not raise."""

    def undo(self, optimizer: Optimizer) -> None:
        """Put replaced sharded parameters, and their state, back into the optimizer."""

    def shared_state(self, optimizer: Optimizer) -> dict[FlatShardTensor, State]:
        """See the function ``shared_state``."""
        return {}


class BucketAdapter(OptimizerAdapter):
    """Adapter of an element-wise optimizer: replaces sharded parameters by ``ParamBucket``s."""

    def __init__(self) -> None:
        # Buckets of earlier steps, keyed by the id of the first member.
        self._known: dict[int, ParamBucket] = {}
        self._buckets: list[ParamBucket] = []  # buckets of the current step
        self._undo = ExitStack()  # when closed, restores the optimizer's parameter groups

    def needs_loss(self, optimizer: Optimizer) -> bool:
        return True

    def begin(self, optimizer: Optimizer, closure: Closure | None) -> Optimizer:
        stepped = {ident for one in extensions for ident in one.step_first(optimizer)}
        self.swap_in(optimizer, optimizer.param_groups, stepped)
        return optimizer

    def swap_in(
        self, optimizer: Optimizer, groups: Sequence[dict[str, Any]], stepped: Collection[int] = ()
    ) -> None:
        """Replace sharded parameters in ``groups`` by buckets, and move their state to the buckets.

        Also selects torch's fused kernel where possible. ``stepped``: ids of parameters that the
        groups must leave out, because an extension has already stepped them.
        """
        with torch._C.DisableTorchFunctionSubclass():
            states = optimizer.state
            # Use ids as keys: each lookup of a tensor would call `Tensor.__hash__`, in Python.
            present = {id(param): state for param, state in states.items()}
            for group in groups:
                before, new = group["params"], list[Any]()
                left = [one for one in before if id(one) not in stepped] if stepped else before
                for item in find_buckets(left, self._known):
                    buckets = item.swap_in(states, present) if isinstance(item, ParamBucket) else []
                    self._buckets += buckets
                    new += [bucket.param for bucket in buckets] or [item]
                if _are_same(new, before):
                    continue  # the group has no sharded parameter with a gradient
                put_others(self._undo, before, new)
                if _suits_fused(optimizer, group):
                    self._undo.callback(group.__setitem__, "fused", None)
                    group["fused"] = True

    def undo(self, optimizer: Optimizer) -> None:
        self._undo.close()
        with torch._C.DisableTorchFunctionSubclass():
            # Pop the first bucket, so that `optimizer.state` has the same order on all ranks.
            while self._buckets:
                self._buckets.pop(0).swap_out(optimizer.state)

    pause = end = undo


def _suits_fused(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether torch's fused kernel supports a group, and the user has not chosen another kernel."""
    # On a CPU, the fused kernel takes a tenth to a third of the default kernel's time, because it
    # reads all memory only once. The results are nearly the same: about 1 of 100 values differs in
    # the last bit after a step.
    if inspect.unwrap(type(optimizer).step) not in _FUSED_STEPS:
        return False
    is_chosen = group["fused"] is not None or group["foreach"] is not None
    if is_chosen or group["capturable"] or group["differentiable"]:
        return False
    numbers = group["lr"], *group["betas"], group["weight_decay"], group["eps"]
    params = [param for param in group["params"] if param.grad is not None]
    kinds = {(p.device.type, p.dtype, p.grad.dtype, p.grad.layout) for p in params}
    return kinds <= _FUSED_KINDS and not any(isinstance(number, Tensor) for number in numbers)


_SHARD_FLAT, _SHARD_SPEC = operator.attrgetter("shard_flat"), operator.attrgetter("shard_spec")

State = dict[str, Any]
States = MutableMapping[Any, State]  # `optimizer.state`, keyed by parameter

# Names of optimizer state that is one number per parameter. The names are needed for a parameter
# with one element, because its state with one value per element has the same shape as a number.
ONE_PER_PARAMETER = frozenset({"step", "eta", "mu", "mu_product"})


def _reading(name: str) -> Any:
    """Return a ``BucketState`` method that copies shared tensors, and calls ``dict``'s method."""
    method = getattr(dict, name)

    def read(self: BucketState, *args: Any) -> Any:
        return method(apart(self), *args)

    return read


class BucketState(dict[str, Any]):
    """Optimizer state of a member of a bucket. The tensors are views of the bucket's state.

    All members share one tensor ``step`` (the number of steps). When a program reads a member's
    state, the member gets its own copy of ``step``, because the program may write to the tensor.
    While the program holds the copy, each optimizer step reads the copy, and updates it.
    """

    # Whether the state has its own copies. None if the bucket has one member: no copies are needed.
    is_apart: bool | None = False
    __getitem__, __iter__, get = _reading("__getitem__"), _reading("__iter__"), _reading("get")
    keys, values, items = _reading("keys"), _reading("values"), _reading("items")
    pop, setdefault, copy = _reading("pop"), _reading("setdefault"), _reading("copy")


_IS_APART = operator.attrgetter("is_apart")
_VERSIONS = partial(map, operator.attrgetter("_version"))


# `_values` and `_are_same` call only functions written in C, for speed: each step compares the
# state of each parameter.
def _values(states: Sequence[State]) -> list[object]:
    return [*map(len, states), *chain(*map(dict.values, states))]


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def apart(state: State) -> State:
    """Give ``state`` its own copies of tensors that a bucket's members share, and return it."""
    if isinstance(state, BucketState) and state.is_apart is False:
        state.is_apart = True
        items = dict.items(state)
        state.update({k: v.clone() for k, v in items if type(v) is Tensor and v.dim() == 0})
    return state


def shown(state: State) -> State:
    """Return a state for ``optimizer.state_dict()``: sharded tensors become this rank's parts."""
    values = state.items()
    return {k: one.to_local() if isinstance(one, FlatShardTensor) else one for k, one in values}


def all_params(optimizer: Optimizer) -> Iterator[Any]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def find_buckets(
    params: Sequence[Any], known: dict[int, ParamBucket]
) -> Iterator[ParamBucket | nn.Parameter]:
    """Join a group's parameters into buckets where possible, and yield the result in order.

    Yields a bucket in place of its members, and each parameter that belongs to no bucket. Adds new
    buckets to ``known``, the buckets of earlier steps, keyed by the id of the first member.
    """
    position = 0
    while position < len(params):
        first = params[position]
        if not isinstance(first, FlatShardTensor) or get_grad(first) is None:
            # The parameter is not sharded, or has no gradient and is not stepped. Its state stays
            # as it is, even if the state is a view of an earlier bucket's state.
            yield first
            position += 1
            continue
        bucket = known.get(id(first))
        # Reuse the bucket of the last step if possible. Then the members' states, which are views
        # of the bucket's state, need not be made again.
        if bucket is None or not bucket.begins_at(params, position):
            members = _neighbours(params, position)
            if bucket is None or not bucket.is_of(members):
                bucket = known[id(first)] = ParamBucket(members)
        yield bucket
        position += len(bucket.members)


def _neighbours(params: Sequence[Any], position: int) -> list[Any]:
    """Return ``params[position]`` and the following parameters that can be in the same bucket."""
    first = params[position]
    found, flat_grad, flat = [first], _flat_grad(first), first.shard_flat
    if flat_grad is None:
        return found
    end, padding = first.spec.range.stop, ALIGNMENT_BYTES / first.dtype.itemsize
    # Loop over positions: a slice `params[position:]` would copy the list for each bucket.
    for number in range(position + 1, len(params)):
        param = params[number]
        if not isinstance(param, FlatShardTensor) or param.shard_flat is not flat:
            break
        # Allow gaps that contain only alignment padding. The optimizer steps the padding, too.
        gap = param.spec.start - end
        if _flat_grad(param) is not flat_grad or not 0 <= gap < padding:
            break
        end = param.spec.range.stop
        found.append(param)
    return found


def _flat_grad(param: Any) -> Tensor | None:
    """Return the flat gradient of which a parameter's gradient is a view, or None if not a view."""
    grad: Any = get_grad(param) if isinstance(param, FlatShardTensor) else None
    is_view = isinstance(grad, FlatShardTensor) and grad.spec is param.spec
    return grad.shard_flat if is_view else None


class ParamBucket:
    """A 1-D parameter, ``param``, that replaces sharded parameters (see [Note: buckets])."""

    def __init__(self, params: Sequence[FlatShardTensor]) -> None:
        self.members, first = list(params), params[0]
        self._flat, self._specs = first.shard_flat, [param.spec for param in params]
        # The members' states are views of the bucket's state, `_shared`.
        self._states, self._shared = [BucketState() for _ in params], State()
        # For each value that `_join` has joined: the member's number, the name, and weak references
        # to the value and to the joined value.
        self._joined = list[tuple[int, str, weakref.ref[Tensor], weakref.ref[Tensor]]]()
        self._remember()
        # Range of the bucket in the shard.
        self._range = slice(first.spec.start, params[-1].spec.range.stop)
        local = first.local.detach() if self._flat is None else self._flat.detach()[self._range]
        self.param = nn.Parameter(local, first.requires_grad)

    def _remember(self) -> None:
        """Store the values of the states, to notice if the user's program replaces a value."""
        self._values_made, self._shared_made = _values(self._states), _values([self._shared])
        items = chain(*(dict.items(state) for state in self._states if state.is_apart))
        # The names of the members' own copies, and the version counters, which a write changes.
        self._own = {v: k for k, v in items if type(v) is Tensor and v.dim() == 0}
        self._versions = [*_VERSIONS(self._own)]

    def _update_own(self) -> bool:
        """Update the members' own copies. If their states were read in the step, return False."""
        are_same = _are_same(_values(self._states), self._values_made)
        if are_same and self._own:
            torch._foreach_copy_([*self._own], [self._shared[k] for k in self._own.values()])
            self._versions = [*_VERSIONS(self._own)]
        return are_same

    def _part(self, param: FlatShardTensor) -> slice:
        """Return the range of a member in the bucket's elements."""
        start = param.spec.start - self._range.start
        return slice(start, start + param.spec.numel)

    def begins_at(self, params: Sequence[Any], position: int) -> bool:
        """Whether ``params[position:]`` begins with the members, and one tensor has all gradients.

        False for a bucket of one parameter, because later parameters may have to join the bucket.
        """
        members = params[position : position + len(self.members)]
        if len(self.members) == 1 or not self.is_of(members):
            return False
        # Use functions written in C (`map`), because this check covers each parameter in each step.
        grads = [*map(get_grad, members)]
        return (
            {*map(type, grads)} == {FlatShardTensor}
            and all(map(operator.is_, map(_SHARD_SPEC, grads), self._specs))
            and {*map(id, map(_SHARD_FLAT, members))} == {id(self._flat)}
            and len({*map(id, map(_SHARD_FLAT, grads))}) == 1
            and grads[0].shard_flat is not None
        )

    def is_of(self, params: Sequence[Any]) -> bool:
        """Whether the bucket's members are exactly ``params``, and are still in the same shard."""
        return (
            _are_same(params, self.members)
            and params[0].requires_grad == self.param.requires_grad
            and params[0].shard_flat is self._flat
        )

    @cached_property
    def divided(self) -> list[ParamBucket]:
        """One bucket per member, for steps in which the members' states cannot be joined."""
        return [ParamBucket([param]) for param in self.members]

    def swap_in(self, states: States, present: dict[int, State]) -> list[ParamBucket]:
        """Set the bucket's gradient, and move the members' optimizer states to the bucket.

        ``states`` is ``optimizer.state``. ``present`` has the same states, keyed by parameter id.
        Returns the buckets to step: one bucket per member if the members' states cannot be joined.
        """
        shared: State | None = self._shared
        # Usually the members' states are the views that `swap_out` made. If not (in the first step,
        # and after the user has assigned or loaded state), join the members' states.
        self._found = [*map(present.get, map(id, self.members))]  # states before the step
        known = self._versions == [*_VERSIONS(self._own)] and _are_same(self._found, self._states)
        if not (known and _are_same(_values(self._states), self._values_made)):
            if (shared := self._join(states)) is None:
                return [bucket for one in self.divided for bucket in one.swap_in(states, present)]
            # The joined state is a copy. Free the members' states before the step, to save memory.
            for param in self.members:
                states.pop(param, None)
            self._found = [one if isinstance(one, BucketState) else None for one in self._found]
        if shared:
            states[self.param] = shared
        # The gradients of several members are neighbours in a flat gradient (`_neighbours`).
        grad, is_one = get_grad(self.members[0]), len(self.members) == 1
        flat = local_grad(grad, self._specs[0]) if is_one else grad.shard_flat.detach()[self._range]
        set_grad(self.param, flat)
        # Increase the shard's version counter here: the step may write to `p.data`, which does not
        # change the counter. Then flatshard would reuse unsharded buffers that have old values.
        torch._C._increment_version((self.param,))  # type: ignore[attr-defined]
        return [self]

    def swap_out(self, states: States) -> None:
        """Give the members their state back after a step, as views of the bucket's state."""
        if self.param.grad is None:
            for param in self.members:
                param.grad = None
        self.param.grad = None
        if (shared := states.pop(self.param, None)) is None:
            return
        # If the optimizer has updated the state in place, the views of the last step are valid. But
        # make new views if a member's state was read during the step (by Dynamo, for example): then
        # the member has a copy of `step` from before the update.
        is_same = shared is self._shared and _are_same(_values([shared]), self._shared_made)
        if not is_same or (any(map(_IS_APART, self._states)) and not self._update_own()):
            self._split(shared, states)
        if states.get(self.members[0]) is not self._states[0]:
            states.update(zip(self.members, self._states, strict=False))

    def _join(self, states: States) -> State | None:
        """Return the members' states, joined into one state, or None if they cannot be joined.

        The state of padding is zero, so that the optimizer computes no inf or NaN in padding.
        """
        sizes = [size for spec in self._specs for size in (spec.numel, math.prod(spec.shape))]
        # If no parameter or range has one element, shapes show which state has a value per element.
        numbers = numbers_in(states.items()) if 1 in sizes else set[str]()
        found = zip(self.members, self._found, strict=False)
        own = {p: _local_state(p, state, numbers) for p, state in found if state is not None}
        if not own:
            return {}
        first = next(iter(own.values()))
        if len(self.members) == 1:
            return {k: v.detach() if type(v) is LocalView else v for k, v in first.items()}
        if len(own) < len(self.members) or any(s.keys() != first.keys() for s in own.values()):
            return None
        shared: State = {}
        for key, value in first.items():
            shapes = {param: getattr(state[key], "shape", None) for param, state in own.items()}
            # If the values are views of one tensor, made by an earlier step or another optimizer,
            # use this tensor, because the program may have references to the views.
            if (whole := self._whole([state[key] for state in own.values()])) is not None:
                shared[key] = whole
            elif key not in numbers and all(s == (p.spec.numel,) for p, s in shapes.items()):
                shared[key] = value.new_zeros(self.param.numel())
                for param, state in own.items():
                    shared[key][self._part(param)] = state[key]
            elif _all_equal([state[key] for state in own.values()]):
                shared[key] = value.clone() if isinstance(value, Tensor) else value
            else:
                return None
        self._joined = [
            (number, key, weakref.ref(value), weakref.ref(shared[key]))
            for number, state in enumerate(own.values())
            for key, value in state.items()
            if isinstance(value, Tensor) and getattr(value, "_base", None) is None
        ]
        return shared

    def _whole(self, values: Sequence[Any]) -> Tensor | None:
        """Return the tensor that `_split` has split into the members' ``values``, or None.

        The tensor may be a range of a longer bucket's state.
        """
        base: Any = getattr(values[0], "_base", None)
        if base is None or base.dim() != 1 or not base.is_contiguous():
            return None
        start = values[0].storage_offset() - base.storage_offset()
        whole: Tensor = base[start : start + self.param.numel()]
        for param, value in zip(self.members, values, strict=False):
            part = whole[self._part(param)]
            if getattr(value, "_base", None) is not base or not value.is_set_to(part):
                return None
        return whole if whole.shape == self.param.shape else None

    def _split(self, shared: State, states: States) -> None:
        """Make ``shared`` the bucket's state, and give each member views of ``shared``."""
        is_small = self.param.numel() == 1
        numbers = numbers_in([*states.items(), (self.param, shared)]) if is_small else set[str]()
        # The joined values that the optimizer has updated in place, and has not replaced.
        joined = [(n, k, ref) for n, k, ref, made in self._joined if made() is shared.get(k)]
        target = self.members[0].spec.state_target
        if target is not None:
            target.take_state(shared, self.param.shape)
        self._shared, items = dict(shared), shared.items()
        # Keep the objects of earlier states, which another optimizer may use, too.
        self._states = [s if isinstance(s, BucketState) else BucketState() for s in self._found]
        for one, state in zip(self.members, self._states, strict=False):
            state.clear()
            state.update({k: v if k in numbers else self._view(k, v, one) for k, v in items})
            state.is_apart = None if len(self.members) == 1 else False
        # Without sharding, steps update the tensors that `state_dict()` returned, and those that
        # `load_state_dict()` received. So update those that the program still holds.
        self._joined, self._own, self._values_made = [], {}, []
        for number, key, ref in joined:
            value = ref()
            if value is not None and value.dim() == 0:
                apart(self._states[number])[key] = value.copy_(shared[key])
            elif value is not None and key not in numbers and shared[key].shape == self.param.shape:
                value.data = shared[key][self._part(self.members[number])]
        self._remember()

    def _view(self, key: str, value: Any, param: FlatShardTensor) -> Any:
        if not isinstance(value, Tensor) or value.shape != self.param.shape:
            return value
        # In a bucket with one member, do not slice the state, which may be quantized: quantized
        # tensors cannot be sliced. Return quantized and fake tensors as they are.
        part = value[self._part(param)] if len(self.members) > 1 else value
        return FlatShardTensor(part, param.spec, role=f"{key} of") if type(part) is Tensor else part


def _all_equal(values: Sequence[Any]) -> bool:
    first = values[0]
    equal = torch.equal if isinstance(first, Tensor) else operator.eq
    return all(type(value) is type(first) and equal(value, first) for value in values)


def _local_state(param: FlatShardTensor, state: State, numbers: Collection[str]) -> State:
    """Replace full and sharded tensors in ``state`` by this rank's ranges, and return ``state``."""
    spec, is_cut = param.spec, False
    for key, value in state.items():
        # `value` may be full (made before the model was wrapped), sharded (made by Adagrad), or
        # already this rank's range.
        part = part_per_element(spec, value, is_local=True, is_number=key in numbers)
        if part is not None:
            state[key] = part
            is_cut |= part is not value and not isinstance(value, FlatShardTensor)
        elif isinstance(value, Tensor) and value.numel() > 1:
            raise RuntimeError(
                f"optimizer state {key!r} of parameter {spec.name!r}: expected shape "
                f"({spec.numel},) (this rank's part) or {spec.shape} (full), got "
                f"{tuple(value.shape)}. A plain optimizer.state_dict() contains only one "
                "rank's part: save ShardedWrapper.optim_state_dict(model, optimizer) instead."
            )
    if is_cut:  # steps do not change the full tensors that were loaded, so leave their `step`, too
        state.update({k: v.clone() for k, v in state.items() if getattr(v, "shape", None) == ()})
    return state


def part_per_element(
    spec: ShardSpec, value: Any, *, is_local: bool = False, is_number: bool = True
) -> Tensor | None:
    """Return this rank's range of ``value``, 1-D, or None if ``value`` is not per element.

    Args:
        spec: the parameter's shape, and this rank's range.
        value: optimizer state of the parameter, full or sharded.
        is_local: whether a 1-D tensor of the range's length counts as the range itself. True only
            for optimizers that step ranges. For other optimizers, a different tensor, such as the
            means of the rows, may have this length by chance.
        is_number: whether a tensor of one element counts as one number per parameter, even if the
            parameter, or this rank's range, has only one element.
    """
    if not isinstance(value, Tensor):
        return None
    if isinstance(value, FlatShardTensor):
        if value.spec.place != spec.place:
            raise ValueError(
                f"state of parameter {spec.name!r} ({unit_text(spec.unit)}) is sharded in another "
                f"layout: expected elements [{spec.offset}, {spec.offset + spec.numel}), got "
                f"[{value.spec.offset}, {value.spec.offset + value.spec.numel}). Load the state "
                "through torch.distributed.checkpoint, into this model's own sharded state."
            )
        return value.local
    if is_number and value.numel() == 1:
        return None
    if is_local and tuple(value.shape) == (spec.numel,):
        return value
    # Clone, because a view would keep the full tensor in memory.
    return spec.slice(value).clone() if tuple(value.shape) == spec.shape else None


def map_state(function: Callable[[str, Any], Any], state: State) -> State:
    """Return a copy of a parameter's state, with each value replaced by ``function(name, value)``.

    A value inside a list, tuple, dict or deque gets a name such as ``factors[0]``.
    """

    def mapped(key: str, value: Any) -> Any:
        if isinstance(value, Tensor):  # the usual case, without a walk through a tree
            return function(str(key), value)
        return tree_map_with_path(lambda at, leaf: function(f"{key}{keystr(at)}", leaf), value)

    return {key: mapped(key, value) for key, value in dict.items(state)}  # `items()` would copy


def named_values(state: State) -> dict[str, Any]:
    """Return the values in a parameter's state, keyed by the names that ``map_state`` gives."""
    found: dict[str, Any] = {}
    map_state(found.__setitem__, state)
    return found


def numbers_in(states: Iterable[tuple[Any, State]]) -> set[str]:
    """Return the names of state that is one number per parameter, such as ``step``.

    If a parameter has one element, its state with one value per element is one number, too. So this
    function looks only at parameters with several elements. ``states``: pairs of a parameter (or
    its spec) and the parameter's state.
    """
    numbers, others = set(ONE_PER_PARAMETER), set[str]()
    for param, state in states:
        if math.prod(getattr(param, "shape", ())) > 1:
            for name, value in named_values(state).items():
                if isinstance(value, Tensor):
                    (numbers if value.numel() == 1 else others).add(name)
    return numbers - others
