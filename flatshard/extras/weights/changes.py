"""``WeightChanges``: sends only the weights whose rounded values have changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatshard.comm.consistency import Checksum, checksum
from flatshard.engine.handle import FlatParamHandle
from flatshard.extras.weights.reading import Flats, Item, Options, read, yielded_dtype
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.units.layout import view_of

_CALLER = "WeightChanges.changes()"
# For each size of an element, the dtype in which elements are compared: bit by bit, as integers. No
# integer has 16 bytes.
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
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
    digest: Checksum | None = None


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

    def changes(self, *, ranks: int | str = "all", digests: bool = False) -> Iterator[WeightChange]:
        """Iterate over the parameters and persistent buffers that changed since the last pass.

        The parameters come unit by unit. If more than a tenth of one rank's shard of a flat
        parameter has changed, the whole flat parameter is sent. If a rank stops early, it still
        takes part in the rest of the pass, the other ranks raise RuntimeError at the end, and the
        next pass yields all weights. Extra memory: about one copy of the largest unit in the dtype
        if all of it is sent, two copies of this rank's shard of the unit, and one parameter.

        Collective: all ranks, with equal arguments, between steps. Nothing may write to the model
        until the iterator is read to its end.

        Args:
            ranks: which ranks get changes: ``"all"``, or the number of one rank of the model.
            digests: whether changes have a ``digest``, which ``apply_changes`` compares. To compute
                digests, all ranks all-gather each flat parameter that has changed.

        Raises:
            ValueError: an argument is wrong, or differs between ranks.
            NotImplementedError: a parameter was a DTensor.
            RuntimeError: a forward or backward of the model is running. At the end: another rank
                stopped early, or a rank wrote to the model.
        """
        options = Options(self._dtype, ranks=ranks, digests=digests)
        finish = lambda _, __, *change: WeightChange(*change)  # noqa: E731
        items = read(self._model, _CALLER, options, self._units, finish)
        # Empty until the pass is complete: the next pass then yields all weights.
        self._last, self._kept = self._kept, {}
        return self._keeping(items)

    def _keeping(self, items: Iterator[Any]) -> Iterator[Any]:
        yield from items
        self._kept = self._last

    def _units(self, options: Options, flats: Flats, rest: list[Item]) -> Iterator[Any]:
        """Yield the changes of each flat parameter, then those of ``rest``. Collective."""
        for param in (param for params in flats.values() for _, param in params):
            param.spec.refuse_part(_CALLER)
        for handle, params in flats.items():
            yield from self._of_flat(handle, params, options)
        for name, tensor in rest:
            new = _words(tensor, options)
            if name not in self._last or not torch.equal(self._last[name], new):
                self._last[name] = new
                yield [(name, None, new.clone().view(yielded_dtype(tensor, options.dtype)))]

    def _of_flat(
        self, handle: FlatParamHandle, params: list[Any], options: Options
    ) -> Iterator[Any]:
        """Yield the changes of one flat parameter. Collective: the shard group."""
        new, old = _words(handle.flat_param, options), self._last.get(handle)
        handle.page_out()
        # Positions of this rank's changed values, to be sent as int32. None: send all values.
        where = None
        if old is not None and handle.layout.padded_numel < 2**31:
            where = (new != old).nonzero().view(-1)
            where = where if len(where) <= _SHARE * len(new) else None
        counts = handle.topology.shard.host.gather(None if where is None else len(where), _CALLER)
        if set(counts) == {0}:
            return
        self._last[handle] = new
        dtype, full = yielded_dtype(handle.flat_param, options.dtype), new
        if options.digests or None in counts:
            full = handle.gather_flat(new).view(dtype)
        if where is not None and None not in counts:
            # All ranks send equally many values: a rank with fewer changes adds values at -1.
            padding = 0, max(counts) - len(where)
            places = (where + handle.topology.index * len(new)).to(torch.int32)
            places = handle.gather_flat(nn.functional.pad(places, padding, value=-1))
            values = handle.gather_flat(nn.functional.pad(new[where], padding)).view(dtype)
            values, places = values[places >= 0], places[places >= 0].to(torch.int64)
        # Yield copies: the pickle of a view would contain the values of the whole flat parameter.
        for name, param in params:
            span = param.span
            digest = checksum(view_of(full, span).clone()) if options.digests else None
            if None in counts:
                yield [(name, None, view_of(full, span).clone(), digest)]
                continue
            bounds = places.new_tensor([span.start, span.end])
            start, end = torch.searchsorted(places, bounds).tolist()
            if start < end:
                indices = _row_major(places[start:end] - span.start, param.spec)
                yield [(name, indices, values[start:end].clone(), digest)]


def _words(tensor: Tensor, options: Options) -> Tensor:
    """Return a copy of the rounded values, as integers: 0.0 is not -0.0, and NaN equals itself."""
    rounded = tensor.detach().to(yielded_dtype(tensor, options.dtype), copy=True).contiguous()
    return rounded.view(_WORDS[rounded.itemsize])


def _row_major(indices: Tensor, spec: ShardSpec) -> Tensor:
    """Return the row-major indices of elements, from their indices in memory order."""
    if spec.order == tuple(range(len(spec.order))):
        return indices
    rows = torch.arange(spec.span.numel, device=indices.device).view(spec.shape)
    return rows.permute(spec.order).reshape(-1)[indices]


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
                raise ValueError(
                    f"apply_changes: {name!r}: expected a tensor of the trained model's shape, got "
                    f"{getattr(target, 'shape', 'none')}. Pass all tensors of the unwrapped model."
                )
            if indices is None:
                target.copy_(values)
            else:
                # As integers, because `put_` does not support float8.
                new = _words(values.to(target.device, target.dtype), Options())
                target.view(new.dtype).put_(indices.to(target.device), new)
            if digest is not None and digest != checksum(target.to(values.dtype, copy=True)):
                raise ValueError(
                    f"apply_changes: {name!r} differs from the trained model after the change. "
                    "Expected the weights of the previous pass before the change. Pass the changes "
                    "of every pass, in order, or those of a new WeightChanges, from its first pass."
                )
