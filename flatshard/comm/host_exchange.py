"""``HostExchange``: exchanges small values between ranks, and compares the name of each exchange.

[Note: frames]
gloo matches collectives only by their order. If two ranks begin different collectives, the ranks
receive each other's values, or wait for ever, or end by SIGABRT if the sizes differ. Therefore
every exchange begins with the same collective: an all-reduce (MAX) of a message of fixed size, the
frame (``FRAME_BYTES``). A frame contains a digest of the exchange's name, and the complement
(255 - byte) of each byte of the digest. If all names are equal, the maximum of a digest byte and
the maximum of its complement add up to 255. If names differ, the sum is larger for at least one
byte, and every rank sees this. Then all ranks send each other their names, and all ranks raise
before any rank has used a value. All ranks have run the same collectives, so later exchanges still
match.

Short values are sent in the frame itself. A longer value follows in a second collective. The kind
and the size of the second collective are part of the name, so that both are compared as well.
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

from flatshard.comm.process_groups import abort, all_gather_single, backend_for
from flatshard.comm.work import CollectiveError, History, describe_difference, named, watch
from flatshard.units.layout import as_bytes

FRAME_BYTES = 1024
_DIGEST_BYTES = 8
# Maximum number of bytes of a value that is sent in the frame. The rest of the frame contains a
# digest of the exchange's name, and the complements of the digest's bytes.
_ROOM = FRAME_BYTES - 2 * _DIGEST_BYTES
_NAME_BYTES = 512  # maximum number of bytes of a name in the error about different names
_DETAIL = re.compile(r"\(|: ")  # ranks compare only the part of a name before "(" or ": "


def with_complements(data: Iterable[int]) -> bytes:
    """Return each byte of ``data``, followed by the byte's complement (255 - byte).

    If ranks all-reduce the result with MAX, ``differ`` finds the bytes that are not the same on all
    ranks.
    """
    return bytes(value for number in data for value in (number, 255 - number))


def differ(maxima: bytes) -> list[bool]:
    """Return, for each byte passed to ``with_complements``, whether the byte differs between ranks.

    A rank that has no value for a byte sends zero for the byte and zero for the complement. Such a
    rank does not count as different.

    ``maxima``: the result of an all-reduce (MAX) of each rank's bytes from ``with_complements``.
    """
    # The maxima of a byte and of its complement add up to 255 if all ranks sent the same byte, and
    # to 0 if no rank has a value for the byte.
    return [sum(pair) not in (0, 255) for pair in zip(maxima[::2], maxima[1::2], strict=True)]


def compared_name(op_name: str) -> str:
    """Return the part of an operation's name that ranks compare: the part before ``(`` or ``: ``.

    ``"saving: /data/0"`` becomes ``"saving"``.
    """
    # Do not compare the rest of the name, which may be a path or another detail of this rank.
    return _DETAIL.split(op_name, maxsplit=1)[0]


def digest_of(name: str) -> bytes:
    """Return a hash of a name. Two names have the same hash with a probability of 2**-64."""
    return blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest()


class HostExchange:
    """Exchanges small values between the ranks of one process group.

    Every method is **Collective**: all ranks of the group call the same methods with the same
    ``op_name``, in the same order. If ranks call different methods or pass different names, all
    ranks raise CollectiveError.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, name: str = ""
    ) -> None:
        """Make the exchange. No other code may run collectives on ``group``.

        Args:
            group: the process group. None: this rank is the only rank.
            device: device of the tensors in which values are sent. Should be the CPU, unless the
                backend of ``group`` cannot send CPU tensors.
            name: name of the ``History`` of this rank's collectives, the same on all ranks. Empty:
                the name of ``group``.
        """
        self._device, self._abort = device, None
        if group is None:
            self._ranks = [0]
            return
        # `_kind`: key under which `History` counts the collectives of this exchange. The key
        # contains the device, because a group may have both gloo and NCCL, and each backend matches
        # only its own collectives.
        self.group, self._kind = group, f"{group.group_name} on {device.type}"
        self._ranks, self._rank = dist.get_process_group_ranks(group), dist.get_rank()
        self.history = History(name or group.group_name, self._ranks, self._rank, self._kind)
        # The host waits in the collectives of this class. Deadlock detection ends a wait from
        # another thread by aborting the group, which is possible only on gloo.
        if backend_for(group, "cpu") == "gloo":
            self._abort = partial(abort, group)

    def meet(self, op_name: str) -> None:
        """Wait until all ranks have called ``meet`` with the same ``op_name``."""
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
        """All-reduce ``values``, in place.

        ``values`` must be on the ``device`` of the exchange, and have the same dtype and size on
        all ranks. ``op`` is the name of a member of ``torch.distributed.ReduceOp``.
        """
        self._frame(f"{op} of {values.numel()} {values.dtype}", op_name, b"")
        with self._waiting(op_name):
            dist.all_reduce(values, op=getattr(dist.ReduceOp, op), group=self.group)

    def broadcast(self, tensor: Tensor, source: int, op_name: str) -> None:
        """Overwrite ``tensor`` with the ``tensor`` of rank ``source`` of the group.

        ``tensor`` must be contiguous and on the ``device`` of the exchange, and have the same size
        on all ranks.
        """
        data, kind = as_bytes(tensor), f"{tensor.nbytes} bytes of rank {source}"
        sends = self.group.rank() == source
        if data.numel() > _ROOM:
            self._frame(kind, op_name, b"")
            with self._waiting(op_name):
                dist.broadcast(data, src=self._ranks[source], group=self.group)
            return
        # A short tensor is sent in the frame, whose all-reduce takes the maximum over the ranks.
        # All ranks except the source send zeros, so the maximum equals the source's bytes.
        mine = data.cpu()
        sent = ctypes.string_at(mine.data_ptr(), mine.numel()) if sends else bytes(mine.numel())
        found = self._frame(kind, op_name, sent)
        if not sends and found:
            data.copy_(torch.frombuffer(bytearray(found), dtype=torch.uint8))

    def gather(self, value: Any, op_name: str) -> list[Any]:
        """Return the ``value`` of every rank, in rank order. ``value`` must be picklable."""
        if len(self._ranks) == 1:
            return [value]
        row = pickle.dumps(value)
        # An all-gather needs rows of the same length, but the ranks' pickles differ in length. So
        # pad all rows to the power of two that fits the longest pickle. The frame takes the maximum
        # of the ranks' exponents, and an exponent fits in one byte.
        (exponent,) = self._frame("objects", op_name, bytes([len(row).bit_length()]))
        # A pickle ends with a mark, so `pickle.loads` ignores the padding.
        rows = self._all_gather_bytes(row.ljust(1 << exponent, b"\0"), op_name)
        return [pickle.loads(row) for row in rows]

    def gather_unless_equal(self, value: Any, op_name: str) -> list[Any]:
        """Return the ``value`` of every rank, in order, or a list of one value if all are equal.

        If all values are equal, only their digests are sent. Values with the same ``repr`` count as
        equal. ``value`` must be picklable.
        """
        if self.all_equal(digest_of(repr(value)), op_name):
            return [value]
        return self.gather(value, op_name)

    # ------------------------------------------------------------ messages

    def _frame(self, kind: str, op_name: str, value: bytes) -> bytes:
        """Send a frame, and return the maximum over the ranks for each byte of ``value``.

        See [Note: frames].

        Args:
            kind: text that says which method was called, and with which dtypes and sizes.
            op_name: name of the operation.
            value: the bytes to send in the frame.

        Raises:
            CollectiveError: ``kind``, ``op_name`` or the length of ``value`` differs between ranks.
                All ranks raise.
        """
        start = _start_of(f"{kind}, {len(value)}", op_name)
        frame = self._all_reduce_bytes((start + value).ljust(FRAME_BYTES, b"\0"), op_name)
        if frame[: len(start)] != start:
            self._refuse(f"{compared_name(op_name)} ({kind})")
        return frame[len(start) : len(start) + len(value)]

    def _refuse(self, name: str) -> NoReturn:
        """Raise CollectiveError. The message contains each rank's exchange and program line.

        Collective: after a frame whose names differ, every rank sees the difference and calls this
        method. ``name``: name and kind of this rank's exchange.
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
        """Return the maximum over the ranks for each byte of ``data``.

        ``data`` must be equally long on all ranks.
        """
        sent = bytearray(data)
        mine = torch.frombuffer(sent, dtype=torch.uint8)
        wire = mine.to(self._device)  # no copy if the device is the CPU
        with self._waiting(op_name):
            dist.all_reduce(wire, op=dist.ReduceOp.MAX, group=self.group)
        if wire is not mine:
            mine.copy_(wire)
        return bytes(sent)

    def _all_gather_bytes(self, row: bytes, op_name: str) -> list[bytes]:
        """Return the ``row`` of each rank, in the order of ranks.

        ``row`` must be equally long on all ranks.
        """
        mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(self._device)
        everything = mine.new_zeros(len(self._ranks) * len(row))
        with self._waiting(op_name):
            all_gather_single(everything, mine, group=self.group)
        everything = everything.cpu()
        data = ctypes.string_at(everything.data_ptr(), everything.numel())
        return [data[start : start + len(row)] for start in range(0, len(data), len(row))]

    def _waiting(self, op_name: str) -> named:
        words = f"{op_name}, rank {self._rank}: exchanging values with the other ranks"
        return named(words, self.history.begin(self._kind, "", self._abort))


@lru_cache(maxsize=256)  # cached, because each step uses the same few names
def _start_of(kind: str, op_name: str) -> bytes:
    """Return the first bytes of a frame: a digest of the exchange, and the digest's complements.

    Ranks in the same exchange get the same bytes.
    """
    return with_complements(digest_of(f"{kind}, {compared_name(op_name)}"))
