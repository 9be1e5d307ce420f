"""``full_tensors``: iterates over the full tensors of a sharded model, one unit at a time.

``norms``: norms of all parameters, gradients or updates, in one collective.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import ALONE, Communicator
from flatshard.comm.consistency import Facts, agreed
from flatshard.comm.work import AsyncWork
from flatshard.engine.handle import FlatParamHandle
from flatshard.extras.weights.norms import norms as norms
from flatshard.memory.buffers import BufferCache
from flatshard.module.wrappers import handles_in, model_shards, unit_of, wrappers_in
from flatshard.state.model_state import StateDictOptions, options_set
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.units.layout import view_of
from flatshard.units.module_proxy import ModuleProxy
from flatshard.units.module_tree import unit_text

Item = tuple["TensorName", Tensor]


class TensorName(str):
    """The name of a tensor in the unwrapped model.

    Attributes:
        names: all names of the tensor. A tied parameter has several names; the first is this name.
    """

    names: tuple[str, ...]


def full_tensors(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    bucket_bytes: int | None = None,
    names: Callable[[str], bool] | Collection[str] | None = None,
    ranks: Literal["all", "local"] | int = "all",
    debug: bool = False,
) -> Iterator[Any]:
    """Iterate over ``(name, full tensor)`` of all parameters and persistent buffers.

    The names are those of the unwrapped model, in the same order on all ranks: parameters unit by
    unit, then parameters outside of units and buffers. Each unit is all-gathered once, while the
    consumer works on the unit before. A tied parameter appears once; ``name.names`` has all of its
    names. Buffers are this rank's own.

    The tensors are copies, valid until the consumer asks for the next item. To keep a tensor for
    longer, use ``.clone()``, so that the memory of the whole unit can be freed. Extra memory at the
    peak: three times the largest unit, or with ``bucket_bytes`` about two buckets and the largest
    unit; and copies in another dtype or on another ``device``.

    Collective: all ranks, with equal arguments; every rank reads to the end. If a rank stops early
    (``break``, an exception, or ``close()`` of a kept iterator), the rank still takes part in the
    remaining all-gathers, and at the end the other ranks raise RuntimeError. From the call to the
    end, forwards of the model raise RuntimeError.
    Other collectives, such as ``state_dict()`` and ``norms()``, may be called between two items, by
    all ranks between the same items.

    Example:
        ```python
        import flatshard

        for name, tensor in flatshard.full_tensors(model, dtype=torch.bfloat16):
            print(name, tuple(tensor.shape))
        ```

    Args:
        model: a wrapper, a module that contains wrappers, or an unwrapped model.
        dtype: floating-point dtype of the floating-point tensors. Each rank casts before it sends,
            unless ``dtype`` is wider than the parameters or float8. None: the model's dtypes.
        device: device of the tensors. None: the device that computes.
        bucket_bytes: if set, each item is a list of ``(name, tensor)`` pairs with at most this
            many bytes, or one larger tensor.
        names: the names to yield, or a function that tells for each name whether to yield it. Units
            without a chosen parameter are not all-gathered. None: all names.
        ranks: which ranks get tensors. ``"all"``: all ranks. A number: only this rank of the
            model's group; the other ranks only take part, and their iterators are empty.
            ``"local"``: all ranks; of a tensor-parallel parameter each rank gets only its part.
        debug: overwrite the tensors of an item with NaN (integers: the largest value) when the
            next item is asked for. This finds consumers that keep tensors without a clone.

    Raises:
        ValueError: on all ranks, before the first all-gather: an argument is wrong or differs
            between ranks, or another ``full_tensors`` of the model is not finished.
        RuntimeError: a forward or backward of the model is running, or parameters were written
            before the last item. At the end: another rank stopped early.
    """
    shards = model_shards(model, "full_tensors()")
    request = Arguments(dtype, device, bucket_bytes, names, ranks, debug)
    world, parts = (ALONE, []) if shards is None else (shards.world, shards.parts)

    def prepare() -> tuple[_Reader, Facts]:
        request.check(world.size)
        with options_set(parts, StateDictOptions()):
            reader = _Reader(model, request, world)
        return reader, {"the call": repr(request), "the list of tensors": repr(reader.order)}

    reader = agreed(prepare, [world], "full_tensors()", "Pass equal arguments on every rank.")
    items = reader.read()
    # Start the generator. If the user drops the iterator before the first item, `read` must still
    # take part in the all-gathers, for which the other ranks wait. But if a generator is dropped
    # before it has started, Python runs none of its code.
    next(items)
    return items


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call of ``full_tensors``. Ranks compare the ``repr`` of this object."""

    dtype: torch.dtype | None
    device: torch.device | str | None
    bucket_bytes: int | None
    names: Callable[[str], bool] | Collection[str] | None = field(repr=False)
    ranks: Literal["all", "local"] | int
    debug: bool

    def check(self, size: int) -> None:
        if self.dtype is not None and not getattr(self.dtype, "is_floating_point", False):
            raise ValueError(f"dtype must be a floating-point dtype, got {self.dtype!r}.")
        limit = 1 if self.bucket_bytes is None else self.bucket_bytes
        if not isinstance(limit, int) or limit < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {self.bucket_bytes!r}.")
        torch.empty(0, device=self.device)  # raises if this host lacks the device
        if self.ranks not in ("all", "local", *range(size)):
            raise ValueError(
                f"ranks must be 'all', 'local' or a rank < {size}, got {self.ranks!r}."
            )

    def chosen(self, known: Iterable[TensorName]) -> set[TensorName]:
        """Return the names to yield. Raises ValueError if the user asked for an unknown name."""
        if not isinstance(self.names, Collection):
            return {one for one in known if self.names is None or any(map(self.names, one.names))}
        asked = {self.names} if isinstance(self.names, str) else set(self.names)
        unknown = asked.difference(*(name.names for name in known))
        if unknown:
            raise ValueError(
                f"names: the model has no parameter or persistent buffer {min(unknown)!r}, and "
                f"{len(unknown)} of {len(asked)} names are unknown. See model.state_dict()."
            )
        return {name for name in known if not asked.isdisjoint(name.names)}

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which ``tensor`` is yielded."""
        return self.dtype if self.dtype and tensor.is_floating_point() else tensor.dtype

    def cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device or tensor.device, self.dtype_of(tensor))


class _Flat:
    """One flat parameter: starts the all-gather, and lists the original parameters to yield."""

    def __init__(self, handle: FlatParamHandle, asked: torch.dtype | None) -> None:
        self.handle = handle
        self.wanted: list[tuple[TensorName, OriginalParam]] = []
        handle.absorb_replaced()
        self.version, stored = handle.version, handle.flat_param.dtype
        # Cast before the all-gather if fewer bytes are sent then. Backends cannot send dtypes of
        # one byte, so cast to float8 afterwards.
        fits = asked and stored.is_floating_point and 2 <= asked.itemsize <= stored.itemsize
        self._dtype: torch.dtype = asked if asked and fits else stored
        self.nbytes = handle.layout.padded_numel * self._dtype.itemsize

    def start(self, cache: BufferCache) -> tuple[Tensor, AsyncWork | None]:
        """Start the all-gather. Collective: all ranks of the shard group.

        Returns a pair: the full flat parameter, ``(padded_numel,)``, in memory of ``cache``, and
        the work that fills the flat parameter, or None if no all-gather was needed.
        """
        handle = self.handle
        with torch.inference_mode(False), torch.no_grad():
            full = cache.take(handle.layout.padded_numel, self._dtype, handle.device)
            shard, buffer, gather = handle.flat_param.detach(), handle.buffer, handle.gather
            if handle.is_whole or (handle.is_current and buffer.dtype == shard.dtype):
                return full.copy_(shard if handle.is_whole else buffer), None
            shard = shard.to(handle.device, self._dtype)
            return full, gather.start_full(shard, full, gather.read_tags)


class _Reader:
    """Reads the full tensors of one model, in one order on all ranks."""

    def __init__(self, model: nn.Module, request: Arguments, world: Communicator) -> None:
        self._request, self._world = request, world
        self._wrappers = wrappers_in(model)
        if any(_refuse in one._forward_pre_hooks.values() for one in self._wrappers):
            raise ValueError(
                "another full_tensors() of this model is not finished. First read that iterator to "
                "the end, or call its close(), on every rank."
            )
        names: dict[Tensor, TensorName] = {}
        # With `keep_vars`, the state dict contains the sharded parameters, without an all-gather.
        for text, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor):
                name = names.setdefault(value, TensorName(text))
                name.names = (*getattr(name, "names", ()), text)
        chosen = request.chosen(names.values())
        owners: dict[Tensor, Any] = {p.sharded: (h, p) for h in handles_in(model) for p in h.params}
        flats: dict[FlatParamHandle, _Flat] = {}
        self._rest: list[Item] = []  # parameters that no unit owns, and buffers
        for tensor, name in names.items():
            if name in chosen and tensor in owners:
                handle, param = owners[tensor]
                flat = flats.get(handle) or _Flat(handle, request.dtype)
                flats.setdefault(handle, flat).wanted.append((name, param))
            elif name in chosen:
                self._rest.append((name, tensor))
        self._flats = [*flats.values()]
        # Names of the tensors to yield, in order.
        self.order = [*(n for flat in self._flats for n, _ in flat.wanted), *dict(self._rest)]
        self._largest = max((flat.nbytes for flat in self._flats), default=0)
        # `_waiting`: flat parameters whose all-gather has not started. `_started`: flat parameters
        # whose all-gather has started, but whose tensors have not been yielded.
        self._waiting = deque(self._flats)
        self._started: deque[tuple[_Flat, Tensor, AsyncWork | None]] = deque()
        # Memory for three flat parameters: the last, the present and the next. A cache does not
        # reuse memory in which the consumer still holds a tensor.
        self._caches = deque(BufferCache() for _ in range(3))

    def read(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> Iterator[Any]:
        """First yield an empty item, which the caller needs to start the generator; then all items.

        A generator that is closed early still takes part in all remaining all-gathers, unless the
        process exits. ``is_exiting`` tells whether the process exits. The function is a local
        variable, because Python clears global variables at exit.
        """
        hooks = [one.register_forward_pre_hook(_refuse, prepend=True) for one in self._wrappers]
        request, failed = self._request, None
        is_reading = request.ranks in ("all", "local", self._world.rank)
        # `stopped`: text that says where the consumer stopped early. "": it has not stopped.
        is_paired, stopped = request.bucket_bytes is None, ""
        try:
            for bucket in chain([[]], self._buckets()):
                for item in [[pair] for pair in bucket] if is_paired and bucket else [bucket]:
                    if stopped or (item and not is_reading):
                        break
                    try:
                        item = [(name, request.cast(tensor)) for name, tensor in item]
                        yield item[0] if is_paired and item else item
                    except Exception as error:  # no memory for a copy, for example
                        failed, stopped = error, f"raised {type(error).__name__}: {error}"
                    except GeneratorExit:
                        if is_exiting():  # a process that exits cannot take part in all-gathers
                            return
                        place = f"after {item[-1][0]!r}" if item else "before the first item"
                        stopped = f"stopped reading {place} (break or exception)"
                    for _, tensor in item if request.debug else ():
                        if tensor.dtype is not torch.bool:
                            is_float = tensor.is_floating_point() or tensor.is_complex()
                            tensor.fill_(torch.nan if is_float else torch.iinfo(tensor.dtype).max)
        finally:
            for hook in hooks:
                hook.remove()
        self._end(stopped)
        if failed is not None:
            raise failed

    def _end(self, stopped: str) -> None:
        """Raise RuntimeError if another rank stopped early, or if a parameter was written.

        Collective: all ranks that train the model.
        """
        written = [f.wanted[0][1].where for f in self._flats if f.version != f.handle.version]
        mine = stopped or (f"wrote {written[0]} before the last item was read" if written else "")
        everyone = self._world.host.gather_unless_equal(mine, "the end of full_tensors()")
        for rank, theirs in zip(self._world.ranks, everyone, strict=False):
            if theirs and not stopped:
                raise RuntimeError(
                    f"full_tensors(): rank {rank} {theirs}. Read to the end on every rank, and "
                    "write to no parameter in between."
                )

    # ------------------------------------------------------------ buckets

    def _buckets(self) -> Iterator[list[Item]]:
        """Yield lists of tensors: the tensors of one unit, or at most ``bucket_bytes`` of tensors.

        Collective. On every rank, even on a rank that gets no tensors, the all-gathers start in the
        same order and before the same items. Otherwise a collective of the user's program between
        two items could come before an all-gather on one rank and after it on another, and NCCL
        would deadlock.
        """
        limit = self._request.bucket_bytes
        budget = 2 * (limit or self._largest) + self._largest
        bucket: list[Item] = []
        # `size`: bytes of the tensors in `bucket`. `held`: bytes of the flat parameters whose
        # memory `bucket` keeps alive. `before`: the same for the last bucket that was yielded,
        # which the consumer may still hold.
        size = held = before = 0
        # `self._rest` has the model's own tensors, not copies of all-gathered values. So copy them:
        # the consumer may write to an item.
        rest = ((name, tensor.detach().clone()) for name, tensor in self._rest)
        for flat in [*self._flats, None]:
            self._start(budget - before - held, is_needed=True)
            held += flat.nbytes if flat else 0
            for name, tensor in rest if flat is None else self._read():
                nbytes = tensor.numel() * self._request.dtype_of(tensor).itemsize
                if limit is not None and bucket and size + nbytes > limit:
                    self._start(budget - before - held)
                    yield bucket
                    bucket, size, before, held = [], 0, held, flat.nbytes if flat else 0
                bucket.append((name, tensor))
                size += nbytes
            if bucket and (limit is None or flat is None):
                self._start(budget - before - held)
                yield bucket
                bucket, before, held = [], held, 0

    def _start(self, budget: int, *, is_needed: bool = False) -> None:
        """Start the all-gathers that fit in ``budget`` bytes; at least one if ``is_needed``."""
        budget -= sum(flat.nbytes for flat, _, _ in self._started)
        waiting = self._waiting
        while waiting and (waiting[0].nbytes <= budget or (is_needed and not self._started)):
            budget -= waiting[0].nbytes
            self._caches.rotate()
            self._started.append((waiting[0], *waiting.popleft().start(self._caches[0])))

    def _read(self) -> Iterator[Item]:
        """Wait for the first started flat parameter; yield the chosen original parameters in it."""
        flat, full, work = self._started.popleft()
        if work is not None:
            work.finish()
            flat.handle.page_out()
        for name, param in flat.wanted:
            tensor = view_of(full, param.span)
            yield name, tensor if self._request.ranks == "local" else param.spec.unsplit(tensor)


def _refuse(wrapper: ModuleProxy, *_: Any) -> None:
    raise RuntimeError(
        f"{unit_text(unit_of(wrapper).name)}: a forward began before full_tensors() was "
        "read to its end. Read all items first, or call the iterator's close() on every rank."
    )
