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
        """Give the modules full parameters, or DTensors over these."""
        shown: list[Any] = [
            param if spec.tensor_parallel is None else spec.tensor_parallel.as_dtensor(param)
            for param, spec in zip(params, self.specs, strict=True)
        ]
        super().put(shown)
