"""Extra: iterates over the full tensors of a sharded model, one unit at a time.

``full_tensors`` yields all tensors, ``WeightChanges`` only the weights that have changed, and
``MergedLora`` adds LoRA adapters of PEFT to the yielded weights. All ranks run the iteration
together (``read``). ``norms`` computes norms of all parameters or gradients.
"""

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain, cycle
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import Facts, agreed
from flatshard.comm.work import AsyncWork
from flatshard.engine.events import StepExtension
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.run_state import temporarily
from flatshard.engine.unit import Unit
from flatshard.extras.model_shards import model_shards
from flatshard.memory import BufferCache, Checksum, checksum
from flatshard.module.wrappers import handles_in, units_between_steps, units_in
from flatshard.state.model_state import StateDictOptions
from flatshard.tensor import operators
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_range, sharded_in
from flatshard.units.layout import view_of
from flatshard.units.module_tree import unit_text

__all__ = ["TensorName", "WeightChange", "WeightChanges", "apply_changes", "full_tensors"]

_CALLER = "WeightChanges.changes()"
# For each size of an element in bytes, the dtype in which elements are compared bit by bit. For 16
# bytes, torch has no integer dtype.
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
# If more than this share of any rank's shard has changed, the whole flat parameter is sent.
_SHARE = 0.1


class TensorName(str):
    """The name of a tensor in the unwrapped model.

    Attributes:
        names: all names of the tensor. A tied parameter has several names; the first is this name.
    """

    names: tuple[str, ...]


@dataclass(frozen=True)
class Options:
    """Arguments of ``full_tensors`` and ``WeightChanges.changes``; see their docstrings."""

    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    # Ranks compare the text of these options. `repr=False` leaves out `names`, because the text of
    # a function differs between ranks. Ranks compare the chosen names instead.
    names: Callable[[str], bool] | Collection[str] | None = field(default=None, repr=False)
    ranks: Any = "all"
    merge_lora: bool = False
    digests: bool = False

    def check(self, size: int) -> None:
        """Raise ValueError if an argument is wrong; ``size``: number of ranks."""
        if self.dtype is not None and not getattr(self.dtype, "is_floating_point", False):
            raise ValueError(f"dtype must be a floating-point dtype, got {self.dtype!r}.")
        torch.empty(0, device=self.device)  # raises if this host lacks the device
        if self.ranks not in ("all", "local", *range(size)):
            raise ValueError(f"ranks must be 'all', 'local' or below {size}, got {self.ranks!r}.")


Item = tuple[Any, ...]  # the name of a tensor, and the tensor or its changes
Flats = dict[FlatParamHandle, list[tuple[TensorName, OriginalParam]]]


def full_tensors(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    names: Callable[[str], bool] | Collection[str] | None = None,
    ranks: Literal["all", "local"] | int = "all",
    merge_lora: bool = False,
) -> Iterator[Any]:
    """Iterate over ``(name, full tensor)`` of all parameters and persistent buffers.

    The names are the unwrapped model's names. The order is the same on all ranks: parameters unit
    by unit, then parameters outside of units and buffers. Each unit is all-gathered once, while the
    consumer works on the previous unit. A tied parameter appears once; ``name.names`` has all of
    its names. Buffers have this rank's values.

    The tensors are copies. A tensor that the consumer keeps also keeps the memory of the other
    tensors of its unit; to free that memory, keep a ``.clone()``. Extra memory at the peak: three
    times the largest unit, and copies in another dtype or on another ``device``.

    Collective: all ranks, with equal arguments; every rank reads to the end. If a rank stops early
    (``break``, an exception, or ``close()`` of a kept iterator), the rank still takes part in the
    remaining all-gathers, and at the end the other ranks raise RuntimeError. From the call to the
    end, forwards of the model raise RuntimeError. Other collectives, such as ``state_dict()`` and
    ``norms()``, may be called between two items, by all ranks between the same items.

    Example:
        ```python
        import flatshard

        for name, tensor in flatshard.full_tensors(model, dtype=torch.bfloat16):
            print(name, tuple(tensor.shape))
        ```

    Args:
        model: a wrapper, a module that contains wrappers, or an unwrapped model.
        dtype: floating-point dtype of the floating-point tensors. Each rank casts before it sends,
            unless ``dtype`` is wider than the parameters. None: the model's dtypes.
        device: device of the tensors. None: the device that computes.
        names: the names to yield, or a function that tells for each name whether to yield it. Units
            without a chosen parameter are not all-gathered. None: all names.
        ranks: which ranks get tensors. ``"all"``: all ranks. A number: only this rank of the
            model's group; the other ranks only take part, and their iterators are empty.
            ``"local"``: all ranks, but each rank gets only its part of tensor-parallel parameters.
        merge_lora: add the active LoRA adapters of PEFT to their weights, one unit at a time, in
            fp32 and rounded once, and yield the names and tensors of the model without adapters
            (as after ``merge_and_unload()``). The model stays as it is. Each rank that gets
            tensors keeps full copies of the adapters meanwhile.

    Raises:
        ValueError: on all ranks, before the first all-gather: an argument is wrong or differs
            between ranks, or another ``full_tensors`` of the model is not finished.
        NotImplementedError: ``merge_lora`` met an adapter that is no plain LoRA (DoRA, IA3, ...).
        RuntimeError: a forward or backward of the model is running, or parameters were written
            before the last item. At the end: another rank stopped early.
    """
    options = Options(dtype, device, names, ranks, merge_lora)
    return read(model, "full_tensors()", options, _units, _finish)


def read(model: nn.Module, caller: str, options: Options, units: Any, finish: Any) -> Iterator[Any]:
    """Return an iterator over the items of ``units``. Collective until all items are read.

    If a rank stops early, the rank still takes part in the remaining collectives, and at the end
    the other ranks raise RuntimeError. Until the end, forwards of the model raise RuntimeError.

    ``units`` yields a list of items for each flat parameter, and a list for the tensors outside of
    units. ``finish`` converts each of these items for the consumer, and may fail on some ranks.
    """
    shards = model_shards(model, caller)
    world = shards.world
    contexts, mark = list(dict.fromkeys(one.context for one in shards.units)), Reading(shards.units)

    def prepare() -> tuple[tuple[Flats, list[Item], MergedLora | None], Facts]:
        options.check(world.size)
        others = (one for context in contexts for one in context.extensions)
        if any(isinstance(one, Reading) and one.reads(shards.units) for one in others):
            raise ValueError(
                f"another {caller} of this model is not finished. First read that iterator to "
                "the end, or call its close(), on every rank."
            )
        lora = MergedLora(model) if options.merge_lora else None
        with temporarily(shards.parts, options=StateDictOptions()):
            flats, rest = _choose(model, options.names, lora)
        order = [*(name for some in flats.values() for name, _ in some), *(one[0] for one in rest)]
        return (flats, rest, lora), {"the call": f"{options}", "the list of tensors": repr(order)}

    flats, rest, lora = agreed(prepare, [world.host], caller, "Pass equal arguments on every rank.")
    versions = {handle: handle.version for handle in flats}
    if lora is not None:
        some = Options(device=options.device, names=lora.sources, ranks=options.ranks)
        adapters = read(model, caller, some, units, finish)
        lora.adapters = {key: one.clone() for name, one in adapters for key in name.names}

    def reading(is_exiting: Callable[[], bool] = sys.is_finalizing) -> Iterator[Any]:
        # If the consumer stops early, this generator still takes part in the remaining all-gathers,
        # unless the process exits. `is_exiting` is a parameter, because Python clears global
        # variables at exit.
        for context in contexts:
            context.extend(mark)
        # `stopped` says where the consumer stopped early; "" if the consumer has not stopped.
        failed, stopped, is_reading = None, "", options.ranks in ("all", "local", world.rank)
        try:
            # The first item is None. To start this generator, `read` takes this item.
            for item in chain([None], chain.from_iterable(units(options, flats, rest))):
                if stopped or (item and not is_reading):
                    continue
                try:
                    yield item and finish(options, lora, *item)
                except Exception as error:  # no memory for a copy, for example
                    failed, stopped = error, f"raised {type(error).__name__}: {error}"
                except GeneratorExit:
                    if is_exiting():  # a process that exits cannot take part in all-gathers
                        return
                    place = f"after {item[0]!r}" if item else "before the first item"
                    stopped = f"stopped reading {place} (break or exception)"
        finally:
            for context in contexts:
                context.drop(mark)
        written = [flats[one][0][1].where for one, old in versions.items() if one.version != old]
        mine = stopped or (f"wrote {written[0]} before the last item was read" if written else "")
        everyone = world.host.gather(mine, f"the end of {caller}")
        for rank, theirs in zip(world.ranks, everyone, strict=True):
            if theirs and not stopped:
                raise RuntimeError(
                    f"{caller}: rank {rank} {theirs}. Read to the end on every rank, and "
                    "write to no parameter in between."
                )
        if failed is not None:
            raise failed

    items = reading()
    # Start the generator now. If the consumer drops a generator before its start, Python runs none
    # of its code. But `reading` must take part in the all-gathers, because other ranks wait.
    next(items)
    return items


def _choose(model: nn.Module, names: Any, lora: "MergedLora | None") -> tuple[Flats, list[Item]]:
    """Return the chosen parameters, grouped by flat parameter, and all other chosen tensors."""
    known: dict[Tensor, TensorName] = {}
    # With `keep_vars`, the state dict contains the sharded parameters, without an all-gather.
    for text, value in model.state_dict(keep_vars=True).items():
        shown = text if lora is None else lora.name_of(text)
        if isinstance(value, Tensor) and shown is not None:
            name = known.setdefault(value, TensorName(shown))
            name.names = (*getattr(name, "names", ()), shown)
    is_asked: Any = names
    if isinstance(names, Collection):
        asked = {names} if isinstance(names, str) else set(names)
        is_asked = asked.__contains__
        if unknown := asked.difference(*(name.names for name in known.values())):
            raise ValueError(
                f"names: the model has no parameter or persistent buffer {min(unknown)!r}, and "
                f"{len(unknown)} of {len(asked)} names are unknown. See model.state_dict()."
            )
    owners: dict[Tensor, Any] = {p.sharded: (h, p) for h in handles_in(model) for p in h.params}
    flats: Flats = {}
    rest: list[Item] = []
    for tensor, name in known.items():
        if is_asked is not None and not any(map(is_asked, name.names)):
            continue
        if tensor in owners:
            handle, param = owners[tensor]
            flats.setdefault(handle, []).append((name, param))
        else:
            rest.append((name, tensor))
    for handle in flats:
        handle.absorb_replaced()
    return flats, rest


def _units(options: Options, flats: Flats, rest: list[Item]) -> Iterator[list[Item]]:
    """Yield one list of chosen tensors per flat parameter, then the list of copies of ``rest``.

    Collective. Each rank starts the next all-gather before it yields the tensors of the current
    flat parameter. Otherwise, a collective of the user's program between two items could come
    before the all-gather on some ranks and after it on others, and NCCL would deadlock.
    """
    # Memory for the previous, the current and the next flat parameter. A cache does not reuse
    # memory while the consumer keeps a tensor in this memory.
    caches = cycle([BufferCache(), BufferCache(), BufferCache()])
    # Dtype to which each rank casts before sending. With `merge_lora`, cast only after the merge.
    sent = None if options.merge_lora else options.dtype
    started = (_start(handle, next(caches), sent) for handle in flats)
    following = next(started, None)
    for handle, some in flats.items():
        assert following is not None, "there is an all-gather for each flat parameter"
        (full, work), following = following, next(started, None)
        if work is not None:
            work.wait()
            handle.page_out()
        views = [(name, view_of(full, param.span), param.spec) for name, param in some]
        is_local = options.ranks == "local"
        yield [(name, view if is_local else spec.unsplit(view)) for name, view, spec in views]
    # Copy tensors outside of units, which belong to the model: the consumer may write to an item.
    yield [(name, tensor.detach().clone()) for name, tensor in rest]


def _start(
    handle: FlatParamHandle, cache: BufferCache, asked: torch.dtype | None
) -> tuple[Tensor, AsyncWork | None]:
    """Start to all-gather a flat parameter into memory of ``cache``. Collective: shard group.

    Returns the full flat parameter, and the work that fills it (None without an all-gather).
    """
    with torch.inference_mode(False), torch.no_grad():
        shard, buffer, gather = handle.flat_param.detach(), handle.buffer, handle.gather
        # Cast before the all-gather, unless the cast would make the elements larger.
        sent = min(yielded_dtype(shard, asked), shard.dtype, key=lambda one: one.itemsize)
        full = cache.take(handle.layout.padded_numel, sent, handle.device)
        if handle.is_whole or (handle.is_current and buffer.dtype == shard.dtype):
            return full.copy_(shard if handle.is_whole else buffer), None
        return full, gather.start_full(shard.to(handle.device, sent), full, gather.read_tags)


def _finish(options: Options, lora: "MergedLora | None", name: TensorName, tensor: Tensor) -> Item:
    merged = tensor if lora is None else lora.merge(name.names, tensor)
    return name, merged.to(options.device or tensor.device, yielded_dtype(tensor, options.dtype))


def yielded_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype and tensor.is_floating_point() else tensor.dtype


class Reading(StepExtension):
    """Refuses forwards of the units whose full tensors are being read."""

    name = "weights"

    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = frozenset(units)

    def reads(self, units: Iterable[Unit]) -> bool:
        return not self._units.isdisjoint(units)

    def begin_forward(self, unit: Unit | None) -> None:
        if unit is not None and any(self.reads(units_in(module)) for module in unit.modules):
            raise RuntimeError(
                f"{unit_text(unit.name)}: a forward began before full_tensors() was read to its "
                "end. Read all items first, or call the iterator's close() on every rank."
            )


# ------------------------------------------------------------ changes


class WeightChange(NamedTuple):
    """The changed values of one parameter or buffer.

    Attributes:
        name: the name in the unwrapped model; for a tied parameter, the first of its names.
        indices: indices of the changed elements, int64, 1-D, for ``Tensor.put_``. None: ``values``
            contains the whole tensor.
        values: the new values, 1-D, or in the tensor's shape if ``indices`` is None.
        digest: checksum of the full tensor with the new values, for ``apply_changes``; None if
            ``digests`` is False, and for buffers.
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
        # Rounded copies of shards, and of tensors outside of units, from the last pass. Empty if
        # that pass was not read to its end.
        self._kept: dict[Any, Tensor] = {}

    def changes(self, *, ranks: int | str = "all", digests: bool = False) -> Iterator[WeightChange]:
        """Iterate over the parameters and persistent buffers that changed since the last pass.

        The parameters come unit by unit. If more than a tenth of one rank's shard of a flat
        parameter has changed, the whole flat parameter is sent. If a rank stops early, the rank
        still takes part in the rest of the pass, the other ranks raise RuntimeError at the end, and
        the next pass yields all weights. Extra memory: two shards of the largest unit and one
        parameter; if the whole unit is sent, also about one copy of the unit in the dtype.

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
        # `_kept` is empty until this pass is complete. So after a pass that was not read to its
        # end, the next pass yields all weights.
        self._last, self._kept = self._kept, {}
        return self._keeping(items)

    def _keeping(self, items: Iterator[Any]) -> Iterator[Any]:
        yield from items
        self._kept = self._last

    def _units(self, options: Options, flats: Flats, rest: list[Item]) -> Iterator[Any]:
        """Yield the changes of each flat parameter, then the changes of ``rest``. Collective."""
        for param in (param for params in flats.values() for _, param in params):
            param.spec.refuse_part(_CALLER)
        for handle, params in flats.items():
            yield from self._of_flat(handle, params, options)
        for name, tensor in rest:
            new = _words(tensor, options)
            if name not in self._last or not torch.equal(self._last[name], new):
                self._last[name] = new
                yield [(name, None, new.clone().view(yielded_dtype(tensor, options.dtype)))]

    def _of_flat(self, handle: FlatParamHandle, some: list[Any], options: Options) -> Iterator[Any]:
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
            # All ranks must send equally many values. A rank with fewer changes adds values with
            # the position -1, which are removed after the all-gather.
            padding = 0, max(counts) - len(where)
            places = (where + handle.topology.index * len(new)).to(torch.int32)
            places = handle.gather_flat(nn.functional.pad(places, padding, value=-1))
            values = handle.gather_flat(nn.functional.pad(new[where], padding)).view(dtype)
            values, places = values[places >= 0], places[places >= 0].to(torch.int64)
        # Yield copies, because the pickle of a view would contain the whole flat parameter.
        for name, param in some:
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
    """Return a copy of the rounded values as integers, to compare bit by bit (NaN equals NaN)."""
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
                # Write integers with the same bits, because `put_` does not support float8.
                new = _words(values.to(target.device, target.dtype), Options())
                target.view(new.dtype).put_(indices.to(target.device), new)
            if digest is not None and digest != checksum(target.to(values.dtype, copy=True)):
                raise ValueError(
                    f"apply_changes: {name!r} differs from the trained model after the change. "
                    "Expected the weights of the previous pass before the change. Pass the changes "
                    "of every pass in order, or begin with the first pass of a new WeightChanges."
                )


# ------------------------------------------------------------ norms


def norms(model: nn.Module, kind: str, norm_type: float) -> dict[str, float]:
    """Compute norms of the full tensors. Documented at ``ShardedWrapper.norms``."""
    if kind not in ("grad", "param"):
        raise ValueError(f"norms(): expected kind 'grad' or 'param', got {kind!r}.")
    units, order = units_between_steps(model, "norms()"), float(norm_type)
    params = [param for unit in units for handle in unit.handles for param in handle.params]
    specs = [param.spec for param in params]
    # Without this context, each access to an attribute of a sharded tensor takes 10 microseconds.
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        tensors: list[Any] = [param.sharded for param in params]
        if kind == "grad":
            # Call the getter of `Tensor`, because the property of `FlatShardTensor` takes longer.
            tensors = [*map(Tensor.grad.__get__, tensors)]  # type: ignore[union-attr]
            for grad in sharded_in(tensors):
                operators.own_part(grad)  # raises if the gradient was not reduced yet
        groups: dict[tuple[Communicator, ...], list[int]] = {}
        for index, (spec, tensor) in enumerate(zip(specs, tensors, strict=True)):
            if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
                # If the user has set `.grad` of a sharded parameter to a plain tensor, this is the
                # full gradient on every rank, so its norm needs no communication.
                is_whole = not isinstance(tensor, FlatShardTensor)
                comms = () if is_whole and spec.comm.size > 1 else spec.comms
                groups.setdefault(comms, []).append(index)
        values = []
        for comms, some in groups.items():
            parts = [local_range(tensors[index]) for index in some]
            # Ranks compare these names. Each name contains `kind`: otherwise, if ranks called
            # `norms` with different kinds, norms of parameters and of gradients would be added up.
            names = [f"{kind} {specs[index].name!r}" for index in some]
            values.append(operators.joined_norms(parts, names, order, None, comms))
        # Copy the norms of all groups to the host at once, so that the host waits only once.
        numbers = torch.cat([one.to(values[0].device) for one in values]).tolist() if values else []
    names = [specs[index].name for index in chain.from_iterable(groups.values())]
    return dict(zip(names, numbers, strict=True))


# ------------------------------------------------------------ LoRA


class MergedLora:
    """Names and values of the model with merged LoRA adapters. The model is not changed.

    Attributes:
        sources: names of the adapters' tensors in the model.
        adapters: full tensors of these names, which ``merge`` adds to the weights.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the adapters of ``model``. Raises if an adapter is not plain LoRA (DoRA, IA3)."""
        # Paths in the model, mapped to paths in the merged model. The path of a PEFT module is
        # mapped to None, because in the merged model an inner module takes the place of the PEFT
        # module. Paths are "" or end with ".".
        self._paths: dict[str, str | None] = {"": ""}
        # For each weight's name in the merged model: the layers with adapters, and their paths.
        self._layers: dict[str, dict[Any, str]] = defaultdict(dict)
        self.adapters: dict[str, Tensor] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            path = f"{name}." if name else ""
            part, shown = _taking_the_place_of(module, name), self.name_of(path)
            if part is None or shown is None:
                continue
            self._paths |= {path: None, f"{path}{part}.": shown}
            if part == "base_layer" and not module.disable_adapters:
                self._layers[shown + getattr(module, "parameter_name", "weight")][module] = path
        layers = {layer: path for some in self._layers.values() for layer, path in some.items()}
        self.sources = {path + name for layer, path in layers.items() for name in _active(layer)}

    def name_of(self, text: str) -> str | None:
        """Return the name of a tensor in the merged model, or None if the merged model lacks it."""
        end = text.rfind(".") + 1
        while text[:end] not in self._paths:
            end = text.rfind(".", 0, end - 1) + 1
        shown = self._paths[text[:end]]
        return None if shown is None else shown + text[end:]

    def merge(self, names: Sequence[str], tensor: Tensor) -> Tensor:
        """Return the weight with these names plus its adapters, in fp32 or wider."""
        layers = {layer: path for name in names for layer, path in self._layers[name].items()}
        for layer, path in layers.items():
            weight = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            full: dict[str, dict[str, Any]] = defaultdict(dict)
            for name in _active(layer):
                kind, adapter, *rest = name.split(".")
                one = self.adapters[path + name].to(weight)
                full[kind][adapter] = SimpleNamespace(weight=one) if rest else one
            # Let PEFT compute the weight's change, with a copy of the layer that has full adapters.
            # PEFT rounds to the dtype of `get_param()`, so `get_param` returns the fp32 weight.
            stand_in = copy.copy(layer)
            vars(stand_in).update(_modules=layer._modules | full, get_param=lambda at=weight: at)
            adapters = dict.fromkeys(adapter for some in full.values() for adapter in some)
            tensor = sum((stand_in.get_delta_weight(one) for one in adapters), weight)
        return tensor


def _active(layer: Any) -> list[str]:
    """Return the names of the tensors of the layer's active adapters."""
    names = [name for name, _ in layer.named_parameters() if name.startswith("lora_")]
    return [name for name in names if name.split(".")[1] in layer.active_adapters]


def _taking_the_place_of(module: Any, path: str) -> str | None:
    """Return the path of the submodule that takes the place of ``module`` in the merged model.

    Returns None if ``module`` is not a PEFT module. Raises if its adapters cannot be merged.
    """
    peft = import_module("peft")
    tuners, others = peft.tuners.tuners_utils, peft.utils.other
    models = peft.PeftModel | peft.PeftMixedModel
    if isinstance(module, models) and isinstance(module.base_model, tuners.BaseTuner):
        return "base_model"
    if isinstance(module, tuners.BaseTuner):
        return "model"
    if isinstance(module, others.ModulesToSaveWrapper):
        is_used = module.active_adapters and not module.disable_adapters
        return f"modules_to_save.{module.active_adapters[0]}" if is_used else "original_module"
    if not isinstance(module, models | tuners.BaseTunerLayer | others.AuxiliaryTrainingWrapper):
        return None
    kind, weight = type(module), getattr(module, "parameter_name", "weight")
    if kind.__module__ != "peft.tuners.lora.layer" or not hasattr(module.get_base_layer(), weight):
        why = f"is a {kind.__name__}, and only LoRA on plain layers and parameters can be merged"
    elif module.lora_variant.keys() & {*module.active_adapters} or any(module.lora_bias.values()):
        why = "has adapters with a LoRA variant (use_dora=True, for example) or a bias"
    elif module.merged_adapters:
        why = f"has merged adapters ({', '.join(module.merged_adapters)}): call unmerge_adapter()"
    else:
        return "base_layer"
    raise NotImplementedError(
        f"merge_lora=True: {path!r} {why}. Read the tensors with merge_lora=False, and merge the "
        "adapters in the program that reads them."
    )
