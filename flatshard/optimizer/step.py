"""Hooks around ``optimizer.step()``: it gets plain tensors in place of sharded parameters.

To dispatch every operation of an optimizer on ``FlatShardTensor`` is right but slow. For
element-wise optimizers the hooks therefore put ``ParamBucket``s into the parameter groups: plain
1-D parameters that share the shard's memory, one for all neighbours. State moves along. For all
other optimizers ``whole_step`` says what they get.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import hooks as torch_hooks

from flatshard.optimizer import offload
from flatshard.optimizer.buckets import (
    ONE_PER_PARAMETER,
    ParamBucket,
    State,
    all_params,
    find_buckets,
    is_sharded,
)
from flatshard.optimizer.consumed_grad import drop_consumed
from flatshard.optimizer.local_state_guard import check_state
from flatshard.optimizer.offload import StepPart
from flatshard.optimizer.trial import StepMode, without_params
from flatshard.optimizer.whole_step import Closure, EveryRankSwap, step_for, step_mode
from flatshard.plan.module_tree import unit_text
from flatshard.precision.casts import check_dtype
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_range, untraced
from flatshard.tensor.tensor_notes import UNREDUCED

_ELEMENTWISE: set[Any] = set(offload.TORCHS_OWN)

_FUSED_STEPS = {inspect.unwrap(kind.step) for kind in (torch.optim.Adam, torch.optim.AdamW)}
# In narrower ones the kernel computes in fp32 what the operations round again and again.
_FUSED_DTYPES = torch.float32, torch.float64

_swapped: weakref.WeakKeyDictionary[
    torch.optim.Optimizer, _BucketSwap | _NoCompiling | EveryRankSwap
] = weakref.WeakKeyDictionary()
# Per optimizer its buckets of the last step, by the id of their first member.
_buckets: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, ParamBucket]] = (
    weakref.WeakKeyDictionary()
)


def declare_elementwise(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Say that an optimizer updates every element from that element's own gradient and state.

    Its ``step`` then works on plain 1-D tensors, as torch's own do. Without this flatshard tries,
    at the first step, whether it works on true-shape sharded parameters, or needs full ones.
    """
    _ELEMENTWISE.add(inspect.unwrap(optimizer_class.step))


def stepped_optimizers() -> list[torch.optim.Optimizer]:
    """The optimizers that have stepped sharded parameters as buckets."""
    return list(_buckets)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    return inspect.unwrap(type(optimizer).step) in _ELEMENTWISE


# ------------------------------------------------------------ hooks around step()


@functools.cache
def install() -> None:
    """Register the hooks, once in a process."""
    # Global ones also serve optimizers that were built before the model was wrapped.
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def restore_all() -> None:
    """Undo swaps where ``step()`` raised, so that its post hook never ran."""
    for optimizer in list(_swapped):
        _swap_out(optimizer)


@untraced
def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    restore_all()
    closure = _closure_in(args, kwargs)
    # A closure's backward may still reduce gradients, so they are checked after it.
    _check_params(optimizer, has_grads=closure is None)
    check_state(optimizer)
    if is_elementwise(optimizer):
        _hook_innermost(optimizer, _begin_elementwise)
    elif any(map(is_sharded, all_params(optimizer))):
        _hook_innermost(optimizer, _begin_other)
    if closure is None:
        return None

    def checked() -> Any:
        result = closure()  # where it raises, the step is over
        _check_params(optimizer)
        return result

    return _with_closure(checked, args, kwargs)


def _closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of ``step``, the first of which is the optimizer."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def _with_closure(
    closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


def _hook_innermost(optimizer: torch.optim.Optimizer, begin: Callable[..., Any]) -> None:
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    for table, hook in ((before, begin), (after, _end)):
        key = next((key for key, own in table.items() if own is hook), None)
        if key is None:
            key = torch_hooks.RemovableHandle(table).id
            table[key] = hook
        # Ours are the innermost hooks, so that users' hooks see sharded parameters. Users may have
        # added some since the last step.
        table.move_to_end(key, last=table is before)


def _check_params(optimizer: torch.optim.Optimizer, *, has_grads: bool = True) -> None:
    """Raise for a step on gradients that only this rank has, or that the optimizer rejects."""
    takes_sparse_alone = isinstance(optimizer, torch.optim.SparseAdam)
    with torch._C.DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            for param in group["params"]:
                if takes_sparse_alone and is_sharded(param):
                    raise RuntimeError(
                        "SparseAdam: gradients of sharded parameters are dense, also those of "
                        "nn.Embedding(sparse=True). Use one that takes them: Adam, SGD, Adagrad."
                    )
                if "flattened_as" in param.__dict__:
                    raise RuntimeError(
                        "step(): the optimizer was made before wrapping, and its parameter "
                        f"{param.flattened_as!r} is a DTensor, whose local part was sharded. Make "
                        "it from model.parameters() after wrapping."
                    )
                drop_consumed(param)  # what backward has stepped is not stepped again
                grad = param.grad
                if grad is None or not has_grads:
                    continue
                if grad.dtype is not param.dtype:
                    check_dtype(optimizer, group, param, _name_of(param))
                # An earlier, reduced gradient is marked too while more waits for its reduction.
                unit = UNREDUCED.get(grad) if UNREDUCED else None
                if unit is not None:
                    raise RuntimeError(
                        f"{unit_text(unit)}: step() on gradients that were accumulated under "
                        "no_sync and not reduced. Run the last backward before a step outside of "
                        "no_sync."
                    )


@untraced
def _begin_elementwise(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    closure = _closure_in(args, kwargs)
    if closure is None:
        _swap_in(optimizer, _step_in_parts(optimizer))
        return None
    _swap_in(optimizer)

    def with_sharded_parameters() -> Any:
        _swap_out(optimizer)  # the closure computes with sharded parameters
        result = closure()
        _swap_in(optimizer, _step_in_parts(optimizer))
        return result

    return _with_closure(with_sharded_parameters, args, kwargs)


@untraced
def _begin_other(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Begin the step of an optimizer that is not known to be element-wise, in its ``StepMode``."""
    if is_elementwise(optimizer):  # declared meanwhile
        return None
    closure = _closure_in(args, kwargs)
    loss, again = None, closure
    if closure is not None:
        # First, as every optimizer does: the mode depends on which parameters have gradients.
        with torch.enable_grad():
            loss = closure()
    mode = step_mode(optimizer)
    if mode is StepMode.ON_EVERY_RANK:
        step = step_for(optimizer, mode)
        swap = _swapped[optimizer] = EveryRankSwap(step)
        if closure is not None:
            again, loss = partial(_evaluate, optimizer, swap, closure), step.average(loss)
    elif mode is not StepMode.ON_SHARDS:
        if closure is not None:
            again = partial(_refuse_closure, optimizer)
        with torch.no_grad():
            first = [] if again is None else [Closure(again, loss)]
            step_for(optimizer, mode).step(first)
        args = (without_params(optimizer), *args[1:])  # the step has been made
    elif closure is None:  # a closure may run a compiled model
        _swapped[optimizer] = _NoCompiling()
    if again is None:
        return args, kwargs
    return _with_closure(Closure(again, loss), args, kwargs)


def _evaluate(
    optimizer: torch.optim.Optimizer, swap: EveryRankSwap, closure: Callable[[], Any]
) -> Any:
    """Call a closure at the values that the optimizer has reached, with sharded parameters."""
    del _swapped[optimizer]  # `restore_all` in the closure's forward must not undo the swap
    loss = swap.evaluate(closure)
    _swapped[optimizer] = swap
    return loss


def _refuse_closure(optimizer: torch.optim.Optimizer) -> NoReturn:
    raise NotImplementedError(
        f"{type(optimizer).__name__}.step() calls its closure several times, and needs full "
        "parameters, each of which one rank alone has meanwhile. Step it without a closure."
    )


@untraced
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        offload.page_out(optimizer, group["params"])


# ------------------------------------------------------------ steps of some parameters


def _step_in_parts(optimizer: torch.optim.Optimizer) -> set[int]:
    """Step what is on a disk; returns the ids of these parameters."""
    parts = offload.plan_parts(optimizer)
    for part in parts:
        offload.fetch(optimizer, part.params)
        step_parts(optimizer, [part])
    return {id(param) for part in parts for param in part.params}


def step_parts(optimizer: torch.optim.Optimizer, parts: Sequence[StepPart]) -> None:
    """Step some parameters of an element-wise optimizer, to the bit as ``step()`` would.

    Hooks of the optimizer are not called. Raises ``NotImplementedError`` where it keeps something
    per group that changes with every step.
    """
    # Groups of their own, so that what is not neighbours in ``step()`` is not joined here either.
    narrow = [{**part.group, "params": list(part.params)} for part in parts]
    groups, optimizer.param_groups = optimizer.param_groups, narrow
    try:
        with torch.no_grad():
            for part in parts:
                for param in part.params:
                    check_dtype(optimizer, part.group, param, _name_of(param))
            _swap_in(optimizer)
            # Without torch's wrapper, which calls the hooks.
            inspect.unwrap(type(optimizer).step)(optimizer)
    finally:
        _swap_out(optimizer)
        optimizer.param_groups = groups
        for part in parts:
            offload.page_out(optimizer, part.params)
    for part, after in zip(parts, narrow, strict=True):
        before = {**part.group, "params": after["params"]}
        changed = [key for key in after if after[key] is not before.get(key)]
        if changed:
            raise NotImplementedError(
                f"{type(optimizer).__name__}.step() changes {changed[0]!r} of a parameter group, "
                "and would do so once per unit. Step it after backward."
            )


# ------------------------------------------------------------ the swap


class _NoCompiling:
    """``torch.compile`` compiles nothing until ``undo``."""

    def __init__(self) -> None:
        stance = torch.compiler.set_stance("force_eager")
        # Also where an optimizer that raised is dropped, and its entry among the swapped ones.
        self.undo = weakref.finalize(self, stance.__exit__, None, None, None)


class _BucketSwap:
    """Buckets in place of one optimizer's sharded parameters while it steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._state = optimizer, optimizer.state
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._buckets: list[ParamBucket] = []
        self._fused: list[dict[str, Any]] = []

    def begin(self, stepped: Collection[int]) -> None:
        """Put buckets into the groups, move the state along, and choose the fastest kernel.

        Parameters with ids in ``stepped`` have been stepped already.
        """
        known = _buckets.setdefault(self._optimizer, {})
        for group in self._optimizer.param_groups:
            params = group["params"]
            before = list(params)
            if stepped:
                params[:] = [param for param in params if id(param) not in stepped]
            new: list[nn.Parameter] = []
            for found in find_buckets(params, known):
                new += self._swap_in(found) if isinstance(found, ParamBucket) else [found]
            if len(new) == len(before) and all(map(operator.is_, new, before)):
                continue  # nothing here is sharded, or has a gradient
            self._lists.append((params, before))
            params[:] = new
            if _suits_fused(self._optimizer, group):
                self._fused.append(group)
                group["fused"] = True

    def _swap_in(self, bucket: ParamBucket) -> Iterator[nn.Parameter]:
        own = [self._state.get(param) for param in bucket.members]
        shared = bucket.known_state(own)
        if shared is None:  # the first step, or someone put other state in place since
            shared = bucket.join(
                [
                    state if state is None else _local_state(param, state)
                    for param, state in zip(bucket.members, own, strict=True)
                ]
            )
            if shared is None:
                # Counts of steps differ, say: one bucket cannot keep both.
                for one in bucket.divided:
                    yield from self._swap_in(one)
                return
            # What was joined has been copied, and is dropped before the step makes temporaries.
            for param in bucket.members:
                self._state.pop(param, None)
        if shared:
            self._state[bucket.param] = shared
        bucket.show_grad()
        self._buckets.append(bucket)
        yield bucket.param

    def undo(self) -> None:
        """Put the parameters back, and their state."""
        for group in self._fused:
            group["fused"] = None
        for params, before in reversed(self._lists):
            params[:] = before
        for bucket in self._buckets:
            bucket.drop_grad()
            shared = self._state.pop(bucket.param, None)
            if shared is not None:
                offload.take_in(bucket.members[0], bucket.param.shape, shared)
                own = bucket.split(shared)
                if self._state.get(bucket.members[0]) is not own[0]:
                    self._state.update(zip(bucket.members, own, strict=True))


def _suits_fused(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
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


def _swap_in(optimizer: torch.optim.Optimizer, stepped: Collection[int] = ()) -> None:
    _swapped[optimizer] = swap = _BucketSwap(optimizer)  # first, so that a failure is undone
    with torch._C.DisableTorchFunctionSubclass():
        swap.begin(stepped)


@untraced
def _end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Undo the swap of a step that went well."""
    swap = _swapped.get(optimizer)
    if isinstance(swap, EveryRankSwap):
        with torch.no_grad():
            swap.write_back()
    _swap_out(optimizer)


def _swap_out(optimizer: torch.optim.Optimizer) -> None:
    swap = _swapped.pop(optimizer, None)
    if swap is not None:
        with torch._C.DisableTorchFunctionSubclass():
            swap.undo()


def _local_state(param: FlatShardTensor, state: State) -> State:
    """State of before wrapping, or of an unwrapped model, with this rank's part of each tensor."""
    held = local_range(param)
    for key, value in state.items():
        if isinstance(value, FlatShardTensor):
            # Made at construction, as Adagrad does; also where this rank holds all of it.
            state[key] = value.local
            continue
        if not isinstance(value, Tensor) or value.shape == held.shape or key in ONE_PER_PARAMETER:
            continue
        if value.shape == param.shape:
            state[key] = param.spec.slice(value).clone()
        elif value.numel() > 1:
            raise RuntimeError(
                f"optimizer state {key!r} of parameter {param.spec.name!r}: "
                f"expected shape {tuple(held.shape)} (this rank's part) or {tuple(param.shape)} "
                f"(full), got {tuple(value.shape)}. A plain optimizer.state_dict() holds one "
                "rank's part: save ShardedWrapper.optim_state_dict(model, optimizer) instead."
            )
    return state


def _name_of(param: Any) -> str | None:
    return param.spec.name if isinstance(param, FlatShardTensor) else None
