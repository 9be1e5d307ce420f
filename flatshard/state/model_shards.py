"""``ModelShards``: this rank's shards of a model, for code that saves and loads files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flatshard.comm.communicator import Communicator
from flatshard.state.model_state import StateDictOptions, UnitStateDict, options_set
from flatshard.tensor.shard_spec import first_of_dtensor
from flatshard.tensor.sharded_tensor import FlatShardTensor
from flatshard.units.layout import memory_order


@dataclass(frozen=True)
class EntryShard:
    """This rank's elements of one entry of a state dict.

    Attributes:
        entry: the tensor in the state dict, with the full shape.
        local: the elements that this rank holds, 1-D.
        order: the dimensions of the entry in memory, outermost first.
        offset: index of the first element of ``local`` among all elements in memory order.
        replicas: the ranks that hold the same elements. None: the entry is a buffer or an ignored
            parameter, and its values may differ between ranks.
        key: identifies the tensor. If two entries (tied parameters) have the same tensor, their
            keys are equal.
    """

    entry: Tensor
    local: Tensor
    order: Sequence[int]
    offset: int
    replicas: Communicator | None
    key: tuple[object, ...]


class ModelShards:
    """Gives access to this rank's shards of a model, for saving and loading. Never communicates."""

    def __init__(self, model: nn.Module, parts: Sequence[UnitStateDict]) -> None:
        self.parts = parts
        self._model, self._units = model, [part.unit for part in parts]
        self._handles = [handle for unit in self._units for handle in unit.handles]
        # The largest group, because some units use fewer ranks.
        self.world = max((unit.topology.world for unit in self._units), key=lambda one: one.size)

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

    def state_dict(self) -> dict[str, Any]:
        """Return the sharded state dict, whose tensors share memory with the model.

        Raises:
            NotImplementedError: a unit trains only on some of the ranks.
        """
        for handle in self._handles:
            handle.absorb_replaced()
        with options_set(self.parts, StateDictOptions(is_sharded=True)):
            return self._model.state_dict()

    def entries(self) -> dict[str, EntryShard]:
        """Return this rank's elements of each entry of the state dict.

        The elements share memory with the model.

        Raises:
            ValueError: an entry is not a plain tensor, or a hook replaced a parameter by another
                tensor.
        """
        handles = {_storage(handle.flat_param): handle for handle in self._handles}
        entries: dict[str, EntryShard] = {}
        others = []
        for name, value in self.state_dict().items():
            is_sharded = isinstance(value, FlatShardTensor)
            is_plain = isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)
            if not is_sharded and not (is_plain and value.layout == torch.strided):
                others.append(f"{name!r} ({type(value).__name__})")
                continue
            local = value.local if is_sharded else value
            handle = handles.get(_storage(local))
            replicas = None if handle is None else handle.topology.replicate
            if not is_sharded:
                order = memory_order(value)
                local = value.permute(order).reshape(-1)
                # Tied entries have the same address. A tensor without elements has no address.
                place = (value.data_ptr(), *value.shape, *value.stride())
                key: tuple[object, ...] = place if value.numel() else (id(value),)
                entries[name] = EntryShard(value, local, order, 0, replicas, key)
            elif handle is None:
                others.append(f"{name!r} (replaced by a hook)")
            else:
                spec, key = value.spec, (id(handle), value.spec.name)
                entries[name] = EntryShard(value, local, spec.order, spec.offset, replicas, key)
        if others:
            raise ValueError(
                "a safetensors file can contain only tensors of the model, but the state dict also "
                f"has {', '.join(others)}. Use flatshard.checkpoint.save instead."
            )
        return entries

    def mark_written(self) -> None:
        """Call after writing into the memory of shards: marks unsharded copies as out of date."""
        for unit in self._units:
            unit.count_load("a checkpoint")
        for handle in self._handles:
            # Reading a file directly into memory does not increase the version counters.
            written = handle.sharded if handle.is_whole else [handle.flat_param]
            torch.autograd.graph.increment_version(written)
            handle.page_out()


def _storage(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage, even if the tensor is empty."""
    return tensor.untyped_storage()._cdata
