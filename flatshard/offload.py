"""``CPUOffload``: where shards, gradients and optimizer state live between uses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CPUOffload:
    """Where shards, gradients and optimizer state live between uses.

    Attributes:
        offload_params: keep them in host memory. On a CPU-only host they already are.
    """

    offload_params: bool = False


def as_cpu_offload(value: object) -> CPUOffload:
    """Read ``cpu_offload``: ours, torch's dataclass of the same field, a bool, or None."""
    if isinstance(value, CPUOffload):
        return value
    if value is None or isinstance(value, bool):
        return CPUOffload(offload_params=bool(value))
    flag = getattr(value, "offload_params", None)
    if not isinstance(flag, bool):
        raise TypeError(f"cpu_offload: expected CPUOffload(offload_params=...), got {value!r}")
    return CPUOffload(offload_params=flag)
