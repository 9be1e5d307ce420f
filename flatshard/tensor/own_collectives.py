"""Collectives of the user's program on sharded tensors.

DistributedDataParallel keeps parameters in full on every rank, and programs average, compare or
broadcast these copies. On a sharded tensor, a backend would move the range of one rank, or a copy
that is dropped afterwards. So a collective either has the result of the collective on equal copies,
without moving values, or raises before communication.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from flatshard.tensor.foreign_wrappers import refuse_foreign_wrapper
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import GRADIENT, HANDLERS, FlatShardTensor, first_sharded

# An all-reduce of N equal tensors multiplies them by N, or changes nothing.
_REDUCTIONS = ("SUM", "AVG", "MAX", "MIN")


def _collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compute an all-reduce of a tensor that is the same on all ranks, or raise."""
    if (func.__module__, func.__name__) == (dist.distributed_c10d.__name__, "all_reduce"):
        _all_reduce(*args, **kwargs)
    else:
        _refuse(first_sharded(args, kwargs), func.__name__.removesuffix(".default"))


def _all_reduce(
    tensor: FlatShardTensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> None:
    """Give ``tensor`` the values of an all-reduce of equal full tensors, without communication.

    SUM multiplies the tensor by the number of ranks; AVG, MAX and MIN change nothing.

    Collective: the ranks that train the parameter. They compare operation and tensor before.
    """
    name = next((name for name in _REDUCTIONS if op == getattr(dist.ReduceOp, name)), None)
    if name is None or async_op or not tensor.is_alike or not _trains(tensor.spec, group):
        _refuse(tensor, "all_reduce")
    spec, asked = tensor.spec, (name, tensor.origin.digest)
    for comm in (spec.comm, spec.replicas):
        if len(comm.host.gather_unless_equal(asked, f"all-reduce of {spec.name!r}")) > 1:
            raise RuntimeError(
                f"{spec.where()}: all_reduce() of a sharded tensor, into which the ranks computed "
                "different numbers; each rank has only a range of its own result. Expected the "
                "same operations on all ranks. Compute under "
                "ShardedWrapper.summon_full_params(model), where each rank has full tensors."
            )
    if name == "SUM":
        with torch.no_grad():
            tensor.mul_(spec.comm.size * spec.replicas.size)


def _trains(spec: ShardSpec, group: Any) -> bool:
    """Whether ``group`` has exactly the ranks that train the parameter, without other splits."""
    if len(spec.comms) > 1 or not isinstance(group, dist.ProcessGroup | None):
        return False
    ranks = set(dist.get_process_group_ranks(group))
    # This rank's row and column of the grid of ranks; the other ranks look at theirs.
    parts = [comm.ranks for comm in (spec.comm, spec.replicas) if comm.size > 1]
    return len(ranks) == spec.comm.size * spec.replicas.size and ranks.issuperset(chain(*parts))


def _refuse(tensor: FlatShardTensor, name: str) -> NoReturn:
    refuse_foreign_wrapper()
    remedy = (
        "The gradient is the average over all ranks already: leave the collective out."
        if tensor.role == GRADIENT
        else f"Expected a synchronous all_reduce ({', '.join(_REDUCTIONS)}), over all ranks that "
        "train it, of a parameter. To write values, communicate under "
        "ShardedWrapper.summon_full_params(model), or use model.load_state_dict()."
    )
    raise RuntimeError(
        f"{tensor.spec.where(tensor.described)} is sharded: {name}() would move only this rank's "
        f"range, or a copy that is dropped. {remedy} To read values, communicate full_tensor(), "
        "which all ranks call. [FS-COLLECTIVE]"
    )


HANDLERS["collective"] = _collective
