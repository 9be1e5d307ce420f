"""Options about communication: how bytes are sent, and which small units are joined."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass

import torch


class Collectives(enum.Enum):
    """Values of ``ShardedWrapper(collectives=...)``: the way in which ranks exchange bytes."""

    AUTO = "auto"
    """The best way for the backend.

    On gloo, ranks on one host read each other's memory, and ranks on different hosts use sockets.
    Other backends use their own collectives.
    """
    SOCKETS = "sockets"
    """Sockets between all ranks, even on one host. Needs gloo."""
    NATIVE = "native"
    """The backend's own collectives, one per unit and purpose."""


@dataclass(frozen=True)
class TransportOptions:
    """The user's options ``collectives`` and ``wire_dtype``."""

    collectives: Collectives = Collectives.AUTO
    # Dtype to which wider floating point values are rounded before sending. None: no rounding.
    wire_dtype: torch.dtype | None = None

    def describe(self) -> str:
        """Return a text of the settings, for ranks to compare."""
        return f"collectives={self.collectives.value}, wire_dtype={self.wire_dtype}"

    @property
    def needs_gloo(self) -> str:
        """The user's option that only gloo supports, as text for an error; "" if there is none."""
        if self.collectives is Collectives.SOCKETS:
            return 'collectives="sockets"'
        return f"wire_dtype={self.wire_dtype}" if self.wire_dtype else ""


# Default of `coalesce_bytes`.
COALESCE_BYTES = 4 << 20


def as_coalesce_bytes(value: object) -> int:
    """Check the user's ``coalesce_bytes``, and return it. None means the default."""
    if value is None:
        return COALESCE_BYTES
    # Refuse True, which would mean one byte.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"coalesce_bytes: expected an int (of bytes) or None, got {value!r}.")
    if value < 0:
        raise ValueError(
            f"coalesce_bytes: expected 0 or more bytes, got {value}. Pass 0 to coalesce nothing."
        )
    return value


def as_transport(collectives: object, wire_dtype: object) -> TransportOptions:
    """Check the user's ``collectives`` and ``wire_dtype``, and return both as one object."""
    try:
        chosen = Collectives(collectives)
    except ValueError:
        choices = ", ".join(f'"{one.value}"' for one in Collectives)
        raise ValueError(f"collectives: expected one of {choices}, got {collectives!r}.") from None
    if wire_dtype is None:
        return TransportOptions(chosen)
    if not isinstance(wire_dtype, torch.dtype):
        raise TypeError(f"wire_dtype: expected torch.bfloat16 or None, got {wire_dtype!r}.")
    if wire_dtype is not torch.bfloat16:
        raise ValueError(
            f"wire_dtype: expected torch.bfloat16 (which has the same range as float32) or None, "
            f"got {wire_dtype}."
        )
    if chosen is Collectives.NATIVE:
        raise ValueError(
            'wire_dtype: collectives="native" uses the backend\'s own collectives, which cannot '
            "round values. Use mixed_precision=MixedPrecision(param_dtype=..., reduce_dtype=...)."
        )
    return TransportOptions(chosen, wire_dtype)


def check_launch_without_group() -> None:
    """Raise RuntimeError if a launcher started several ranks, which would train separate models."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1:
        raise RuntimeError(
            f"ShardedWrapper: {world_size} ranks were started (WORLD_SIZE), but there is no "
            "process group. Call torch.distributed.init_process_group() before wrapping."
        )
