"""``ParamBucket``: neighbours in one shard that an element-wise optimizer updates as one tensor.

Parameters of one group that lie one after the other in a shard, and whose gradients lie so in one
tensor, are one 1-D tensor to the optimizer: a kernel per flat parameter instead of one per
original. Between steps the optimizer's state is theirs one by one, as views of the bucket's.

[Note: pieces]
A step goes over parameters, gradients and state several times, and makes temporary tensors as
large. On a CPU the optimizer therefore gets the bucket in pieces that stay in the cache; to the bit
the result is the same.

[Note: shared counts]
What a step keeps once per parameter, its count of steps for one, is the same object for all members
of a bucket. It must not leave the bucket like that: whoever counts it again for one member would
count it for all. ``BucketState`` marks such state; ``apart`` makes it a parameter's own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from flatshard.memory.disk import DiskMemory
from flatshard.plan.layout import ALIGNMENT_BYTES
from flatshard.precision.casts import set_grad
from flatshard.tensor.flat_parameter import FlatParameter
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_range

Sharded = FlatShardTensor | FlatParameter
State = dict[str, Any]

ONE_PER_PARAMETER = frozenset({"step", "eta", "mu", "mu_product"})
"""State of one number per parameter, not per element: also where the parameter is 0-d itself."""

_PIECE_NUMEL = 1 << 17
"""Elements of a piece: of the few arrays that a step works on, one each fits into the cache. Full
vectors, too: kernels may round what is left over of them differently."""


class BucketState(dict[str, Any]):
    """A bucket's state as one member sees it; see the note above."""


def apart(state: State) -> State:
    """State that shares no count with another parameter's."""
    if not isinstance(state, BucketState):
        return state
    return {
        key: value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value
        for key, value in state.items()
    }


def is_sharded(param: object) -> TypeGuard[Sharded]:
    """Whether optimizers see something else in the parameter's place."""
    return isinstance(param, FlatShardTensor | FlatParameter)


def find_buckets(
    params: Sequence[Any], known: dict[int, ParamBucket]
) -> Iterator[ParamBucket | nn.Parameter]:
    """Divide a group's parameters into buckets and single parameters, in their order.

    Args:
        params: a group's.
        known: buckets of earlier steps, by their first member's id; new ones are added.
    """
    position = 0
    while position < len(params):
        param = params[position]
        if not is_sharded(param) or param.grad is None:
            # What has no gradient is left alone: its state may be part of a bucket's.
            yield param
            position += 1
            continue
        bucket = known.get(id(param))
        if bucket is None or not bucket.is_at(params, position):
            members = _neighbours(params, position)
            if bucket is None or not bucket.is_of(members):
                bucket = known[id(param)] = ParamBucket(members)
        yield bucket
        position += len(bucket.members)


def _neighbours(params: Sequence[Any], position: int) -> list[Any]:
    """The parameters from ``position`` on that can be stepped as one."""
    found = [params[position]]
    for number in range(position + 1, len(params)):  # not a slice, which each bucket would copy
        if not _follows(found[-1], params[number]):
            break
        found.append(params[number])
    return found


def _follows(before: Any, after: Any) -> bool:
    """Whether a parameter and its gradient lie behind another's, in the shard and its gradient."""
    if not (isinstance(before, FlatShardTensor) and isinstance(after, FlatShardTensor)):
        return False
    grad = _flat_grad(before)
    if grad is None or before.flat is not after.flat or _flat_grad(after) is not grad:
        return False
    gap = after.spec.start - before.spec.start - before.spec.numel
    return 0 <= gap * before.dtype.itemsize < ALIGNMENT_BYTES


def _flat_grad(param: FlatShardTensor) -> Tensor | None:
    """The flat gradient in which a parameter's gradient lies as the parameter does in the shard."""
    grad = param.grad
    if isinstance(grad, FlatShardTensor) and grad.spec is param.spec:
        return grad.flat
    return None  # the user assigned it, or there is none


def _pieces(flat: Tensor) -> tuple[Tensor, ...]:
    """Views of ``flat`` that the optimizer steps one at a time."""
    return flat.split(_PIECE_NUMEL) if flat.device.type == "cpu" else (flat,)


class ParamBucket:
    """Some neighbours, one at least, as one optimizer steps them.

    Attributes:
        members: the parameters.
        pieces: what the optimizer sees in their place.
    """

    def __init__(self, members: Sequence[Sharded]) -> None:
        """``members`` are neighbours, and so are their gradients."""
        self.members = list(members)
        self._flat = members[0].flat
        self._requires_grad = members[0].requires_grad
        flat = local_range(members[0]).detach()
        self._bounds = [(0, flat.numel())]
        if len(members) > 1:
            specs = [member.spec for member in members if isinstance(member, FlatShardTensor)]
            self._start = specs[0].start
            starts = [spec.start - self._start for spec in specs]
            self._bounds = [
                (start, start + spec.numel) for start, spec in zip(starts, specs, strict=True)
            ]
            assert self._flat is not None, "neighbours share a shard"
            flat = self._flat.detach()[self._start : self._start + self._bounds[-1][1]]
        self._numel = self._bounds[-1][1]
        self.pieces = [nn.Parameter(piece, self._requires_grad) for piece in _pieces(flat)]
        self._shared: State = {}  # the bucket's state
        self._values: State = {}  # the objects in it when it was divided
        self._states: list[BucketState] = []  # the members' share of it
        self._shown: list[tuple[Any, ...]] = []  # the objects in those
        self._handed: list[State] = []  # the pieces' share of it
        self._handed_of: State = {}
        self._alone: list[ParamBucket] = []

    def is_of(self, members: Sequence[Any]) -> bool:
        """Whether these are its members, and show the memory that they showed before."""
        return (
            len(members) == len(self.members)
            and all(map(operator.is_, members, self.members))
            and members[0].requires_grad == self._requires_grad
            and all(member.flat is self._flat for member in members)
        )

    def is_at(self, params: Sequence[Any], position: int) -> bool:
        """Whether exactly its members are neighbours in ``params`` from there on."""
        end = position + len(self.members)
        if not self.is_of(params[position:end]):
            return False
        if len(self.members) > 1:
            first: Any = self.members[0]
            grad = _flat_grad(first)
            if grad is None or any(_flat_grad(one) is not grad for one in params[position:end]):
                return False
        return end == len(params) or not _follows(self.members[-1], params[end])

    def divided(self) -> list[ParamBucket]:
        """A bucket for each member, where their states differ in more than values."""
        if not self._alone:
            self._alone = [ParamBucket([member]) for member in self.members]
        return self._alone

    # ------------------------------------------------------------ gradients

    def show_grads(self) -> None:
        """Give the pieces the members' gradients."""
        for piece, grad in zip(self.pieces, _pieces(self._grad()), strict=True):
            set_grad(piece, grad)
        # An optimizer that writes to `p.data` would leave no trace of it, and what was unsharded
        # before would be taken for current.
        torch.autograd.graph.increment_version(self.pieces[0])

    def _grad(self) -> Tensor:
        first: Any = self.members[0]
        if len(self.members) > 1:
            grad = _flat_grad(first)
            assert grad is not None, "neighbours share a flat gradient"
            return grad.detach()[self._start : self._start + self._numel]
        grad = first.grad
        if isinstance(grad, FlatShardTensor):
            return grad.local
        # The user assigned it: a full tensor, or one as long as the flat parameter.
        return first.spec.slice(grad.detach()) if isinstance(first, FlatShardTensor) else grad

    def drop_grads(self) -> None:
        """Take the gradients back; the members lose theirs if the optimizer dropped them."""
        if self.pieces[0].grad is None:
            for param in self.members:
                param.grad = None
        for piece in self.pieces:
            piece.grad = None

    # ------------------------------------------------------------ state: of the members, as one

    def known_state(self, states: Sequence[State | None]) -> State | None:
        """The bucket's state, if the members' are as ``split`` left them, up to edits in place."""
        if self._states and all(map(_is_unchanged, states, self._states, self._shown)):
            return self._shared
        return None

    def join(self, states: Sequence[State | None]) -> State | None:
        """The bucket's state from its members'; None where they can't be joined.

        Args:
            states: each member's, this rank's part; None: it has none yet.
        """
        present = [state for state in states if state is not None]
        if not present:
            return {}
        if len(states) == 1:
            return apart(present[0])
        if len(present) < len(states) or any(
            state.keys() != present[0].keys() for state in present
        ):
            return None
        shared = {}
        for key in present[0]:
            values = [state[key] for state in present]
            if self._has_elements(values):
                shared[key] = self._laid_out(values)
            elif _all_equal(values):
                shared[key] = values[0].clone() if isinstance(values[0], Tensor) else values[0]
            else:
                return None
        return shared

    def _has_elements(self, values: Sequence[Any]) -> bool:
        return all(
            isinstance(value, Tensor) and value.dim() == 1 and value.numel() == end - start
            for value, (start, end) in zip(values, self._bounds, strict=True)
        )

    def _laid_out(self, values: Sequence[Tensor]) -> Tensor:
        shared = values[0].new_zeros(self._numel)
        for value, (start, end) in zip(values, self._bounds, strict=True):
            shared[start:end].copy_(value)
        return shared

    def split(self, shared: State) -> list[BucketState]:
        """Each member's part of the bucket's state after a step."""
        # Mostly the step updated the same objects in place: the views of before still show them.
        if not self._states or not _same_values(shared, self._values):
            self._states = [
                BucketState((key, self._slice(value, *bounds)) for key, value in shared.items())
                for bounds in self._bounds
            ]
            self._shown = [tuple(state.values()) for state in self._states]
            self._shared, self._values = shared, dict(shared)
        return self._states

    def _slice(self, value: Any, start: int, end: int) -> Any:
        is_divided = isinstance(value, Tensor) and value.dim() and len(self.members) > 1
        return value[start:end] if is_divided else value

    # ------------------------------------------------------------ state: of the pieces

    def hand_out(self, shared: State) -> list[State]:
        """Each piece's state, of the bucket's."""
        if len(self.pieces) == 1:
            return [shared]
        if not _same_values(shared, self._handed_of) or not self._handed:
            self._handed = [
                {key: self._cut(value, number) for key, value in shared.items()}
                for number in range(len(self.pieces))
            ]
            self._handed_of = dict(shared)
        return [dict(state) for state in self._handed]

    def _cut(self, value: Any, number: int) -> Any:
        if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == self._numel:
            return _pieces(value)[number]
        # Every piece counts its own steps; the first one's count is the bucket's.
        return value.clone() if isinstance(value, Tensor) and number else value

    def collect(self, states: Sequence[State], storage: DiskMemory | None = None) -> State:
        """The bucket's state from its pieces' after a step; on disk with a ``storage``."""
        if len(states) == 1:
            return {key: self._kept([value], storage) for key, value in states[0].items()}
        shared = {}
        for key, first in states[0].items():
            values = [state[key] for state in states]
            if not all(
                isinstance(value, Tensor) and value.shape == piece.shape
                for value, piece in zip(values, self.pieces, strict=True)
            ):
                shared[key] = first
            # Views of one tensor, updated in place: nothing to put together.
            elif self._handed and all(
                value is handed.get(key) for value, handed in zip(values, self._handed, strict=True)
            ):
                known = self._handed_of[key]
                shared[key] = known if storage is None else storage.take_in(known)
            else:
                shared[key] = self._kept(values, storage)
        return shared

    def _kept(self, values: Sequence[Any], storage: DiskMemory | None) -> Any:
        """The pieces' values as one, in memory or in ``storage``."""
        first = values[0]
        is_divided = isinstance(first, Tensor) and first.shape == self.pieces[0].shape
        if storage is None or not is_divided:
            return first if len(values) == 1 else torch.cat(list(values))
        if len(values) == 1:
            return storage.take_in(first)
        return torch.cat(list(values), out=storage.new(self._numel, first.dtype))


def _is_unchanged(state: State | None, own: BucketState, shown: tuple[Any, ...]) -> bool:
    """Whether a member's state is what ``split`` made it, up to edits in place."""
    return state is own and len(own) == len(shown) and all(map(operator.is_, own.values(), shown))


def _same_values(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(value is other[key] for key, value in one.items())


def _all_equal(values: Sequence[Any]) -> bool:
    first = values[0]
    if isinstance(first, Tensor):
        return all(isinstance(v, Tensor) and torch.equal(v, first) for v in values)
    return all(type(value) is type(first) and value == first for value in values)
