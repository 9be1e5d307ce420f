"""``SwappableParam``: a parameter that gets other memory and stays the object that users know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from flatshard.plan.param_info import ParamInfo
from flatshard.tensor.sharded_tensor import OWN_ATTRIBUTES, FlatShardTensor, attributes_of


class SwappableParam:
    """An original parameter, and its hooks while they wait for the tensor that they belong on."""

    def __init__(self, info: ParamInfo) -> None:
        self.param = info.param  # the object that users hold
        self.locations = info.locations  # the first one names it
        # The dictionaries that torch made, so that handles can still remove what is in them.
        self._tensor_hooks: Any = None
        self._post_hooks: Any = None

    def swap_into(self, view: Tensor) -> None:
        """Turn the parameter, in place, into ``view``; it keeps identity and attributes."""
        param, name = self.param, self.locations[0].name
        is_first = not isinstance(param, FlatShardTensor)
        clashing = OWN_ATTRIBUTES & param.__dict__.keys()
        if is_first and clashing:
            raise ValueError(
                f"parameter {name!r} has an attribute {min(clashing)!r}, which a sharded parameter "
                "needs for itself. Give yours another name before wrapping."
            )
        for place in self.locations:
            if isinstance(place.module, nn.RNNBase):
                # Tensors that are weakly referenced cannot be swapped; None counts as unchanged.
                place.module._flat_weight_refs = [None] * len(place.module._flat_weights_names)
                place.module.__dict__["_flat_weights"] = []
            for hook in place.module._forward_pre_hooks.values():
                if isinstance(hook, WeightNorm):  # it computes the weight before each forward
                    # Not through a local variable, whose graph would hold the parameter below.
                    setattr(place.module, hook.name, getattr(place.module, hook.name).detach())
        attributes = attributes_of(param)
        if is_first:
            self._tensor_hooks = param._backward_hooks
            self._post_hooks = getattr(param, "_post_accumulate_grad_hooks", None)
        param.grad = None
        try:
            torch.utils.swap_tensors(param, view)
        except RuntimeError as error:
            raise RuntimeError(
                f"parameter {name!r} cannot be sharded: a graph, a view or a weak reference "
                "still holds it (a loss kept from before wrapping, say). Drop that, or wrap the "
                f"model earlier. ({error})"
            ) from error
        param.__dict__.update(attributes)
        if not isinstance(param, FlatShardTensor):
            # The swap moved the hooks away with the memory; this one computes, so they stay.
            self.move_hooks(param)

    def move_hooks(self, full: nn.Parameter) -> None:
        """Let hooks from before wrapping fire where they must: tensor hooks on ``full``."""
        if self._tensor_hooks is not None:
            full._backward_hooks = self._tensor_hooks
        if self._post_hooks is not None and isinstance(self.param, FlatShardTensor):
            self.param.spec.post_accumulate_hooks = self._post_hooks
        elif self._post_hooks is not None:
            full._post_accumulate_grad_hooks = self._post_hooks  # type: ignore[attr-defined]
        self._tensor_hooks, self._post_hooks = None, None

    def copied(self, memo: dict[int, Any]) -> ParamInfo:
        """The same parameter of modules that were deep-copied."""
        places = [replace(place, module=memo[id(place.module)]) for place in self.locations]
        return ParamInfo(memo.get(id(self.param), self.param), places)
