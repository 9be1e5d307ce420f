"""``norms``: one norm for each parameter of a model, for training logs."""

from __future__ import annotations

import math
import weakref
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.engine.handle import FlatParamHandle
from flatshard.module.wrappers import units_between_steps
from flatshard.tensor import reduction_ops
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import UNREDUCED, FlatShardTensor, local_range, sharded_in

# In this file, a group is a tuple that describes tensors whose norms are reduced together:
# - text that names the tensors, and that ranks compare;
# - the communicators over which the norms are reduced;
# - the tensors' indices in the list of the tensors of all parameters;
# - the indices of the tensors that have elements on this rank;
# - for each tensor that has elements on this rank, its position among the tensors of the group: a
#   tensor of integers, on the device of the tensors.

# For each model, a dictionary with two kinds of entries:
# - plan of a flat parameter: copy of this rank's chunk at the last `norms("update")`;
# - "grad", "param" or "update": the groups of the last call of this kind, and the names, types and
#   devices for which the groups are valid. Usually, the next call can use the same groups.
_KEPT: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()


class Norms(dict[str, float]):
    """Norms, keyed by name.

    Attributes:
        non_finite: for each name whose norm is inf or NaN, the ranks whose chunk has an element
            that is inf or NaN.
    """

    non_finite: dict[str, list[int]]


def norms(model: nn.Module, kind: str, per: str, norm_type: float) -> Norms:
    """Compute norms of the full tensors. Documented at ``ShardedWrapper.norms``."""
    if kind not in ("grad", "param", "update") or per not in ("parameter", "unit"):
        raise ValueError(
            f"norms(): expected kind 'grad', 'param' or 'update', and per 'parameter' or 'unit', "
            f"got {kind!r} and {per!r}."
        )
    units, order = units_between_steps(model, "norms()"), float(norm_type)
    handles = [handle for unit in units for handle in unit.handles]
    specs = [param.spec for handle in handles for param in handle.params]
    attribute, kept = ("unit" if per == "unit" else "name"), _KEPT.setdefault(model, {})
    # Without this context, each access to an attribute of a sharded tensor takes 10 microseconds.
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        tensors = _tensors(kind, handles, kept)
        names = [spec.name for spec in specs]
        state = names, [*map(type, tensors)], [handle.flat_param.device for handle in handles]
        if kind not in kept or kept[kind][0] != state:
            kept[kind] = state, _groups(kind, specs, tensors)
        groups = kept[kind][1]
        values = [_norms(group, tensors, order) for group in groups]
        # Copy the norms of all groups to the host at once, so that the host waits only once.
        numbers = torch.cat([one.to(values[0].device) for one in values]).tolist() if values else []
        names = [getattr(specs[index], attribute) for group in groups for index in group[2]]
        found = Norms(zip(names, numbers, strict=True))
        for unit in found if per == "unit" else ():
            some = [one for name, one in zip(names, numbers, strict=True) if name == unit]
            joined = torch.linalg.vector_norm(torch.tensor(some, dtype=torch.float64), order)
            found[unit] = sum(some) if order == 0 else float(joined)
        found.non_finite = {name: [] for name, value in found.items() if not math.isfinite(value)}
        if found.non_finite:  # on all ranks
            own = [(specs[i], local_range(tensors[i])) for group in groups for i in group[3]]
            mine = {getattr(s, attribute) for s, part in own if not torch.isfinite(part).all()}
            world = units[0].topology.world
            everyone = world.host.gather(mine, "norms(): which ranks have inf or NaN")
            for rank, theirs in zip(world.ranks, everyone, strict=True):
                for name in theirs & found.non_finite.keys():
                    found.non_finite[name].append(rank)
    return found


def _tensors(kind: str, handles: list[FlatParamHandle], kept: dict[Any, Any]) -> list[Any]:
    """Return a tensor or None for each parameter; for updates, only this rank's elements."""
    found: list[Any] = [param.sharded for handle in handles for param in handle.params]
    if kind == "grad":
        # Call the getter of `Tensor`, because the property of `FlatShardTensor` takes longer.
        found = [*map(Tensor.grad.__get__, found)]  # type: ignore[union-attr]
        for grad in sharded_in(found) if UNREDUCED else ():
            reduction_ops.own_part(grad)  # raises if the gradient was not reduced yet
    changes: list[Any] = []
    for handle in handles if kind == "update" else ():
        handle.absorb_replaced()
        # Use the plan as the key, and not the handle: the handle refers to the model, so the
        # entry would keep the model alive forever.
        chunk, last = handle.flat_param.detach(), kept.get(handle.plan)
        kept[handle.plan] = chunk.clone()
        change = None if last is None else chunk - last.to(chunk)
        parts = [slice(one.local.start, one.local.end) for one in handle.params]
        changes += [None if change is None else change[part] for part in parts]
    return changes if kind == "update" else found


def _groups(kind: str, specs: list[ShardSpec], tensors: list[Any]) -> list[Any]:
    indices_of: dict[Any, list[int]] = {}
    for index, (spec, tensor) in enumerate(zip(specs, tensors, strict=True)):
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
            # A plain tensor in `.grad` of a sharded parameter was set by the user, and is the full
            # gradient on every rank. So the norm needs no communication.
            is_whole = not isinstance(tensor, FlatShardTensor) and kind == "grad"
            comms = () if is_whole and spec.comm.size > 1 else spec.comms
            indices_of.setdefault((comms, tensor.device), []).append(index)
    groups = []
    for (comms, device), indices in indices_of.items():
        names = [specs[index].name for index in indices]
        # Put the kind into the text that ranks compare. Otherwise ranks that call `norms` with
        # different kinds would combine norms of parameters with norms of gradients.
        which = f"set {zlib.crc32(', '.join(names).encode()):08x}"
        text = f"{len(names)} tensors from {kind} {names[0]!r} on, {which}"
        places = [i for i, index in enumerate(indices) if local_range(tensors[index]).numel()]
        own = [indices[place] for place in places]
        groups.append((text, comms, indices, own, torch.tensor(places, device=device)))
    return groups


def _norms(group: Any, tensors: list[Any], order: float) -> Tensor:
    """Return the norms of a group, in float64. Collective: all ranks of its communicators."""
    text, comms, indices, own, places = group
    # Replace complex numbers by absolute values, which have the same norm: torch would warn about
    # a norm of order 0 of complex numbers.
    parts = [local_range(tensors[index]) for index in own]
    parts = [part.abs() if part.is_complex() else part for part in parts]
    # A tensor without elements on this rank must not change the norm.
    local = places.new_full((len(indices),), 0.0 if order >= 0 else math.inf, dtype=torch.float64)
    if parts:
        # Choose the dtype of the norms: by default, torch rounds a norm to the dtype of the tensor,
        # and bfloat16 has only 3 decimal digits.
        dtype = torch.float64 if torch.float64 in {part.dtype for part in parts} else torch.float32
        local[places] = torch.stack(torch._foreach_norm(parts, order, dtype)).double()
    return reduction_ops.joined_norms(local, order, comms, f"norms of order {order:g} of {text}")
