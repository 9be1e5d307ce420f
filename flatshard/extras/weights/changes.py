"""``WeightChanges``: sends only the weights whose rounded values have changed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.engine.handle import FlatParamHandle
from flatshard.extras.weights.reading import Flats, Item, Options, read
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.units.layout import as_bytes, view_of

_CALLER = "WeightChanges.changes()"
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# dtype of sent positions; flat parameters of at least 2**31 elements are sent whole
_PLACE = torch.int32
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
        Options(dtype).check(1)
        self._model, self._dtype = model, dtype
        # Rounded copies of shards and of tensors outside of units, from the last complete pass.
        self._kept: dict[Any, Tensor] = {}

    def changes(
        self, *, ranks: Literal["all"] | int = "all", digests: bool = False
    ) -> Iterator[WeightChange]:
        """Iterate over the parameters and persistent buffers that changed since the last pass.

        The parameters come unit by unit. If more than a tenth of one rank's shard of a flat
        parameter has changed, the whole flat parameter is sent. If a rank stops early, it still
        takes part in the rest of the pass, the other ranks raise RuntimeError at the end, and the
        next pass yields all weights. Extra memory: about two copies of the largest unit in the
        dtype, and three if all of it is sent.

        Collective: all ranks, with equal arguments, between steps. Nothing may write to the model
        until the iterator is read to its end.

        Args:
            ranks: which ranks get changes: ``"all"``, or the number of one rank of the model.
            digests: whether changes have a ``digest``, which ``apply_changes`` compares.

        Raises:
            ValueError: an argument is wrong, or differs between ranks.
            NotImplementedError: a parameter was a DTensor.
            RuntimeError: a forward or backward of the model is running. At the end: another rank
                stopped early, or a rank wrote to the model.
        """
        kept, options = self._kept, Options(self._dtype, ranks=ranks, digests=digests)
        finish = lambda _, __, *change: WeightChange(*change)  # noqa: E731
        items = read(self._model, _CALLER, options, partial(_units, kept), finish)
        self._kept = {}
        return self._keeping(kept, items)

    def _keeping(self, kept: dict[Any, Tensor], items: Iterator[Any]) -> Iterator[Any]:
        yield from items
        self._kept = kept  # the pass is complete; otherwise, the next pass yields all weights


def _units(
    kept: dict[Any, Tensor], options: Options, world: Communicator, flats: Flats, rest: list[Item]
) -> Iterator[list[Item]]:
    """Yield the changes of each flat parameter, then those of ``rest``. Collective: all ranks."""
    # For each flat parameter: positions of this rank's changed values (None: send all), checksums.
    looked = [_look(handle, params, kept.get(handle), options) for handle, params in flats.items()]
    mine = [(None if where is None else len(where), sums) for where, sums in looked]
    said = dict(zip(world.ranks, world.host.gather(mine, _CALLER), strict=True))
    getting = world.ranks if options.ranks in ("all", "local") else [world.ranks[options.ranks]]
    for number, (handle, params) in enumerate(flats.items()):
        ranks, shard = handle.topology.shard.ranks, handle.flat_param.detach()
        counts, checksums = zip(*(said[rank][number] for rank in ranks), strict=True)
        is_whole = None in counts
        if not (is_whole or any(counts)):
            continue
        where: Any = slice(None) if is_whole else looked[number][0]
        changed = _bits(shard[where], options)
        kept.setdefault(handle, torch.empty_like(changed))[where] = changed
        handle.page_out()
        sizes = [len(shard)] * len(ranks) if is_whole else counts
        is_changed = changed
        if is_whole and changed.itemsize > 1:  # backends cannot all-gather dtypes of one byte
            full = handle.gather_flat(changed.view(_dtype(shard, options))).view(changed.dtype)
        else:
            full = _joined(handle, changed, sizes, getting)
        if not is_whole:
            first = handle.layout.shard_range(handle.topology.index)[0]
            places = _joined(handle, (where + first).to(_PLACE), counts, getting).to(torch.int64)
            found, full = full, full.new_empty(handle.layout.padded_numel)
            full[places] = found
            is_changed = torch.zeros_like(full, dtype=torch.bool)
            is_changed[places] = True
        for index, (name, param) in enumerate(params if world.global_rank in getting else ()):
            digest = sum(sums[index] for sums in checksums) % 2**64 if options.digests else None
            values, indices = view_of(full, param.span), None
            if not is_whole:
                indices = view_of(is_changed, param.span).reshape(-1).nonzero().view(-1)
                values = values.reshape(-1)[indices]
            if indices is None or len(indices):
                yield [(name, indices, values.view(_dtype(shard, options)), digest)]
    for name, tensor in rest:
        new = _bits(tensor, options).clone()
        if name not in kept or not torch.equal(kept[name], new):
            kept[name] = new
            yield [(name, None, new.clone().view(_dtype(tensor, options)))]


def _look(
    handle: FlatParamHandle, params: list[Any], old: Tensor | None, options: Options
) -> tuple[Tensor | None, list[int]]:
    """Return the positions of changed values in this rank's shard, and checksums of the shard.

    If too many values have changed, None takes the place of the positions. With ``digests``, there
    is a checksum for each parameter in ``params``; otherwise there is none.
    """
    for _, param in params:
        param.spec.refuse_part(_CALLER)
    shard, where, sums = _bits(handle.flat_param, options), None, []
    if old is not None and handle.layout.padded_numel <= torch.iinfo(_PLACE).max:
        where = (shard != old).nonzero().view(-1)
        where = where if len(where) <= _SHARE * len(shard) else None
    for _, param in params if options.digests else ():
        own = shard[param.local.start : param.local.end]
        places = torch.arange(own.numel(), device=own.device) + param.spec.offset
        sums.append(int(_checksum(own, _row_major(places, param.spec))))
    handle.page_out()
    return where, sums


def _joined(
    handle: FlatParamHandle, mine: Tensor, counts: Sequence[int], getting: Collection[int]
) -> Tensor:
    """Return the elements of all ranks' ``mine``, in the order of shards; empty if not ``getting``.

    Collective: the shard group. ``counts``: number of elements per rank. ``getting``: the ranks
    that get the elements.
    """
    comm, mine = handle.topology.shard, mine.to(handle.device)
    if comm.size == 1:
        return mine.clone()
    gets = [rank in getting for rank in comm.ranks]
    lengths = [mine.nbytes * one for one in gets]
    expected = [count * mine.itemsize * gets[comm.rank] for count in counts]
    work, came = comm.exchange(as_bytes(mine).repeat(sum(gets)), lengths, expected, op_name=_CALLER)
    work.wait()
    pieces = came.to(handle.device).split(expected)
    return torch.cat([pieces[rank] for rank in handle.topology.holders]).view(mine.dtype)


def _dtype(tensor: Tensor, options: Options) -> Any:
    return options.dtype if tensor.is_floating_point() else tensor.dtype


def _bits(tensor: Tensor, options: Options) -> Tensor:
    """Return the rounded values as integers: -0.0 differs from 0.0, and a NaN equals itself."""
    rounded = tensor.detach().to(_dtype(tensor, options)).contiguous()
    return rounded.view(_WORDS[rounded.itemsize])


def _row_major(indices: Tensor, spec: ShardSpec) -> Tensor:
    """Return the row-major indices of elements, from their indices in memory order."""
    if spec.order == tuple(range(len(spec.order))):
        return indices
    rows = torch.arange(math.prod(spec.shape), device=indices.device).view(spec.shape)
    return rows.permute(spec.order).reshape(-1)[indices]


def _checksum(values: Tensor, indices: Tensor) -> Tensor:
    """Return a checksum of values at some indices, which adds up over the parts of a tensor."""
    return (values.to(torch.int64).view(-1) * (indices + 1)).sum()  # the sum is modulo 2**64


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
                word = _WORDS[target.itemsize]  # `put_` does not support float8
                new = values.to(target.device, target.dtype).view(word)
                target.view(word).put_(indices.to(target.device), new)
            held = target.detach().to(values.dtype).contiguous().view(_WORDS[values.itemsize])
            places = torch.arange(held.numel(), device=held.device)
            if digest is not None and int(_checksum(held, places)) % 2**64 != digest:
                raise ValueError(
                    f"apply_changes: {name!r} differs from the trained model after the change. "
                    "Expected that the tensor held the weights of the previous pass before the "
                    "change. Pass the changes of every pass, in order, or make a new "
                    "WeightChanges, whose first pass has all weights."
                )
