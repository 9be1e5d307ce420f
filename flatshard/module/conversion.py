"""``.to()`` and ``copy.deepcopy`` of a sharded model: units are converted and copied, not views."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from flatshard.comm.process_groups import copying
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.hooks import UnitHooks
from flatshard.engine.unit import Unit
from flatshard.module.run import start_run
from flatshard.module.sharding import Sharding, shardings_in, units_in
from flatshard.plan.module_proxy import ModuleProxy
from flatshard.precision.casts import convert_buffers


def convert(
    root: Sharding,
    fn: Callable[..., Any],
    apply_to_module: Callable[[], Any],
    *,
    recurse: bool,
) -> None:
    """Convert shards instead of parameters.

    Args:
        root: of the wrapper that is converted.
        fn: torch's function of a tensor, behind ``.to()``, ``.double()`` and the like.
        apply_to_module: ``nn.Module._apply`` of the wrapper with ``fn``.
        recurse: units inside too.
    """
    context = root.context
    if context.is_converting:  # with the wrapper around it, which converts all shards
        apply_to_module()
        return
    context.recover()
    root.check_not_summoned("converted")
    root.check_has_all_modules("converted")
    units = units_in(root.wrapper) if recurse else [root.unit]
    handles = [handle for unit in units for handle in unit.handles]
    # All units first: what raises here leaves no unit converted.
    for handle in handles:
        handle.check_keeps_order(fn)
    context.is_converting = True
    try:
        with _hidden(shardings_in(root.wrapper), handles):
            convert_buffers(root.wrapper.modules(), apply_to_module, fn)
    finally:
        context.is_converting = False
    for handle in handles:
        handle.convert(fn)
    context.refresh()


def copy_model(root: Sharding, memo: dict[int, Any]) -> nn.Module:
    """Copy the wrapper of ``root``, for ``copy.deepcopy``. No communication."""
    root.check_not_summoned("copied")
    # A wrapper inside the one that is copied has its unit there already.
    is_outermost = id(root.unit) not in memo
    inside = shardings_in(root.wrapper) if is_outermost else []
    if is_outermost:
        root.check_has_all_modules("copied")
    for sharding in inside:
        sharding.context.recover()
    hooks = list(dict.fromkeys(one.hooks for one in inside))
    for one in hooks:
        # Copied modules call the copied hooks, which are filled once they are complete.
        memo[id(one)], memo[id(one.unit)] = UnitHooks.__new__(UnitHooks), Unit.__new__(Unit)
    wrapper = root.wrapper
    twin: ModuleProxy = type(wrapper).__new__(type(wrapper))
    memo[id(wrapper)] = twin
    twin.__dict__.update(copy.deepcopy(wrapper.__dict__, memo))
    with copying():
        for one in hooks:
            one.copy_into(memo, memo[id(one)], memo[id(one.unit)])
    if is_outermost:
        # Perhaps one rank copies alone, so it cannot ask the others for a new number.
        start_run(shardings_in(twin)[0], number=root.context.number)
    return twin


@contextlib.contextmanager
def without_flat_parameters(shardings: Iterable[Sharding]) -> Iterator[None]:
    """Take the flat parameters of ``use_orig_params=False`` out of wrappers for a while."""
    flat = [(one.wrapper, dict(one.wrapper._parameters)) for one in shardings]
    for wrapper, _ in flat:
        wrapper._parameters.clear()
    try:
        yield
    finally:
        for wrapper, parameters in flat:
            wrapper._parameters.update(parameters)


@contextlib.contextmanager
def _hidden(shardings: Iterable[Sharding], handles: Iterable[FlatParamHandle]) -> Iterator[None]:
    """Take all parameters that handles own out of the modules for a while."""
    hidden = [one for handle in handles for one in handle.params.hide()]
    try:
        with without_flat_parameters(shardings):
            yield
    finally:
        for held, attribute, param in hidden:
            held[attribute] = param
