"""``CPUOffload``: where shards, gradients and optimizer state live between uses."""

from __future__ import annotations

import os
from dataclasses import dataclass


class OffloadError(RuntimeError):
    """The disk has too little space for the tensors that ``CPUOffload(path=...)`` stores on it."""


def check_flags(policy: object, *names: str) -> None:
    """Raise TypeError if one of a policy's attributes ``names`` is not a bool."""
    for name in names:
        if not isinstance(value := getattr(policy, name), bool):
            kind = type(policy).__name__
            raise TypeError(f"{kind}: {name} must be True or False, got {value!r}.")


@dataclass(frozen=True)
class CPUOffload:
    """Where shards, gradients and optimizer state are kept between uses.

    Without ``path``, offloaded tensors are in host memory. If the model computes on the CPU, all
    tensors are in host memory anyway, so nothing changes. With ``path``, offloaded tensors are in
    files without names. The files disappear when the process ends. Setting only ``path`` offloads
    everything. The page on precision and offload says how much time and memory each choice costs.

    Example:
        ```python
        in_host_memory = CPUOffload(offload_params=True)
        on_disk = CPUOffload(path="/tmp")
        policy = ModuleWrapPolicy({Block})
        model = ShardedWrapper(model, auto_wrap_policy=policy, cpu_offload=on_disk)
        ```

    Attributes:
        offload_params: offload the shards, their gradients and the optimizer state. Each all-gather
            copies the shard to the device, each reduce-scatter copies the gradient back, and
            optimizers step in the offload target.
        offload_optimizer: offload the optimizer state, and on an accelerator also gradients and
            full precision shards. The device keeps a copy of each shard in the compute dtype. No
            effect if ``offload_params`` is set, too.
        path: a directory for the files; ranks may pass different directories.
        pin_memory: whether to pin host memory, so that copies overlap with computation.

    Raises:
        TypeError: a flag is not a bool, or ``path`` is not a directory's path.
        OffloadError: from ``ShardedWrapper``, on all ranks: the disk at ``path`` is too full, or
            the process has too many mapped files.
    """

    offload_params: bool = False
    offload_optimizer: bool = False
    path: str | os.PathLike[str] | None = None
    pin_memory: bool = True

    def __post_init__(self) -> None:
        check_flags(self, "offload_params", "offload_optimizer", "pin_memory")
        if self.path is not None and not isinstance(self.path, str | os.PathLike):
            raise TypeError(f"CPUOffload: path must be a directory's path, got {self.path!r}.")

    @property
    def is_on(self) -> bool:
        """Whether anything is offloaded."""
        return self.offload_params or self.offload_optimizer or self.path is not None

    @property
    def takes_params(self) -> bool:
        """Whether shards are offloaded, without a copy that stays on the device."""
        return self.offload_params or (self.is_on and not self.offload_optimizer)

    def describe(self) -> str:
        """Return a text of the settings, for ranks to compare."""
        to = "host" if self.path is None else "disk"
        return f"offload of {'all' if self.takes_params else 'state'} to {to}" if self.is_on else ""


def as_cpu_offload(value: object) -> CPUOffload:
    """Convert the user's ``cpu_offload`` to a ``CPUOffload``.

    ``value``: a ``CPUOffload`` of flatshard or FSDP1, an offload policy of FSDP2, a bool, or None.
    """
    if isinstance(value, CPUOffload):
        return value
    flag = False if value is None else getattr(value, "offload_params", value)
    if isinstance(flag, bool):
        return CPUOffload(offload_params=flag)
    # FSDP2's policies: OffloadPolicy offloads nothing, CPUOffloadPolicy offloads everything.
    if type(value).__name__ == "OffloadPolicy":
        return CPUOffload()
    if isinstance(getattr(value, "pin_memory", None), bool):
        return CPUOffload(offload_params=True, pin_memory=value.pin_memory)  # type: ignore[attr-defined]
    raise TypeError(f"cpu_offload: expected CPUOffload(offload_params=...), got {value!r}.")
