"""``SocketTransport``: all-gathers parameters and averages gradients by gloo's sends and receives.

gloo's own collectives are slower: ``all_gather`` fills a temporary tensor, ``reduce_scatter`` is an
all-reduce and a copy, and the all-to-all uses only one direction of a slow link at a time. gloo
matches a send and a receive by their tag, and each flat parameter has its own tag, so ranks may
begin all-gathers in different orders.

gloo's sends and receives complete only while a thread waits for them. So a background thread waits
for gradients, and adds them as they arrive. Even beginning a send can take as long as sending the
data, because gloo may write into the socket directly. So a second background thread begins sends.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatshard.comm.process_groups import OUR_THREADS
from flatshard.comm.transports import Gather, Members, ReduceScatter, Transport, average
from flatshard.comm.work import AsyncWork
from flatshard.options import Collectives
from flatshard.units.layout import as_bytes

# Gradients are received and added in pieces. While one piece is added, the next pieces arrive.
PIECE_BYTES = 2 << 20
# Number of elements added at once. So few elements stay in the CPU's cache, and torch adds them
# without starting a pool of threads.
_ADDED_AT_ONCE = 1 << 14


def _settle(outcome: Future[Any], function: Callable[[], Any]) -> None:
    """Call ``function``, and store the result or the error in ``outcome``."""
    try:
        outcome.set_result(function())
    except BaseException as error:
        outcome.set_exception(error)


class _Message:
    """One send or receive of a tensor, with the interface of ``dist.Work``.

    A background thread calls ``begin``. Another thread calls ``wait``, even before ``begin``.
    """

    def __init__(self, begin: Callable[..., Any], tensor: Tensor, peer: int, tag: int) -> None:
        """Prepare a message. Argument ``begin``: a process group's method ``recv`` or ``send``.

        A sent tensor must not be written until ``wait`` has returned.
        """
        self._begun: Future[Any] | None = Future()
        self._ask = partial(begin, [as_bytes(tensor)], peer, tag)

    def begin(self) -> None:
        """Begin the send or receive. ``wait`` raises errors of gloo."""
        assert self._begun is not None, "begun before it is waited for"
        _settle(self._begun, self._ask)

    def is_completed(self) -> bool:
        return self._begun is None

    def wait(self) -> None:
        """Wait until the tensor is received or sent. Must be called only once."""
        assert self._begun is not None, "waited for once"
        self._begun.result().wait()
        # Free the tensor now, before the whole collective is complete.
        del self._ask
        self._begun = None

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # The program may drop a model during an all-gather. Keep the receive until the message has
        # arrived: if a receive is freed earlier, gloo stops reading from the sender, and all later
        # collectives of the ranks wait forever.
        if not is_ending() and self._begun is not None and self._begun.done():
            with contextlib.suppress(RuntimeError):  # near the end of Python, no thread can start
                _dropped.put(partial(_end_dropped, self._begun, self._ask))


def _begin(messages: Sequence[_Message]) -> None:
    for message in messages:
        message.begin()


class SocketTransport(Transport):
    """Moves CPU tensors between the ranks of a gloo group, by sends and receives with tags."""

    host_only = gathers_in_background = True

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

    def _sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        wire = self._wire_dtype
        if wire is None or not dtype.is_floating_point or dtype.itemsize <= wire.itemsize:
            return dtype
        return wire

    def forget(self, tag: int) -> None:
        self._members.history.forget(("gather", tag), ("average", tag))

    def gather(self, request: Gather, op_name: str) -> AsyncWork:
        members, source, out = self._members, request.shard, request.out
        need = members.history.begin(members.gather_group, ("gather", request.tag))
        dtype = source.dtype if request.exact else self._sent_dtype(source.dtype)
        arrived, then = out, None
        if dtype is not source.dtype:
            # Also round this rank's own part, because all ranks must compute with the same values.
            source, arrived = source.to(dtype), torch.empty_like(out, dtype=dtype)

            def then() -> None:
                out.copy_(arrived)

        group, tag, slots = members.gather_group, request.tag, arrived.chunk(members.size)
        # Begin the receives first. For each receive, gloo sends a notice, and the peer sends data
        # only after the notice. Notices and data share a connection. Behind this rank's data, a
        # notice would arrive late, and only one direction of a link would be busy at a time.
        receives = [_Message(group.recv, slots[peer], peer, tag) for peer in members.peers]
        sends = [_Message(group.send, source, peer, tag) for peer in members.peers]
        self._begins.put(partial(_begin, [*receives, *sends]))
        slots[members.rank].copy_(source)
        return AsyncWork(
            receives,
            op_name,
            [source, out],
            peers=[members.ranks[peer] for peer in members.peers],
            then=then,
            sends=sends,
            reports_sent=False,
            condition=need,
            sends_need=need,
        )

    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
        members, full = self._members, request.full
        need = members.history.begin(members.reduce_group, ("average", request.tag))
        dtype = self._sent_dtype(full.dtype)
        step = max(PIECE_BYTES // dtype.itemsize, 1)
        reduction = _Average(members, request, dtype, step)
        shards = full.chunk(members.size)
        leaving = {peer: shards[peer].to(dtype).split(step) for peer in members.peers}
        # Send one piece to each peer in turn, which keeps the links to all peers busy.
        reduction.sends = [
            _Message(members.reduce_group.send, leaving[peer][number], peer, request.tag)
            for number in range(len(leaving[members.peers[0]]))
            for peer in members.peers
        ]
        # Begin the receives before the sends, for the reason given in ``gather``.
        self._begins.put(partial(_begin, [*reduction.receives(), *reduction.sends]))
        self._adds.put(reduction.run)
        return AsyncWork([reduction], op_name, [full, request.out], condition=need)


class _Piece(NamedTuple):
    """Consecutive elements of an average, received and added together."""

    out: Tensor  # receives the averages of these elements

    # The values of all ranks, this rank included, in the order of the additions.
    values: list[Tensor]
    receives: list[_Message]


class _Average:
    """An unfinished reduce-scatter, with the interface of ``dist.Work``.

    ``run`` receives the other ranks' values, averages them, and waits for this rank's sends.
    """

    def __init__(
        self, members: Members, request: ReduceScatter, dtype: torch.dtype, step: int
    ) -> None:
        """Prepare the receives, in ``dtype``, of at most ``step`` elements each."""
        self._pieces: list[_Piece] = []
        self.sends: list[_Message] = []
        self._over: Future[None] = Future()  # completed at the end of `run`

        # The background thread and `wait` both call `run`. Only the first call does the work.
        self._is_taken = threading.Lock()
        out, peers, numel = request.out, sorted(members.peers), request.out.numel()
        # If the dtypes are equal, receive the first peer's values into the result, and add there.
        rows = [out] if dtype is out.dtype else []
        rows += torch.empty(len(peers) - len(rows), numel, dtype=dtype)
        own = request.full.chunk(members.size)[members.rank]
        splits = [whole.split(step) for whole in (out, own, *rows)]
        for part, mine, *values in zip(*splits, strict=True):
            receives = [
                _Message(members.reduce_group.recv, theirs, peer, request.tag)
                for theirs, peer in zip(values, peers, strict=True)
            ]
            # Add in rank order. But on rank 0, add rank 0's own values second, because `out` may
            # already contain the first peer's values: a + b is equal to b + a.
            values.insert(max(members.rank, 1), mine)
            self._pieces.append(_Piece(part, values, receives))

    def receives(self) -> Iterator[_Message]:
        return chain.from_iterable(piece.receives for piece in self._pieces)

    def is_completed(self) -> bool:
        return self._over.done()

    def wait(self) -> None:
        """Wait until the average is complete. If ``run`` failed, raise the error."""
        # The background thread may be busy with another model's average, which the other ranks
        # begin only after this average: a deadlock. So call `run` in this thread, too.
        self.run()
        self._over.result()

    def run(self) -> None:
        """Compute the average, unless another thread computes it. ``wait`` raises any error."""
        if self._is_taken.acquire(blocking=False):
            _settle(self._over, self._wait_and_add)

    def _wait_and_add(self) -> None:
        for piece in self._pieces:
            for receive in piece.receives:
                receive.wait()
            parts = (values.split(_ADDED_AT_ONCE) for values in (piece.out, *piece.values))
            for out, *rows in zip(*parts, strict=False):
                average(rows, out)
        for send in self.sends:
            send.wait()
        self._pieces.clear()
        self.sends.clear()


class _Thread:
    """A background thread that runs tasks in order. The first task starts the thread."""

    # Not an executor of `concurrent.futures`: at exit, Python waits for the threads of executors. A
    # thread that waits for a dead rank would block the exit.

    def __init__(self, name: str) -> None:
        self._name = OUR_THREADS + name
        self._tasks: SimpleQueue[Callable[[], None] | None] | None = None

    def put(self, task: Callable[[], None]) -> None:
        """Queue ``task``. Raises RuntimeError if the system cannot start the thread."""
        if self._tasks is None:
            tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            threading.Thread(target=_serve, args=(tasks,), name=self._name, daemon=True).start()
            weakref.finalize(self, tasks.put, None)
            self._tasks = tasks
        self._tasks.put(task)


_dropped = _Thread("dropped messages")


def _end_dropped(begun: Future[Any], _: object) -> None:
    with contextlib.suppress(Exception):  # the program no longer needs the message
        begun.result().wait()


def _serve(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # otherwise this variable would keep the task's tensors alive until the next task
