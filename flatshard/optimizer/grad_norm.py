"""``clip_grad_norm_``: the norm of a model's gradients, one reduction per process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.engine.handle import FlatParamHandle
from flatshard.tensor import reduction_ops


def check_reduced(
    handles: Sequence[FlatParamHandle], world: Communicator, *, is_reducing: bool
) -> None:
    """Refuse gradients that were accumulated under ``no_sync`` and not reduced.

    Collective: all ranks of ``world``, unless ``is_reducing``.

    Args:
        handles: whose gradients are asked for.
        world: the ranks that train the model.
        is_reducing: whether the last forward began outside of ``no_sync``. If not, ranks may have
            used different parameters since, and tell each other.

    Raises:
        RuntimeError: on all ranks, when any of them has such gradients.
    """
    mine = next((h.unit_name for h in handles if h.grad_publish.unreduced.is_shown()), None)
    if is_reducing:
        found = {world.rank: mine}
    else:
        found = dict(enumerate(world.gather_objects(mine, op_name="clip_grad_norm_")))
    for rank, unit in found.items():
        if unit is not None:
            raise RuntimeError(
                f"unit {unit!r}, rank {rank}: clip_grad_norm_() on gradients that were accumulated "
                "under no_sync and not reduced. Clip after a backward outside of no_sync."
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
    """Scale the gradients of ``params`` so that their total norm is at most ``max_norm``.

    Collective: all ranks that hold parts of ``params``.

    Args:
        params: everything to scale, sharded or not.
        handles: the flat parameters behind those that are sharded.
        max_norm: the largest norm allowed.
        norm_type: the order of the norm.
        error_if_nonfinite: whether a norm that is not finite raises.
        foreach: as in ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        The total norm before; 0-dimensional, dtype and device as torch's.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
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
