"""``torch_request``: what torch's ``get_state_dict`` and its siblings ask for while they run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

# It takes the state of a parameter that is no DTensor for full, and has no way to be told.
_MODULE = "torch.distributed.checkpoint.state_dict"


@dataclass(frozen=True)
class TorchRequest:
    """Options of ``torch.distributed.checkpoint.state_dict.StateDictOptions``."""

    full: bool
    to_cpu: bool
    rank0_only: bool  # it drops what other ranks have
    broadcasts: bool  # from rank 0

    def check_order(self, name: str, order: Sequence[int]) -> None:
        """Raise for a parameter, with its dimensions in memory order, that was mixed up."""
        if self.broadcasts and list(order) != sorted(order):
            raise ValueError(
                f"parameter {name!r}: broadcast_from_rank0 sends memory as it lies, and mixes up "
                "tensors that are not contiguous (channels_last). Pass full tensors on every rank, "
                "with StateDictOptions(full_state_dict=True) alone."
            )


def torch_request() -> TorchRequest | None:
    """The options of the innermost such call on this thread; None: there is none."""
    for frame in _frames():
        if "info" in frame.f_locals:
            info = frame.f_locals["info"]
            drops = info.full_state_dict and info.cpu_offload
            # Not before it has looked for the frozen ones among them.
            rank0_only = drops and not info.ignore_frozen_params
            return TorchRequest(
                info.full_state_dict, info.cpu_offload, rank0_only, info.broadcast_from_rank0
            )
    return None


def is_getting_shards() -> bool:
    """Whether torch's ``get_state_dict``, or a sibling, runs without ``full_state_dict``."""
    getters = [frame for frame in _frames() if frame.f_code.co_name.startswith("get_")]
    return any(not getattr(f.f_locals["options"], "full_state_dict", False) for f in getters)


def _frames() -> Iterator[FrameType]:
    """The frames of its functions on this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE:
            yield frame
        frame = frame.f_back
