"""The values that units start with: each rank's own, rank 0's, or none yet (the meta device).

No rank needs the full model: a unit takes its part of each original parameter. If rank 0's values
count, rank 0 broadcasts one parameter after the other, and every rank keeps its part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import Checksum, checksum
from flatshard.comm.host_exchange import differ, digest_of, with_complements
from flatshard.module.model_plan import ModelPlan
from flatshard.plan.layout import part_of
from flatshard.tensor.flat_parameter import OriginalParam

LEFT_EMPTY = "_flatshard_left_empty"


def leave_empty(module: nn.Module) -> None:
    """As or in a ``param_init_fn``: leave a module empty, since ``load_state_dict`` follows.

    It allocates no memory beside the shards. The first forward checks that all values were loaded.

    Example:
        ```python
        with torch.device("meta"):
            model = Model()
        model = ShardedWrapper(model, param_init_fn=flatshard.leave_empty)
        model.load_state_dict(torch.load("model.pt", mmap=True))
        ```
    """
    module.__dict__[LEFT_EMPTY] = True


@dataclass
class InitialValues:
    """What the ranks agreed on before anything is sharded."""

    world: Communicator
    sync: bool | None  # `sync_module_states`
    sends: bool  # whether every rank takes rank 0's values
    missing: set[int]  # ids of tensors on the meta device: rank 0's if `sends`, else this rank's
    any_missing: bool  # whether some rank must initialise tensors
    different: list[str]  # names of the tensors that differ between ranks

    @property
    def source(self) -> Communicator | None:
        """The ranks whose rank 0 broadcasts its values; None: each rank has its own values."""
        return self.world if self.sends else None

    def shard(self, params: Sequence[OriginalParam], numel: int, device: torch.device) -> Tensor:
        """This rank's shard of a flat parameter, ``(numel,)``, with the values of ``params``.

        Missing values are zeros. Collective if rank 0's values count.
        """
        with torch.inference_mode(False), torch.no_grad():
            shard = torch.zeros(numel, dtype=params[0].sharded.dtype, device=device)
            for param in params:
                if id(param.sharded) not in self.missing:
                    take_part(shard, param, param.sharded, self.source)
        return shard

    def warnings(self) -> list[str]:
        """A warning that names tensors which differed."""
        if not self.different:
            return []
        first, *others = self.different
        listed = f"{first!r} and {len(others)} more" if others else repr(first)
        outcome = (
            "Every rank now takes rank 0's. Seed all ranks alike, or pass sync_module_states=True "
            "to say that this is meant."
            if self.sync is None
            else "Each keeps its own part, as sync_module_states=False asks: the result is a "
            "mixture of different models."
        )
        what = f"ShardedWrapper: the ranks start from different weights ({listed})."
        return [f"{what} {outcome} [FS-WEIGHTS]"]


def compare_values(plan: ModelPlan) -> InitialValues:
    """Decide whose values count, and which tensors must be initialised. Collective.

    Rank 0's count if ``sync`` is True, or None and checksums differ. Tensors on the meta device
    have no values.
    """
    sync, world = plan.settings.sync_module_states, plan.settings.ranks.world
    named = [*plan.params(), *plan.buffers()]
    # Values that are sent anyway need no checksum, only whether they are on the meta device.
    mine = [
        None if tensor.is_meta else (0, 0) if sync is True else checksum(tensor.detach())
        for _, tensor in named
    ]
    different = names_of_different([name for name, _ in named], mine, world)
    sends = world.size > 1 and (sync is True or (sync is None and bool(different)))
    marks = bytes(value is None for value in mine)
    # If rank 0's values count, so do rank 0's marks: the remaining ranks send zeros.
    counted = bytes(len(marks)) if sends and world.rank != 0 else marks
    everywhere = world.maxima(counted, op_name="comparing weights")
    marks = everywhere if sends else marks
    missing = {id(tensor) for (_, tensor), mark in zip(named, marks, strict=True) if mark}
    different = [] if sync is True else different
    return InitialValues(world, sync, sends, missing, any(everywhere), different)


def take_part(
    shard: Tensor, param: OriginalParam, value: Tensor | None, source: Communicator | None
) -> None:
    """Copy this rank's part of ``value``, all of ``param``, into ``shard``.

    With ``source`` the value is that of rank 0 of ``source``; the other ranks may pass None.
    Collective with a ``source``: all its ranks.
    """
    span, local = param.span, param.local
    part = shard[local.start : local.end]
    if source is not None:
        # One parameter at a time, on rank 0 without a copy if possible: a unit fits in memory.
        if source.rank == 0:
            assert value is not None, "rank 0 has the values"
            whole = value.permute(span.order).reshape(-1).to(part.device, part.dtype)
        else:
            whole = torch.empty(span.numel, dtype=part.dtype, device=part.device)
        source.broadcast(whole, op_name=span.name)
        part.copy_(whole[local.offset : local.offset + local.numel])
    else:
        assert value is not None, "every rank has the values"
        part.copy_(part_of(value, span, local))


def names_of_different(
    names: Sequence[str], sums: Iterable[Checksum | None], world: Communicator
) -> list[str]:
    """The names whose checksums are not the same on every rank. Collective."""
    # One message, of the same size for any number of ranks.
    digests = b"".join(digest_of(repr(one)) for one in sums)
    flags = differ(world.maxima(with_complements(digests), op_name="comparing weights"))
    size = len(digests) // max(len(names), 1)
    return [name for n, name in enumerate(names) if any(flags[n * size : (n + 1) * size])]


def move_buffers(plan: ModelPlan, start: InitialValues) -> None:
    """Move buffers to the device, with rank 0's values if those count. Collective if they do."""
    for _, buffer in plan.buffers():
        if not buffer.is_meta and buffer.device != plan.settings.device:
            buffer.data = buffer.data.to(plan.settings.device)
    if not start.sends:
        return
    others = start.missing.union(plan.left_alone)
    received: dict[int, Tensor] = {}  # several modules may hold one buffer
    for name, module in plan.module.named_modules():
        for attribute, buffer in module._buffers.items():
            if buffer is None or id(buffer) in others:
                continue
            if id(buffer) not in received:
                name_of_buffer = f"{name}.{attribute}" if name else attribute
                received[id(buffer)] = take_from_rank_0(
                    buffer, name_of_buffer, start.world, plan.settings.device
                )
            module._buffers[attribute] = received[id(buffer)]


def take_from_rank_0(
    buffer: Tensor, name: str, world: Communicator, device: torch.device
) -> Tensor:
    """The buffer, with the values of rank 0; a new one if it is on the meta device. Collective."""
    if buffer.is_meta:
        buffer = torch.empty_like(buffer, device=device)
    contiguous = buffer.detach().contiguous()
    world.broadcast(contiguous, op_name=name)
    # A buffer of other strides was copied.
    if contiguous.data_ptr() != buffer.data_ptr():
        buffer.detach().copy_(contiguous)
    return buffer
