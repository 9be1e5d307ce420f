"""Inspects a module before it is sharded: its tensors, whether they can be, and the device."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard.comm.process_groups import current_cuda
from flatshard.options.collectives import Collectives, TransportOptions
from flatshard.options.offload import CPUOffload
from flatshard.plan.ignored import Ignored
from flatshard.tensor.flat_parameter import FlatParameter


def named_tensors(module: nn.Module, left_alone: set[int]) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by name, without those whose ids are ``left_alone``."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tensor) for name, tensor in named if id(tensor) not in left_alone]


def check_params(module: nn.Module, left_alone: set[int]) -> None:
    """Raise if a parameter that is not in ``left_alone`` cannot be flattened."""
    for name, param in module.named_parameters():
        if id(param) in left_alone:
            continue
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"ShardedWrapper: parameter {name!r} is not initialised (a lazy module). Run one "
                "forward on the unwrapped model first."
            )
        if type(param.data) is not Tensor:
            raise TypeError(
                f"ShardedWrapper: parameter {name!r} is a {type(param.data).__name__}; only plain "
                "tensors can be flattened"
            )
    _check_one_device(module, left_alone)


def check_no_gradients(module: nn.Module, left_alone: set[int]) -> None:
    """Raise if a parameter not in ``left_alone`` has a gradient, which sharding would drop."""
    for name, param in module.named_parameters():
        grad = None if id(param) in left_alone else param.grad
        if grad is not None and bool(grad.any()):
            raise ValueError(
                f"ShardedWrapper: parameter {name!r} has a gradient, which would be lost. Wrap the "
                "model before backward, or call zero_grad() before wrapping."
            )


def _check_one_device(module: nn.Module, left_alone: set[int]) -> None:
    first: tuple[str, torch.device] | None = None
    for name, param in module.named_parameters():
        if id(param) in left_alone or param.is_meta:
            continue
        first = first or (name, param.device)
        if param.device != first[1]:
            raise ValueError(
                f"ShardedWrapper: parameter {name!r} is on {str(param.device)!r}, {first[0]!r} on "
                f"{str(first[1])!r}. Move the module to one device before wrapping."
            )


def find_device(
    module: nn.Module,
    device_id: int | str | torch.device | None,
    group: dist.ProcessGroup | None,
    ignored: Ignored,
) -> torch.device:
    """The device of the shards and of computation.

    Raises:
        ValueError: ``device_id`` names no device of this host.
    """
    if isinstance(device_id, int) and not isinstance(device_id, bool):
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None:
            raise ValueError(f"device_id={device_id}: this host has no accelerator")
        device = torch.device(accelerator.type, device_id)
        _check_exists(device)
        return device
    if device_id is not None:
        try:
            device = torch.device(device_id)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device_id: expected an index or a device, got {device_id!r}") from (
                error
            )
        _check_exists(device)
        # With its index: "cuda" alone means another device after a thread sets another one.
        return torch.empty(0, device=device).device
    skipped = ignored.ids()
    present = [
        param
        for param in module.parameters()
        if not isinstance(param, FlatParameter) and id(param) not in skipped
    ]
    # Ranks with and without values must agree, so tensors on the meta device do not count.
    devices = [param.device for param in present if not param.is_meta]
    first = devices[0] if devices else torch.device("cpu")
    if first.type == "cpu" and torch.cuda.is_available():
        types = {"cpu"} if group is None else {str(device) for device in group._device_types}
        if "cpu" not in types or (present and not devices):
            return current_cuda(group)
    return first


def _check_exists(device: torch.device) -> None:
    accelerator = torch.accelerator.current_accelerator()
    has = accelerator is not None and accelerator.type == device.type
    count = torch.accelerator.device_count() if has else 0
    if device.type not in ("cpu", "meta") and (device.index or 0) >= count:
        kind = accelerator.type if has and accelerator is not None else device.type
        raise ValueError(
            f"device_id: there is no {str(device)!r} on this host, which has {count} {kind} "
            "devices. Pass one of them, or 'cpu'."
        )


def check_transport(device: torch.device, transport: TransportOptions) -> None:
    """Raise if the user asks for a transport that does not work on this device.

    Raises:
        ValueError: sockets, or ``wire_dtype``, with an accelerator.
    """
    asked = {
        "wire_dtype": transport.wire_dtype is not None,
        f'collectives="{transport.collectives.value}"': (
            transport.collectives is Collectives.SOCKETS
        ),
    }
    for keyword, is_asked in asked.items():
        if is_asked and device.type != "cpu":
            raise ValueError(
                f"{keyword} is for gloo and parameters in host memory; they are on {device}. "
                "Leave it out, and the backend moves them; MixedPrecision(param_dtype, "
                "reduce_dtype) reduces the communication volume."
            )


def check_offload(device: torch.device, offload: CPUOffload) -> None:
    """Warn if ``cpu_offload`` has no effect."""
    if offload.is_on and offload.path is None and device.type == "cpu":
        warnings.warn(
            "cpu_offload: the parameters are on the CPU already; nothing changes", stacklevel=3
        )


def move_buffers(module: nn.Module, left_alone: set[int], device: torch.device) -> None:
    """Move the buffers that have values to ``device``."""
    for buffer in module.buffers():
        if id(buffer) not in left_alone and not buffer.is_meta and buffer.device != device:
            buffer.data = buffer.data.to(device)
