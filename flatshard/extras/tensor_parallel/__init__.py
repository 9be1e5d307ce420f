"""Extra: DTensors as parameters (tensor parallelism).

Tensor parallelism has cut a DTensor over the ranks of a mesh. flatshard shards this rank's local
part of the DTensor once more, over the data parallel ranks, which are not in the DTensor's mesh. In
a forward, modules compute with a DTensor whose local part is the unsharded parameter.

Without this folder, wrapping a model with a DTensor as a parameter raises ``MissingExtraError``.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatshard.comm.communicator import Communicator
from flatshard.comm.process_groups import ranks_text
from flatshard.comm.ranks import communicator
from flatshard.module.model_plan import PlannedUnit
from flatshard.module.settings import Settings
from flatshard.options import Collectives, TransportOptions
from flatshard.units.module_tree import Ignored, ParamInfo, find_params, unit_text

# Communicators over the ranks of a mesh use native collectives, because they only exchange numbers.
_NATIVE = TransportOptions(Collectives.NATIVE)


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """How tensor parallelism has cut a parameter over a mesh."""

    layout: Any  # torch's DTensorSpec
    comms: tuple[Communicator, ...]  # a communicator for each mesh dimension that is split
    shape: tuple[int, ...]  # the parameter's shape in the model without parallelism
    strides: tuple[int, ...]  # the same parameter's strides, in elements

    def as_dtensor(self, local: Tensor) -> Tensor:
        """Return a DTensor whose local part is ``local``, so that backward reaches ``local``.

        If the parameter is replicated in the mesh, torch sums the gradient over the mesh's ranks.
        """
        from torch.distributed.tensor import DTensor  # slow to load

        with torch.inference_mode(False), torch.enable_grad():
            shown = DTensor.from_local(
                local,
                self.layout.mesh,
                self.layout.placements,
                run_check=False,
                shape=self.layout.shape,
                stride=self.layout.stride,
            )
        if isinstance(local, nn.Parameter):
            shown.__dict__ = local.__dict__  # share the attributes that users set
        shown._is_param = True  # makes the DTensor an instance of ``nn.Parameter``
        return shown

    def hook_of_part(self, hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Any]:
        """Return a hook for the local part's gradient, which calls ``hook`` with a DTensor."""

        def call(grad: Tensor) -> Any:
            result: Any = hook(self.as_dtensor(grad))
            if result is None:
                return None
            return result.redistribute(self.layout.mesh, self.layout.placements).to_local()

        return call

    def full(self, local: Tensor) -> Tensor:
        """Return the full tensor. ``local`` is this rank's part of the full tensor.

        Collective: all ranks of the mesh.
        """
        with torch.no_grad():
            shown: Any = self.as_dtensor(local.to(self.layout.mesh.device_type))
            return shown.full_tensor().to(local.device, copy=True)  # type: ignore[no-any-return]

    def part_of(self, full: Tensor) -> Tensor:
        """Return this rank's part of the full tensor ``full``. No communication."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        mesh, placements = self.layout.mesh, self.layout.placements
        with torch.no_grad():
            if not isinstance(full, DTensor):
                full = distribute_tensor(full.detach(), mesh, placements, src_data_rank=None)
            return full.redistribute(mesh, placements).to_local()

    def offsets(self) -> tuple[int, ...]:
        """Return, for each dimension, the index at which this rank's part begins."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        layout = self.layout
        found = compute_local_shape_and_global_offset(layout.shape, layout.mesh, layout.placements)
        return tuple(found[1])


@contextmanager
def local_parts(module: nn.Module, ignored: Ignored, settings: Settings) -> Iterator[None]:
    """Replace DTensors among the module's parameters by local parts, for wrapping.

    The local parts stay in the module if the ``with`` block succeeds. If the block raises, the
    DTensors are put back. Collective: all ranks of the DTensors' meshes.
    """
    found = [one for one in find_params(module, ignored.ids()) if hasattr(one.param, "_spec")]
    for one in found:
        _check(one.name, one.param, settings)
    try:
        # `torch.utils.swap_tensors` cannot swap a DTensor and an ordinary parameter, because the
        # classes have different slots.
        for one in found:
            _put(one, _local_part(one.param))
        yield
    except BaseException:
        for one in found:
            _put(one, one.param)
        raise
    for one in found:
        # Free the memory of the DTensor, to which an optimizer made before wrapping still refers.
        param: Any = one.param
        param._local_tensor, param.flattened_as = param._local_tensor.new_empty(0), one.name


def _refuse_replaced(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if "flattened_as" in param.__dict__:
            raise RuntimeError(
                "step(): the optimizer was made before wrapping, and still has the DTensor "
                f"{param.flattened_as!r}, which a sharded parameter has replaced in the model. "
                "Make the optimizer from model.parameters() after wrapping."
            )


# Runs once: this module is imported when the first model with a DTensor is wrapped.
register_optimizer_step_pre_hook(_refuse_replaced)


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
    split = TensorParallel(layout, comms, tuple(layout.shape), tuple(layout.stride))
    local.dtensor_split = split  # type: ignore[attr-defined]
    return local


def _check(name: str, param: Any, settings: Settings) -> None:
    where, mesh = f"ShardedWrapper: parameter {name!r} is a DTensor", param._spec.mesh
    world, split = settings.ranks.world, mesh.mesh.flatten().tolist()
    ranks = world.ranks if world.size > 1 else [dist.get_rank()]
    if set(ranks).intersection(split) - {dist.get_rank()}:
        raise ValueError(
            f"{where} over ranks {ranks_text(split)}, and would be sharded over ranks "
            f"{ranks_text(ranks)}, which hold other parts of the DTensor. Pass only the data "
            'parallel dimension of the mesh: device_mesh=mesh["dp"].'
        )
    kinds = {type(placement).__name__ for placement in param._spec.placements}
    reasons = {
        f"placed as {', '.join(sorted(kinds))}": not kinds <= {"Shard", "Replicate"},
        "on the meta device": param.is_meta,
        "with hooks": param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None),
        "with a gradient": param.grad is not None,
    }
    _refuse(where, reasons)


def _refuse(where: str, reasons: dict[str, Any]) -> None:
    """Raise NotImplementedError for the first reason that applies."""
    for reason, applies in reasons.items():
        if applies:
            raise NotImplementedError(
                f"{where} {reason}, which is not supported. Change this before wrapping, or do "
                "not apply tensor parallelism to this parameter."
            )


def check_units(units: Iterable[PlannedUnit]) -> None:
    """Raise NotImplementedError if a setting of a unit is not supported for the unit's DTensors."""
    for unit in units:
        settings = unit.settings
        for flat in unit.flats:
            reasons = {
                f"with boundary={settings.boundary!r}": settings.boundary != "element",
                f"with gather_dtype={flat.precision.gather_dtype}": flat.precision.gather_dtype,
                "in a shard group of one rank (as NO_SHARD)": settings.topology.shard.size == 1,
            }
            for one in (one for one in flat.infos if hasattr(one.param, "dtensor_split")):
                _refuse(f"{unit_text(unit.name)}: parameter {one.name!r} is a DTensor", reasons)
