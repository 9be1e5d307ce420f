"""``WeightChanges``: sends only the weights whose rounded values have changed."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import ALONE, Communicator
from flatshard.comm.consistency import Facts, agreed
from flatshard.engine.handle import FlatParamHandle
from flatshard.module.wrappers import handles_in, model_shards, state_dicts_in
from flatshard.state.model_state import StateDictOptions, options_set
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.units.layout import as_bytes, view_of

_CALLER = "WeightChanges.changes()"
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POSITION = torch.int32  # dtype of sent positions; flat parameters of 2**31 elements are sent whole
# If a larger share of one rank's shard has changed, the whole flat parameter is sent.
_SHARE = 0.1


class WeightChange(NamedTuple):
    """The changed values of one parameter or buffer.

    Attributes:
        name: the name in the unwrapped model; of a tied parameter, the first name.
        indices: indices of the changed elements, int64, 1-D, as ``Tensor.put_`` takes them. None:
            ``values`` are all elements.
        values: the new values, 1-D, or in the tensor's shape if ``indices`` is None.
        digest: checksum of the full tensor with the new values, for ``apply_changes``; None if
            ``digests`` was not asked for, and for buffers.
    """

    name: str
    indices: Tensor | None
    values: Tensor
    digest: int | None = None


class WeightChanges:
    """Yields the weights whose values, rounded to a dtype, have changed since the previous pass.

    A pass is one call of ``changes``, read to its end. The first pass yields all weights. In
    reinforcement learning, a step changes 1 to 3 % of the values in bfloat16. An inference engine
    that has the weights of the previous pass needs only these values. Each rank keeps one copy of
    its shards in ``dtype``, to compare with.

    Example:
        ```python
        changes = flatshard.WeightChanges(model)
        weights = {}
        for name, tensor in flatshard.full_tensors(model):
            weights[name] = tensor.to(torch.bfloat16, copy=True)
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss_fn(model(inputs), labels).backward()
            optimizer.step()
            flatshard.apply_changes(weights, changes.changes())
        ```
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        """Prepare the first pass, which yields all weights. No communication.

        Args:
            model: a wrapper, a module that contains wrappers, or an unwrapped model.
            dtype: floating-point dtype to which floating-point weights are rounded.

        Raises:
            ValueError: ``dtype`` is no floating-point dtype.
        """
        if not getattr(dtype, "is_floating_point", False):
            raise ValueError(f"dtype must be a floating-point dtype, got {dtype!r}.")
        self._model, self._dtype = model, dtype
        self._is_reading = False
        self._kept: dict[Any, Tensor] = {}  # copies of shards, and of tensors outside of units

    def changes(
        self, *, ranks: Literal["all"] | int = "all", digests: bool = False
    ) -> Iterator[WeightChange]:
        """Iterate over the parameters and persistent buffers that changed since the last pass.

        The parameters come unit by unit. If more than a tenth of one rank's shard of a flat
        parameter has changed, the whole flat parameter is sent. If a rank stops early, it still
        takes part in the rest of the pass, and the next pass yields all weights on every rank.
        Extra memory: about two copies of the largest unit in the dtype.

        Collective: all ranks, with equal arguments, between steps. Nothing may write to the model
        until the iterator is read to its end.

        Args:
            ranks: which ranks get changes: ``"all"``, or the number of one rank of the model.
            digests: whether changes have a ``digest``, which ``apply_changes`` compares.

        Raises:
            ValueError: an argument is wrong, or differs between ranks.
            NotImplementedError: a parameter was a DTensor.
            RuntimeError: a forward or backward of the model is running.
        """
        shards = model_shards(self._model, _CALLER)
        world: Communicator = ALONE if shards is None else shards.world

        def prepare() -> tuple[bool, Facts]:
            if self._is_reading:
                raise ValueError("the last pass is not over. Read its iterator to the end first.")
            if ranks not in ("all", *range(world.size)):
                raise ValueError(f"ranks must be 'all' or a rank < {world.size}, got {ranks!r}.")
            return True, {"the call": f"{ranks=}, {digests=}, {self._dtype}"}

        agreed(prepare, [world], _CALLER, "Pass equal arguments on every rank.")
        if shards is not None:
            shards.refuse_dtensors(_CALLER)
        items = self._read(world, ranks, digests)
        # Start the generator. If the user drops the iterator unread, `_read` must still take part
        # in the exchanges, for which the other ranks wait. But if a generator is dropped before it
        # has started, Python runs none of its code.
        next(items)
        return items

    def _read(
        self,
        world: Communicator,
        ranks: Any,
        digests: bool,
        is_exiting: Callable[[], bool] = sys.is_finalizing,
    ) -> Iterator[Any]:
        handles = handles_in(self._model)
        for handle in handles:
            handle.absorb_replaced()
        # Positions of changed values in this rank's shards.
        changed = {handle: self._changed(handle) for handle in handles}
        # For each flat parameter: how many values of this rank changed (None: send all), and
        # checksums.
        mine = [
            (None if where is None else len(where), self._digests(handle) if digests else [])
            for handle, where in changed.items()
        ]
        said = dict(zip(world.ranks, world.host.gather(mine, _CALLER), strict=True))
        receivers = set(world.ranks) if ranks == "all" else {world.ranks[ranks]}
        self._is_reading, is_over = True, False
        items = self._items(changed, said, receivers)
        try:
            yield None
            for item in items:
                if world.global_rank in receivers:
                    yield item
            is_over = True
        finally:
            # The other ranks wait for this rank. But a process that exits cannot take part.
            for _ in items if not is_exiting() else ():
                pass
            self._is_reading = False
            if not is_over:
                self._kept.clear()

    def _rounded(self, tensor: Tensor, *, copy: bool = False) -> Tensor:
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(dtype, copy=copy)

    def _changed(self, handle: FlatParamHandle) -> Tensor | None:
        """Return the positions of changed values in this rank's shard; None for too many."""
        old = self._kept.get(handle)
        if old is None or handle.layout.padded_numel > torch.iinfo(_POSITION).max:
            return None
        where = (_words(self._rounded(handle.flat_param)) != _words(old)).nonzero().view(-1)
        handle.page_out()
        return where if len(where) <= _SHARE * handle.layout.shard_numel else None

    def _digests(self, handle: FlatParamHandle) -> list[int]:
        """Return, for each parameter, the checksum of this rank's elements."""
        shard, sums = self._rounded(handle.flat_param), []
        for param in handle.params:
            own = shard[param.local.start : param.local.end]
            places = torch.arange(own.numel(), device=own.device) + param.spec.offset
            sums.append(_checksum(own, _row_major(places, param.spec)))
        return torch.stack(sums).tolist()  # type: ignore[no-any-return]

    def _items(
        self,
        changed: dict[FlatParamHandle, Tensor | None],
        said: dict[int, Any],
        receivers: set[int],
    ) -> Iterator[WeightChange]:
        names: dict[Tensor, str] = {}  # a wrapper inside of the model has shorter names
        with options_set(state_dicts_in(self._model), StateDictOptions()):
            for name, tensor in self._model.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor):
                    names.setdefault(tensor, name)
        for number, (handle, where) in enumerate(changed.items()):
            ranks = handle.topology.shard.ranks
            counts, digests = zip(*(said[rank][number] for rank in ranks), strict=True)
            sums = [sum(each) % 2**64 for each in zip(*digests, strict=True)]
            found: Iterator[Any]
            if where is None or None in counts:
                found = self._whole(handle)
            else:
                found = self._sparse(handle, where, counts, receivers)
            for param, indices, values in found:
                digest = sums[param.index] if sums else None
                yield WeightChange(names[param.sharded], indices, values, digest)
        inside = {param.sharded for handle in changed for param in handle.params}
        for tensor, name in names.items():
            if tensor not in inside:
                old, new = self._kept.get(name), self._rounded(tensor).contiguous()
                if old is None or not torch.equal(as_bytes(old), as_bytes(new)):
                    self._kept[name] = new.clone()
                    yield WeightChange(name, None, new.clone())

    def _whole(self, handle: FlatParamHandle) -> Iterator[tuple[Any, None, Tensor]]:
        """All-gather a flat parameter; yield ``(parameter, None, all values)`` per parameter.

        Collective: all ranks of the shard group.
        """
        shard = handle.flat_param.detach()
        rounded = self._kept[handle] = self._rounded(shard, copy=True)
        # Backends cannot send dtypes of one byte, so round to such a dtype after the all-gather.
        full = handle.gather_flat(rounded if rounded.element_size() > 1 else shard)
        for param in handle.params:
            yield param, None, self._rounded(view_of(full, param.span))

    def _sparse(
        self, handle: FlatParamHandle, where: Tensor, counts: Sequence[int], receivers: set[int]
    ) -> Iterator[tuple[Any, Tensor, Tensor]]:
        """Exchange the changed values of a flat parameter. Collective: the shard group.

        Args:
            handle: the owner of the flat parameter.
            where: positions of the changed values in this rank's shard.
            counts: how many values changed on each rank of the group.
            receivers: the ranks that get the values.
        """
        comm, holders, kept = handle.topology.shard, handle.topology.holders, self._kept[handle]
        values = handle.flat_param.detach()[where].to(kept.dtype)
        kept[where] = values
        first = handle.layout.shard_range(handle.topology.index)[0]
        positions = (where + first).to(handle.device, _POSITION)
        values = values.to(handle.device)
        if comm.size > 1 and any(counts):
            size = _POSITION.itemsize + values.element_size()
            payload = torch.cat([as_bytes(positions), as_bytes(values)])
            gets = [rank in receivers for rank in comm.ranks]
            lengths = [payload.numel() * getting for getting in gets]
            expected = [count * size * gets[comm.rank] for count in counts]
            sent = payload.repeat(sum(gets))
            work, came = comm.exchange(sent, lengths, expected, op_name=_CALLER)
            work.wait()
            pieces = came.to(handle.device).split(expected)
            # In the order of shards, positions ascend.
            found = [(pieces[rank], _POSITION.itemsize * counts[rank]) for rank in holders]
            positions = torch.cat([part[:end].clone().view(_POSITION) for part, end in found])
            values = torch.cat([part[end:].clone().view(kept.dtype) for part, end in found])
        positions = positions.to(torch.int64)
        bounds = [end for param in handle.params for end in (param.span.start, param.span.end)]
        # One search, and one wait for an accelerator, for all parameters of the unit.
        ends = torch.searchsorted(positions, positions.new_tensor(bounds)).tolist()
        for param, start, end in zip(handle.params, ends[::2], ends[1::2], strict=True):
            if start < end:
                indices = _row_major(positions[start:end] - param.span.start, param.spec)
                yield param, indices, values[start:end]


def _words(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_WORDS[tensor.element_size()])


def _row_major(indices: Tensor, spec: ShardSpec) -> Tensor:
    """Return the row-major indices of elements, from their indices in memory order."""
    if spec.order == tuple(range(len(spec.order))):
        return indices
    rows = torch.arange(math.prod(spec.shape), device=indices.device).view(spec.shape)
    return rows.permute(spec.order).reshape(-1)[indices]


def _checksum(values: Tensor, indices: Tensor) -> Tensor:
    """Return a checksum of values at some indices, which adds up over the parts of a tensor."""
    return (_words(values).to(torch.int64).view(-1) * (indices + 1)).sum()  # modulo 2**64


def apply_changes(tensors: Mapping[str, Tensor], changes: Iterable[WeightChange]) -> None:
    """Write changed weights into plain tensors, such as the weights of an inference engine.

    No communication, and no process group is needed: changes may come from another process.

    Args:
        tensors: tensors by name, on any device; with digests, in the dtype of the changes or wider.
        changes: from ``WeightChanges.changes``; each change may be pickled.

    Raises:
        ValueError: a name is missing in ``tensors``, a shape differs, or a tensor's checksum after
            the change differs from the digest.
    """
    with torch.no_grad():
        for name, indices, values, digest in changes:
            target = tensors.get(name)
            if target is None or (indices is None and target.shape != values.shape):
                what = "there is no such tensor" if target is None else f"got {tuple(target.shape)}"
                raise ValueError(
                    f"apply_changes: {name!r}: expected a tensor of the trained model's shape, "
                    f"{what}. Pass tensors under the names of the unwrapped model."
                )
            if indices is None:
                target.copy_(values)
            else:
                target.put_(indices.to(target.device), values.to(target.device, target.dtype))
            if digest is not None:
                held = target.detach().to(values.dtype)
                places = torch.arange(held.numel(), device=held.device)
                if int(_checksum(held, places)) % 2**64 != digest:
                    raise ValueError(
                        f"apply_changes: {name!r} differs from the trained model after the change. "
                        "Expected that the tensor held the weights of the previous pass before the "
                        "change. Pass the changes of every pass, in order, or make a new "
                        "WeightChanges, whose first pass has all weights."
                    )
