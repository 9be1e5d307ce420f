"""``norms``: one norm for each parameter of a model, for training logs."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.module.wrappers import units_between_steps
from flatshard.tensor import operators
from flatshard.tensor.sharded_tensor import UNREDUCED, FlatShardTensor, local_range, sharded_in


class Norms(dict[str, float]):
    """Norms, keyed by name.

    Attributes:
        non_finite: for each name whose norm is inf or NaN, the ranks whose shard has an element
            that is inf or NaN.
    """

    non_finite: dict[str, list[int]]


def norms(model: nn.Module, kind: str, per: str, norm_type: float) -> Norms:
    """Compute norms of the full tensors. Documented at ``ShardedWrapper.norms``."""
    if kind not in ("grad", "param") or per not in ("parameter", "unit"):
        raise ValueError(
            f"norms(): expected kind 'grad' or 'param', and per 'parameter' or 'unit', got "
            f"{kind!r} and {per!r}."
        )
    units, order = units_between_steps(model, "norms()"), float(norm_type)
    params = [param for unit in units for handle in unit.handles for param in handle.params]
    specs = [param.spec for param in params]
    attribute = "unit" if per == "unit" else "name"
    # Without this context, each access to an attribute of a sharded tensor takes 10 microseconds.
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        tensors: list[Any] = [param.sharded for param in params]
        if kind == "grad":
            # Call the getter of `Tensor`, because the property of `FlatShardTensor` takes longer.
            tensors = [*map(Tensor.grad.__get__, tensors)]  # type: ignore[union-attr]
            for grad in sharded_in(tensors) if UNREDUCED else ():
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
        indices = [*chain.from_iterable(groups.values())]
        names = [getattr(specs[index], attribute) for index in indices]
        found = Norms(zip(names, numbers, strict=True))
        for unit in found if per == "unit" else ():
            some = [one for name, one in zip(names, numbers, strict=True) if name == unit]
            joined = torch.linalg.vector_norm(torch.tensor(some, dtype=torch.float64), order)
            found[unit] = sum(some) if order == 0 else float(joined)
        found.non_finite = {name: [] for name, value in found.items() if not math.isfinite(value)}
        if found.non_finite:  # norms are equal on all ranks, so all ranks or none enter
            own = zip(names, (local_range(tensors[index]) for index in indices), strict=True)
            mine = {name for name, part in own if not torch.isfinite(part).all()}
            world = units[0].topology.world
            everyone = world.host.gather(mine, "norms(): which ranks have inf or NaN")
            for rank, theirs in zip(world.ranks, everyone, strict=True):
                for name in theirs & found.non_finite.keys():
                    found.non_finite[name].append(rank)
    return found
