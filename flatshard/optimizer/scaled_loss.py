"""Whether the backward that runs now looks like that of a loss which a ``GradScaler`` has scaled.

Nothing of the scaler's is called before it is too late for a step in backward. But what it gives is
a product with a constant, the last node of the graph, and who runs a backward holds that. By which
constant, autograd has forgotten by the time the model hears of it.
"""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph


def is_scaled() -> bool:
    """Whether the loss is such a product, and some scaler has scaled something.

    On the thread that runs the hooks of a backward.
    """
    return any(map(_is_product, _terms(_losses()))) and any(map(_has_scaled, gc.get_objects()))


def _losses() -> Any:
    """What ``backward()`` was called on; nothing where torch calls it in another way."""
    run = getattr(graph, "_engine_run_backward", None)
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    frame: FrameType | None
    for frame in (sys._getframe(), main):  # accelerators have threads of their own
        while frame is not None and run is not None:
            if frame.f_code is run.__code__:
                return frame.f_locals.get("t_outputs", ())
            frame = frame.f_back
    return ()


def _terms(losses: Any) -> list[Any]:
    """The last nodes of what the losses are sums of."""
    nodes = [loss.grad_fn for loss in losses if isinstance(loss, Tensor)]
    for node in nodes:
        if node is not None and node.name() == "AddBackward0" and len(nodes) < _TERMS:
            nodes += [before for before, _ in node.next_functions]
    return nodes


_TERMS = 32


def _is_product(node: Any) -> bool:
    """Whether a node multiplies by what has no gradient."""
    return node is not None and node.name() == "MulBackward0" and node.next_functions[1][0] is None


def _has_scaled(thing: object) -> bool:
    return (
        issubclass(type(thing), torch.amp.GradScaler)  # proxies do things when asked otherwise
        and thing.is_enabled()  # type: ignore[attr-defined]
        and getattr(thing, "_scale", None) is not None
    )
