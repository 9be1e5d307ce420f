"""``clip_grad_norm_``: the norm of a model's gradients, one reduction per process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.engine.handle import FlatParamHandle
from flatshard.plan.module_tree import unit_text
from flatshard.tensor import reduction_ops


def check_alike(handles: Sequence[FlatParamHandle], world: Communicator) -> None:
    """Raise where ranks have different units, whose norms would differ too; on all ranks."""
    for handle in handles:
        if handle.topology.world.size < world.size:
            raise RuntimeError(
                f"{unit_text(handle.unit_name)}: clip_grad_norm_() where a unit trains on ranks "
                f"{handle.topology.world.ranks_text} alone: the norm would differ between ranks. "
                "Clip with a norm that you compute, or call clip_grad_norm_() of the units."
            )


def check_reduced(
    handles: Sequence[FlatParamHandle], world: Communicator, *, is_reducing: bool
) -> None:
    """Raise, on all ranks, if any has gradients that were accumulated under ``no_sync``.

    Collective: all ranks of ``world``, unless ``is_reducing``: the last forward began outside of
    ``no_sync``.
    """
    mine = next((h.unit_name for h in handles if h.grad_publish.unreduced.is_shown()), None)
    found = {world.rank: mine}
    if not is_reducing:
        # Ranks may have used different parameters since, and tell each other.
        found = dict(enumerate(world.host.gather_unless_equal(mine, "clip_grad_norm_")))
    for rank, unit in found.items():
        if unit is not None:
            raise RuntimeError(
                f"{unit_text(unit)}, rank {rank}: clip_grad_norm_() on gradients that were "
                "accumulated under no_sync and not reduced. Clip after a backward outside of it."
            )


@torch.no_grad()
def clip_grad_norm_(
    params: Sequence[Tensor],
    handles: Sequence[FlatParamHandle],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """See ``ShardedWrapper.clip_grad_norm_``; ``handles`` are behind the sharded of ``params``.

    Collective: all ranks that hold parts of ``params``.
    """
    max_norm, order = float(max_norm), float(norm_type)
    norms = reduction_ops.norms(_grads(params, handles), order)
    # A number's norm is the number itself, so torch only combines: its dtypes, its errors.
    total = nn.utils.get_total_norm(norms, order, error_if_nonfinite, foreach)
    nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach)
    return total


def _grads(params: Sequence[Tensor], handles: Sequence[FlatParamHandle]) -> list[Tensor]:
    """One gradient per original parameter that has one; elements of none add to no norm."""
    owned = {id(param) for handle in handles for param in handle.sharded}
    grads = [param.grad for param in params if id(param) not in owned and param.grad is not None]
    wanted = {id(param) for param in params}
    for handle in handles:
        grads.extend(handle.grad_publish.published(wanted))
    return [grad for grad in grads if grad.numel() > 0]
