"""``untraced``: a function that Dynamo does not trace when a compiled one comes to call it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def untraced(function: Callable[..., Any]) -> Any:
    """``torch.compiler.disable``, which imports Dynamo, at the first call: that takes a second."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            disabled = torch.compiler.disable(function)
            # Dynamo would compile this function for each that it stands for, up to its limit.
            torch._dynamo.decorators.skip(call)
        return disabled(*args, **kwargs)

    return call
