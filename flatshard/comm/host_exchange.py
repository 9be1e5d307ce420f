"""``HostExchange``: exchanges small values in host memory, and checks the name of each exchange.

[Note: frames]
gloo matches collectives only by their order. If two ranks begin different collectives, they receive
each other's values, wait for ever, or end by SIGABRT if the sizes differ. Therefore every exchange
begins with the same collective: an all-reduce (MAX) of a frame of ``FRAME_BYTES``. A frame contains
the digest of the exchange's name and the complement of each digest byte. If all names are equal,
the maximum of a digest byte and the maximum of its complement add up to 255. If names differ, the
sum is larger for some byte, on every rank. Then all ranks send each other their names, and all
ranks raise before any rank has used a value. Afterwards the ranks are in step again.

Short values are sent in the frame itself. Longer values follow in a second collective, whose kind
and size are part of the compared name.
"""

from __future__ import annotations

import ctypes
import pickle
import re
from collections.abc import Iterable
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm.process_groups import abort, all_gather_single, as_bytes, backend_for
from flatshard.comm.work import CollectiveError, History, describe_difference, named, watch

FRAME_BYTES = 1024
_DIGEST_BYTES = 8
_ROOM = FRAME_BYTES - 2 * _DIGEST_BYTES  # maximum number of bytes of a value in the frame
_NAME_BYTES = 512  # maximum number of bytes of a name in the error about different names
_LENGTH_BYTES = 8
_DETAIL = re.compile(r"\(|: ")


def with_complements(data: Iterable[int]) -> bytes:
    """Return each byte of ``data``, followed by the byte's complement.

    After an all-reduce (MAX), ``differ`` finds the bytes that were not the same on all ranks.
    """
    return bytes(value for number in data for value in (number, 255 - number))


def differ(maxima: bytes) -> list[bool]:
    """For each byte passed to ``with_complements``, whether two ranks passed different bytes.

    A rank abstains if it sends zeros for both the byte and the complement.
    """
    # A byte and its complement add up to 255 if all ranks agree, and to 0 if all ranks abstain.
    return [sum(pair) not in (0, 255) for pair in zip(maxima[::2], maxima[1::2], strict=True)]


def compared_name(op_name: str) -> str:
    """Return the part of a name before ``(`` or ``: ``, which must be equal on all ranks."""
    # Do not compare the rest of the name: the rest may be a path or another detail that differs
    # between ranks.
    return _DETAIL.split(op_name, maxsplit=1)[0]


def digest_of(name: str) -> bytes:
    """Eight bytes that identify a name. Two names collide with a probability of 2**-64."""
    return blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest()


class HostExchange:
    """The exchanges of one process group. All ranks call the same methods in the same order.

    Every method is **Collective**: all ranks of the group. Every method raises CollectiveError, on
    all ranks, if ranks call it under different names, or if they call different methods.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, name: str = ""
    ) -> None:
        """Exchange over ``group``. No other code may run collectives on ``group``.

        Args:
            group: the process group. None: only this rank.
            device: a device whose tensors the backend of ``group`` can send; the CPU if the backend
                can send CPU tensors.
            name: the name of the history that records this rank's collectives. Empty: the name of
                the group.
        """
        self._device, self._abort = device, None
        if group is None:
            self._ranks = [0]
            return
        self.group, self._rank = group, dist.get_rank()
        self._ranks = dist.get_process_group_ranks(group)
        self.history = History(name or group.group_name, self._ranks, self._rank)
        # The host waits in these collectives. Deadlock detection ends such a wait from another
        # thread, by `abort`, which only works on gloo.
        if backend_for(group, "cpu") == "gloo":
            self._abort = partial(abort, group)

    def meet(self, op_name: str) -> None:
        """Wait until all ranks are at ``op_name``."""
        self._frame("meeting", op_name, b"")

    def maxima(self, values: bytes, op_name: str) -> bytes:
        """Return the maximum over the ranks for each byte of ``values``."""
        if len(self._ranks) == 1:
            return values
        found = self._frame(f"{len(values)} maxima", op_name, values[:_ROOM])
        if len(values) > _ROOM:
            found += self._all_reduce_bytes(values[_ROOM:], op_name)
        return found

    def all_equal(self, value: bytes, op_name: str) -> bool:
        """Return whether ``value`` is the same on all ranks."""
        return not any(differ(self.maxima(with_complements(value), op_name)))

    def reduce(self, values: Tensor, op: str, op_name: str) -> None:
        """Combine ``values`` over the ranks, in place.

        ``values`` are on this exchange's device, with the same dtype and size on all ranks. ``op``
        is the name of a member of ``torch.distributed.ReduceOp``.
        """
        self._frame(f"{op} of {values.numel()} {values.dtype}", op_name, b"")
        with self._waiting(op_name):
            dist.all_reduce(values, op=getattr(dist.ReduceOp, op), group=self.group)

    def broadcast(self, tensor: Tensor, source: int, op_name: str) -> None:
        """Overwrite ``tensor`` with the ``tensor`` of rank ``source`` of the group.

        ``tensor`` is contiguous, on this exchange's device, and of equal size on all ranks.
        """
        data, kind = as_bytes(tensor), f"{tensor.nbytes} bytes of rank {source}"
        sends = self.group.rank() == source
        if data.numel() > _ROOM:
            self._frame(kind, op_name, b"")
            with self._waiting(op_name):
                dist.broadcast(data, src=self._ranks[source], group=self.group)
            return
        # All ranks except the source send zeros, so the maximum equals the source's bytes: a short
        # broadcast needs no second message.
        mine = data.cpu()
        sent = ctypes.string_at(mine.data_ptr(), mine.numel()) if sends else bytes(mine.numel())
        found = self._frame(kind, op_name, sent)
        if not sends and found:
            data.copy_(torch.frombuffer(bytearray(found), dtype=torch.uint8))

    def gather(self, value: Any, op_name: str) -> list[Any]:
        """Return the ``value`` of every rank, in the group's order. ``value`` is picklable."""
        if len(self._ranks) == 1:
            return [value]
        row = pickle.dumps(value)
        # An all-gather needs rows of the same length, but the pickles differ in length. So pad each
        # row to a power of two, and let all ranks use the largest exponent. The exponent takes only
        # one byte of the frame.
        exponent = (len(row) + _LENGTH_BYTES).bit_length()
        (exponent,) = self._frame("objects", op_name, bytes([exponent]))
        row = len(row).to_bytes(_LENGTH_BYTES, "big") + row
        rows = self._all_gather_bytes(row.ljust(1 << exponent, b"\0"), op_name)
        return [_unpacked(row) for row in rows]

    def gather_unless_equal(self, value: Any, op_name: str) -> list[Any]:
        """Return the ``value`` of every rank, in order; if all are equal, only one value.

        Equal values cost one message of constant size. Values with the same ``repr`` count as
        equal. ``value`` is picklable.
        """
        if self.all_equal(digest_of(repr(value)), op_name):
            return [value]
        return self.gather(value, op_name)

    # ------------------------------------------------------------ messages

    def _frame(self, kind: str, op_name: str, value: bytes) -> bytes:
        """For each byte of ``value``, return the maximum over the ranks; see [Note: frames].

        Raises CollectiveError, on all ranks, if the ranks' kinds, names or lengths differ.
        """
        start = _start_of(f"{kind}, {len(value)}", op_name)
        frame = self._all_reduce_bytes((start + value).ljust(FRAME_BYTES, b"\0"), op_name)
        if frame[: len(start)] != start:
            self._refuse(f"{compared_name(op_name)} ({kind})")
        return frame[len(start) : len(start) + len(value)]

    def _refuse(self, name: str) -> NoReturn:
        """Raise CollectiveError with the exchange and the program line of each rank.

        All ranks find the difference, so all ranks call this method.
        """
        line = watch().program_line()
        place = f"{name}, at {line}" if line else name
        row = place.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        rows = self._all_gather_bytes(row, "comparing the names of different collectives")
        names = {
            rank: row.rstrip(b"\0").decode(errors="replace")
            for rank, row in zip(self._ranks, rows, strict=True)
        }
        raise CollectiveError(f"{name}, rank {self._rank} failed: {describe_difference(names)}")

    def _all_reduce_bytes(self, data: bytes, op_name: str) -> bytes:
        """Return the maximum over the ranks of each byte. ``data`` is equally long on all ranks."""
        sent = bytearray(data)
        mine = torch.frombuffer(sent, dtype=torch.uint8)
        wire = mine.to(self._device)  # no copy if the device is the CPU
        with self._waiting(op_name):
            dist.all_reduce(wire, op=dist.ReduceOp.MAX, group=self.group)
        if wire is not mine:
            mine.copy_(wire)
        return bytes(sent)

    def _all_gather_bytes(self, row: bytes, op_name: str) -> list[bytes]:
        """Return the ``row`` of each rank, in order. All rows have the same length."""
        mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(self._device)
        everything = mine.new_zeros(len(self._ranks) * len(row))
        with self._waiting(op_name):
            all_gather_single(everything, mine, group=self.group)
        everything = everything.cpu()
        data = ctypes.string_at(everything.data_ptr(), everything.numel())
        return [data[start : start + len(row)] for start in range(0, len(data), len(row))]

    def _waiting(self, op_name: str) -> named:
        words = f"{op_name}, rank {self._rank}: exchanging values with the other ranks"
        return named(words, self.history.begin(self.group.group_name, "", self._abort))


@lru_cache(maxsize=256)  # every step uses the same few names
def _start_of(kind: str, op_name: str) -> bytes:
    """Return the first bytes of a frame: equal on all ranks that are in the same exchange."""
    return with_complements(digest_of(f"{kind}, {compared_name(op_name)}"))


def _unpacked(row: bytes) -> Any:
    length = int.from_bytes(row[:_LENGTH_BYTES], "big")
    return pickle.loads(row[_LENGTH_BYTES : _LENGTH_BYTES + length])
