"""Decides whether tensors start with this rank's values, rank 0's, or none (meta device).

A shard gets this rank's part of each original parameter. If all ranks take rank 0's values, rank 0
broadcasts one parameter after the other, and every rank keeps only its part. So only rank 0 needs
memory for the values of the full model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import Checksum, checksum
from flatshard.comm.host_exchange import differ, digest_of, with_complements
from flatshard.module.model_plan import ModelPlan
from flatshard.module.settings import Settings
from flatshard.tensor.flat_parameter import FlatParamPlan, OriginalParam
from flatshard.units.layout import part_of

LEFT_EMPTY = "_flatshard_left_empty"


def leave_empty(module: nn.Module) -> None:
    """Do not initialise a module on the meta device, because ``load_state_dict`` gives its values.

    Pass this function as ``param_init_fn``, or call it inside of a ``param_init_fn``. Only the
    shards get memory. The first forward raises an error if a tensor still has no values.

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
    """Which values parameters and buffers start with. All ranks have made the same decision."""

    settings: Settings
    sends: bool  # whether every rank takes rank 0's values
    sends_buffers: bool  # whether every rank takes rank 0's buffers, too

    # Ids of the tensors that are on the meta device: on rank 0 if `sends`, otherwise on this rank.
    missing: set[int]
    any_missing: bool  # whether some rank must initialise tensors
    different: list[str]  # names of the tensors that differ between ranks

    @property
    def world(self) -> Communicator:
        return self.settings.ranks.world

    def shard(self, plan: FlatParamPlan, params: Sequence[OriginalParam]) -> Tensor:
        """Return this rank's shard of a flat parameter, with the values of ``params``.

        The shape of the shard is ``(plan.layout.shard_numel,)``.
        Elements of a parameter without values (on the meta device) are zero. Collective if all
        ranks take rank 0's values.
        """
        with torch.inference_mode(False), torch.no_grad():
            shard = torch.zeros(plan.layout.shard_numel, dtype=plan.dtype, device=plan.device)
            for param in params:
                if id(param.sharded) not in self.missing:
                    self.take_part(shard, param, param.sharded)
        return shard

    def take_part(self, shard: Tensor, param: OriginalParam, value: Tensor | None) -> None:
        """Copy this rank's part of ``value``, the full tensor of ``param``, into ``shard``.

        If all ranks take rank 0's values, rank 0 broadcasts its ``value``, and the other ranks may
        pass None. Then the call is collective: all ranks.
        """
        span, local = param.span, param.local
        part = shard[local.start : local.end]
        if self.sends:
            # Broadcast one parameter at a time, and copy the parameter on rank 0 only if necessary.
            # Otherwise a unit that just fits in memory could not be wrapped.
            if self.world.rank == 0:
                assert value is not None, "rank 0 has the values"
                whole = value.permute(span.order).reshape(-1).to(part.device, part.dtype)
            else:
                whole = torch.empty(span.numel, dtype=part.dtype, device=part.device)
            self.world.broadcast(whole, op_name=span.name)
            part.copy_(whole[local.offset : local.offset + local.numel])
        else:
            assert value is not None, "every rank has the values"
            part.copy_(part_of(value, span, local))

    def take_buffer(self, buffer: Tensor, name: str) -> Tensor:
        """Broadcast rank 0's values of ``buffer``, and return a buffer with these values.

        A buffer on the meta device is replaced by a new buffer. Collective: all ranks.
        """
        if buffer.is_meta:
            buffer = torch.empty_like(buffer, device=self.settings.device)
        contiguous = buffer.detach().contiguous()
        self.world.broadcast(contiguous, op_name=name)
        # If the buffer is not contiguous, the broadcast wrote into a contiguous copy of the buffer,
        # not into the buffer. Then copy the values back.
        if contiguous.data_ptr() != buffer.data_ptr():
            buffer.detach().copy_(contiguous)
        return buffer

    def warnings(self) -> list[str]:
        """Return a warning, in a list, if the ranks start with different weights.

        The warning names tensors with different values. The list is empty if no tensor differs,
        and always empty on ranks other than rank 0, so that only rank 0 warns.
        """
        if self.world.rank != 0 or not self.different or self.settings.sync_module_states:
            return []
        first, *others = self.different
        listed = f"{first!r} and {len(others)} more" if others else repr(first)
        outcome = (
            "Every rank now takes the weights of rank 0. Call torch.manual_seed() with one seed on "
            "all ranks before making the model, or pass sync_module_states=True."
            if self.settings.sync_module_states is None
            else "With sync_module_states=False each rank keeps its own part, so the weights are a "
            "mixture. Pass sync_module_states=True, or load the same weights on all ranks."
        )
        what = f"ShardedWrapper: the ranks start from different weights ({listed})."
        return [f"{what} {outcome} [FS-WEIGHTS]"]


def compare_values(plan: ModelPlan) -> InitialValues:
    """Decide whether to broadcast rank 0's values, and find the tensors on the meta device.

    All ranks take rank 0's values in two cases: ``sync_module_states`` is True, or
    ``sync_module_states`` is None and the checksums of the values differ between ranks. Otherwise,
    each rank keeps its own values. Tensors on the meta device have no values yet, so they must be
    initialised later. Collective: all ranks.

    With ``broadcast_buffers=False`` and ``sync_module_states=None``, each rank keeps its own
    buffers, as in DistributedDataParallel.
    """
    sync, world = plan.settings.sync_module_states, plan.settings.ranks.world
    tensors = plan.params | plan.buffers
    kept = {} if sync is not None or plan.settings.broadcast_buffers else plan.buffers
    # With ``sync_module_states=True``, all ranks take rank 0's values in any case. Then save the
    # time for checksums, and compare only which tensors are on the meta device.
    mine = [
        None if tensor.is_meta else (0, 0) if sync or name in kept else checksum(tensor.detach())
        for name, tensor in tensors.items()
    ]
    different = names_of_different(tensors, mine, world)
    sends = world.size > 1 and (bool(different) if sync is None else sync)
    marks = bytes(value is None for value in mine)
    # `marks` has a 1 for each tensor without values. If all ranks take rank 0's values, only the
    # marks of rank 0 count. So the other ranks send zeros, and the maxima are rank 0's marks.
    counted = bytes(len(marks)) if sends and world.rank != 0 else marks
    everywhere = world.maxima(counted, op_name="comparing weights")
    missing = {id(tensor) for tensor in compress(tensors.values(), everywhere if sends else marks)}
    # A rank whose buffers are on the meta device needs rank 0's buffers.
    sends_buffers = sends and (not kept or not kept.keys().isdisjoint(different))
    return InitialValues(plan.settings, sends, sends_buffers, missing, any(everywhere), different)


def names_of_different(
    tensors: Collection[str], sums: Iterable[Checksum | None], world: Communicator
) -> list[str]:
    """Return the names of tensors whose checksums differ between ranks. Collective: all ranks.

    ``tensors``: the names, or a dict whose keys are the names. ``sums``: the checksum of each
    tensor, in the same order.
    """
    # Send all checksums in one message, and take maxima instead of gathering the checksums: so the
    # size of the message does not depend on the number of ranks.
    digests = b"".join(digest_of(repr(one)) for one in sums)
    flags = differ(world.maxima(with_complements(digests), op_name="comparing weights"))
    size = len(digests) // max(len(tensors), 1)
    return [name for n, name in enumerate(tensors) if any(flags[n * size : (n + 1) * size])]


def move_buffers(plan: ModelPlan, start: InitialValues) -> None:
    """Move buffers to the device. If ``start.sends_buffers``, also broadcast rank 0's buffers.

    Collective if ``start.sends_buffers``: all ranks.
    """
    device = plan.settings.device
    # New buffers, keyed by the id of the old buffer: several modules may share a buffer.
    received: dict[int, Tensor] = {}
    for name, buffer in plan.buffers.items():
        if not buffer.is_meta and buffer.device != device:
            buffer.data = buffer.data.to(device)
        if start.sends_buffers and id(buffer) not in start.missing:
            received[id(buffer)] = start.take_buffer(buffer, name)
    for inner in plan.module.modules() if received else ():
        inner._buffers.update(
            {name: received.get(id(buffer), buffer) for name, buffer in inner._buffers.items()}
        )
