"""Which unit owns which parameter, and at which places in the model a parameter stands."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.plan.module_tree import paths
from flatshard.tensor.sharded_tensor import FlatShardTensor


@dataclass(frozen=True)
class ParamLocation:
    """One place of a parameter: ``module._parameters[attribute]``, and its name in the model."""

    module: nn.Module
    attribute: str
    name: str


@dataclass
class ParamInfo:
    """An original parameter with all its places; the first one names it."""

    param: nn.Parameter
    locations: list[ParamLocation] = field(default_factory=list)
    # Dictionaries as torch made them, so that handles can still remove what is in them.
    _tensor_hooks: Any = None
    _post_hooks: Any = None

    @property
    def name(self) -> str:
        """The parameter's name in the unwrapped model; the first one of a tied parameter."""
        return self.locations[0].name

    def swap_into(self, view: Tensor) -> None:
        """Turn the parameter, in place, into ``view``; it keeps identity and attributes.

        Raises:
            RuntimeError: something else holds on to the parameter's memory.
        """
        param = self.param
        for site in self.locations:
            if isinstance(site.module, nn.RNNBase):
                # Weak references forbid the exchange; None counts as unchanged.
                names = site.module._flat_weights_names
                site.module._flat_weight_refs = [None] * len(names)
                site.module.__dict__["_flat_weights"] = []
        attributes = {k: v for k, v in param.__dict__.items() if k not in view.__dict__}
        # Python's dictionaries stay with the name, the hooks themselves go with the memory.
        if not isinstance(param, FlatShardTensor):  # else they were moved already
            self._tensor_hooks = param._backward_hooks
            self._post_hooks = getattr(param, "_post_accumulate_grad_hooks", None)
        param.grad = None
        try:
            torch.utils.swap_tensors(param, view)
        except RuntimeError as error:
            raise RuntimeError(
                f"parameter {self.name!r} cannot be sharded: a graph, a view or a weak reference "
                "still holds it (a loss kept from before wrapping, say). Drop that, or wrap the "
                f"model earlier. ({error})"
            ) from error
        param.__dict__.update(attributes)
        if not isinstance(param, FlatShardTensor):  # it computes itself
            param._backward_hooks = self._tensor_hooks
            if self._post_hooks is not None:
                param._post_accumulate_grad_hooks = self._post_hooks
            self._tensor_hooks, self._post_hooks = None, None

    def invalidate(self, unit_name: str) -> None:
        """Nobody uses the parameter any more: free it, and say so to who still holds it."""
        self.param.data = self.param.data.new_empty(0)
        self.param._flattened_into = unit_name  # type: ignore[attr-defined]

    def move_hooks(self, full: nn.Parameter) -> None:
        """Let hooks from before wrapping fire where they must: tensor hooks on ``full``."""
        assert isinstance(self.param, FlatShardTensor), "hooks move after ``swap_into``"
        if self._tensor_hooks is not None:
            full._backward_hooks = self._tensor_hooks
        if self._post_hooks is not None:
            self.param.spec.post_accumulate_hooks = self._post_hooks
        self._tensor_hooks, self._post_hooks = None, None


def find_owners(
    root: nn.Module, unit_modules: Collection[nn.Module], taken: Collection[int] = ()
) -> dict[nn.Module, list[ParamInfo]]:
    """Give every parameter to the lowest unit that contains all its users.

    Ties are found by identity, so a weight shared by two units is stored once, in the unit that
    contains both.

    Args:
        root: the outermost unit.
        unit_modules: the units below it.
        taken: ids of parameters that a unit owns already.

    Returns:
        For every unit, ``root`` first, what it owns in registration order; may be nothing.
    """
    units = {*unit_modules, root}
    found: dict[int, ParamInfo] = {}
    common: dict[int, list[nn.Module]] = {}
    seen_sites: set[tuple[int, str]] = set()
    for path, chain in paths(root):
        module = chain[-1]
        prefix = f"{path}." if path else ""
        enclosing = [ancestor for ancestor in chain if ancestor in units]
        for attribute, param in module._parameters.items():
            if param is None or id(param) in taken:
                continue
            key = id(param)
            owned = found.setdefault(key, ParamInfo(param))
            if (id(module), attribute) not in seen_sites:
                seen_sites.add((id(module), attribute))
                owned.locations.append(ParamLocation(module, attribute, prefix + attribute))
            before = common.get(key, enclosing)
            common[key] = [unit for unit in before if unit in enclosing]
    owners: dict[nn.Module, list[ParamInfo]] = {root: []}
    owners.update({unit: [] for unit in unit_modules})
    for key, owned in found.items():
        owners[common[key][-1]].append(owned)
    return owners
