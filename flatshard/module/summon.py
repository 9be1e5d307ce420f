"""``summon``: a context in which the modules of a model hold full parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from torch import nn

from flatshard.engine.unit import Unit
from flatshard.module.settings import as_flags
from flatshard.module.sharding import handles_in, outermost_shardings, shardings_in
from flatshard.plan.module_tree import unit_text
from flatshard.state import full_params
from flatshard.tensor.sharded_tensor import FlatShardTensor


@contextlib.contextmanager
def summon(module: nn.Module, request: full_params.Request, *, recurse: bool) -> Iterator[None]:
    """See ``ShardedWrapper.summon_full_params``. Collective at entry."""
    as_flags(recurse=recurse, **vars(request))
    if request.rank0_only and request.writeback:
        raise ValueError(
            "summon_full_params: rank0_only=True needs writeback=False, got writeback=True: "
            "what rank 0 writes would not reach the other ranks' parts. To edit, let every "
            "rank write the same with rank0_only=False."
        )
    shardings = shardings_in(module) if recurse else outermost_shardings(module)
    for one in shardings:
        one.check_between_steps("summon_full_params()")
    _check_owns_parameters(module)
    units = dict.fromkeys(one.unit for one in shardings)
    handles = [handle for unit in units for handle in unit.handles]
    with full_params.summoned(handles, request), _inert(units):
        yield


@contextlib.contextmanager
def _inert(units: Collection[Unit]) -> Iterator[None]:
    """Let forwards of modules that hold full parameters communicate nothing."""
    for unit in units:
        unit.is_summoned = True
    try:
        yield
    finally:
        for unit in units:
            unit.is_summoned = False


def _check_owns_parameters(module: nn.Module) -> None:
    """Raise if a unit that is not in ``module`` owns one of its parameters."""
    inside = {id(param.spec) for handle in handles_in(module) for param in handle.params}
    for part in module.modules():
        for value in (*part._parameters.values(), *vars(part).values()):
            if isinstance(value, FlatShardTensor) and id(value.spec) not in inside:
                raise RuntimeError(
                    f"summon_full_params: parameter {value.spec.name!r} belongs to "
                    f"{unit_text(value.spec.unit)}, which is not in the given module. Pass its "
                    "ShardedWrapper, or the whole model."
                )
