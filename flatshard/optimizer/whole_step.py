"""``WholeStep``: an optimizer steps full parameters, of which the ranks hold parts.

What looks at a whole tensor (Muon's Newton-Schulz, Adafactor's rows and columns, a norm of each
layer, blocks of 8-bit states) steps each parameter on one rank, its owner, which brings the parts
together, has the state, and gives the new values back. What looks at several parameters at once
(LBFGS) steps all of them on every rank. See ``Manner`` for who needs what.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import Facts, agreed, raise_everywhere
from flatshard.optimizer.trial import Manner, inert, manner_of, step_of
from flatshard.optimizer.whole_tensors import Held, Piece, Whole, collect, spread
from flatshard.plan.owners import choose_owners
from flatshard.precision.casts import set_grad
from flatshard.tensor.flat_parameter import FlatParameter
from flatshard.tensor.sharded_tensor import FlatShardTensor, attributes_of, check_data, wrote

# Of the parameters and gradients that come together on the owners at a time: on each rank about.
PART_BYTES = 64 << 20

_OP = "optimizer.step()"
_REMEDY = "Every rank must step the same optimizer, with gradients of the same parameters."


def _sharded(optimizer: torch.optim.Optimizer) -> list[FlatShardTensor]:
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return [param for param in params if isinstance(param, FlatShardTensor)]


@dataclass(frozen=True)
class Owned:
    """A sharded parameter, what it is while it is whole, and the bytes that come together."""

    param: FlatShardTensor
    whole: Whole

    @property
    def nbytes(self) -> int:
        grad = self.param.grad
        return self.param.nbytes + (0 if grad is None else grad.nbytes)


class WholeStep:
    """Steps one optimizer's sharded parameters whole."""

    def __init__(self, optimizer: torch.optim.Optimizer, manner: Manner) -> None:
        """Collective: all ranks of the optimizer's sharded parameters."""
        self.manner = manner
        self._optimizer = weakref.ref(optimizer)
        self._params = _sharded(optimizer)
        self.owned: dict[FlatShardTensor, Whole] = {}
        by_comm: dict[Communicator, list[FlatShardTensor]] = {}
        for param in self._params:
            by_comm.setdefault(param.spec.comm, []).append(param)
        self.comms = list(by_comm)
        for comm, params in by_comm.items():
            mine = [Held(param.spec.offset, param.spec.numel) for param in params]
            held = list(zip(*comm.gather_objects(mine, op_name=f"{_OP}: owners"), strict=True))
            shapes = [param.spec.shape for param in params]
            owners: Sequence[int | None] = [None] * len(params)
            if manner is not Manner.ON_EVERY_RANK:
                owners = choose_owners(shapes, [[one.numel for one in parts] for parts in held])
            for param, parts, owner in zip(params, held, owners, strict=True):
                self.owned[param] = Whole(param.spec, parts, owner)

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether these are the optimizer's parameters still."""
        params = _sharded(optimizer)
        return len(params) == len(self._params) and all(
            mine is theirs and mine.spec is self.owned[theirs].spec
            for mine, theirs in zip(self._params, params, strict=True)
        )

    # ------------------------------------------------------------ on owners

    def step(self, loss: Any, *, has_closure: bool) -> None:
        """Step each parameter on its owner; of a closure, ``loss`` is what it returned.

        Collective. Where a rank's step raises, all raise that, and no parameter has changed.
        """
        optimizer = self._optimizer()
        assert optimizer is not None, "it is stepping"
        arguments: list[Any] = [lambda: loss] if has_closure else []
        owned = self._with_gradients(optimizer)
        parts = self._parts(owned) if self.manner is Manner.IN_PARTS else [owned]
        others = [g["params"] for g in optimizer.param_groups]
        kept = [[p for p in params if not isinstance(p, FlatShardTensor)] for params in others]
        error: Exception | None = None
        done: dict[FlatShardTensor, Tensor] = {}
        # The next part is under way while one is stepped.
        coming = self._bring(parts[0]) if parts else None
        for number, _ in enumerate(parts):
            assert coming is not None, "it was begun"
            shown = coming()
            coming = self._bring(parts[number + 1]) if number + 1 < len(parts) else None
            if error is not None:
                continue  # the other ranks wait for this one's parts
            try:
                with self._shown(optimizer, shown, kept if number == 0 else None):
                    if optimizer.param_groups:
                        step_of(optimizer)(optimizer, *arguments)
                for param, full in shown.items():
                    check_data(f"{_OP}: parameter {param.spec.name!r}", param, full.data)
                    done[param] = full.detach()
            except Exception as raised:
                error = raised
        self._raise_everywhere(error)
        for part in parts:
            self._give_back(part, done)

    def _with_gradients(self, optimizer: torch.optim.Optimizer) -> list[Owned]:
        """The parameters that are to be stepped, in the optimizer's order, the same on all ranks."""

        def prepare() -> tuple[list[Owned], Facts]:
            some = [Owned(p, whole) for p, whole in self.owned.items() if p.grad is not None]
            facts: Facts = {"the manner": self.manner.value}
            for one in some:
                name, grad, state = one.param.spec.name, one.param.grad, optimizer.state.get(one.param)
                assert grad is not None
                sharded = sorted(_sharded_state(state)) if state else []
                facts[f"parameter {name!r}"] = f"gradient {grad.dtype}, state {sharded}"
            return some, facts

        return agreed(prepare, self.comms, _OP, _REMEDY)

    def _parts(self, owned: Sequence[Owned]) -> list[list[Owned]]:
        """Divided so that each rank gets some bytes at a time."""
        filled: dict[tuple[Communicator, int | None], int] = {}
        parts: dict[int, list[Owned]] = {}
        for one in owned:
            key = one.whole.spec.comm, one.whole.owner
            filled[key] = filled.get(key, 0) + one.nbytes
            parts.setdefault((filled[key] - 1) // PART_BYTES, []).append(one)
        return [parts[number] for number in sorted(parts)]

    def _bring(self, owned: Sequence[Owned]) -> Callable[[], dict[FlatShardTensor, nn.Parameter]]:
        """Begin to bring values, gradients and loaded state together."""
        optimizer = self._optimizer()
        assert optimizer is not None
        waits = []
        for comm in self.comms:
            here = [one for one in owned if one.whole.spec.comm is comm]
            places: list[tuple[FlatShardTensor, str | None, bool]] = []
            pieces: list[Piece] = []
            for param, whole in ((one.param, one.whole) for one in here):
                pieces.append((whole, param.local.detach()))
                places.append((param, None, False))
                if param.grad is not None:
                    pieces.append((whole, _local_grad(param)))
                    places.append((param, None, True))
                state = optimizer.state.get(param)
                for key in sorted(_sharded_state(state)) if state else ():
                    pieces.append((whole, state[key].local))
                    places.append((param, key, False))
            mine = [place for place, (whole, _) in zip(places, pieces, strict=True) if whole.is_here]
            waits.append((mine, collect(comm, pieces, f"{_OP}: to the owners")))

        def finish() -> dict[FlatShardTensor, nn.Parameter]:
            shown: dict[FlatShardTensor, nn.Parameter] = {}
            for mine, wait in waits:
                for (param, key, is_grad), full in zip(mine, wait(), strict=True):
                    if key is not None:
                        optimizer.state[param][key] = full
                    elif is_grad:
                        set_grad(shown[param], full)
                    else:
                        shown[param] = nn.Parameter(full, param.requires_grad)
                        shown[param].__dict__.update(attributes_of(param))
            for one in owned:
                if not one.whole.is_here:  # the owner has it
                    optimizer.state.pop(one.param, None)
            return shown

        return finish

    @contextmanager
    def _shown(
        self,
        optimizer: torch.optim.Optimizer,
        shown: dict[FlatShardTensor, nn.Parameter],
        others: list[list[Any]] | None,
    ) -> Iterator[None]:
        """Inside, the optimizer has the full parameters, and of its ``others`` those given."""
        groups = optimizer.param_groups
        before = [list(group["params"]) for group in groups]
        states = [one.state for one in _family(optimizer)]
        for number, group in enumerate(groups):
            group["params"][:] = [shown[p] for p in group["params"] if p in shown]
            group["params"] += others[number] if others else []
        for state in states:
            for param, full in shown.items():
                if param in state:
                    state[full] = state.pop(param)
        if self.manner is Manner.IN_PARTS:  # some optimizers take no empty group
            optimizer.param_groups = [group for group in groups if group["params"]]
        try:
            yield
        finally:
            optimizer.param_groups = groups
            for group, params in zip(groups, before, strict=True):
                group["params"][:] = params
            for state in states:
                for param, full in shown.items():
                    if full in state:
                        state[param] = state.pop(full)

    def _raise_everywhere(self, error: Exception | None) -> None:
        for comm in self.comms:
            raise_everywhere(error, comm)
        for replicas in {param.spec.replicas: None for param in self._params}:
            raise_everywhere(error, replicas)

    def _give_back(self, owned: Sequence[Owned], done: dict[FlatShardTensor, Tensor]) -> None:
        for comm in self.comms:
            here = [one for one in owned if one.whole.spec.comm is comm]
            pieces = [(one.whole, done.get(one.param, one.param.local)) for one in here]
            parts = [one.param.local.detach() for one in here]
            if pieces:
                spread(comm, pieces, parts, f"{_OP}: to the shards")
        wrote([one.param for one in owned])


def _sharded_state(state: dict[str, Any]) -> list[str]:
    return [key for key, value in state.items() if isinstance(value, FlatShardTensor)]


def _local_grad(param: FlatShardTensor) -> Tensor:
    grad = param.grad
    assert grad is not None
    if isinstance(grad, FlatShardTensor):
        return grad.local.detach()
    return param.spec.slice(grad.detach())  # the user assigned it, a full one


def _family(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizer, and those inside it, as Lookahead has one."""
    inner = (v for v in optimizer.__dict__.values() if isinstance(v, torch.optim.Optimizer))
    return [optimizer, *inner]
