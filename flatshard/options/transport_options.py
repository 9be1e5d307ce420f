"""How ranks communicate, as the user chose: the transport, and coalescing."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass

import torch


class Collectives(enum.Enum):
    """How ranks move tensors."""

    AUTO = "auto"
    """What fits best: on gloo, ranks on one host read one another's memory, others use sockets."""
    SOCKETS = "sockets"
    """On gloo, sockets also between ranks of one host."""
    NATIVE = "native"
    """The backend's own collectives, one per unit and purpose."""


@dataclass(frozen=True)
class TransportOptions:
    """How ranks move tensors, as the user chose."""

    collectives: Collectives = Collectives.AUTO
    # Wider floating point values are rounded to it before they are sent; None: they are not.
    wire_dtype: torch.dtype | None = None

    def describe(self) -> str:
        """The settings that must be the same on every rank."""
        return f"collectives={self.collectives.value}, wire_dtype={self.wire_dtype}"

    @property
    def needs_gloo(self) -> str:
        """What only process groups of gloo have, in the user's words; or ""."""
        if self.collectives is Collectives.SOCKETS:
            return 'collectives="sockets"'
        return f"wire_dtype={self.wire_dtype}" if self.wire_dtype else ""


# Default of `coalesce_bytes`: largest sum of parameter bytes of units that are coalesced.
COALESCE_BYTES = 4 << 20


def as_coalesce_bytes(value: object) -> int:
    """Read ``coalesce_bytes``; None is the default."""
    if value is None:
        return COALESCE_BYTES
    # True is an int: it would mean one byte.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"coalesce_bytes: expected an int of bytes or None, got {value!r}")
    if value < 0:
        raise ValueError(f"coalesce_bytes: expected 0 or more bytes, got {value}")
    return value


def as_transport(collectives: object, wire_dtype: object) -> TransportOptions:
    """Read ``collectives`` and ``wire_dtype``."""
    try:
        chosen = Collectives(collectives)
    except ValueError:
        choices = ", ".join(f'"{one.value}"' for one in Collectives)
        raise ValueError(f"collectives: expected one of {choices}, got {collectives!r}") from None
    if wire_dtype is None:
        return TransportOptions(chosen)
    if not isinstance(wire_dtype, torch.dtype):
        raise TypeError(f"wire_dtype: expected torch.bfloat16 or None, got {wire_dtype!r}")
    if wire_dtype is not torch.bfloat16:
        raise ValueError(
            f"wire_dtype: expected torch.bfloat16, which has the range of float32, or None; "
            f"got {wire_dtype}"
        )
    if chosen is Collectives.NATIVE:
        raise ValueError(
            'wire_dtype: the backend\'s own collectives (collectives="native") send what they are '
            "given. Use MixedPrecision(param_dtype, reduce_dtype) for them."
        )
    return TransportOptions(chosen, wire_dtype)


def check_launch_without_group() -> None:
    """Raise if a launcher started other ranks: each would train a model of its own."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1:
        raise RuntimeError(
            f"ShardedWrapper: {world_size} ranks were started (WORLD_SIZE), but there is no "
            "process group. Call torch.distributed.init_process_group() before wrapping."
        )
