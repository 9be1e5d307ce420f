"""``WholeStep``: gathers sharded parameters, for optimizers to step full parameters.

Some optimizers compute with a whole tensor: Newton-Schulz in Muon, rows and columns in Adafactor,
the norm of a layer, blocks of 8-bit states. Such an optimizer steps each parameter on a single
rank, the parameter's owner. The owner gathers the parts, keeps the optimizer's state, and scatters
the new values. Optimizers with computations on several parameters together (LBFGS) step all
parameters on every rank. ``StepMode`` lists all modes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import Facts, agreed, check_same_state, raise_everywhere
from flatshard.extras.whole_tensors.owners import (
    HeldRange,
    OwnedParam,
    Piece,
    choose_owners,
    gather_to_owners,
    scatter_to_shards,
)
from flatshard.extras.whole_tensors.trial import StepMode
from flatshard.optimizer.adapter import (
    State,
    all_params,
    map_state,
    named_values,
    put_others,
    step_groups,
    with_inner,
)
from flatshard.precision import set_grad
from flatshard.tensor.sharded_tensor import FlatShardTensor, check_data, local_grad, wrote

# Approximate number of bytes of parameters and gradients that a rank gathers at a time.
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
    """Replace sharded parameters of an optimizer by full parameters, until the stack is closed.

    The state of the sharded parameters moves to the full parameters. ``full`` maps sharded to full
    parameters. All other parameters leave the optimizer, except ``others``.

    Returns a stack of actions that undo this when the stack is closed.
    """
    undo = ExitStack()
    kept = {id(param) for param in others}
    lists = (group["params"] for one in with_inner(optimizer) for group in one.param_groups)
    for params in {id(params): params for params in lists}.values():
        put_others(undo, params, [full.get(p, p) for p in params if p in full or id(p) in kept])
    _move_state(optimizer, full.items())
    undo.callback(_move_state, optimizer, [(new, sharded) for sharded, new in full.items()])
    return undo


def _move_state(optimizer: torch.optim.Optimizer, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Move the state of the first tensor of each pair to the second tensor."""
    states = [one.state for one in with_inner(optimizer)]
    for old, new in pairs:
        for state in states:
            if old in state:
                state[new] = state.pop(old)


class WholeStep:
    """Steps the sharded parameters of one optimizer as full tensors."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, mode: StepMode, before: WholeStep | None = None
    ) -> None:
        """Choose the owner of each parameter.

        ``before`` is the optimizer's previous ``WholeStep``, if the parameters have changed since.
        Parameters keep the owners from ``before``.

        Collective: all ranks of the optimizer's sharded parameters.
        """
        self.mode = mode
        # Also keep the owner of a removed parameter: the parameter may be added again later.
        self._owners: MutableMapping[Tensor, int] = (
            WeakIdKeyDictionary() if before is None else before._owners
        )
        self._params = sharded_params(optimizer)
        self.owned: dict[FlatShardTensor, OwnedParam] = {}
        # The full parameters, if every rank steps all of them (`StepMode.ON_EVERY_RANK`).
        self._full: dict[FlatShardTensor, nn.Parameter] = {}
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
                # Keep each parameter's earlier owner, because only the owner has optimizer state.
                known = [self._owners.get(param) for param in params]
                numels = [{rank: one.numel for rank, one in parts.items()} for parts in held]
                chosen = owners = choose_owners(shapes, numels, comm.size, known)
                self._owners.update(zip(params, chosen, strict=True))
            for param, parts, owner in zip(params, held, owners, strict=True):
                self.owned[param] = OwnedParam(param.spec, parts, owner)

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has the same parameters as when this object was made."""
        now = {param: param.spec for param in sharded_params(optimizer)}
        return now == {param: owned.spec for param, owned in self.owned.items()}

    def extra_bytes(self) -> int:
        """Peak bytes of full tensors, send buffers and receive buffers in a step on this rank."""
        owned = [param for param, one in self.owned.items() if one.is_full_here]
        values = sum(param.local.element_size() * param.numel() for param in owned)
        # The owners step the parameters in parts, and gather the values and gradients of the next
        # part during the step of a part. While a part is gathered, the data exist three times: in a
        # send buffer, in a receive buffer and as full tensors. The part in the step exists as full
        # tensors. So there are four times the bytes of a part.
        part = 2 * values
        if self.mode is StepMode.IN_PARTS:
            largest = max(map(_gathered_bytes, self.owned), default=0)
            part = min(part, PART_BYTES + largest)
        return values + 4 * part

    # ------------------------------------------------------------ on owners

    def step(self, optimizer: torch.optim.Optimizer, arguments: Sequence[Any]) -> None:
        """Step each parameter that has a gradient, on the parameter's owner.

        If the step raises on a rank, all ranks raise the error, and no parameter has changed.

        Collective: all ranks of the optimizer's sharded parameters.
        """
        params = self.agree_on_gradients(optimizer)
        parts = (self._parts(params) if self.mode is StepMode.IN_PARTS else None) or [params]
        others = _others(optimizer)
        error: Exception | None = None
        done: dict[FlatShardTensor, Tensor] = {}
        # Gather the next part while the current part is stepped.
        finish = self.start_gather(optimizer, parts[0])
        for number, _ in enumerate(parts):
            full = finish()
            if number + 1 < len(parts):
                finish = self.start_gather(optimizer, parts[number + 1])
            if error is not None:
                continue  # step no further part, but keep gathering: other ranks need the data
            try:
                with swap_full_in(optimizer, full, others if number == 0 else ()):
                    groups = optimizer.param_groups
                    # Leave out empty groups, for which some optimizers raise.
                    if self.mode is StepMode.IN_PARTS:
                        groups = [group for group in groups if group["params"]]
                    changed = step_groups(optimizer, groups, *arguments) if groups else None
                if changed is not None and self.mode is StepMode.IN_PARTS:
                    raise NotImplementedError(
                        f"{type(optimizer).__name__}.step() changes its parameter groups. "
                        "flatshard calls step() once for each part of the parameters, so the "
                        "groups would change several times. Change them after step() returns."
                    )
                for param, stepped in full.items():
                    if stepped.grad is None:
                        raise NotImplementedError(
                            f"parameter {param.spec.name!r}: {type(optimizer).__name__}.step() "
                            "sets the gradient to None, but only on the rank that steps the "
                            "parameter. Call zero_grad() after step() instead."
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
        """Return the parameters that have gradients, in the optimizer's order. Collective.

        Raises:
            ValueError: ranks have gradients of different parameters. All ranks raise.
        """

        def prepare() -> tuple[list[FlatShardTensor], Facts]:
            params = [param for param in self.owned if param.grad is not None]
            facts: Facts = {"the step mode": self.mode.value}
            for param in params:
                loaded = sorted(_sharded_state(optimizer.state.get(param, {})))
                grad: Any = param.grad
                facts[f"parameter {param.spec.name!r}"] = f"gradient {grad.dtype}, {loaded}"
            return params, facts

        return agreed(prepare, self.comms, OP, REMEDY)

    def _parts(self, params: Sequence[FlatShardTensor]) -> list[list[FlatShardTensor]]:
        """Divide parameters into parts. For each part, an owner gathers about ``PART_BYTES``."""
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
        """Start to gather values, gradients and loaded state on the owners.

        Returns a function that waits, and returns the full parameters of this rank.
        """
        waits = []
        for comm in self.comms:
            some = [param for param in params if param.spec.comm is comm]
            parts = [(self.owned[p], part) for p in some for part in _local_parts(optimizer, p)]
            waits.append((some, gather_to_owners(comm, parts, f"{OP}: to the owners")))

        def finish() -> dict[FlatShardTensor, nn.Parameter]:
            full: dict[FlatShardTensor, nn.Parameter] = {}
            for some, wait in waits:
                tensors = iter(wait())  # tensors in the order of `_local_parts`
                for param in some:
                    if not self.owned[param].is_full_here:
                        # Only the owner has state. Give the parameter an empty entry here: if there
                        # were no entry, torch's get_state_dict would make a step to create state.
                        optimizer.state[param] = {}
                        continue
                    full[param] = nn.Parameter(next(tensors), param.requires_grad)
                    full[param].__dict__ = param.__dict__  # attributes that users set
                    if param.grad is not None:
                        set_grad(full[param], next(tensors))
                    state = optimizer.state.get(param, {})
                    loaded = {name: next(tensors) for name in sorted(_sharded_state(state))}
                    if loaded:
                        optimizer.state[param] = map_state(loaded.get, state)
            return full

        return finish

    def average(self, loss: Any) -> Any:
        """Return the average of the ranks' losses, the loss of the whole batch. Collective."""
        # All ranks need the same loss, because optimizers such as LBFGS decide by the loss.
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
        """Write the full values from the owners to all shards. Collective."""
        for comm in self.comms:
            some = [param for param in params if param.spec.comm is comm]
            pieces = [(self.owned[p], p.local.detach(), done.get(p)) for p in some]
            scatter_to_shards(comm, pieces, f"{OP}: to the shards")
        wrote(params)

    # ------------------------------------------------------------ on every rank

    @torch.no_grad()
    def swap_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's sharded parameters by full parameters. Collective."""
        self.agree_on_gradients(optimizer)
        for param, full in self.start_gather(optimizer, self._params)().items():
            # Use the same parameter objects at each call of a closure, because the optimizer may
            # keep references to the objects.
            known = self._full.setdefault(param, full)
            known.data = full.data
            set_grad(known, full.grad)
        self._swap = swap_full_in(optimizer, self._full, _others(optimizer))

    @torch.no_grad()
    def write_back(self) -> None:
        """Write the new values to the shards, and restore the sharded parameters. Collective."""
        for param, full in self._full.items():
            if full.grad is None:  # the step has set the gradient to None, on all ranks
                param.grad = None
        if self._full:
            self.scatter(self._params, {param: full.detach() for param, full in self._full.items()})
        self._swap.close()

    def undo(self) -> None:
        """Restore the sharded parameters, and drop the full parameters."""
        self._swap.close()
        self._full = {}

    # ------------------------------------------------------------ state

    def shared_state(self, optimizer: torch.optim.Optimizer) -> dict[FlatShardTensor, State]:
        """Send the owners' state of all parameters to all ranks, and return the state. Collective.

        State with a value per element is sharded; all other state is equal on all ranks.
        """
        shared: dict[FlatShardTensor, State] = {}
        for comm in self.comms:
            params = [param for param in self.owned if param.spec.comm is comm]
            described = {
                number: _described(param, optimizer.state[param])
                for number, param in enumerate(params)
                if self.owned[param].is_full_here and param in optimizer.state
            }
            everyone = comm.host.gather(described, "optimizer state")
            pieces: list[Piece] = []
            for number, param in enumerate(params):
                owned = self.owned[param]
                # Skip state from a checkpoint: it is already sharded, until the next step gathers
                # the state on the owner.
                if _sharded_state(optimizer.state.get(param, {})):
                    continue
                assert owned.owner is not None
                state = everyone[owned.owner].get(number, {})
                mine = named_values(optimizer.state.get(param, {}))
                sharded: State = {}
                for name, value in named_values(state).items():
                    if isinstance(value, Tensor) and value.is_meta:
                        part = param.local.detach().new_empty(owned.spec.numel, dtype=value.dtype)
                        pieces.append((owned, part, mine[name] if owned.is_full_here else None))
                        sharded[name] = FlatShardTensor(part, param.spec, role=f"{name} of")
                shared[param] = map_state(sharded.get, state)
            scatter_to_shards(comm, pieces, "optimizer state: to the shards")
        return shared

    def check_same_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError on all ranks unless all ranks have the same state. Collective.

        Every rank steps all full parameters, so the ranks' states should be equal. But an optimizer
        that calls collectives itself may update the state of a parameter only on one rank.
        """
        values = {
            f"state {name!r} of parameter {param.spec.name!r}": value
            for param in self._params
            for name, value in named_values(optimizer.state.get(param, {})).items()
            if not isinstance(value, FlatShardTensor)  # from a checkpoint
        }
        for number, group in enumerate(optimizer.param_groups):  # NorMuon keeps its momenta here
            options = {name: value for name, value in group.items() if name != "params"}
            values |= {
                f"option {name!r} of group {number}": value
                for name, value in named_values(options).items()
                if isinstance(value, Tensor)
            }
        for comm in dict.fromkeys((*self.comms, *(p.spec.replicas for p in self._params))):
            gather = comm.host.gather_unless_equal
            check_same_state(values, gather, comm.ranks, type(optimizer).__name__)


def _held_ranges(
    params: Sequence[FlatShardTensor], comm: Communicator
) -> list[dict[int, HeldRange]]:
    """Return, for each parameter, a dict from ranks to their ranges of elements. Collective."""
    specs = enumerate(param.spec for param in params)
    mine = {number: HeldRange(one.offset, one.numel) for number, one in specs if one.numel}
    held: list[dict[int, HeldRange]] = [{} for _ in params]
    for rank, ranges in enumerate(comm.host.gather(mine, f"{OP}: owners")):
        for number, one in ranges.items():
            held[number][rank] = one
    return held


def _gathered_bytes(param: FlatShardTensor) -> int:
    """Return the number of bytes to gather on the owner: the parameter and the gradient."""
    return param.nbytes + (0 if param.grad is None else param.grad.nbytes)


def _described(param: FlatShardTensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return the owner's state, to send to other ranks, without the values of per-element state.

    Meta tensors replace these values. ``scatter_to_shards`` sends the values instead.
    """

    def described(_: str, value: Any) -> Any:
        if isinstance(value, FlatShardTensor):
            return None  # from a checkpoint, and still sharded: not sent
        is_per_element = type(value) is Tensor and value.shape == param.shape and value.numel() > 1
        return value.to("meta") if is_per_element else value

    return map_state(described, state)


def _local_parts(optimizer: torch.optim.Optimizer, param: FlatShardTensor) -> list[Tensor]:
    """Return this rank's parts of the tensors to gather on the parameter's owner.

    These are the parameter, the gradient (unless None), and state from a checkpoint.
    """
    parts = [param.local.detach()]
    if param.grad is not None:
        parts.append(local_grad(param.grad, param.spec))
    loaded = _sharded_state(optimizer.state.get(param, {}))
    return [*parts, *(loaded[key].local for key in sorted(loaded))]


def _sharded_state(state: State) -> dict[str, FlatShardTensor]:
    """Return the sharded values in a parameter's state. Such values come from a checkpoint."""
    values = named_values(state).items()
    return {name: value for name, value in values if isinstance(value, FlatShardTensor)}
