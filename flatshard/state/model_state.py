"""State dicts: full or sharded tensors under the unwrapped model's names.

Hooks on the wrapped modules themselves do the work, so that ``model.state_dict()``,
``model.module.state_dict()`` and a submodule's all give the same, and torch's own recursion keeps
its order, its extra state and the users' hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.optimizer.state_dicts import torch_request
from flatshard.plan.module_tree import unit_text
from flatshard.state.full_params import gather_full, original_of
from flatshard.state.write_through import WriteThrough
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.tensor.sharded_tensor import FlatShardTensor, state_shard


@dataclass(frozen=True)
class StateDictOptions:
    """What state dicts hold, where they lie and who gets them, as FSDP1's configs say it."""

    is_sharded: bool = False  # for `torch.distributed.checkpoint`
    offload_to_cpu: bool = False
    rank0_only: bool = False
    optim_offload_to_cpu: bool = True
    optim_rank0_only: bool = False


class UnitStateDict:
    """One unit's part of state dicts: its modules', their parts', and those of what is around."""

    def __init__(self, unit: Unit) -> None:
        self.options = StateDictOptions()
        self.writes = WriteThrough()  # one for a model
        self.is_apart = False  # whether fewer ranks train the unit than the model
        self.unit = unit
        # Torch calls these hooks inside one another: the outermost does the work.
        self._depth = 0
        places = (place for handle in unit.handles for place in handle.places)
        for module in {*unit.modules, *(module for module, _, _ in places)}:
            # Torch marks the functions that it is given, which a bound method does not allow.
            module.register_state_dict_pre_hook(partial(self._enter))
            module.register_state_dict_post_hook(partial(self._after_save))
            module.register_load_state_dict_pre_hook(self._before_load)
            module.register_load_state_dict_post_hook(self._after_load)

    def _after_save(
        self, _: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        if not self._leave():
            return
        options = self.requested()
        if options.is_sharded:
            self.check_names()
            for handle in self.unit.handles:
                _keep_sharded(handle, state_dict, options)
        is_saving = not options.rank0_only or self.unit.topology.world.rank == 0
        for handle in () if options.is_sharded else self.unit.handles:
            given = _replace_by_full(handle, state_dict, options, is_saving)
            # Where users ask for copies they are none of the model's memory.
            if not (options.offload_to_cpu or options.rank0_only):
                for param, full in given.items():
                    self.writes.watch(self.unit, handle, param, full)
        for key in [key for key in state_dict if key.startswith(prefix)]:
            _treat_rest(state_dict, key, options, is_saving)

    def check_names(self) -> None:
        """Raise if the names in the unit's sharded state dict mean something else on some ranks."""
        if self.is_apart:
            raise NotImplementedError(
                f"{unit_text(self.unit.name)} trains only on ranks "
                f"{self.unit.topology.world.ranks_text} of the model's ranks. Other ranks may hold "
                "other parameters of the same names, and a sharded checkpoint keeps one parameter "
                "per name. Save the unit's state dict separately, under names of its own."
            )

    def requested(self) -> StateDictOptions:
        """The options, or what torch's ``get_state_dict`` asks for, if that calls."""
        asked = torch_request()
        if asked is None:
            return self.options
        return StateDictOptions(not asked.full, asked.to_cpu, asked.rank0_only)

    def _before_load(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *rest: Any,
    ) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise ValueError(
                "load_state_dict(assign=True) would put full tensors where shards are. Load "
                "without assign: values are copied into the shards and cast to their dtype."
            )
        asked = torch_request()
        if asked is not None:
            for param in chain.from_iterable(handle.params for handle in self.unit.handles):
                asked.check_order(param.name, param.span.order)
        for handle in self.unit.handles:
            for place, attribute, param in handle.places:
                key = prefix + attribute
                if place is module and key in state_dict:  # torch compares with local shapes
                    state_dict[key] = param.spec.split(state_dict[key])
        self._enter(module)

    def _after_load(self, *_: Any) -> None:
        if self._leave():
            self.unit.num_loads += 1

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if module in self.unit.modules:
            # Nothing of this unit is further out: a depth left is that of a call that raised.
            self._depth = 0
        self.writes.check()
        self._depth += 1

    def _leave(self) -> bool:
        self._depth -= 1
        return self._depth <= 0


def _replace_by_full(
    handle: FlatParamHandle, state_dict: dict[str, Any], options: StateDictOptions, is_saving: bool
) -> dict[OriginalParam, Tensor]:
    """Put full copies where the flat parameter's originals stand; drop them if not ``is_saving``.

    Returns the copies.

    Collective: all ranks of the shard group, also those that save nothing; of tensor-parallel
    parameters, those of their mesh.
    """
    shown: dict[str, OriginalParam] = {}
    for key, value in state_dict.items():
        # With keep_vars=True users want the parameters themselves.
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            param = original_of(handle, value)
            if param is not None:
                shown[key] = param
    if not shown:
        return {}
    device = torch.device("cpu") if options.offload_to_cpu else handle.device
    full = gather_full(handle, handle.flat_param, device, is_kept=is_saving)
    # In one order on all ranks: a DTensor's part is put together by the ranks of its mesh.
    wanted = sorted({*shown.values()}, key=lambda param: param.index) if is_saving else ()
    full_of = {param: param.spec.unsplit(full[param.index]) for param in wanted}
    for key, param in shown.items():
        if is_saving:
            state_dict[key] = full_of[param]
        else:
            del state_dict[key]
    return full_of


def _keep_sharded(
    handle: FlatParamHandle, state_dict: dict[str, Any], options: StateDictOptions
) -> None:
    """Let each original be what ``torch.distributed.checkpoint`` saves, and loads in place."""
    for key, value in list(state_dict.items()):
        is_shown = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        if not is_shown or original_of(handle, value) is None:
            continue
        # Where one rank holds everything, the shard itself may be what modules hold.
        if isinstance(value, FlatShardTensor):
            local = value.local.cpu() if options.offload_to_cpu else value.local
            state_dict[key] = state_shard(local, value.spec, value.role)
        elif value.untyped_storage()._cdata != handle.flat_param.untyped_storage()._cdata:
            raise RuntimeError(
                f"{unit_text(handle.unit_name)}: a sharded state dict was asked for in the forward "
                "of the unit. Ask for it between steps."
            )


def _treat_rest(
    state_dict: dict[str, Any], key: str, options: StateDictOptions, is_saving: bool
) -> None:
    """Treat buffers, extra state and ignored parameters as a unit's parameters."""
    value = state_dict[key]
    is_parameter = isinstance(value, nn.Parameter)  # with keep_vars=True: the module's own
    if isinstance(value, FlatShardTensor) and not is_parameter:
        return  # another unit's: every rank has to see it to take part in its all-gather
    if not is_saving:
        del state_dict[key]
    elif options.offload_to_cpu and isinstance(value, Tensor) and not is_parameter:
        state_dict[key] = value.cpu()


def options_of(parts: Sequence[UnitStateDict]) -> StateDictOptions:
    """The options that all units of a model have; the default without units.

    Raises:
        RuntimeError: its units differ.
    """
    options = {part.options: part.unit.name for part in parts}
    if len(options) > 1:
        (first, one), (second, other), *_ = options.items()
        raise RuntimeError(
            f"state_dict_type: units {one!r} and {other!r} differ: {first} and {second}. Set "
            "the type of the whole model."
        )
    return next(iter(options), StateDictOptions())


@contextlib.contextmanager
def options_set(parts: Sequence[UnitStateDict], options: StateDictOptions) -> Iterator[None]:
    """Let units' parts of state dicts be as ``options`` say, for a while."""
    before = [part.options for part in parts]
    for part in parts:
        part.options = options
    try:
        yield
    finally:
        for part, its_own in zip(parts, before, strict=True):
            part.options = its_own


def without_ddp_prefix(state_dict: dict[str, Any], children: Iterable[str]) -> dict[str, Any]:
    """The state dict without DistributedDataParallel's prefix ``module.``, where it has it.

    A model with a child of that name is left alone: there the prefix is its own.
    """
    prefix = "module."
    if "module" not in children and all(key.startswith(prefix) for key in state_dict):
        return {key.removeprefix(prefix): value for key, value in state_dict.items()}
    return state_dict


# By torch's names for the types, how its names for their configs begin.
_CONFIGS = {"FULL_STATE_DICT": "Full", "SHARDED_STATE_DICT": "Sharded"}


def read_options(
    state_dict_type: Any, state_dict_config: Any, optim_state_dict_config: Any
) -> StateDictOptions:
    """Read torch's enum and configs; raises for state dicts without the originals' shapes."""
    name = getattr(state_dict_type, "name", state_dict_type)
    if name not in _CONFIGS:
        raise NotImplementedError(
            f"state_dict_type: expected {' or '.join(_CONFIGS)}, got {name}: state dicts "
            "hold tensors of the unwrapped model's shapes under its names."
        )
    options = {"is_sharded": name == "SHARDED_STATE_DICT"}
    for prefix, config in (("", state_dict_config), ("optim_", optim_state_dict_config)):
        if config is None:
            continue
        keyword = f"{prefix}state_dict_config"
        kind = f"{_CONFIGS[name]}{'Optim' if prefix else ''}StateDictConfig"
        # By name, as torch's package is slow to load.
        if kind not in (base.__name__ for base in type(config).__mro__):
            raise TypeError(
                f"state_dict_type: {keyword}: expected torch's {kind}, which goes with "
                f"{name}, got {config!r}"
            )
        options[f"{prefix}offload_to_cpu"] = config.offload_to_cpu
        options[f"{prefix}rank0_only"] = getattr(config, "rank0_only", False)
    return StateDictOptions(**options)


def as_torch(options: StateDictOptions) -> Any:
    """The same as torch's ``StateDictSettings``."""
    # Here, as the package is slow to load.
    from torch.distributed.fsdp import api

    if options.is_sharded:
        return api.StateDictSettings(
            api.StateDictType.SHARDED_STATE_DICT,
            api.ShardedStateDictConfig(options.offload_to_cpu),
            api.ShardedOptimStateDictConfig(options.optim_offload_to_cpu),
        )
    return api.StateDictSettings(
        api.StateDictType.FULL_STATE_DICT,
        api.FullStateDictConfig(options.offload_to_cpu, options.rank0_only),
        api.FullOptimStateDictConfig(options.optim_offload_to_cpu, options.optim_rank0_only),
    )
