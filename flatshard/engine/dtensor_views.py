"""``DTensorViews``: modules compute with DTensors over the full parameters of a flat parameter."""

from __future__ import annotations

from typing import Any

from torch import nn

from flatshard.engine.param_views import ParamViews
from flatshard.tensor.tensor_parallel import tensor_parallel_of


class DTensorViews(ParamViews):
    """Of a flat parameter with originals that were DTensors before wrapping."""

    def _make_specs(self) -> None:
        super()._make_specs()
        for spec, owned in zip(self.specs, self.owned, strict=True):
            spec.tensor_parallel = tensor_parallel_of(owned.param)

    def put(self, params: list[nn.Parameter]) -> None:
        """Give the modules full parameters, and DTensors over these."""
        super().put(params)
        shown: dict[int, Any] = {
            index: spec.tensor_parallel.as_dtensor(params[index])
            for index, spec in enumerate(self.specs)
            if spec.tensor_parallel is not None
        }
        for module, attribute, index in self.places:
            if index in shown:  # found before ``_parameters``
                module.__dict__[attribute] = shown[index]

    def show_sharded(self) -> None:
        """Let the modules hold the sharded parameters, whatever they hold now."""
        for module, attribute, _ in self.places:
            module.__dict__.pop(attribute, None)
        super().show_sharded()
