"""``ModelShards``: gives extras and checkpoints access to this rank's shards of a model."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from flatshard.comm.communicator import ALONE, Communicator
from flatshard.comm.consistency import raise_everywhere
from flatshard.engine.run_state import temporarily
from flatshard.module.wrappers import state_dicts_in, unit_of, units_between_steps, units_in
from flatshard.state.model_state import StateDictOptions, UnitStateDict
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.units.module_proxy import ModuleProxy
from flatshard.units.module_tree import unit_text


class ModelShards:
    """Gives access to this rank's shards of a model, for saving and loading. Never communicates.

    An unwrapped model has no units, and its ``world`` is ``ALONE``.
    """

    def __init__(self, model: nn.Module, parts: Sequence[UnitStateDict]) -> None:
        self.parts = parts
        self._model, self.units = model, [part.unit for part in parts]
        self._handles = [handle for unit in self.units for handle in unit.handles]
        # The ranks of the unit with the most ranks: some units train on only a part of the ranks.
        worlds = (unit.topology.world for unit in self.units)
        self.world = max(worlds, key=lambda one: one.size, default=ALONE)

    def refuse_dtensors(self, caller: str) -> None:
        """Raise NotImplementedError if a parameter was a DTensor."""
        split = first_of_dtensor(p.spec for handle in self._handles for p in handle.params)
        if split is not None:
            raise NotImplementedError(
                f"{caller}: parameter {split!r} was a DTensor before it was sharded, and ranks "
                "outside of this model's process group hold other parts of the parameter. Call "
                "model.state_dict() under state_dict_type(model, 'SHARDED_STATE_DICT') and pass "
                "the result to torch.distributed.checkpoint.save, or save full_state_dict(model)."
            )

    def state_dict(
        self, options: StateDictOptions | None = None, *, keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return a state dict. By default it is sharded, and shares memory with the model."""
        for handle in self._handles:
            handle.absorb_replaced()
        with temporarily(self.parts, options=options or StateDictOptions(is_sharded=True)):
            return self._model.state_dict(keep_vars=keep_vars)

    def replicas(self) -> dict[int, Communicator]:
        """Return, for each flat parameter, the ranks that hold the same shard as this rank.

        The key identifies the storage of this rank's shard (``_cdata``).
        """
        known = ((one.flat_param, one.topology.replicate) for one in self._handles)
        return {param.untyped_storage()._cdata: replicate for param, replicate in known}

    def mark_written(self) -> None:
        """Mark unsharded copies as out of date. Call after writing into the memory of shards."""
        for unit in self.units:
            unit.count_load("a checkpoint")
        for handle in self._handles:
            # Increase the version counters: reading a file into the memory has not changed them.
            written = handle.sharded if handle.is_whole else [handle.flat_param]
            torch.autograd.graph.increment_version(written)
            handle.page_out()


def model_shards(model: nn.Module, caller: str) -> ModelShards:
    """Return this rank's shards of a model, for checkpoints.

    Collective: all ranks that train the model. If one rank is inside of a step or of
    ``summon_full_params``, all ranks raise that rank's error.
    """
    problem = None
    try:
        units_between_steps(model, caller)
    except RuntimeError as error:
        # Raise the error on all ranks below. If only this rank raised here, the other ranks would
        # wait for this rank in the next collective.
        problem = error
    shards = ModelShards(model, state_dicts_in(model))
    # Pass `caller`, the name of the user's call. Deadlock detection reports the name if the other
    # ranks never make the call (for example under `if rank == 0:`).
    raise_everywhere(problem, shards.world, op_name=caller)
    return shards


def check_has_all_modules(wrapper: ModuleProxy, action: str) -> None:
    """Raise RuntimeError if a unit in the wrapper also has modules outside of the wrapper."""
    inside, own = set(wrapper.modules()), unit_of(wrapper)
    for unit in units_in(wrapper):
        if not inside.issuperset(unit.modules):
            name = own.names[list(own.modules).index(wrapper.module)]
            raise RuntimeError(
                f"{unit_text(unit.name)}: {name!r} cannot be {action} separately: it shares a unit "
                "with its neighbours. Use the outermost wrapper, or wrap with coalesce_bytes=0."
            )


def first_of_dtensor(specs: Iterable[ShardSpec]) -> str | None:
    """Return the name of the first parameter that is part of a DTensor, or None."""
    return next((spec.name for spec in specs if spec.tensor_parallel is not None), None)
