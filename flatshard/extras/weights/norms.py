"""``norms``: one norm for each parameter of a model, for training logs."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.engine.handle import FlatParamHandle
from flatshard.module.sharding import outermost_shardings, units_between_steps
from flatshard.tensor import reduction_ops
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.tensor.sharded_tensor import local_range

# For each model, copies of this rank's chunks at the last `norms("update")`.
_BEFORE: weakref.WeakKeyDictionary[nn.Module, dict[Any, Tensor]] = weakref.WeakKeyDictionary()


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
    units = units_between_steps(model, "norms()")
    wrapper, order = outermost_shardings(model)[0].wrapper, float(norm_type)
    handles = [handle for unit in units for handle in unit.handles]
    # Without this context, each access to an attribute of a sharded tensor takes 10 microseconds.
    with torch._C.DisableTorchFunctionSubclass():
        pairs = _pairs(handles, kind, _BEFORE.setdefault(wrapper, {}))
        names = [param.name if per == "parameter" else param.spec.unit for param, _ in pairs]
        grouped: dict[str, list[float]] = {}
        for name, value in zip(names, _norms([tensor for _, tensor in pairs], order), strict=True):
            grouped.setdefault(name, []).append(value)
        found = Norms({name: _joined(values, order) for name, values in grouped.items()})
        found.non_finite = {name: [] for name, value in found.items() if not math.isfinite(value)}
        if found.non_finite:  # the same on all ranks, so all ranks take part in the exchange below
            mine = set()
            for name, (_, tensor) in zip(names, pairs, strict=True):
                if name in found.non_finite and not torch.isfinite(local_range(tensor)).all():
                    mine.add(name)
            world = units[0].topology.world
            everyone = world.host.gather(mine, "norms(): which ranks have inf or NaN")
            for rank, theirs in zip(world.ranks, everyone, strict=True):
                for name in theirs:
                    found.non_finite[name].append(rank)
    return found


def _pairs(
    handles: list[FlatParamHandle], kind: str, before: dict[FlatParamHandle, Tensor]
) -> list[tuple[OriginalParam, Tensor]]:
    """Return pairs of a parameter and the tensor whose norm is wanted.

    For updates, also replaces the chunks in ``before`` by copies of the present chunks.
    """
    found: list[tuple[OriginalParam, Tensor | None]] = []
    for handle in handles:
        handle.absorb_replaced()
        chunk = handle.flat_param.detach()
        if kind == "grad":
            found += [(param, param.sharded.grad) for param in handle.params]
        elif kind == "param":
            found += [(param, param.sharded) for param in handle.params]
        else:
            last, before[handle] = before.get(handle), chunk.clone()
            if last is not None:
                change = chunk - last
                for param in handle.params:
                    found.append((param, param.of_chunk(change)))
                    # The ranks compare the role, so an update is never combined with a gradient.
                    found[-1][1].role = "update of"  # type: ignore[union-attr]
    return [
        (param, tensor)
        for param, tensor in found
        if tensor is not None and (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    ]


def _norms(tensors: list[Tensor], order: float) -> list[float]:
    if not tensors:
        return []
    # Compute norms in fp32 at least. By default, torch rounds a norm to the dtype of the tensor,
    # and bfloat16 has only 3 digits.
    is_double = any(tensor.dtype.to_real() is torch.float64 for tensor in tensors)
    found = reduction_ops.norms(tensors, order, torch.float64 if is_double else torch.float32)
    values: list[float] = torch.stack([norm.to(found[0].device) for norm in found]).tolist()
    return values


def _joined(values: list[float], order: float) -> float:
    """Return the norm of several tensors together, from the norm of each tensor."""
    if len(values) == 1 or order == 0:
        return sum(values)
    return float(torch.linalg.vector_norm(torch.tensor(values, dtype=torch.float64), order))
