"""``Run``: neighbours in one shard that an element-wise optimizer updates as one tensor.

Parameters of one group that lie one after the other in a shard, and whose gradients do so too, are
one 1-D tensor to the optimizer: a kernel per flat parameter instead of one per original. Between
steps the optimizer's state is theirs one by one, as views of the run's.

[Note: pieces]
A step goes over parameters, gradients and state several times, and makes temporary tensors as
large. On a CPU the optimizer therefore gets the run in pieces that stay in the cache; to the bit
the result is the same.

[Note: shared counts]
What a step keeps once per parameter, its count of steps for one, is the same object for all members
of a run. It must not leave the run like that: whoever counts it again for one member would count
it for all. ``Part`` marks such state; ``apart`` makes it a parameter's own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatshard.memory.disk import DiskMemory
from flatshard.plan.layout import ALIGNMENT_BYTES
from flatshard.precision.casts import set_grad
from flatshard.tensor.flat_parameter import FlatParameter
from flatshard.tensor.sharded_tensor import FlatShardTensor

_PIECE_NUMEL = 1 << 17
"""Elements of a piece: of the few arrays that a step works on, one each fits into the cache. Whole
vectors, too: kernels may round what is left over of them differently."""


class Part(dict[str, Any]):
    """A run's state as one member sees it; see the note above."""


def apart(state: dict[str, Any]) -> dict[str, Any]:
    """State that shares no count with another parameter's."""
    if not isinstance(state, Part):
        return state
    return {
        key: value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value
        for key, value in state.items()
    }


class _Place(NamedTuple):
    """Where a tensor lies: storage, first element, elements and dtype."""

    storage: int
    start: int
    numel: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        storage = tensor.untyped_storage()._cdata
        return cls(storage, int(tensor.storage_offset()), tensor.numel(), tensor.dtype)

    def gap_to(self, other: _Place) -> int:
        """Elements between the end of this and the start of another one; -1 if none follows."""
        if self.storage != other.storage or self.dtype != other.dtype:
            return -1
        gap = other.start - self.start - self.numel
        return gap if gap * self.dtype.itemsize < ALIGNMENT_BYTES else -1


def find_runs(params: Sequence[Any], known: dict[int, Run]) -> Iterator[tuple[int, Run]]:
    """Parameters that can be stepped as one: neighbours, and their gradients too.

    And single ones that are worth cutting into pieces.

    Args:
        params: a group's.
        known: runs of earlier steps, by their first member's id; new ones are added.

    Yields:
        Positions of first members, and their runs; from left to right.
    """
    position = 0
    while position < len(params):
        run = known.get(id(params[position]))
        if run is None or not run.goes_on(params, position):
            members = _neighbours(params, position)
            if not _is_worth_it(members):
                position += max(1, len(members))
                continue
            if run is None or not run.is_of(members):
                run = known[id(members[0])] = Run(members)
        yield position, run
        position += len(run.members)


def _neighbours(params: Sequence[Any], position: int) -> list[Any]:
    """The longest run from there; nothing where none begins."""
    found: list[Any] = []
    before: tuple[_Place, _Place] | None = None
    for number in range(position, len(params)):  # not a slice, which each run would make anew
        places = _places(params[number])
        if places is None or (before is not None and not _follows(before, places)):
            break
        found.append(params[number])
        before = places
    return found


def _is_worth_it(members: Sequence[Any]) -> bool:
    return len(members) > 1 or (len(members) == 1 and len(_pieces(local_of(members[0]))) > 1)


def local_of(param: FlatShardTensor | FlatParameter) -> Tensor:
    """What this rank holds of a parameter, ``(numel held here,)``."""
    return param.local if isinstance(param, FlatShardTensor) else param.detach()


def _pieces(flat: Tensor) -> tuple[Tensor, ...]:
    """What the optimizer is to see one at a time; views."""
    return flat.split(_PIECE_NUMEL) if flat.device.type == "cpu" else (flat,)


def _places(param: Any) -> tuple[_Place, _Place] | None:
    if not isinstance(param, FlatShardTensor | FlatParameter):
        return None
    grad = param.grad
    if not isinstance(grad, FlatShardTensor):
        return None
    return _Place.of(local_of(param)), _Place.of(grad.local)


def _follows(before: tuple[_Place, _Place], after: tuple[_Place, _Place]) -> bool:
    gap, grad_gap = (one.gap_to(other) for one, other in zip(before, after, strict=True))
    return gap >= 0 and gap == grad_gap


class Run:
    """Some neighbours, as one optimizer steps them."""

    def __init__(self, members: Sequence[FlatShardTensor | FlatParameter]) -> None:
        """``members`` are neighbours, and so are their gradients."""
        self.members = list(members)
        local = local_of(members[0])
        first = int(local.storage_offset())
        starts = [int(local_of(member).storage_offset()) - first for member in members]
        self._bounds = [
            (start, start + local_of(member).numel())
            for start, member in zip(starts, members, strict=True)
        ]
        self._numel = self._bounds[-1][1]
        self._requires_grad = members[0].requires_grad
        flat = _stretched(local, self._numel)
        self._addresses = [_address(local_of(member)) for member in members]
        self.pieces = [nn.Parameter(piece, self._requires_grad) for piece in _pieces(flat)]
        self._handed: list[dict[str, Any]] = []  # what the pieces got last
        self._handed_of: dict[str, Any] = {}  # of what
        self._whole: dict[str, Any] = {}
        self._values: dict[str, Any] = {}  # what is in it, by object
        self._parts: list[Part] = []
        self._shown: list[tuple[Any, ...]] = []  # what is in them

    def is_of(self, members: Sequence[Any]) -> bool:
        """Whether these are its members, and still where they were."""
        return (
            len(members) == len(self.members)
            and all(map(operator.is_, members, self.members))
            # Each: somebody may have assigned to `p.data` of one.
            and [_address(local_of(member)) for member in members] == self._addresses
            and members[0].requires_grad == self._requires_grad
        )

    def goes_on(self, params: Sequence[Any], position: int) -> bool:
        """Whether its members are ``params`` from there on, with gradients that are neighbours.

        Quickly: False also where only ``_neighbours`` can tell.
        """
        return self.is_of(params[position : position + len(self.members)]) and self._has_grads()

    def _has_grads(self) -> bool:
        """Whether the members' gradients are views of one tensor, and lie as the members do."""
        first: Any = self.members[0].grad
        if not isinstance(first, FlatShardTensor):
            return False
        if len(self.members) == 1:
            return True
        local = first.local
        base, dtype, offset = local._base, local.dtype, local.storage_offset()
        if base is None:
            return False
        for member, (start, end) in zip(self.members, self._bounds, strict=True):
            grad: Any = member.grad
            if not isinstance(grad, FlatShardTensor):
                return False
            local = grad.local
            if (
                local._base is not base
                or local.storage_offset() != offset + start
                or local.numel() != end - start
                or local.dtype is not dtype
            ):
                return False
        return True

    def show_grads(self) -> None:
        """Give the pieces the members' gradients."""
        grad: Any = self.members[0].grad
        grads = _pieces(_stretched(grad.local, self._numel))
        for piece, part in zip(self.pieces, grads, strict=True):
            set_grad(piece, part)

    def hand_out(self, whole: dict[str, Any]) -> list[dict[str, Any]]:
        """Each piece's state, of the run's."""
        if len(self.pieces) == 1:
            return [whole]
        if not _same_values(whole, self._handed_of) or not self._handed:
            self._handed = [
                {key: self._cut(value, number) for key, value in whole.items()}
                for number in range(len(self.pieces))
            ]
            self._handed_of = dict(whole)
        return [dict(state) for state in self._handed]

    def _cut(self, value: Any, number: int) -> Any:
        if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == self._numel:
            return _pieces(value)[number]
        # Every piece counts its own steps; the first one's count is the run's.
        return value.clone() if isinstance(value, Tensor) and number else value

    def collect(
        self, states: Sequence[dict[str, Any]], home: DiskMemory | None = None
    ) -> dict[str, Any]:
        """The run's state, of its pieces' after a step; ``home`` keeps it, if there is one."""
        if len(states) == 1:
            return {key: self._kept([value], home) for key, value in states[0].items()}
        whole = {}
        for key, first in states[0].items():
            values = [state[key] for state in states]
            if not all(
                isinstance(value, Tensor) and value.shape == piece.shape
                for value, piece in zip(values, self.pieces, strict=True)
            ):
                whole[key] = first
            elif self._handed and all(
                value is handed.get(key) for value, handed in zip(values, self._handed, strict=True)
            ):
                known = self._handed_of[key]
                whole[key] = known if home is None else home.take_in(known)
            else:
                whole[key] = self._kept(values, home)
        return whole

    def _kept(self, values: Sequence[Any], home: DiskMemory | None) -> Any:
        """What the pieces have, together, where it is to be."""
        first = values[0]
        is_divided = isinstance(first, Tensor) and first.shape == self.pieces[0].shape
        if home is None or not is_divided:
            return first if len(values) == 1 else torch.cat(list(values))
        if len(values) == 1:
            return home.take_in(first)
        return torch.cat(list(values), out=home.new(self._numel, first.dtype))

    def known_state(
        self, states: Sequence[dict[str, Any] | None]
    ) -> tuple[dict[str, Any], list[Part]] | None:
        """The run's state and its members', if these are as ``split`` left them; else None.

        Up to edits in place, which both see.
        """
        if self._parts and all(map(_is_unchanged, states, self._parts, self._shown)):
            return self._whole, self._parts
        return None

    def join(self, states: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
        """The run's state, of its members'; None where they can't be joined.

        Args:
            states: each member's, this rank's part; None: it has none yet.
        """
        present = [state for state in states if state is not None]
        if not present:
            return {}
        if len(present) < len(states) or any(
            state.keys() != present[0].keys() for state in present
        ):
            return None
        whole = {}
        for key in present[0]:
            values = [state[key] for state in present]
            if self._has_elements(values):
                whole[key] = self._laid_out(values)
            elif _all_equal(values):
                whole[key] = values[0].clone() if isinstance(values[0], Tensor) else values[0]
            else:
                return None
        return whole

    def _has_elements(self, values: Sequence[Any]) -> bool:
        return all(
            isinstance(value, Tensor) and value.dim() == 1 and value.numel() == end - start
            for value, (start, end) in zip(values, self._bounds, strict=True)
        )

    def _laid_out(self, values: Sequence[Tensor]) -> Tensor:
        whole = values[0].new_zeros(self._numel)
        for value, (start, end) in zip(values, self._bounds, strict=True):
            whole[start:end].copy_(value)
        return whole

    def split(self, whole: dict[str, Any]) -> list[Part]:
        """Each member's part of the run's state after a step."""
        if not self._parts or not _same_values(whole, self._values):
            self._parts = [
                Part(
                    (key, value[start:end] if isinstance(value, Tensor) and value.dim() else value)
                    for key, value in whole.items()
                )
                for start, end in self._bounds
            ]
            self._shown = [tuple(part.values()) for part in self._parts]
            self._whole, self._values = whole, dict(whole)
        return self._parts


def _is_unchanged(state: dict[str, Any] | None, part: Part, shown: tuple[Any, ...]) -> bool:
    """Whether a member's state is what ``split`` made it, up to edits in place."""
    return (
        state is part and len(part) == len(shown) and all(map(operator.is_, part.values(), shown))
    )


def _same_values(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(value is other[key] for key, value in one.items())


def _address(local: Tensor) -> int:
    """Where a tensor begins, also one without elements, for which torch says 0."""
    return local.untyped_storage().data_ptr() + int(local.storage_offset()) * local.element_size()


def _stretched(first: Tensor, numel: int) -> Tensor:
    """From the start of ``first`` so many elements, sharing memory and version counter."""
    return first.detach().as_strided((numel,), (1,), first.storage_offset())


def _all_equal(values: Sequence[Any]) -> bool:
    first = values[0]
    if isinstance(first, Tensor):
        return all(isinstance(v, Tensor) and torch.equal(v, first) for v in values)
    return all(type(value) is type(first) and value == first for value in values)
