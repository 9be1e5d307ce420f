"""``ParamBucket``: neighbours in one shard that an element-wise optimizer updates as one tensor.

Parameters of one group that lie one after the other in a shard, and whose gradients lie so in one
tensor, are one 1-D tensor to the optimizer: a kernel per flat parameter instead of one per
original. Between steps the optimizer's state is theirs one by one, as views of the bucket's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from flatshard.plan.layout import ALIGNMENT_BYTES
from flatshard.precision.casts import set_grad
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_range

State = dict[str, Any]

# State of one number per parameter, not per element: also where the parameter is 0-d itself.
ONE_PER_PARAMETER = frozenset({"step", "eta", "mu", "mu_product"})


class BucketState(dict[str, Any]):
    """A bucket's state, or a member's view of it."""

    # A count of steps is one object for all members. It must not leave the bucket like that:
    # whoever counts it again for one member would count it for all. See `apart`.

    def __init__(self, values: State) -> None:
        super().__init__(values)
        self._made_of = tuple(self.values())

    def is_unchanged(self) -> bool:
        """Whether it holds the objects that it was made of, up to edits in place."""
        same = map(operator.is_, self.values(), self._made_of)
        return len(self) == len(self._made_of) and all(same)


def apart(state: State) -> State:
    """State that shares no count with another parameter's."""
    if not isinstance(state, BucketState):
        return state
    return {
        key: value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value
        for key, value in state.items()
    }


class BucketView(Tensor):
    """A member's state in ``optimizer.state_dict()``: deep copies are as small as the member.

    torch copies the storage behind a tensor, which here is the bucket's: ``dataclasses.asdict``,
    which copies each tensor by itself, would copy the bucket once for each member.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl  # results are plain tensors

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # files hold plain tensors


def shown(state: State) -> State:
    """State for ``optimizer.state_dict()``: it shares elements with a bucket, but no count."""
    if not isinstance(state, BucketState):
        return state
    return {key: _shown(value) for key, value in apart(state).items()}


def _shown(value: Any) -> Any:
    is_part = isinstance(value, Tensor) and value.nbytes < value.untyped_storage().nbytes()
    return value.as_subclass(BucketView) if is_part else value


def all_params(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """The parameters of all groups, in their order."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def is_sharded(param: object) -> TypeGuard[FlatShardTensor]:
    """Whether optimizers see something else in the parameter's place."""
    return isinstance(param, FlatShardTensor)


def find_buckets(
    params: Sequence[Any], known: dict[int, ParamBucket]
) -> Iterator[ParamBucket | nn.Parameter]:
    """Divide a group's parameters into buckets and single parameters, in their order.

    ``known`` has buckets of earlier steps, by their first member's id; new ones are added.
    """
    position = 0
    while position < len(params):
        first = params[position]
        if not is_sharded(first) or first.grad is None:
            # What has no gradient is left alone: its state may be part of a bucket's.
            yield first
            position += 1
            continue
        members = _neighbours(params, position)
        bucket = known.get(id(first))
        # One of the last step keeps its views of state, which are then still right.
        if bucket is None or not bucket.is_of(members):
            bucket = known[id(first)] = ParamBucket(members)
        yield bucket
        position += len(members)


def _neighbours(params: Sequence[Any], position: int) -> list[Any]:
    """The parameters from ``position`` on that lie, gradients too, as one tensor would."""
    first = params[position]
    found, grad = [first], _flat_grad(first)
    if grad is None:
        return found
    end = first.spec.start + first.spec.numel
    for number in range(position + 1, len(params)):  # not a slice, which each bucket would copy
        param = params[number]
        if _flat_grad(param) is not grad or param.flat is not first.flat:
            break
        # Aligned parameters have padding between them. The optimizer steps it along.
        if not 0 <= (param.spec.start - end) * first.dtype.itemsize < ALIGNMENT_BYTES:
            break
        end = param.spec.start + param.spec.numel
        found.append(param)
    return found


def _flat_grad(param: Any) -> Tensor | None:
    """The flat gradient in which a parameter's gradient lies as the parameter does in the shard."""
    if isinstance(param, FlatShardTensor):
        grad = param.grad
        if isinstance(grad, FlatShardTensor) and grad.spec is param.spec:
            return grad.flat
    return None  # the user assigned it, or there is none


class ParamBucket:
    """Some neighbours, one at least, as one optimizer steps them: as ``param``, which is 1-D."""

    def __init__(self, members: Sequence[FlatShardTensor]) -> None:
        self.members = list(members)
        self._flat = members[0].flat
        local = local_range(members[0]).detach()
        self._ranges = [slice(0, local.numel())]
        if len(members) > 1:
            assert self._flat is not None, "neighbours share a shard"
            self._start = members[0].spec.start
            starts = [member.spec.start - self._start for member in members]
            self._ranges = [
                slice(start, start + member.spec.numel)
                for start, member in zip(starts, members, strict=True)
            ]
            local = self._flat.detach()[self._start : self._start + self._ranges[-1].stop]
        self.param = nn.Parameter(local, members[0].requires_grad)
        self._shared: BucketState | None = None
        self._states: list[BucketState] = []  # the members' views of it

    def is_of(self, members: Sequence[Any]) -> bool:
        """Whether these are its members, and show the memory that they showed before."""
        return (
            len(members) == len(self.members)
            and all(map(operator.is_, members, self.members))
            and members[0].requires_grad == self.param.requires_grad
            and members[0].flat is self._flat
        )

    @cached_property
    def divided(self) -> list[ParamBucket]:
        """A bucket for each member, where their states differ in more than values."""
        return [ParamBucket([member]) for member in self.members]

    # ------------------------------------------------------------ gradients

    def show_grad(self) -> None:
        set_grad(self.param, self._grad())
        # An optimizer that writes to `p.data` would leave no trace of it, and what was unsharded
        # before would be taken for current.
        torch.autograd.graph.increment_version(self.param)

    def _grad(self) -> Tensor:
        first: Any = self.members[0]
        if len(self.members) > 1:
            grad = _flat_grad(first)
            assert grad is not None, "neighbours share a flat gradient"
            return grad.detach()[self._start : self._start + self.param.numel()]
        grad = first.grad
        if isinstance(grad, FlatShardTensor):
            return grad.local
        return first.spec.slice(grad.detach())  # the user assigned it: a full tensor

    def drop_grad(self) -> None:
        """Take the gradient back; the members lose theirs if the optimizer dropped it."""
        if self.param.grad is None:
            for param in self.members:
                param.grad = None
        self.param.grad = None

    # ------------------------------------------------------------ state

    def known_state(self, states: Sequence[State | None]) -> State | None:
        """The bucket's state, if the members' are as ``split`` left them, up to edits in place."""
        if not self._states:
            return None
        for state, own in zip(states, self._states, strict=True):
            if state is not own or not own.is_unchanged():
                return None
        return self._shared

    def join(self, states: Sequence[State | None]) -> State | None:
        """The bucket's state from its members' parts on this rank; None if they can't be joined."""
        present = [state for state in states if state is not None]
        if not present:
            return {}
        if len(states) == 1:
            return apart(present[0])
        if len(present) < len(states) or any(
            state.keys() != present[0].keys() for state in present
        ):
            return None
        shared: State = {}
        for key, first in present[0].items():
            values = [state[key] for state in present]
            if self._has_elements(values):
                # Zeros between members: the padding is stepped along, and stays finite.
                shared[key] = first.new_zeros(self.param.numel())
                for value, part in zip(values, self._ranges, strict=True):
                    shared[key][part] = value
            elif _all_equal(values):
                shared[key] = first.clone() if isinstance(first, Tensor) else first
            else:
                return None
        return shared

    def _has_elements(self, values: Sequence[Any]) -> bool:
        return all(
            isinstance(value, Tensor) and value.shape == (part.stop - part.start,)
            for value, part in zip(values, self._ranges, strict=True)
        )

    def split(self, shared: State) -> list[BucketState]:
        """Each member's view of the bucket's state after a step."""
        # Mostly the step updated the same objects in place: the views of before still show them.
        if shared is not self._shared or not self._shared.is_unchanged():
            self._shared = BucketState(shared)
            self._states = [
                BucketState({key: self._view(value, part) for key, value in shared.items()})
                for part in self._ranges
            ]
        return self._states

    def _view(self, value: Any, part: slice) -> Any:
        is_divided = isinstance(value, Tensor) and value.dim() and len(self.members) > 1
        return value[part] if is_divided else value


def _all_equal(values: Sequence[Any]) -> bool:
    first = values[0]
    if isinstance(first, Tensor):
        return all(isinstance(v, Tensor) and torch.equal(v, first) for v in values)
    return all(type(value) is type(first) and value == first for value in values)
