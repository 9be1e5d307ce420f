"""``WholeStep``: an optimizer steps full parameters, of which the ranks hold parts.

Optimizers that look at a whole tensor (Muon's Newton-Schulz, Adafactor's rows and columns, a norm
of each layer, blocks of 8-bit states) step each parameter on one rank, its owner: it gathers the
parts, has the optimizer's state, and scatters the new values. Those that look at several parameters
at once (LBFGS) step all of them on every rank. ``StepMode`` lists the cases.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import Facts, agreed, raise_everywhere
from flatshard.extras.whole_tensors.owners import (
    HeldRange,
    OwnedParam,
    Piece,
    choose_owners,
    gather_to_owners,
    scatter_to_shards,
)
from flatshard.extras.whole_tensors.trial import StepMode
from flatshard.optimizer.stepper import (
    ONE_PER_PARAMETER,
    State,
    all_params,
    local_grad,
    put_others,
    step_groups,
)
from flatshard.precision import set_grad
from flatshard.tensor.sharded_tensor import FlatShardTensor, attributes_of, check_data, wrote

# About how many bytes of parameters and gradients each rank gathers at a time.
PART_BYTES = 32 << 20

OP = "optimizer.step()"
REMEDY = "Every rank must step the same optimizer, with gradients of the same parameters."


def sharded_params(optimizer: torch.optim.Optimizer) -> list[FlatShardTensor]:
    return [param for param in all_params(optimizer) if isinstance(param, FlatShardTensor)]


def _others(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [param for param in all_params(optimizer) if not isinstance(param, FlatShardTensor)]


def swap_full_in(
    optimizer: torch.optim.Optimizer,
    full: dict[FlatShardTensor, nn.Parameter],
    others: Collection[Any],
) -> ExitStack:
    """Give an optimizer full parameters in place of sharded ones, and their state, until closed.

    Of its parameters without a full one the optimizer keeps only those in ``others``.
    """
    undo = ExitStack()
    kept = {id(param) for param in others}
    for group in optimizer.param_groups:
        params = group["params"]
        chosen = [full.get(p, p) for p in params if p in full or id(p) in kept]
        put_others(undo, params, chosen)
    _move_state(optimizer, full.items())
    undo.callback(_move_state, optimizer, [(new, sharded) for sharded, new in full.items()])
    return undo


def _move_state(optimizer: torch.optim.Optimizer, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give the state of each first tensor to the second one."""
    # Also the state of optimizers inside the optimizer, as Lookahead has one.
    inner = (v for v in optimizer.__dict__.values() if isinstance(v, torch.optim.Optimizer))
    states = [one.state for one in (optimizer, *inner)]
    for old, new in pairs:
        for state in states:
            if old in state:
                state[new] = state.pop(old)


class WholeStep:
    """Steps the sharded parameters of one optimizer as full tensors."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, mode: StepMode, before: WholeStep | None = None
    ) -> None:
        """Follow ``before``, which stepped other parameters of the optimizer.

        Collective: all ranks of the optimizer's sharded parameters.
        """
        self.mode = mode
        # Also of parameters that the optimizer has no more: they may come back.
        self._owners: MutableMapping[Tensor, int] = (
            WeakIdKeyDictionary() if before is None else before._owners
        )
        self._params = sharded_params(optimizer)
        _check_attributes(optimizer)
        self.owned: dict[FlatShardTensor, OwnedParam] = {}
        self._full: dict[FlatShardTensor, nn.Parameter] = {}  # of a step on every rank
        self._swap = ExitStack()
        by_comm: dict[Communicator, list[FlatShardTensor]] = {}
        for param in self._params:
            by_comm.setdefault(param.spec.comm, []).append(param)
        self.comms = list(by_comm)
        for comm, params in by_comm.items():
            held = _held_ranges(params, comm)
            shapes = [param.spec.shape for param in params]
            owners: Sequence[int | None] = [None] * len(params)
            if mode is not StepMode.ON_EVERY_RANK:
                # Owners stay, as they alone have the state.
                known = [self._owners.get(param) for param in params]
                numels = [{rank: one.numel for rank, one in parts.items()} for parts in held]
                chosen = owners = choose_owners(shapes, numels, comm.size, known)
                self._owners.update(zip(params, chosen, strict=True))
            for param, parts, owner in zip(params, held, owners, strict=True):
                self.owned[param] = OwnedParam(param.spec, parts, owner)

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer still has the parameters that this was made for."""
        now = {param: param.spec for param in sharded_params(optimizer)}
        return now == {param: owned.spec for param, owned in self.owned.items()}

    def extra_bytes(self) -> int:
        """Bytes of full tensors and of send and receive buffers, at a step's peak on this rank."""
        owned = [param for param, one in self.owned.items() if one.is_full_here]
        values = sum(param.local.element_size() * param.numel() for param in owned)
        # A part is values and gradients. The next one is in three buffers while it is gathered (the
        # one sent, the one received, its full tensors); of the one before there are full tensors.
        part = 2 * values
        if self.mode is StepMode.IN_PARTS:
            largest = max(map(_gathered_bytes, self.owned), default=0)
            part = min(part, PART_BYTES + largest)
        return values + 4 * part

    # ------------------------------------------------------------ on owners

    def step(self, optimizer: torch.optim.Optimizer, arguments: Sequence[Any]) -> None:
        """Step each parameter that has a gradient on its owner.

        Collective. Where a rank's step raises, all raise that, and no parameter has changed.
        """
        params = self.agree_on_gradients(optimizer)
        parts = (self._parts(params) if self.mode is StepMode.IN_PARTS else None) or [params]
        others = _others(optimizer)
        error: Exception | None = None
        done: dict[FlatShardTensor, Tensor] = {}
        # The next part is gathered while one is stepped.
        finish = self.start_gather(optimizer, parts[0])
        for number, _ in enumerate(parts):
            full = finish()
            if number + 1 < len(parts):
                finish = self.start_gather(optimizer, parts[number + 1])
            if error is not None:
                continue  # the other ranks wait for this one's parts
            try:
                with swap_full_in(optimizer, full, others if number == 0 else ()):
                    groups = optimizer.param_groups
                    if self.mode is StepMode.IN_PARTS:  # some optimizers take no empty group
                        groups = [group for group in groups if group["params"]]
                    changed = step_groups(optimizer, groups, *arguments) if groups else None
                if changed is not None and self.mode is StepMode.IN_PARTS:
                    raise NotImplementedError(
                        f"{type(optimizer).__name__}.step() has begun to change its parameter "
                        "groups, and would do so once for each part of the parameters."
                    )
                for param, stepped in full.items():
                    if stepped.grad is None:
                        raise NotImplementedError(
                            f"parameter {param.spec.name!r}: {type(optimizer).__name__}.step() "
                            "sets its gradient to None, which other ranks would keep. Call "
                            "zero_grad() after step() instead."
                        )
                    check_data(f"{OP}: parameter {param.spec.name!r}", param, stepped.data)
                    done[param] = stepped.detach()
            except Exception as raised:
                error = raised
        for comm in dict.fromkeys((*self.comms, *(p.spec.replicas for p in self._params))):
            raise_everywhere(error, comm)
        for part in parts:
            self.scatter(part, done)

    def agree_on_gradients(self, optimizer: torch.optim.Optimizer) -> list[FlatShardTensor]:
        """The parameters that have gradients, in the optimizer's order. Collective.

        Raises:
            ValueError: on all ranks, where they differ in these.
        """

        def prepare() -> tuple[list[FlatShardTensor], Facts]:
            params = [param for param in self.owned if param.grad is not None]
            facts: Facts = {"the step mode": self.mode.value}
            for param in params:
                loaded = sorted(_sharded_state(optimizer.state.get(param)))
                grad: Any = param.grad
                facts[f"parameter {param.spec.name!r}"] = f"gradient {grad.dtype}, {loaded}"
            return params, facts

        return agreed(prepare, self.comms, OP, REMEDY)

    def _parts(self, params: Sequence[FlatShardTensor]) -> list[list[FlatShardTensor]]:
        """Divided so that each rank gathers about ``PART_BYTES`` at a time."""
        filled: dict[tuple[Communicator, int | None], int] = {}
        parts: dict[int, list[FlatShardTensor]] = {}
        for param in params:
            key = param.spec.comm, self.owned[param].owner
            filled[key] = filled.get(key, 0) + _gathered_bytes(param)
            parts.setdefault((filled[key] - 1) // PART_BYTES, []).append(param)
        return [parts[number] for number in sorted(parts)]

    def start_gather(
        self, optimizer: torch.optim.Optimizer, params: Sequence[FlatShardTensor]
    ) -> Callable[[], dict[FlatShardTensor, nn.Parameter]]:
        """Start to gather values, gradients and loaded state on owners.

        The function returned waits, and returns the full parameters of this rank.
        """
        waits = []
        for comm in self.comms:
            some = [param for param in params if param.spec.comm is comm]
            parts = [(self.owned[p], part) for p in some for part in _local_parts(optimizer, p)]
            waits.append((some, gather_to_owners(comm, parts, f"{OP}: to the owners")))

        def finish() -> dict[FlatShardTensor, nn.Parameter]:
            full: dict[FlatShardTensor, nn.Parameter] = {}
            for some, wait in waits:
                tensors = iter(wait())  # in the order of `_local_parts`
                for param in some:
                    if not self.owned[param].is_full_here:
                        # The owner has the state. Without an entry, torch's get_state_dict would
                        # make a step.
                        optimizer.state[param] = {}
                        continue
                    full[param] = nn.Parameter(next(tensors), param.requires_grad)
                    full[param].__dict__.update(attributes_of(param))
                    if param.grad is not None:
                        set_grad(full[param], next(tensors))
                    for key in sorted(_sharded_state(optimizer.state.get(param))):
                        optimizer.state[param][key] = next(tensors)
            return full

        return finish

    def average(self, loss: Any) -> Any:
        """The mean of the ranks' losses, which is that of all their inputs. Collective."""
        # From different losses the ranks would draw different conclusions.
        if not isinstance(loss, Tensor | float) or not self._params:
            return loss
        value = torch.as_tensor(loss).detach().to(torch.float64, copy=True).cpu()
        for comm in (self._params[0].spec.comm, self._params[0].spec.replicas):
            value = comm.reduce_scalars(value.to(comm.control_device), "SUM", op_name=OP).cpu()
            value /= comm.size
        return value.to(loss) if isinstance(loss, Tensor) else value.item()

    def scatter(
        self, params: Sequence[FlatShardTensor], done: dict[FlatShardTensor, Tensor]
    ) -> None:
        """Write the owners' full values to all shards. Collective."""
        for comm in self.comms:
            some = [param for param in params if param.spec.comm is comm]
            pieces = [(self.owned[p], p.local.detach(), done.get(p)) for p in some]
            scatter_to_shards(comm, pieces, f"{OP}: to the shards")
        wrote(params)

    # ------------------------------------------------------------ on every rank

    @torch.no_grad()
    def swap_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Put all full parameters in place of the sharded ones. Collective."""
        self.agree_on_gradients(optimizer)
        for param, full in self.start_gather(optimizer, self._params)().items():
            # The same objects at each call of a closure: the optimizer may refer to them.
            known = self._full.setdefault(param, full)
            known.data = full.data
            set_grad(known, full.grad)
        self._swap = swap_full_in(optimizer, self._full, _others(optimizer))

    @torch.no_grad()
    def write_back(self) -> None:
        """Write new values to the shards, and put the sharded parameters back. Collective."""
        for param, full in self._full.items():
            if full.grad is None:  # the step has cleared it, on all ranks
                param.grad = None
        if self._full:
            done = {param: full.detach() for param, full in self._full.items()}
            self.scatter(self._params, done)
        self._swap.close()

    def undo(self) -> None:
        """Put the sharded parameters back, and forget the full ones."""
        self._swap.close()
        self._full = {}

    # ------------------------------------------------------------ state

    def shared_state(self, optimizer: torch.optim.Optimizer) -> dict[FlatShardTensor, State]:
        """State that owners have, on all ranks. Collective."""
        shared: dict[FlatShardTensor, State] = {}
        for comm in self.comms:
            params = [param for param in self.owned if param.spec.comm is comm]
            mine = {
                number: _described(param, optimizer.state.get(param, {}))
                for number, param in enumerate(params)
                if self.owned[param].is_full_here
            }
            everyone = comm.host.gather(mine, "optimizer state")
            pieces: list[Piece] = []
            for number, param in enumerate(params):
                owned = self.owned[param]
                # State that was loaded, and not stepped since, is sharded already.
                if _sharded_state(optimizer.state.get(param)):
                    continue
                assert owned.owner is not None
                state = shared[param] = everyone[owned.owner].get(number, {})
                for key, value in state.items():
                    if isinstance(value, _PerElement):
                        part = param.local.detach().new_empty(owned.spec.numel, dtype=value.dtype)
                        full = optimizer.state[param][key] if owned.is_full_here else None
                        pieces.append((owned, part, full))
                        state[key] = FlatShardTensor(part, param.spec, role=f"{key} of")
            scatter_to_shards(comm, pieces, "optimizer state: to the shards")
        return shared


def _held_ranges(
    params: Sequence[FlatShardTensor], comm: Communicator
) -> list[dict[int, HeldRange]]:
    """For each parameter, the holders and their ranges. Collective."""
    specs = enumerate(param.spec for param in params)
    mine = {number: HeldRange(one.offset, one.numel) for number, one in specs if one.numel}
    held: list[dict[int, HeldRange]] = [{} for _ in params]
    for rank, ranges in enumerate(comm.host.gather(mine, f"{OP}: owners")):
        for number, one in ranges.items():
            held[number][rank] = one
    return held


def _gathered_bytes(param: FlatShardTensor) -> int:
    """Bytes of a parameter and its gradient, which its owner gathers."""
    return param.nbytes + (0 if param.grad is None else param.grad.nbytes)


class _PerElement(NamedTuple):
    """State that its owner has in the parameter's shape."""

    dtype: torch.dtype


def _described(param: FlatShardTensor, state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _PerElement(value.dtype)
        if type(value) is Tensor and value.shape == param.shape and key not in ONE_PER_PARAMETER
        else value
        for key, value in state.items()
        if not isinstance(value, FlatShardTensor)
    }


def _local_parts(optimizer: torch.optim.Optimizer, param: FlatShardTensor) -> list[Tensor]:
    """This rank's parts of a parameter, of its gradient if it has one, and of its loaded state."""
    parts = [param.local.detach()]
    if param.grad is not None:
        parts.append(local_grad(param))
    loaded = _sharded_state(optimizer.state.get(param))
    return [*parts, *(loaded[key].local for key in sorted(loaded))]


def _sharded_state(state: dict[str, Any] | None) -> dict[str, FlatShardTensor]:
    """State of which this rank holds a part: a checkpoint's."""
    return {k: v for k, v in (state or {}).items() if isinstance(v, FlatShardTensor)}


def _check_attributes(optimizer: torch.optim.Optimizer) -> None:
    """Raise NotImplementedError for parameters that cannot be replaced for a step."""
    groups = optimizer.param_groups
    known = {id(group["params"]) for group in groups} | {id(groups), id(optimizer.state)}
    for name, value in optimizer.__dict__.items():
        for kept in pytree.tree_leaves(value, is_leaf=lambda one: id(one) in known):
            if isinstance(kept, FlatShardTensor):
                raise NotImplementedError(
                    f"{type(optimizer).__name__} keeps parameter {kept.spec.name!r} in its "
                    f"attribute {name!r}, and would not see the full one that it needs. Let it "
                    "take parameters from param_groups."
                )
