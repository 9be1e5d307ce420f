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
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.tensor.sharded_tensor import FlatShardTensor

# What torch's ``checkpoint_wrapper`` adds to names, but not to those in state dicts.
_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


@dataclass(frozen=True)
class OptimParam:
    """A parameter of an optimizer, in terms of the unwrapped model."""

    fqn: str
    original: OriginalParam | None = None  # None: the parameter is not sharded
    handle: FlatParamHandle | None = None  # of its flat parameter


class OptimParams:
    """The parameters of an optimizer, found in a model."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, units: Sequence[Unit]
    ) -> None:
        prefixes = {
            module: unwrapped(f"{name}.") if name else "" for name, module in model.named_modules()
        }
        found = dict(_params_of_units(prefixes, units))
        for name, param in model.named_parameters():
            # No unit owns it: it is ignored, or the model is not wrapped.
            found.setdefault(id(param), OptimParam(unwrapped(name)))
        # As ``optimizer.param_groups`` has them.
        self.groups: list[list[OptimParam]] = []
        for number, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                known = found.get(id(param))
                if known is None or (known.handle is None and isinstance(param, FlatShardTensor)):
                    raise ValueError(
                        f"parameter {position} of the optimizer's group {number}, of shape "
                        f"{tuple(param.shape)}, is not in the given model. Pass the outermost "
                        "ShardedWrapper and an optimizer over its parameters."
                    )
            self.groups.append([found[id(param)] for param in group["params"]])

    def __iter__(self) -> Iterator[OptimParam]:
        return chain.from_iterable(self.groups)

    def fqns(self, group: int) -> list[str]:
        """The names of a group's parameters."""
        return [param.fqn for param in self.groups[group]]

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
        for param in handle.params:
            # The first place in `model`, which may be a part of the sharded model.
            fqn = next(
                prefixes[place.module] + place.attribute
                for place in param.locations
                if place.module in prefixes
            )
            yield id(param.sharded), OptimParam(fqn, param, handle)


def unwrapped(name: str) -> str:
    """A name as state dicts have it, where activations are checkpointed."""
    return name.replace(_CHECKPOINT_PREFIX, "")
