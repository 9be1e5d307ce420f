"""Extra: finds ranks that step an optimizer with different options, or different numbers of times.

When a step begins, each rank records the optimizer's options, and counts the parameters without
gradients. In the exchange at the end of each backward, the ranks also compare a digest of these
records. If the digests differ, the ranks exchange the records, and all raise.

Without this folder, ranks with different options train without an error.
"""

import operator
import weakref
from collections import deque
from contextlib import suppress
from functools import cached_property
from itertools import chain, compress, repeat
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from flatshard.comm.consistency import Facts, differing_fact
from flatshard.engine.run_state import RunState
from flatshard.optimizer.adapter import Optimizer, all_params, at_step
from flatshard.precision import get_grad
from flatshard.units.module_tree import unit_text

# For torch's optimizers, ranks compare all options except `_KERNELS`, which choose a kernel. For
# optimizers of other libraries, ranks compare only `_OPTIONS`: the step of such an optimizer may
# store other numbers in the groups, computed from this rank's shards.
_OPTIONS = {"lr", "weight_decay", "betas", "momentum", "eps"}
_KERNELS = {"foreach", "fused", "capturable", "differentiable"}

_OP = "the options of optimizers"
_MISSING = "the list of parameters without .grad"
_SIMPLE = {int, float, bool, str, tuple, type(None)}  # types of options that are compared as is


class ComparedSteps:
    """Compares between ranks the optimizer steps on one model since the last exchange.

    Attributes:
        digest: a digest of all steps. Ranks compare the digest at the end of each backward.
        facts: texts about the steps since the last comparison. Only the last 4096 steps are kept,
            because a program may step often without a backward.
    """

    num_made: Any = 0  # number of these objects that were ever made

    def __init__(self, state: RunState) -> None:
        self.digest, self.facts = 0, deque[Facts](maxlen=4096)
        self._state = weakref.proxy(state)
        # Cache for parameter groups of optimizers. Key: the ids of the group's parameters. Value:
        # the first parameter's name (None if the model has none of these parameters), and a text
        # that ranks compare: the number of names, and a checksum of the names.
        self._groups: dict[tuple[int, ...], tuple[str | None, str]] = {}
        _models.add(self)
        ComparedSteps.num_made += 1

    def raise_difference(self) -> None:
        """Raise RuntimeError on all ranks if the steps of ranks differ. Collective."""
        mine: Facts = {}
        for facts in self.facts:
            mine |= {k: f"{mine[k]}, then {v}" if k in mine else v for k, v in facts.items()}
        world, digest = self._state.world, self.digest
        self.digest = 0
        self.facts.clear()
        everyone, digests = zip(*world.host.gather((mine, digest), _OP), strict=True)
        if len({*digests}) == 1:
            return
        names = sorted({*chain.from_iterable(everyone)})
        names.sort(key=lambda name: not name.startswith("'lr'"))  # name learning rates first
        steps = [{name: one.get(name, "no step") for name in names} for one in everyone]
        difference = differing_fact(steps, world.ranks) or "the step is too old to be recorded"
        raise RuntimeError(
            f"backward of {unit_text(self._state.root.name)}: since the last backward, ranks "
            "stepped an optimizer with different options, or different numbers of times: "
            f"{difference}. The model now mixes shards of different steps. Step in the same way on "
            "every rank: a scheduler such as ReduceLROnPlateau needs the same metric on every rank "
            "(average it with dist.all_reduce). Start again from a checkpoint. [FS-STEPS]"
        )

    @cached_property
    def _names(self) -> dict[int, str]:
        """Names of the parameters that all ranks train, keyed by the parameter's id."""
        with suppress(ReferenceError):  # the model was freed, or became a part of a larger model
            size = self._state.world.size
            handles = (one for one in self._state.handles if one.topology.world.size == size)
            return {id(param.sharded): param.name for one in handles for param in one.params}
        return {}

    def facts_of(self, optimizer: Optimizer, names: list[str]) -> Facts:
        """Return facts to compare, about the optimizer's groups with parameters of the model."""
        facts: Facts = {}
        for group in optimizer.param_groups:
            ids = tuple(map(id, group["params"]))
            if ids not in self._groups:  # once per group: steps change only options
                # Sort: a program may collect parameters in a set, whose order may differ by rank.
                inside = sorted(self._names[one] for one in ids if one in self._names)
                checksum = crc32(repr(inside).encode())
                text = f"{len(inside)} with checksum {checksum:08x}"
                self._groups[ids] = inside[0] if inside else None, text
            first, text = self._groups[ids]
            if first is not None:
                of = f"of {type(optimizer).__name__}'s group with {first!r}"
                facts |= {f"{k!r} {of}": _text(_plain(group[k])) for k in names if k in group}
                facts[f"the number of parameters {of}"] = text
        return facts


class _Seen:
    """Last recorded step of an optimizer. A step with the same options reuses the facts."""

    def __init__(self, optimizer: Optimizer) -> None:
        is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        names = (_OPTIONS | optimizer.defaults.keys()) - _KERNELS if is_torchs else _OPTIONS
        self.names = sorted(names)  # names of the options that ranks compare
        # First entry: `ComparedSteps.num_made`, because a new model may contain the optimizer's
        # parameters. Other entries: the options and the number of parameters of each group.
        self.options: list[Any] = []
        # For each model that the optimizer steps: the facts to compare, their digest, and the
        # parameters that all ranks of the model train (their names, and the objects).
        self.facts: list[tuple[ComparedSteps, Facts, int, list[str], list[Tensor]]] = []

    def update(self, optimizer: Optimizer, options: list[Any]) -> None:
        if self.options == options:
            return
        self.options, self.facts = options, []
        for model in _models:
            if facts := model.facts_of(optimizer, self.names):
                facts[_MISSING] = "none"
                digest = crc32(repr(sorted(facts.items())).encode())
                params = [param for param in all_params(optimizer) if id(param) in model._names]
                names = [model._names[id(param)] for param in params]
                self.facts.append((model, facts, digest, names, params))


_models: weakref.WeakSet[ComparedSteps] = weakref.WeakSet()
_seen: weakref.WeakKeyDictionary[Optimizer, _Seen] = weakref.WeakKeyDictionary()


def record_step(optimizer: Optimizer) -> None:
    """Record a step of ``optimizer`` for each model whose parameters the optimizer holds."""
    seen = _seen.get(optimizer) or _seen.setdefault(optimizer, _Seen(optimizer))
    options = [ComparedSteps.num_made]
    for group in optimizer.param_groups:
        options += *map(group.get, seen.names), len(group["params"])
    # Do not compare tensors here: the comparison would wait for an accelerator.
    if not _SIMPLE.issuperset(map(type, options)) or seen.options != options:
        seen.update(optimizer, [*map(_plain, options)])
    for model, facts, digest, names, params in seen.facts:
        with torch._C.DisableTorchFunctionSubclass():
            missing = [*compress(names, map(operator.is_, map(get_grad, params), repeat(None)))]
        # Add the digests, because the order in which several optimizers step does not matter.
        model.digest += digest + crc32(repr(sorted(missing)).encode())
        model.facts.append({**facts, _MISSING: ", ".join(sorted(missing))} if missing else facts)


# Runs once: this module is imported when the first model is wrapped.
at_step.append(record_step)


def _plain(value: Any) -> Any:
    """Return a number or a text for an option. Does not wait for a tensor on an accelerator."""
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, list):
        return tuple(map(_plain, value))
    if isinstance(value, Tensor):
        is_number = type(value) is Tensor and value.is_cpu and value.numel() == 1
    else:
        is_number = getattr(value, "ndim", None) == 0  # a number of numpy
    return value.item() if is_number else type(value).__name__


def _text(value: Any) -> str:
    """Return a text that stays equal if the ranks' processors round numbers differently."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
