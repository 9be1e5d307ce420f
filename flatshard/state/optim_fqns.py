"""``OptimParams``: what the parameters of an optimizer are in the unwrapped model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.tensor.flat_parameter import FlatParameter
from flatshard.tensor.sharded_tensor import FlatShardTensor

# What torch's ``checkpoint_wrapper`` adds to names, but not to those in state dicts.
_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


@dataclass(frozen=True)
class OptimParam:
    """A parameter of an optimizer, in terms of the unwrapped model."""

    # Which originals are in it, by name: their numbers in the handle; None: nothing is sharded.
    indices: dict[str, int]
    handle: FlatParamHandle | None = None

    @property
    def is_flat(self) -> bool:
        """Whether the optimizer sees the flat parameter itself."""
        return self.handle is not None and not self.handle.params.use_orig_params


class OptimParams:
    """The parameters of an optimizer, found in a model."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, units: Sequence[Unit]
    ) -> None:
        prefixes = {
            module: unwrapped(f"{name}.") if name else "" for name, module in model.named_modules()
        }
        # Of every place, also of tied parameters: which of them names it, the units decide.
        self._order: dict[str, int] = {}
        for module, prefix in prefixes.items():
            for attribute in module._parameters:
                self._order.setdefault(prefix + attribute, len(self._order))
        found = dict(_params_of_units(prefixes, units))
        for name, param in model.named_parameters():
            # No unit owns it: it is ignored, or the model is not wrapped.
            found.setdefault(id(param), OptimParam({unwrapped(name): 0}))
        # As ``optimizer.param_groups`` has them.
        self.groups: list[list[OptimParam]] = []
        for number, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                known = found.get(id(param))
                is_sharded = isinstance(param, FlatShardTensor | FlatParameter)
                if known is None or (known.handle is None and is_sharded):
                    raise ValueError(
                        f"parameter {position} of the optimizer's group {number}, of shape "
                        f"{tuple(param.shape)}, is not in the given model. Pass the outermost "
                        "ShardedWrapper and an optimizer over its parameters; with "
                        "use_orig_params=False, one that was made after wrapping."
                    )
            self.groups.append([found[id(param)] for param in group["params"]])

    def __iter__(self) -> Iterator[OptimParam]:
        return chain.from_iterable(self.groups)

    def fqns(self, group: int) -> list[str]:
        """The original parameters of a group, as an optimizer of the unwrapped model has them."""
        fqns = [fqn for param in self.groups[group] for fqn in param.indices]
        if any(param.is_flat for param in self.groups[group]):
            # One flat parameter per dtype: originals of several may alternate in the model.
            fqns.sort(key=self._order.__getitem__)
        return fqns

    def by_key(self, state_dict: dict[str, Any]) -> dict[Any, OptimParam]:
        """The parameters by the keys that a state dict of this very optimizer has for them."""
        keys = [list(group["params"]) for group in state_dict["param_groups"]]
        expected, found = [[len(group) for group in groups] for groups in (self.groups, keys)]
        if found != expected:
            raise ValueError(
                f"optim_state_dict: expected groups of {expected} parameters, as the optimizer "
                f"has, got {found}. Pass optimizer.state_dict(), or None."
            )
        return dict(zip(chain.from_iterable(keys), self, strict=True))


def _params_of_units(
    prefixes: dict[nn.Module, str], units: Sequence[Unit]
) -> Iterable[tuple[int, OptimParam]]:
    """All that units own, by the id of what the optimizer may hold."""
    for handle in chain.from_iterable(unit.handles for unit in units):
        # A place inside ``model``, which may be a part of what was wrapped.
        fqns = [
            next(
                prefixes[place.module] + place.attribute
                for place in handle.params.owned[index].locations
                if place.module in prefixes
            )
            for index in range(len(handle.layout.spans))
        ]
        if handle.params.use_orig_params:
            for index, param in enumerate(handle.sharded):
                yield id(param), OptimParam({fqns[index]: index}, handle)
        else:
            indices = {fqn: index for index, fqn in enumerate(fqns)}
            yield id(handle.sharded[0]), OptimParam(indices, handle)


def unwrapped(name: str) -> str:
    """A name as state dicts have it, where activations are checkpointed."""
    return name.replace(_CHECKPOINT_PREFIX, "")
