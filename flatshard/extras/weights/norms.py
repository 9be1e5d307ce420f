"""``norms``: one norm for each parameter of a model, for training logs."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.module.wrappers import units_between_steps
from flatshard.tensor import operators
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_range, sharded_in


def norms(model: nn.Module, kind: str, norm_type: float) -> dict[str, float]:
    """Compute norms of the full tensors. Documented at ``ShardedWrapper.norms``."""
    if kind not in ("grad", "param"):
        raise ValueError(f"norms(): expected kind 'grad' or 'param', got {kind!r}.")
    units, order = units_between_steps(model, "norms()"), float(norm_type)
    params = [param for unit in units for handle in unit.handles for param in handle.params]
    specs = [param.spec for param in params]
    # Without this context, each access to an attribute of a sharded tensor takes 10 microseconds.
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        tensors: list[Any] = [param.sharded for param in params]
        if kind == "grad":
            # Call the getter of `Tensor`, because the property of `FlatShardTensor` takes longer.
            tensors = [*map(Tensor.grad.__get__, tensors)]  # type: ignore[union-attr]
            for grad in sharded_in(tensors):
                operators.own_part(grad)  # raises if the gradient was not reduced yet
        groups: dict[tuple[Communicator, ...], list[int]] = {}
        for index, (spec, tensor) in enumerate(zip(specs, tensors, strict=True)):
            if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
                # If the user has set `.grad` of a sharded parameter to a plain tensor, this is the
                # full gradient on every rank, so its norm needs no communication.
                is_whole = not isinstance(tensor, FlatShardTensor)
                comms = () if is_whole and spec.comm.size > 1 else spec.comms
                groups.setdefault(comms, []).append(index)
        values = []
        for comms, some in groups.items():
            parts = [local_range(tensors[index]) for index in some]
            # Ranks compare these names. Each name contains `kind`: otherwise, if ranks called
            # `norms` with different kinds, norms of parameters and of gradients would be added.
            names = [f"{kind} {specs[index].name!r}" for index in some]
            values.append(operators.joined_norms(parts, names, order, None, comms))
        # Copy the norms of all groups to the host at once, so that the host waits only once.
        numbers = torch.cat([one.to(values[0].device) for one in values]).tolist() if values else []
    names = [specs[index].name for index in chain.from_iterable(groups.values())]
    return dict(zip(names, numbers, strict=True))
