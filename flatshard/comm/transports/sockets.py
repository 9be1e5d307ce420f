"""``SocketTransport``: all-gathers and averages by gloo's sends and receives.

gloo's own collectives are slower: ``all_gather`` fills a temporary tensor, ``reduce_scatter`` is an
all-reduce and a copy, and the all-to-all sends before it can receive, so that only one direction of
a slow link is used at a time. Here, sends and receives have a tag per flat parameter. Messages
match by tag, so ranks may begin the all-gathers of different flat parameters in different orders.

gloo's sends and receives complete only when a thread waits for them, and a wait cannot be
cancelled. Therefore a background thread waits for the receives of averages, and adds the pieces as
they arrive. The training thread can ask whether an average is complete, and can continue meanwhile.
Beginning a message can take as long as sending the message, because gloo waits for its own thread
or writes into the socket directly. Therefore a second background thread begins all messages.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain, zip_longest
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatshard.comm.process_groups import OUR_THREADS, as_bytes
from flatshard.comm.transports import (
    BufferRequest,
    FlatChunks,
    Gather,
    Members,
    ReduceScatter,
    Transport,
    divide,
)
from flatshard.comm.work import AsyncWork
from flatshard.memory.buffers import BufferMemory, PooledBuffer, allocate, fills_pages
from flatshard.options.offload import OffloadError
from flatshard.options.transport_options import Collectives

# Averages are received and added in pieces of this size, while the next pieces are on their way.
PIECE_BYTES = 2 << 20
# Gradients of at least this size are sent directly from the tensors that autograd made: copying
# them together would cost more than sending separate messages.
SENT_IN_PLACE_BYTES = 1 << 20
# Number of elements that are added at a time. This number is small enough that the elements stay in
# the CPU's cache, and that torch starts no threads: torch would otherwise start a separate thread
# pool for each of flatshard's background threads.
_ADDED_AT_ONCE = 1 << 14


class _Message:
    """One receive or send, matched by its tag. Has the interface of ``dist.Work``."""

    reports_end = False  # gloo completes a message only when a thread waits for the message

    def __init__(self, begin: Callable[..., Any], tensor: Tensor, peer: int, tag: int) -> None:
        """Prepare a message, without beginning it.

        Args:
            begin: method ``recv`` or ``send`` of a process group.
            tensor: the tensor to fill or to send. A sent tensor must not be written until the
                message is completed.
            peer: the rank that sends or receives.
            tag: the tag that matches the send and the receive.
        """
        self._ask = partial(begin, [as_bytes(tensor)], peer, tag)
        self._begun: Future[Any] | None = Future()

    def begin(self) -> None:
        """Begin the message. If this fails, ``wait`` raises the error."""
        assert self._begun is not None, "begun before it is waited for"
        try:
            self._begun.set_result(self._ask())
        except BaseException as error:
            self._begun.set_exception(error)

    def is_completed(self) -> bool:
        """Whether ``wait`` has returned."""
        return self._begun is None

    def wait(self) -> None:
        """Wait until the message is completed. This method is called only once."""
        assert self._begun is not None, "waited for once"
        self._begun.result().wait()
        # Both attributes keep the tensor alive. Drop them now, because this object lives until all
        # other messages of the collective are completed.
        del self._ask
        self._begun = None


def _begin(messages: Sequence[_Message]) -> None:
    """Begin messages in the given order."""
    for message in messages:
        message.begin()


class SocketTransport(Transport):
    """Moves tensors in host memory between the ranks of gloo groups; messages match by tag.

    With a wire dtype, wider floating-point values are rounded to the wire dtype before they are
    sent.
    """

    gathers_in_background = True

    def __init__(self, members: Members) -> None:
        self._members = members
        self._wire_dtype = members.options.wire_dtype
        wire = "" if self._wire_dtype is None else f", {self._wire_dtype}".replace("torch.", "")
        self.name = f"sockets{wire}"
        self._begins = _Thread("messages")
        self._adds = _Thread("averages")

    @classmethod
    def connect(cls, members: Members) -> SocketTransport | str:
        if not members.is_gloo or members.options.collectives is Collectives.NATIVE:
            return ""
        return cls(members)

    def accepts(self, device: torch.device, tag: int) -> bool:
        return device.type == "cpu"

    def min_chunk_bytes(self, dtype: torch.dtype) -> int | None:
        return SENT_IN_PLACE_BYTES if self._sent_dtype(dtype) is dtype else None

    def _sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        wire = self._wire_dtype
        if wire is None or not dtype.is_floating_point or dtype.itemsize <= wire.itemsize:
            return dtype
        return wire

    def allocate_unsharded(self, request: BufferRequest) -> BufferMemory:
        numel, dtype, target = request.numel, request.dtype, request.shard_target
        part = numel // self._members.size
        # If values are rounded to the wire dtype, this rank's range of the buffer differs from the
        # shard, so the buffer cannot map the shard's memory.
        is_exact = self._sent_dtype(dtype) is dtype
        if target is not None and is_exact and fills_pages(part * dtype.itemsize):
            start = self._members.rank * part
            # If the system has no addresses left or cannot make a file, use ordinary memory.
            with contextlib.suppress(OSError, OffloadError):
                return PooledBuffer(numel, dtype, range(start, start + part), target)
        return allocate(numel, dtype, request.device)

    def gather(self, request: Gather, op_name: str) -> AsyncWork:
        members, source, out = self._members, request.shard, request.out
        need = members.begin(members.gather_group, ("gather", request.tag))
        dtype = source.dtype if request.exact else self._sent_dtype(source.dtype)
        arrived, then = out, None
        if dtype is not source.dtype:
            # Round this rank's own part too, so that all ranks compute with the same values.
            source, arrived = source.to(dtype), torch.empty_like(out, dtype=dtype)

            def then() -> None:
                out.copy_(arrived)

        group, tag, slots = members.gather_group, request.tag, arrived.chunk(members.size)
        # Begin all receives before the sends. gloo sends a message only after the receiver has
        # announced the receive, on the same connection as the data. If this rank sent data first,
        # its announcements would wait behind the data, and only one direction of a link would be
        # used at a time.
        receives = [_Message(group.recv, slots[peer], peer, tag) for peer in members.peers]
        sends = [_Message(group.send, source, peer, tag) for peer in members.peers]
        self._begins.put(partial(_begin, [*receives, *sends]))
        if request.memory is None or request.memory.shard is None:
            slots[members.rank].copy_(source)
        return AsyncWork(
            receives,
            op_name,
            [source, out],
            peers=[members.ranks[peer] for peer in members.peers],
            then=then,
            sends=sends,
            need=need,
            sends_need=need,
        )

    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
        members, chunks, out = self._members, request.chunks, request.out
        need = members.begin(members.reduce_group, ("average", request.tag))
        dtype = self._sent_dtype(chunks.dtype)
        step = max(PIECE_BYTES // dtype.itemsize, 1)
        average = _Average(members, request, dtype, step)
        leaving = [_leaving(chunks, peer, out.numel(), dtype, step) for peer in members.peers]
        # Send one piece to each peer in turn, so that all links are used at the same time.
        for pieces in zip_longest(*leaving):
            for peer, piece in zip(members.peers, pieces, strict=True):
                if piece is not None:
                    send = _Message(members.reduce_group.send, piece, peer, request.tag)
                    average.sends.append(send)
        # Receives begin before sends here too, as in ``gather``.
        self._begins.put(partial(_begin, [*average.receives(), *average.sends]))
        self._adds.put(average.run)
        return AsyncWork([average], op_name, [*chunks.tensors, out], need=need)


def _leaving(
    chunks: FlatChunks, peer: int, numel: int, dtype: torch.dtype, step: int
) -> list[Tensor]:
    """Split the values for ``peer`` into the same pieces that ``peer`` receives."""
    leaving: list[Tensor] = []
    for one in chunks.cut(peer * numel, (peer + 1) * numel):
        if one.values is None:
            values = torch.zeros(one.end - one.start, dtype=dtype)
        else:
            values = one.values.to(dtype)  # no copy if the dtypes are equal
        leaving += values.split(step)
    return leaving


class _Piece(NamedTuple):
    """A piece of an average."""

    out: Tensor  # receives the average
    # The values of the first peer, then the values of the other ranks and of this rank in rank
    # order. None: zeros.
    values: list[Tensor | None]
    receives: list[_Message]  # the messages that fill ``values``


class _Average:
    """An average in progress, with the interface of ``dist.Work``.

    ``run`` receives the values of the other ranks, adds them, and waits for this rank's sends.
    """

    def __init__(
        self, members: Members, request: ReduceScatter, dtype: torch.dtype, step: int
    ) -> None:
        """Make the messages that receive the other ranks' values, ``step`` elements each."""
        self._size, self._pieces = members.size, list[_Piece]()
        self.sends: list[_Message] = []
        self._over: Future[None] = Future()
        # The background thread and a waiting thread compete for this lock; only the winner runs.
        self._is_taken = threading.Lock()
        out, peers, numel = request.out, sorted(members.peers), request.out.numel()
        # If the sent dtype and the result's dtype are equal, the values of the first peer are
        # received directly into the result, and the other values are added to them.
        self._in_place = dtype is out.dtype
        num_rows = len(peers) - 1 if self._in_place else len(peers)
        rows = [out] if self._in_place else []
        rows += torch.empty(num_rows, numel, dtype=dtype)
        begin = members.rank * numel
        for own in request.chunks.cut(begin, begin + numel, step):
            part = slice(own.start - begin, own.end - begin)
            values: list[Tensor | None] = [row[part] for row in rows]
            receives = [
                _Message(members.reduce_group.recv, row[part], peer, request.tag)
                for row, peer in zip(rows, peers, strict=True)
            ]
            # If this rank is rank 0, its values come second instead of first. The sum is the same,
            # because the order of the first two addends does not matter.
            values.insert(max(members.rank, 1), own.values)
            self._pieces.append(_Piece(out[part], values, receives))

    def receives(self) -> Iterator[_Message]:
        """Return the receives that fill the values, in the order of the pieces."""
        return chain.from_iterable(piece.receives for piece in self._pieces)

    def is_completed(self) -> bool:
        """Whether ``wait`` would return or raise immediately."""
        return self._over.done()

    def wait(self) -> None:
        """Wait until the average is complete; raises the error of the average, if any."""
        # The background thread may be busy with an average of another model, which the other ranks
        # may begin only after this average. So the waiting thread runs this average itself, unless
        # the background thread has taken it already.
        self.run()
        self._over.result()

    def run(self) -> None:
        """Run the average, unless another thread has taken it. ``wait`` raises any error."""
        if not self._is_taken.acquire(blocking=False):
            return
        try:
            self._wait_and_add()
        except BaseException as error:
            self._over.set_exception(error)
        else:
            self._over.set_result(None)

    def _wait_and_add(self) -> None:
        for piece in self._pieces:
            for receive in piece.receives:
                receive.wait()
            self._add(piece)
        for send in self.sends:
            send.wait()
        # Drop all references to tensors: after ``wait`` the caller may free or reuse the memory.
        self._pieces.clear()
        self.sends.clear()

    def _add(self, piece: _Piece) -> None:
        first, *others = piece.values
        assert first is not None, "the first peer's values have arrived"
        for start in range(0, piece.out.numel(), _ADDED_AT_ONCE):
            end = start + _ADDED_AT_ONCE
            total = piece.out[start:end]
            if not self._in_place:
                total.copy_(first[start:end])
            for values in others:
                if values is not None:
                    total.add_(values[start:end])
            divide(total, self._size, total)


class _Thread:
    """Runs tasks one after another in a background thread. The first task starts the thread."""

    # This class does not use `concurrent.futures`, because Python joins the threads of executors at
    # the end of the program. A thread that waits for a dead rank would then block the exit.

    def __init__(self, name: str) -> None:
        self._name = OUR_THREADS + name
        self._tasks: SimpleQueue[Callable[[], None] | None] | None = None

    def put(self, task: Callable[[], None]) -> None:
        """Queue ``task`` for the thread that runs tasks in order, and return without waiting.

        Raises RuntimeError if no thread can start.
        """
        if self._tasks is None:
            tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            threading.Thread(target=_serve, args=(tasks,), name=self._name, daemon=True).start()
            weakref.finalize(self, tasks.put, None)
            self._tasks = tasks
        self._tasks.put(task)


def _serve(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # otherwise the task would keep its tensors alive until the next task arrives
