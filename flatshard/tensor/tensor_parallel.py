"""``TensorParallel``: how a parameter that was a DTensor before wrapping lies on its own mesh.

Its local part is what is flattened and sharded, over other ranks than those of the mesh. Modules
compute with a DTensor over that part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatshard.comm.communicator import Communicator


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """The mesh and the placements of a parameter, which every copy of it shares."""

    layout: Any  # torch's DTensorSpec
    comms: tuple[Communicator, ...]  # one for each dimension of the mesh that splits it

    def __deepcopy__(self, _: object) -> TensorParallel:
        return self  # process groups cannot be copied

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter in the model without any parallelism."""
        return tuple(self.layout.shape)

    def as_dtensor(self, local: Tensor) -> Tensor:
        """A differentiable DTensor over ``local``, which gets the local part of its gradient.

        Torch sums what ranks of the mesh have of a replicated parameter's gradient.
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
        shown._is_param = True  # so that it counts as an ``nn.Parameter``
        return shown

    def hook_of_part(self, hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Any]:
        """``hook`` of a DTensor's gradient, as one of its local part: norms are of all parts."""

        def call(grad: Tensor) -> Any:
            result: Any = hook(self.as_dtensor(grad))
            if result is None:
                return None
            return result.redistribute(self.layout.mesh, self.layout.placements).to_local()

        return call

    def full(self, local: Tensor) -> Tensor:
        """The tensor whose part on this rank is ``local``. Collective: all ranks of the mesh."""
        with torch.no_grad():
            shown: Any = self.as_dtensor(local.to(self.layout.mesh.device_type))
            return shown.full_tensor().to(local.device, copy=True)  # type: ignore[no-any-return]

    def part_of(self, full: Tensor) -> Tensor:
        """This rank's part of a tensor that all ranks of the mesh have. No communication."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        mesh, placements = self.layout.mesh, self.layout.placements
        with torch.no_grad():
            if not isinstance(full, DTensor):
                full = distribute_tensor(full.detach(), mesh, placements, src_data_rank=None)
            return full.redistribute(mesh, placements).to_local()

    def offsets(self) -> tuple[int, ...]:
        """Where this rank's part begins, by dimension."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        layout = self.layout
        found = compute_local_shape_and_global_offset(layout.shape, layout.mesh, layout.placements)
        return tuple(found[1])


class SavedDTensor(NamedTuple):
    """A DTensor over an unsharded buffer, as autograd saved it."""

    local: Any  # how the part on this rank was saved
    layout: Any

    def around(self, local: Tensor) -> Tensor:
        """The DTensor over ``local``."""
        from torch.distributed.tensor import DTensor

        return DTensor(local, self.layout, requires_grad=False)


def tensor_parallel_of(param: Tensor) -> TensorParallel | None:
    """How a parameter lies on a mesh of its own; None for all but those that were DTensors."""
    return getattr(param, "tensor_parallel", None)
