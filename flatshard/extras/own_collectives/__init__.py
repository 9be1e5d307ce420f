"""Extra: collectives that the user's program calls on a parameter (``dist.all_reduce(p)``).

Under DistributedDataParallel every rank holds the full parameter, and programs average, compare or
broadcast the ranks' copies. With a sharded tensor, the backend would send only the elements of one
rank, or would write to a temporary copy. So a collective on a sharded tensor either raises before
any communication, or returns the result that the collective would have if all ranks held the same
full tensor. No values need to be sent for this.

Without this folder, all collectives on sharded tensors raise.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import GRADIENT, FlatShardTensor, first_sharded
from flatshard.units.module_proxy import refuse_foreign_wrapper

# The reductions that `_all_reduce` supports. They need no communication of values, because all
# ranks have parts of the same tensor: the SUM of N equal tensors is N times the tensor, and AVG,
# MAX and MIN change nothing.
_REDUCTIONS = ("SUM", "AVG", "MAX", "MIN")


def collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Handle a collective that the user's program calls on a sharded tensor.

    An all-reduce is supported. Any other collective raises RuntimeError.
    """
    if (func.__module__, func.__name__) == (dist.distributed_c10d.__name__, "all_reduce"):
        _all_reduce(*args, **kwargs)
    else:
        refuse(first_sharded(args, kwargs), func.__name__.removesuffix(".default"))


def _all_reduce(
    tensor: FlatShardTensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> None:
    """Write into ``tensor`` the result of an all-reduce in which each rank has the full tensor.

    No values are sent: SUM multiplies the tensor by the number of ranks, and AVG, MAX and MIN
    change nothing.

    Collective: all ranks that train the parameter. The ranks check that all ranks call the same
    operation on the same tensor.

    Raises:
        RuntimeError: the arguments are not supported, or the ranks' calls differ.
    """
    name = next((name for name in _REDUCTIONS if op == getattr(dist.ReduceOp, name)), None)
    if name is None or async_op or not tensor.is_alike or not _trains(tensor.spec, group):
        refuse(tensor, "all_reduce")
    spec, origin = tensor.spec, tensor.origin
    asked = name, origin.digest, origin.num_writes
    for comm in (spec.comm, spec.replicas):
        if len(comm.host.gather_unless_equal(asked, f"all-reduce of {spec.name!r}")) > 1:
            raise RuntimeError(
                f"{spec.where()}: all_reduce() got a sharded tensor that the ranks have computed "
                "or written differently, so the ranks' ranges do not form one tensor. Expected the "
                "same operations with the same numbers on all ranks. Compute and write under "
                "ShardedWrapper.summon_full_params(model), where each rank has full tensors. "
                "[FS-COLLECTIVE]"
            )
    if name == "SUM":
        with torch.no_grad():
            tensor.mul_(spec.comm.size * spec.replicas.size)


def _trains(spec: ShardSpec, group: Any) -> bool:
    """Whether the members of ``group`` are exactly the ranks that train the parameter.

    False if the parameter is part of a DTensor. ``group``: None for the default group.
    """
    if len(spec.comms) > 1 or not isinstance(group, dist.ProcessGroup | None):
        return False
    ranks = set(dist.get_process_group_ranks(group))
    # Check that ``group`` has the right size, and contains this rank's shard group and replicate
    # group. A rank does not know the members of other shard groups and replicate groups, but the
    # other ranks check these.
    parts = [comm.ranks for comm in (spec.comm, spec.replicas) if comm.size > 1]
    return len(ranks) == spec.comm.size * spec.replicas.size and ranks.issuperset(chain(*parts))


def refuse(tensor: FlatShardTensor, name: str) -> NoReturn:
    """Raise RuntimeError: the program called the collective ``name`` on a sharded tensor."""
    refuse_foreign_wrapper()
    remedy = (
        "The gradient is already averaged over all ranks: leave the collective out."
        if tensor.role == GRADIENT
        else f"Expected a synchronous all_reduce ({', '.join(_REDUCTIONS)}) of a parameter, over "
        "all ranks that train the parameter. To write values, communicate under "
        "ShardedWrapper.summon_full_params(model), or use model.load_state_dict()."
    )
    raise RuntimeError(
        f"{tensor.spec.where(tensor.described)} is sharded: {name}() would send only this rank's "
        f"range, or write to a temporary copy. {remedy} To read values, call full_tensor() on all "
        "ranks and communicate the result. [FS-COLLECTIVE]"
    )
