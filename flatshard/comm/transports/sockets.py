"""``SocketTransport``: all-gathers and averages by gloo's sends and receives.

gloo's own ``all_gather`` fills a temporary, its ``reduce_scatter`` is an all-reduce and a copy, and
its all-to-all sends before it can receive, so that both directions of a slow link take turns. Sends
and receives have a tag per flat parameter and match in whatever order ranks begin them.

[Note: receives first]
A message is sent when its receive was announced, over the same connection as the data. Behind data
already on their way the announcement comes late, and both directions take turns. So all receives of
an all-gather or an average are posted before anything is sent.

[Note: who waits]
gloo's sends and receives complete only in a wait, and a wait cannot be given up. A thread waits for
those of averages and adds what arrives, piece by piece: so the host can ask whether an average is
done, and go on without it. Beginning a message can take as long as sending it, since gloo then
waits for its own thread, or writes into the socket itself: a second thread begins them all.

[Note: narrow]
With a wire dtype, wider floating point values are sent in it. They are narrowed and widened in
place: what is sent occupies the first bytes of its slot, what is received the last bytes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm.flat_chunks import FlatChunks, as_bytes, divide
from flatshard.comm.requests import BufferRequest, Gather, ReduceScatter
from flatshard.comm.transports.base import Members, Transport
from flatshard.comm.work import AsyncWork
from flatshard.memory.buffers import BufferMemory
from flatshard.memory.page_pool import PooledBuffer, allocate, fills_pages
from flatshard.options.collectives import Collectives

PIECE_BYTES = 2 << 20
"""Averages are received and added in pieces of this size, while the next are on their way."""

SENT_IN_PLACE_BYTES = 1 << 20
"""From here on a gradient is sent from where autograd made it: copying it costs more than beginning
messages of its own."""

_logger = logging.getLogger("flatshard")

_ADDED_AT_ONCE = 1 << 14
"""Elements that are added at a time: they stay in the cache, and torch starts no threads for so
few, of which a thread like ours would get a pool of its own."""


class WorkerFuture:
    """Future of work that a helper thread runs; same interface as ``dist.Work``."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.help: Callable[[], None] | None = None

    def is_completed(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return self._over.is_set()

    def wait(self) -> None:
        """Wait until the work is over; raises what ended it."""
        # The helper thread may be busy with another model's average, which the other ranks begin
        # only after this one: whoever waits runs the work, if nobody does yet.
        if self.help is not None and not self._over.is_set():
            self.help()
        self._over.wait()
        if self._error is not None:
            raise self._error

    def run(self, work: Callable[[], None]) -> None:
        """Do the work here, and set the future; errors are for those who wait."""
        try:
            work()
        except BaseException as error:
            self._error = error
        self.help = None
        self._over.set()


class _Messages(WorkerFuture):
    """Receives and sends of one all-gather or average; a future of their beginning."""

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        super().__init__()
        self._group, self._tag = group, tag
        self._to_begin: list[tuple[Callable[..., Any], Tensor, int]] = []
        self.works: list[Any] = []

    def receive(self, out: Tensor, peer: int) -> _Message:
        """Fill ``out`` with what ``peer`` sends."""
        return self._add(self._group.recv, out, peer)

    def send(self, source: Tensor, peer: int) -> _Message:
        """Send ``source`` to ``peer``; it must stay as it is until that is completed."""
        return self._add(self._group.send, source, peer)

    def _add(self, begin: Callable[..., Any], tensor: Tensor, peer: int) -> _Message:
        self._to_begin.append((begin, as_bytes(tensor), peer))
        return _Message(self, len(self._to_begin) - 1)

    def begin_all(self) -> None:
        """Begin them in the order in which they were asked for."""
        self.run(self._begin)

    def _begin(self) -> None:
        for begin, tensor, peer in self._to_begin:
            self.works.append(begin([tensor], peer, self._tag))
        self._to_begin.clear()


class _Message:
    """One receive or send; same interface as ``dist.Work``.

    Attributes:
        reports_end: whether it becomes completed without a wait.
    """

    reports_end = False

    def __init__(self, messages: _Messages, index: int) -> None:
        self._messages, self._index = messages, index
        self._is_over = False

    def is_completed(self) -> bool:
        """Whether somebody has waited for it."""
        return self._is_over

    def wait(self) -> None:
        """Wait until it is completed; only once, and on one thread."""
        self._messages.wait()
        self._messages.works[self._index].wait()
        self._is_over = True


class SocketTransport(Transport):
    """Moves tensors in host memory between the ranks of gloo groups."""

    gathers_in_background = True

    def __init__(self, members: Members) -> None:
        """Communicates nothing."""
        self._members = members
        self._wire_dtype = members.options.wire_dtype
        wire = "" if self._wire_dtype is None else f", {self._wire_dtype}".replace("torch.", "")
        self.name = f"sockets{wire}"
        self._scratch = Scratch()
        self._begins = _Thread("flatshard messages")
        self._adds = _Thread("flatshard averages")

    @classmethod
    def connect(cls, members: Members) -> SocketTransport | str:
        """See ``Transport``; every gloo group has it."""
        if not members.is_gloo or members.options.collectives is Collectives.NATIVE:
            return ""
        return cls(members)

    def accepts(self, device: torch.device, tag: int) -> bool:
        """See ``Transport``."""
        return device.type == "cpu"

    def min_chunk_bytes(self, dtype: torch.dtype) -> int | None:
        """See ``Transport``."""
        return None if self._narrows(dtype) else SENT_IN_PLACE_BYTES

    def allocate_unsharded(self, request: BufferRequest) -> BufferMemory:
        """See ``Transport``: a large buffer maps this rank's shard, which is a file."""
        numel, dtype, files = request.numel, request.dtype, request.shard_files
        part = numel // self._members.size
        # Rounded for the wire, the buffer differs from the shard.
        if files is not None and not self._narrows(dtype) and fills_pages(part * dtype.itemsize):
            start = self._members.rank * part
            with contextlib.suppress(OSError):  # no addresses left
                own = range(start, start + part)
                return PooledBuffer(numel, dtype, own=own, files=files)
        return allocate(numel, dtype, request.device)

    def gather(self, request: Gather, op_name: str) -> AsyncWork:
        """See ``Transport``. Matches by tag, in any order; sent slots are rounded alike."""
        members, shard, out, tag = self._members, request.shard, request.out, request.tag
        need = members.begin(members.gather_group, ("gather", tag))
        messages, slots = _Messages(members.gather_group, tag), out.chunk(members.size)
        narrow = None if request.exact or not self._narrows(shard.dtype) else self._wire_dtype
        places = slots if narrow is None else [_last(slot, narrow) for slot in slots]
        # Before the sends; see the note on receives.
        receives = [messages.receive(places[peer], peer) for peer in members.peers]
        source = shard if narrow is None else shard.to(narrow)
        sends = [messages.send(source, peer) for peer in members.peers]
        self._begin(messages)
        if request.memory is None or request.memory.shard is None:
            slots[members.rank].copy_(source)  # rounded like the others' copies of it
        widen = None
        if narrow is not None:
            widen = partial(_widen_all, [slots[peer] for peer in members.peers], narrow)
        return AsyncWork(
            receives,
            op_name,
            [source, out],
            peers=[members.ranks[peer] for peer in members.peers],
            then=widen,
            sends=sends,
            need=need,
            sends_need=need,
        )

    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
        """See ``Transport``; added up in rank order."""
        members, chunks, out, tag = self._members, request.chunks, request.out, request.tag
        need = members.begin(members.reduce_group, ("average", tag))
        messages, numel = _Messages(members.reduce_group, tag), out.numel()
        dtype = self._wire_dtype if self._narrows(chunks.dtype) else chunks.dtype
        assert dtype is not None, "what narrows is a dtype"
        scratch = self._scratch.take((members.size - 2) * numel * dtype.itemsize)
        average = _Average(members, None if dtype is out.dtype else dtype, scratch, self._scratch)
        step = max(PIECE_BYTES // dtype.itemsize, 1)
        average.receive(messages, chunks, out, step)
        leaving = [self._leaving(chunks, peer, numel, dtype, step) for peer in members.peers]
        # To all peers in turn: so all links are used at once.
        for pieces in zip_longest(*leaving):
            for peer, piece in zip(members.peers, pieces, strict=True):
                if piece is not None:
                    average.sends.append(messages.send(piece, peer))
        self._begin(messages)
        # Set before the thread has it: a rank that waits meanwhile runs it itself.
        average.averaged.help = average.sent.help = average.run
        self._adds.put(average.run)  # without a thread, whoever waits runs it
        return AsyncWork(
            [average.averaged],
            op_name,
            [*chunks.tensors, out],
            sends=[average.sent],
            need=need,
            sends_need=need,
        )

    def _begin(self, messages: _Messages) -> None:
        if not self._begins.put(messages.begin_all):
            messages.begin_all()

    def _leaving(
        self, chunks: FlatChunks, peer: int, numel: int, dtype: torch.dtype, step: int
    ) -> list[Tensor]:
        """What is sent to ``peer``, in the pieces in which it receives it."""
        leaving = []
        for one in chunks.cut(peer * numel, (peer + 1) * numel):
            values = one.values
            if values is None:
                values = torch.zeros(one.end - one.start, dtype=dtype)
            elif values.dtype is not dtype:
                values = narrow_(values, dtype)
            leaving += values.split(step)
        return leaving

    def _narrows(self, dtype: torch.dtype) -> bool:
        """Whether values of a dtype travel in a narrower one."""
        wire = self._wire_dtype
        return wire is not None and dtype.is_floating_point and dtype.itemsize > wire.itemsize


# ---------------------------------------------------------------- averages


@dataclass(frozen=True)
class _Piece:
    """A part of an average.

    Attributes:
        out: where it goes.
        own: this rank's values; None: zeros.
        places: where those of the other ranks arrive.
        receives: what fills these.
    """

    out: Tensor
    own: Tensor | None
    places: dict[int, Tensor]
    receives: list[_Message]


class _Average:
    """What the thread does for one average, or whoever waits for it first."""

    def __init__(
        self, members: Members, to_widen: torch.dtype | None, scratch: Tensor, idle: Scratch
    ) -> None:
        """Nothing is received yet.

        Args:
            members: the ranks.
            to_widen: in which values arrive, if that is not the result's dtype.
            scratch: where they arrive, but for the first peer's.
            idle: gets ``scratch`` back.
        """
        self._rank, self._size = members.rank, members.size
        # The first peer's values arrive in the result's own memory; the others' are added there.
        self._first, *self._others = sorted(members.peers)
        self._to_widen, self._scratch, self._idle = to_widen, [scratch], idle
        self._pieces: list[_Piece] = []
        self.sends: list[_Message] = []
        self.averaged, self.sent = WorkerFuture(), WorkerFuture()
        self._is_taken = threading.Lock()  # the thread and whoever waits race for it; one runs

    def receive(self, messages: _Messages, chunks: FlatChunks, out: Tensor, step: int) -> None:
        """Ask for what the others have for ``out``, ``step`` elements at a time."""
        numel, dtype = out.numel(), self._to_widen or out.dtype
        begin, length = self._rank * numel, len(self._others) * numel
        rows = self._scratch[0][: length * dtype.itemsize].view(dtype)
        for own in chunks.cut(begin, begin + numel, step):
            start, end = own.start - begin, own.end - begin
            part = out[start:end]
            places = {self._first: part if self._to_widen is None else _last(part, dtype)}
            for row, peer in enumerate(self._others):
                places[peer] = rows[row * numel + start : row * numel + end]
            receives = [messages.receive(place, peer) for peer, place in places.items()]
            self._pieces.append(_Piece(part, own.values, places, receives))

    def run(self) -> None:
        """Wait and add until it is over, once; errors are for those who wait for it."""
        if not self._is_taken.acquire(blocking=False):
            return
        self.averaged.run(self._wait_and_add)
        self.sent.run(self._wait_sends)

    # Whoever waits may count on the memory: after these nothing here refers to it any more.

    def _wait_and_add(self) -> None:
        for piece in self._pieces:
            for receive in piece.receives:
                receive.wait()
            self._add(piece)
        self._pieces.clear()
        self._idle.give_back(self._scratch.pop())

    def _wait_sends(self) -> None:
        self.averaged.wait()  # what made that fail is the end of this, too
        for send in self.sends:
            send.wait()
        self.sends.clear()

    def _add(self, piece: _Piece) -> None:
        if self._to_widen is not None:
            widen_(piece.out, self._to_widen)
        for start in range(0, piece.out.numel(), _ADDED_AT_ONCE):
            end = start + _ADDED_AT_ONCE
            total = piece.out[start:end]
            # The first sum of two is the same in either order.
            for rank in range(self._size):
                place = piece.own if rank == self._rank else piece.places[rank]
                if rank != self._first and place is not None:
                    total.add_(place[start:end])
            divide(total, self._size, total)


class _Thread:
    """Runs one task after another in the background; started by the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[Callable[[], None] | None] | None = None
        self._may_start = True

    def put(self, task: Callable[[], None]) -> bool:
        """Have ``task`` run after those before; False where the system has no more threads."""
        if self._tasks is None and self._may_start:
            self._start()
        if self._tasks is not None:
            self._tasks.put(task)
        return self._tasks is not None

    def _start(self) -> None:
        tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        try:
            threading.Thread(target=_serve, args=(tasks,), name=self._name, daemon=True).start()
        except RuntimeError as error:
            self._may_start = False  # or some tasks would run behind others that came later
            _logger.warning("no thread for %s, so nothing overlaps: %s", self._name, error)
            return
        self._tasks = tasks
        weakref.finalize(self, tasks.put, None)


def _serve(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
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


def _widen_all(slots: Sequence[Tensor], narrow: torch.dtype) -> None:
    for slot in slots:
        widen_(slot, narrow)


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
