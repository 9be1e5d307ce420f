"""``torch_request``: what torch's ``get_state_dict`` and its siblings ask for while they run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType

# It takes the state of a parameter that is no DTensor for full, and has no way to be told.
_MODULE = "torch.distributed.checkpoint.state_dict"


@dataclass(frozen=True)
class TorchRequest:
    """Options of ``torch.distributed.checkpoint.state_dict.StateDictOptions``."""

    full: bool
    to_cpu: bool


def torch_request() -> TorchRequest | None:
    """The options of the innermost such call on this thread; None: there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE and "info" in frame.f_locals:
            info = frame.f_locals["info"]
            return TorchRequest(info.full_state_dict, info.cpu_offload)
        frame = frame.f_back
    return None
