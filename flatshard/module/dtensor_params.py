"""``local_parts``: parameters that are DTensors become plain ones of this rank's part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from flatshard.comm.process_groups import ranks_text
from flatshard.comm.ranks import communicator
from flatshard.module.inspection import UnwrappedModel
from flatshard.module.model_plan import PlannedUnit
from flatshard.module.settings import Settings
from flatshard.options.collectives import Collectives, TransportOptions
from flatshard.plan.module_tree import unit_text
from flatshard.plan.param_info import ParamInfo, find_params
from flatshard.tensor.tensor_parallel import TensorParallel, tensor_parallel_of

_NATIVE = TransportOptions(Collectives.NATIVE)  # for numbers alone
_OTHERWISE = "Leave that out, or apply tensor parallelism to other parameters only."


@contextmanager
def local_parts(model: UnwrappedModel, settings: Settings) -> Iterator[None]:
    """Replace DTensors among the parameters by their local parts; undone by an exception.

    Collective: all ranks of their meshes, where there are any.

    Raises:
        ValueError: a mesh that shares ranks with those over which the parameters are to be sharded.
        NotImplementedError: placements other than Shard and Replicate; a DTensor on the meta
            device; one with hooks or a gradient.
    """
    infos = find_params(model.module, model.left_alone)
    found: dict[str, tuple[ParamInfo, Any]] = {
        one.name: (one, one.param) for one in infos if hasattr(one.param, "_spec")
    }
    for name, (_, param) in found.items():
        _check(name, param, settings)
    try:
        # Replaced, as torch swaps no tensors of classes with other slots.
        for name, (one, param) in found.items():
            _put(one, _local_part(param))
            param.flattened_as = name
        yield
    except BaseException:
        for one, param in found.values():
            param.__dict__.pop("flattened_as", None)
            _put(one, param)
        raise
    for _, param in found.values():
        param._local_tensor = param._local_tensor.new_empty(0)  # optimizers may hold the DTensor


def _put(one: ParamInfo, param: nn.Parameter) -> None:
    for place in one.locations:
        place.module._parameters[place.attribute] = param


def _local_part(param: Any) -> nn.Parameter:
    layout, attributes = param._spec, param.__dict__
    comms = tuple(
        communicator(layout.mesh.get_group(dim), mode=_NATIVE)
        for dim, placement in enumerate(layout.placements)
        if not placement.is_replicate() and layout.mesh.size(dim) > 1
    )
    local = nn.Parameter(param._local_tensor.detach(), param.requires_grad)
    local.__dict__.update({k: v for k, v in attributes.items() if k not in ("_spec", "_is_param")})
    local.tensor_parallel = TensorParallel(layout, comms)  # type: ignore[attr-defined]
    return local


def _check(name: str, param: Any, settings: Settings) -> None:
    where, mesh = f"ShardedWrapper: parameter {name!r} is a DTensor", param._spec.mesh
    world, split = settings.ranks.world, mesh.mesh.flatten().tolist()
    ranks = world.ranks if world.size > 1 else [dist.get_rank()]
    if set(ranks).intersection(split) - {dist.get_rank()}:
        raise ValueError(
            f"{where} over ranks {ranks_text(split)}, and would be sharded over ranks "
            f"{ranks_text(ranks)}, which hold other parts of it. Pass the dimension of the mesh "
            'over which data are split: device_mesh=mesh["dp"].'
        )
    kinds = {type(placement).__name__ for placement in param._spec.placements}
    reasons = {
        f"placed as {', '.join(sorted(kinds))}": not kinds <= {"Shard", "Replicate"},
        "on the meta device": param.is_meta,
        "with hooks": param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None),
        "with a gradient": param.grad is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise NotImplementedError(f"{where} {reason}, which is not supported. {_OTHERWISE}")


def check_units(units: Iterable[PlannedUnit]) -> None:
    """Raise NotImplementedError where a unit with such parameters asks for what cannot be done."""
    for unit in units:
        settings = unit.settings
        for kind, owned in unit.flat_params.items():
            first = next((one for one in owned if tensor_parallel_of(one.param)), None)
            reasons = {
                f"boundary={settings.boundary!r}": settings.boundary != "element",
                f"gather_dtype={kind.precision.gather_dtype}": kind.precision.gather_dtype,
                "a shard group of one rank (NO_SHARD, say)": settings.topology.shard.size == 1,
            }
            for reason, applies in reasons.items():
                if first is not None and applies:
                    raise NotImplementedError(
                        f"{unit_text(unit.name)}: {reason} with parameter {first.name!r}, a "
                        f"DTensor, is not supported. {_OTHERWISE}"
                    )
