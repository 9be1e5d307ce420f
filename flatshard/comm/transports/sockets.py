"""``SocketTransport``: gathers and averages by sends and receives, for ``collectives``.

[Note: receives first]
A message waits for its receive, and that the receive is there is said over the same connection as
the data. Behind data that are on their way already, it reaches the other rank when these have
passed: both directions then take turns. So every receive of a gather or an average is posted, for
all of it, before anything is sent.

[Note: who waits]
gloo's sends and receives are over only for somebody who waits for them, and a wait cannot be given
up. Averages have a thread for it, which also adds what comes in, piece by piece; so one can ask
whether an average is done, and go on without it. To begin a message can take as long as to pass
one, since gloo then waits for its own thread, or writes into the socket itself: another thread
begins them all.

[Note: narrow]
With a wire dtype, floating point values that are wider travel in it. They are narrowed and widened
in the memory where they lie: what is sent takes the first bytes of its place, what is received
the last bytes of its own.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm.flat_chunks import FlatChunks
from flatshard.comm.rank_order import divide

PIECE_BYTES = 2 << 20
"""Averages are received and added in pieces of so many bytes, while the next are on their way."""

SENT_IN_PLACE_BYTES = 1 << 20
"""From here on a gradient is sent from where autograd made it: to copy it takes longer than it
takes to begin messages of its own."""

_logger = logging.getLogger("flatshard")

_ADDED_AT_ONCE = 1 << 14
"""Elements that are added at a time: they stay in the cache, and torch starts no threads for so
few, of which a thread like ours would get a pool of its own."""


class WorkerFuture:
    """Something that another thread does; has the methods of a backend's work."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.help: Callable[[], None] | None = None

    def is_completed(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return self._over.is_set()

    def wait(self) -> None:
        """Wait until it is over; raises what ended it. Does it, if the other thread is not there.

        That may be waiting for what the other ranks do only after this: another model's average.
        """
        if self.help is not None and not self._over.is_set():
            self.help()
        self._over.wait()
        if self._error is not None:
            raise self._error

    def tell(self, error: BaseException | None = None) -> None:
        """It is over."""
        self._error, self.help = error, None
        self._over.set()


def _tell(told: WorkerFuture, do: Callable[[], None]) -> None:
    try:
        do()
    except BaseException as error:
        told.tell(error)
    else:
        told.tell()


class _Messages(WorkerFuture):
    """Receives and sends of one gather or average; told when all have begun."""

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        super().__init__()
        self._group, self._tag = group, tag
        self._to_begin: list[tuple[Callable[..., Any], Tensor, int]] = []
        self.works: list[Any] = []

    def receive(self, out: Tensor, peer: int) -> _Message:
        """Fill ``out`` with what ``peer`` sends."""
        return self._add(self._group.recv, out, peer)

    def send(self, source: Tensor, peer: int) -> _Message:
        """Send ``source`` to ``peer``; it must stay as it is until that is over."""
        return self._add(self._group.send, source, peer)

    def _add(self, begin: Callable[..., Any], tensor: Tensor, peer: int) -> _Message:
        self._to_begin.append((begin, as_bytes(tensor), peer))
        return _Message(self, len(self._to_begin) - 1)

    def run(self) -> None:
        """Begin them in the order in which they were asked for."""
        _tell(self, self._begin)

    def _begin(self) -> None:
        for begin, tensor, peer in self._to_begin:
            self.works.append(begin([tensor], peer, self._tag))
        self._to_begin.clear()


class _Message:
    """One of them; has the methods of a backend's work.

    Attributes:
        tells: whether it becomes completed without a wait.
    """

    tells = False

    def __init__(self, of: _Messages, number: int) -> None:
        self._of, self._number = of, number
        self._is_over = False

    def is_completed(self) -> bool:
        """Whether somebody has waited for it."""
        return self._is_over

    def wait(self) -> None:
        """Wait until it is over; only once, and on one thread."""
        self._of.wait()
        self._of.works[self._number].wait()
        self._is_over = True


class SocketTransport:
    """Moves tensors in host memory between the ranks of gloo groups."""

    def __init__(
        self,
        gathers: dist.ProcessGroup,
        reductions: dist.ProcessGroup,
        wire_dtype: torch.dtype | None,
    ) -> None:
        """Communicates nothing.

        Args:
            gathers: the ranks, for gathers.
            reductions: the same ranks, for averages.
            wire_dtype: what wider floating point values are rounded to before they are sent.
        """
        self._gathers, self._reductions = gathers, reductions
        self._wire_dtype = wire_dtype
        self.rank, self.size = gathers.rank(), gathers.size()
        # The next one first: so all connections are in use at once.
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._scratch = Scratch()
        self._begins = _Thread("flatshard messages")
        self._adds = _Thread("flatshard averages")

    def gather(
        self, shard: Tensor, out: Tensor, tag: int, *, exact: bool, is_there: bool
    ) -> Gathering:
        """Begin filling ``out`` with every rank's shard. Collective: in any order under ``tag``.

        Args:
            shard: ``(shard_numel,)``; must not be written before the sends are over.
            out: ``(shard_numel * size,)``, same dtype.
            tag: tells what is sent from all else in the group of gathers.
            exact: send values as they are whatever the wire dtype.
            is_there: ``out`` shows ``shard`` already.
        """
        messages, slots = _Messages(self._gathers, tag), out.chunk(self.size)
        narrow = None if exact or not self.narrows(shard.dtype) else self._wire_dtype
        places = slots if narrow is None else [_last(slot, narrow) for slot in slots]
        receives = {peer: messages.receive(places[peer], peer) for peer in self._peers}
        source = shard if narrow is None else shard.to(narrow)
        sends = [messages.send(source, peer) for peer in self._peers]
        if not self._begins.put(messages):
            messages.run()
        if not is_there:
            slots[self.rank].copy_(source)  # rounded like the others' copies of it
        to_widen = [] if narrow is None else [slots[peer] for peer in self._peers]
        return Gathering(receives, sends, source, to_widen, narrow)

    def average(
        self, whole: FlatChunks, out: Tensor, tag: int
    ) -> tuple[WorkerFuture, WorkerFuture]:
        """Begin averaging this rank's share of what all ranks have, added up in rank order.

        Collective: all ranks start their averages in the same order.

        Args:
            whole: ``shard_numel * size`` elements; one part is used up, several are only read, and
                must not travel in another dtype.
            out: ``(shard_numel,)``, in the same dtype or the wider one in which to add. What
                ``whole`` has no range for is left as it is.
            tag: tells what is sent from all else in the group of reductions.

        Returns:
            What says that ``out`` has the average, and what says that the parts are sent.
        """
        messages, numel = _Messages(self._reductions, tag), out.numel()
        dtype = self._wire_dtype if self.narrows(whole.dtype) else whole.dtype
        assert dtype is not None, "what narrows is a dtype"
        to_widen = None if dtype is out.dtype else dtype
        first, *others = sorted(self._peers)
        step = max(PIECE_BYTES // dtype.itemsize, 1)
        scratch = self._scratch.take(len(others) * numel * dtype.itemsize)
        rows = scratch[: len(others) * numel * dtype.itemsize].view(dtype)
        pieces = []
        begin = self.rank * numel
        for own in whole.cut(begin, begin + numel, step):
            start, end = own.start - begin, own.end - begin
            place = out[start:end]
            places = {first: place if to_widen is None else _last(place, to_widen)}
            for row, peer in enumerate(others):
                places[peer] = rows[row * numel + start : row * numel + end]
            receives = {peer: messages.receive(place, peer) for peer, place in places.items()}
            pieces.append(_Piece(out[start:end], own.values, places, receives))
        leaving = [self._leaving(whole, peer, numel, dtype, step) for peer in self._peers]
        sends = []
        # To all peers in turn: so all connections are in use at once.
        for ones in zip_longest(*leaving):
            for peer, one in zip(self._peers, ones, strict=True):
                if one is not None:
                    sends.append(messages.send(one, peer))
        if not self._begins.put(messages):
            messages.run()
        average = _Average(
            self.rank, self.size, first, to_widen, pieces, sends, [scratch], self._scratch
        )
        average.averaged.help = average.sent.help = average.run
        self._adds.put(average)  # without a thread, whoever waits runs it
        return average.averaged, average.sent

    def _leaving(
        self, whole: FlatChunks, peer: int, numel: int, dtype: torch.dtype, step: int
    ) -> list[Tensor]:
        """What is sent to ``peer``, in the pieces in which it receives it."""
        leaving = []
        for one in whole.cut(peer * numel, (peer + 1) * numel):
            values = one.values
            if values is None:
                values = torch.zeros(one.end - one.start, dtype=dtype)
            elif values.dtype is not dtype:
                values = narrow_(values, dtype)
            leaving += values.split(step)
        return leaving

    def narrows(self, dtype: torch.dtype) -> bool:
        """Whether values of a dtype travel in a narrower one."""
        wire = self._wire_dtype
        return wire is not None and dtype.is_floating_point and dtype.itemsize > wire.itemsize


@dataclass(frozen=True)
class Gathering:
    """A gather under way.

    Attributes:
        receives: what fills each other rank's slot, by rank.
        sends: what gives them this rank's.
        source: what they send; must stay as it is.
    """

    receives: dict[int, _Message]
    sends: list[_Message]
    source: Tensor
    _to_widen: Sequence[Tensor]
    _narrow: torch.dtype | None

    def finish(self) -> None:
        """After the receives: bring what came to the dtype of the buffer."""
        for slot in self._to_widen:
            assert self._narrow is not None, "it came in another dtype"
            widen_(slot, self._narrow)


# ---------------------------------------------------------------- averages


@dataclass(frozen=True)
class _Piece:
    """A part of an average: where it goes, this rank's values, and where those of others arrive.

    Attributes:
        own: this rank's values; None: zeros.
    """

    out: Tensor
    own: Tensor | None
    places: dict[int, Tensor]
    receives: dict[int, _Message]


@dataclass(frozen=True)
class _Average:
    """What the thread does for one average, or who waits for it first."""

    rank: int
    size: int
    first: int
    """Whose values arrive in the result's own memory: the others' are added there."""
    to_widen: torch.dtype | None
    """In which values arrive, if that is not the result's."""
    pieces: list[_Piece]
    sends: list[_Message]
    scratch: list[Tensor]
    idle: Scratch
    averaged: WorkerFuture = field(default_factory=WorkerFuture)
    sent: WorkerFuture = field(default_factory=WorkerFuture)
    _is_taken: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Wait and add until it is over, once; errors are for those who wait for it."""
        if not self._is_taken.acquire(blocking=False):
            return
        _tell(self.averaged, self._receive)
        _tell(self.sent, self._see_sent)

    # Whoever is told may count on the memory: nothing here refers to it any more.

    def _receive(self) -> None:
        for piece in self.pieces:
            for receive in piece.receives.values():
                receive.wait()
            self._add(piece)
        self.pieces.clear()
        self.idle.give_back(self.scratch.pop())

    def _see_sent(self) -> None:
        self.averaged.wait()  # what made that fail is the end of this, too
        for send in self.sends:
            send.wait()
        self.sends.clear()

    def _add(self, piece: _Piece) -> None:
        if self.to_widen is not None:
            widen_(piece.out, self.to_widen)
        for start in range(0, piece.out.numel(), _ADDED_AT_ONCE):
            end = start + _ADDED_AT_ONCE
            total = piece.out[start:end]
            # The first sum of two is the same in either order.
            for rank in range(self.size):
                place = piece.own if rank == self.rank else piece.places[rank]
                if rank != self.first and place is not None:
                    total.add_(place[start:end])
            divide(total, self.size, total)


class _Thread:
    """Runs one task after another in the background; started by the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[_Messages | _Average | None] | None = None
        self._may_start = True

    def put(self, task: _Messages | _Average) -> bool:
        """Have ``task`` run after those before; False where the system has no more threads."""
        if self._tasks is None and self._may_start:
            self._start()
        if self._tasks is not None:
            self._tasks.put(task)
        return self._tasks is not None

    def _start(self) -> None:
        tasks: SimpleQueue[_Messages | _Average | None] = SimpleQueue()
        try:
            threading.Thread(target=_serve, args=(tasks,), name=self._name, daemon=True).start()
        except RuntimeError as error:
            self._may_start = False  # or some tasks would run behind others that came later
            _logger.warning("no thread for %s, so nothing overlaps: %s", self._name, error)
            return
        self._tasks = tasks
        weakref.finalize(self, tasks.put, None)


def _serve(tasks: SimpleQueue[_Messages | _Average | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # or its tensors would live until the next


class Scratch:
    """Memory that is used again by averages that overlap; given up when none is under way."""

    def __init__(self) -> None:
        self._idle: list[Tensor] = []
        self._num_used = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """At least ``nbytes`` bytes, uint8; belongs to the caller until it is given back."""
        with self._lock:
            self._num_used += 1
            fitting = [one for one in self._idle if one.numel() >= nbytes]
            if fitting:
                best = min(fitting, key=Tensor.numel)
                self._idle = [one for one in self._idle if one is not best]
                return best
        return torch.empty(nbytes, dtype=torch.uint8)

    def give_back(self, memory: Tensor) -> None:
        """Let the next one have it."""
        with self._lock:
            self._num_used -= 1
            self._idle.append(memory)
            if not self._num_used:
                self._idle.clear()


# ---------------------------------------------------------------- narrow values


def widen_(slot: Tensor, narrow: torch.dtype) -> None:
    """Spread values that lie in a narrower dtype in the last bytes of a contiguous tensor."""
    source, ratio = _last(slot, narrow), slot.element_size() // narrow.itemsize
    start = 0
    while start < slot.numel():
        left = slot.numel() - start
        # So many lie, widened, before the first of those that are still to be read.
        end = start + left * (ratio - 1) // ratio
        if left <= _FEW:
            slot[start:] = source[start:].clone()
            return
        slot[start:end].copy_(source[start:end])
        start = end


def narrow_(wide: Tensor, narrow: torch.dtype) -> Tensor:
    """Round the values of a contiguous tensor into its first bytes, and return these."""
    out, ratio = wide.view(narrow)[: wide.numel()], wide.element_size() // narrow.itemsize
    start = min(_FEW, wide.numel())
    out[:start] = wide[:start].to(narrow)
    while start < wide.numel():
        # So many, narrowed, lie before the first of those that are still to be read.
        end = min(start * ratio, wide.numel())
        out[start:end].copy_(wide[start:end])
        start = end
    return out


_FEW = 256
"""Elements that are not worth another round, and take the way over a copy."""


def _last(slot: Tensor, narrow: torch.dtype) -> Tensor:
    """The last bytes of a slot, as many as its values take in a narrower dtype."""
    as_narrow = slot.view(narrow)
    return as_narrow[as_narrow.numel() - slot.numel() :]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, ``(nbytes,)`` uint8."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(-1).view(torch.uint8)
