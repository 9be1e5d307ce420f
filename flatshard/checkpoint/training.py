"""``Training``: the model and optimizer of a save or load. ``HostRanks``: exchanges objects.

``HostRanks`` uses a separate process group, so the thread of a ``PendingSave`` can exchange objects
while training continues.

[Note: values that DCP would lose]
DCP stores each tensor in a list or dict separately. But DCP pickles a tuple or a deque as a whole,
turns keys into texts, and leaves out empty dicts. So ``pack`` turns nested values into dicts whose
keys are texts, and DCP keeps every value. ``pack`` also returns a ``Form``, from which ``unpack``
restores the original values.
"""

import atexit
import logging
import os
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard.comm.consistency import agreed
from flatshard.comm.host_exchange import HostExchange
from flatshard.comm.process_groups import is_fake, new_group
from flatshard.comm.work import named
from flatshard.extras.model_shards import ModelShards, model_shards
from flatshard.state.optim_state import OptimState

T = TypeVar("T")
_logger = logging.getLogger("flatshard.checkpoint")


class HostRanks(HostExchange):
    """Exchanges Python objects between the ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group, torch.device("cpu"))
        self.rank = 0 if group is None else group.rank()

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "HostRanks":
        """Return an instance for the ranks of ``group``. Collective at the first call."""
        if group is None or group.size() == 1 or is_fake(group):
            return cls(None)
        if group not in _known:
            with named(f"flatshard.checkpoint, rank {dist.get_rank()}: meeting the ranks"):
                _known[group] = cls(new_group(group, on_host=True))
        return _known[group]

    def agree(self, work: Callable[[], T], op_name: str) -> T:
        """Run ``work`` and return its result; if any rank raises, all ranks raise. Collective."""
        return agreed(lambda: (work(), {}), [self], op_name, "")

    def on_first(self, work: Callable[[], object], op_name: str) -> None:
        """Run ``work`` on rank 0 of the group; if ``work`` raises, all ranks raise. Collective."""
        self.agree(work if self.rank == 0 else lambda: None, op_name)


# Results of `HostRanks.of`, keyed by the process group that trains the model.
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, HostRanks] = weakref.WeakKeyDictionary()

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, Any]
"""One optimizer, or several over one model: a list, a tuple, or a dict from names to optimizers."""


Kinds = dict[str, list[Any]]  # class name and names of parameters of each optimizer


def by_name(optimizer: Optimizers | None) -> dict[str, Any]:
    """Return the optimizers, keyed by name. In a list, the name is the position."""
    if isinstance(optimizer, Mapping):
        return {str(name): one for name, one in optimizer.items()}
    if isinstance(optimizer, list | tuple):
        return {str(number): one for number, one in enumerate(optimizer)}
    return {} if optimizer is None else {"0": optimizer}


class Training:
    """The model and the optimizers that a call saves or loads, and the ranks that train the model.

    ``plain`` is the model, or the module inside DistributedDataParallel: its parameters have the
    names of the unwrapped model. ``shards`` has no units if the model is unwrapped.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers | None, caller: str) -> None:
        """Check the types of the arguments, and find the ranks that train ``model``. Collective."""
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{caller}: model must be one torch model, got a {type(model).__name__}. "
                f"For several models, call {caller} once for each model, with its own folder."
            )
        # The thread of an unfinished save runs collectives on the group of `ranks`. So no other
        # save or load may use the group before the thread ends.
        wait_for_pending()
        self.plain, group = model, dist.group.WORLD if dist.is_initialized() else None
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self.plain, group = model.module, model.process_group
        self.shards = model_shards(self.plain, caller)
        self.shards.refuse_dtensors(caller)
        # Ask the units first: with CPUOffload, parameters are not on the device that computes.
        handles = chain.from_iterable(unit.handles for unit in self.shards.units)
        devices = chain((one.device for one in handles), (one.device for one in model.parameters()))
        self.device = next(devices, torch.device("cpu"))
        self.ranks = HostRanks.of(self.shards.world.group if self.shards.units else group)
        optimizers, units = by_name(optimizer).items(), self.shards.units
        self.optimizers = {name: OptimState(self.plain, one, units) for name, one in optimizers}

    def kinds(self) -> Kinds:
        """Return each optimizer's class, and the names of its parameters."""
        return {
            name: [type(one.optimizer).__name__, sorted(param.fqn for param in one.params)]
            for name, one in self.optimizers.items()
        }


def joined(states: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Join the state dicts of several optimizers into one, as in torch's ``get_state_dict``."""
    if len(states) < 2:
        return next(iter(states.values()), None)
    owner: dict[str, str] = {}
    for name, state in states.items():
        for fqn in chain.from_iterable(group["params"] for group in state["param_groups"]):
            if owner.setdefault(fqn, name) != name:
                raise ValueError(
                    f"parameter {fqn!r} belongs to optimizers {owner[fqn]!r} and {name!r}. Give "
                    "each parameter to one optimizer."
                )
    whole: dict[str, Any] = {"state": {}, "param_groups": []}
    for name, state in states.items():
        if others := [*(state.keys() - whole.keys()), *(state["state"].keys() - owner.keys())]:
            raise ValueError(
                f"optimizer {name!r} has state {others[0]!r}, which belongs to no parameter. Such "
                "state can be saved only for a single optimizer: save each in its own folder."
            )
        whole["state"] |= state["state"]
        whole["param_groups"] += state["param_groups"]
    return whole


def sharded(model: nn.Module, caller: str) -> tuple[ModelShards, HostRanks]:
    """Return this rank's shards of a sharded model, and the model's ``HostRanks``. Collective.

    Raises:
        ValueError: the model is unwrapped.
    """
    training = Training(model, None, caller)
    if not training.shards.units:
        raise ValueError(
            f"{caller}: expected a ShardedWrapper or a module with a ShardedWrapper inside, got an "
            f"unwrapped {type(model).__name__}. For unwrapped models, use safetensors.torch."
        )
    return training.shards, training.ranks


# ---------------------------------------------------------------- a save in a thread


class PendingSave:
    """A checkpoint that a thread writes while training continues.

    Example:
        ```python
        from flatshard import checkpoint

        pending = checkpoint.save("runs/step-1", model, optimizer, async_=True)
        loss_fn(model(inputs), labels).backward()  # training continues
        optimizer.step()
        pending.wait()
        ```
    """

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        global _pending
        self.path = path
        # Use an executor: at the end of a program, Python waits for the threads of executors.
        thread = ThreadPoolExecutor(1, "flatshard-checkpoint")
        self._written = thread.submit(write)
        thread.shutdown(wait=False)  # the thread ends when the save ends
        _pending = self

    def done(self) -> bool:
        """Whether the save has ended, so that ``wait`` would not block."""
        return self._written.done()

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises the errors that ``save`` lists. The next save or load does not repeat these errors.
        """
        global _pending
        if _pending is self:
            _pending = None
        self._written.result()


_pending: PendingSave | None = None


def wait_for_pending() -> None:
    """Wait for an unfinished save. Raises the save's error, unless ``wait()`` has raised it."""
    if _pending is not None:
        if not _pending.done():
            _logger.info("waiting until %s is saved", _pending.path)
        _pending.wait()


@atexit.register
def _at_exit() -> None:
    try:
        wait_for_pending()
    except Exception:
        # Exit with status 1: Python would only print the exception, and exit with status 0.
        traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


# ---------------------------------------------------------------- values that DCP would lose

Form = list[Any] | None
"""How ``unpack`` restores a value. None: the value stays as DCP loads it. A list: the type's name,
the keys of a dict (or ``maxlen`` of a deque), and a form for each inner value.
"""
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "deque": deque}


def pack(value: Any) -> tuple[Any, Form]:
    """Return ``value`` with dicts in place of containers of tensors, and a form for ``unpack``."""
    if isinstance(value, Mapping):
        keys, values = list(value), list(value.values())
        if any(isinstance(key, Tensor) for key in keys):
            raise TypeError("the optimizer has a dict with tensors as keys, which cannot be saved")
        names = _dcp_names(keys)
        packed, forms = zip(*map(pack, values), strict=True) if values else ((), ())
        form = None if names is keys and not any(forms) else ["dict", keys, list(forms)]
        return dict(zip(names, packed, strict=True)), form
    kind = type(value).__name__
    if type(value) is not _SEQUENCES.get(kind) or (kind != "deque" and not _has_tensors(value)):
        return value, None
    packed, forms = zip(*map(pack, value), strict=True) if value else ((), ())
    length = value.maxlen if kind == "deque" else None
    return {str(number): one for number, one in enumerate(packed)}, [kind, length, list(forms)]


def _dcp_names(keys: list[Any]) -> list[str]:
    """Return names for a dict's values in DCP: the keys if DCP keeps them, otherwise numbers."""
    is_plain = bool(keys) and all(type(key) is str and "." not in key for key in keys)
    return keys if is_plain else [str(number) for number in range(len(keys))]


def _has_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    # Say yes for all deques and dicts: DCP would pickle a deque, and turn a dict's keys into texts.
    return isinstance(value, Tensor | Mapping | deque)


def unpack(packed: Any, form: Form) -> Any:
    """Undo ``pack``. ``packed`` is None for an empty dict, which DCP does not save."""
    if form is None:
        return packed
    kind, keys, forms = form
    packed = packed or {}
    names = _dcp_names(keys) if kind == "dict" else map(str, range(len(forms)))
    values = [unpack(packed.get(name), one) for name, one in zip(names, forms, strict=True)]
    if kind == "dict":
        return dict(zip(keys, values, strict=True))
    return deque(values, keys) if kind == "deque" else _SEQUENCES[kind](values)


def pack_optimizer(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide a sharded state dict of an optimizer into a part that DCP can save, and the rest."""
    names = {name for group in state["param_groups"] for name in group["params"]}
    states = {name: pack(one) for name, one in state["state"].items() if name in names}
    groups = [pack(group) for group in state["param_groups"]]
    rest = {
        "forms": {name: form for name, (_, form) in states.items() if form},
        "groups": [form for _, form in groups],
        "state": {key: one for key, one in state["state"].items() if key not in names},
        "entries": {k: one for k, one in state.items() if k not in ("state", "param_groups")},
    }
    packed = {name: one for name, (one, _) in states.items()}
    return {"state": packed, "param_groups": [one for one, _ in groups]}, rest


def unpack_optimizer(packed: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Undo ``pack_optimizer``. ``rest`` is empty if an earlier release saved the checkpoint."""
    states, groups = dict(packed.get("state", {})), packed.get("param_groups", [])
    for name, form in rest.get("forms", {}).items():
        states[name] = unpack(states.get(name), form)
    forms = rest.get("groups") or [None] * len(groups)
    groups = [unpack(group, form) for group, form in zip(groups, forms, strict=True)]
    states.update(rest.get("state", {}))
    return {**rest.get("entries", {}), "state": states, "param_groups": groups}
