"""``HostExchange``: exchanges small values between ranks, and compares the name of each exchange.

[Note: frames]
gloo matches collectives only by order. If two ranks begin different collectives, both ranks receive
wrong values, or wait forever, or end by SIGABRT if the sizes differ. Therefore every exchange
begins with the same collective: an all-reduce (MAX) of a message of fixed size, the frame. A frame
contains a digest of the exchange's name, and the complement (255 - byte) of each byte. If all names
are equal, the maxima of a byte and of its complement add up to 255. Otherwise, the sum is larger
for at least one byte. Then all ranks send each other the names, and raise before any rank has used
a value. All ranks have run the same collectives, so later exchanges still match.

The frame also has room for values to be reduced by MAX. Other values follow in a second collective,
whose kind and size are part of the compared name.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm.work import CollectiveError, History, describe_difference, named, watch

HOST = torch.device("cpu")
FRAME_BYTES = 1024
_DIGEST_BYTES = 8
# Maximum number of bytes of values in a frame, next to the digest and the digest's complements.
_ROOM = FRAME_BYTES - 2 * _DIGEST_BYTES
_ALL_REDUCE_MAX = partial(dist.all_reduce, op=dist.ReduceOp.MAX)
_DETAIL = re.compile(r"\(|: ")  # ranks compare only the part of a name before "(" or ": "


def with_complements(data: Iterable[int]) -> bytes:
    """Return each byte of ``data``, followed by the byte's complement (255 - byte).

    If ranks all-reduce the result with MAX, ``differ`` finds the bytes that are not the same on all
    ranks.
    """
    return bytes(value for number in data for value in (number, 255 - number))


def differ(maxima: bytes) -> list[bool]:
    """Return, for each byte passed to ``with_complements``, whether the byte differs between ranks.

    ``maxima``: the result of an all-reduce (MAX) of each rank's ``with_complements(...)``. A rank
    that has no value sends zeros for a byte and its complement, and does not count as different.
    """
    # The maxima add up to 255 if all ranks sent the same byte, and to 0 if no rank has a value.
    return [sum(pair) not in (0, 255) for pair in zip(maxima[::2], maxima[1::2], strict=True)]


def compared_name(op_name: str) -> str:
    """Return the part of an operation's name that ranks compare: the part before ``(`` or ``: ``.

    The rest may differ between ranks: ``"saving: /data/0"`` becomes ``"saving"``.
    """
    return _DETAIL.split(op_name, maxsplit=1)[0]


def digest_of(data: bytes) -> bytes:
    """Return a hash of ``data``. Different data have the same hash with a probability of 2**-64."""
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


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
                use the name of ``group``.
        """
        self.group: Any = group
        self.device, self.ranks, self.global_rank = device, [0], 0
        if group is None:
            return
        # The key under which `History` counts this exchange's collectives. The device is a part of
        # the key, because a group may have both gloo and NCCL, which match collectives separately.
        self._kind = f"{group.group_name} on {device.type}"
        self.ranks, self.global_rank = dist.get_process_group_ranks(group), dist.get_rank()
        self.history = History(name or group.group_name, self.ranks, self.global_rank, self._kind)

    def meet(self, op_name: str, kind: str = "meeting") -> None:
        """Wait until all ranks have called ``meet`` with the same ``op_name`` and ``kind``."""
        self.maxima(b"", op_name, kind)

    def maxima(self, values: bytes, op_name: str, kind: str = "maxima") -> bytes:
        """Return the maximum over the ranks for each byte of ``values``; see [Note: frames].

        Args:
            values: bytes, equally many on all ranks.
            op_name: name of the operation.
            kind: text that names the exchanged values, their dtypes and their sizes.

        Raises:
            CollectiveError: ``kind``, ``op_name`` or the length of ``values`` differs between
                ranks. All ranks raise.
        """
        if len(self.ranks) == 1:
            return values
        start = _start_of(f"{kind}, {len(values)}", op_name)
        frame = self._all_reduce_bytes((start + values[:_ROOM]).ljust(FRAME_BYTES, b"\0"), op_name)
        if frame[: len(start)] != start:
            self._refuse(f"{compared_name(op_name)} ({kind})")
        rest = self._all_reduce_bytes(values[_ROOM:], op_name) if len(values) > _ROOM else b""
        return (frame[len(start) :] + rest)[: len(values)]

    def gather(self, value: Any, op_name: str) -> list[Any]:
        """Return the ``value`` of every rank, in rank order. ``value`` must be picklable.

        If the pickles of all values are equal, only their digests are sent. Equal values may have
        different pickles.
        """
        if len(self.ranks) == 1:
            return [value]
        digests = with_complements(digest_of(pickle.dumps(value)))
        if not any(differ(self.maxima(digests, op_name, "objects"))):
            return [value] * len(self.ranks)
        return self._gather(value, op_name)

    def run(self, collective: Callable[..., Any], tensor: Tensor, kind: str, op_name: str) -> None:
        """Call ``collective(tensor, group=...)``, which changes ``tensor`` in place, and wait.

        Before the call, all ranks compare ``kind`` and ``op_name``. ``tensor`` may be on any
        device.
        """
        self.meet(op_name, kind)
        self._run(collective, tensor, op_name)

    # ------------------------------------------------------------ messages

    def announce(self, what: str) -> None:
        """Compare between ranks which collective begins next, unless the order is the usual one.

        ``what`` describes the collective that this rank is about to begin. Collective, unless
        ``what`` has always followed the last two collectives.

        Raises:
            CollectiveError: ranks are about to begin different collectives. All ranks raise.
        """
        # gloo ends the process with SIGABRT if ranks run collectives of different sizes. So a rank
        # that leaves the usual order first compares descriptions with all ranks (`meet`). If the
        # other ranks follow the usual order, they wait in their collective, and this rank waits in
        # `meet`, until deadlock detection ends both waits.
        if not self.history.is_usual(what):
            self.meet(what)
            self.history.learn(what)

    def _refuse(self, name: str) -> NoReturn:
        """Raise CollectiveError, whose text has each rank's exchange and line of the program.

        ``name``: the name of this rank's exchange. Collective: all ranks find the difference in the
        same frame.
        """
        line = watch().program_line()
        places = self._gather(
            f"{name}, at {line}" if line else name, "comparing the names of different collectives"
        )
        names = dict(zip(self.ranks, places, strict=True))
        raise CollectiveError(
            f"{name}, rank {self.global_rank} failed: {describe_difference(names)}"
        )

    def _all_reduce_bytes(self, data: bytes, op_name: str) -> bytes:
        """Return the maximum over the ranks for each byte of ``data``; same length on all ranks."""
        sent = bytearray(data)
        self._run(_ALL_REDUCE_MAX, torch.frombuffer(sent, dtype=torch.uint8), op_name)
        return bytes(sent)

    def _gather(self, value: Any, op_name: str) -> list[Any]:
        everyone: list[Any] = [None] * len(self.ranks)
        with self._waiting(op_name):
            dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def _run(self, collective: Callable[..., Any], tensor: Tensor, op_name: str) -> None:
        wire = tensor.to(self.device)  # no copy if `tensor` is on the device already
        with self._waiting(op_name):
            collective(wire, group=self.group)
        if wire is not tensor:
            tensor.copy_(wire)

    def _waiting(self, op_name: str) -> named:
        words = f"{op_name}, rank {self.global_rank}: exchanging values with the other ranks"
        return named(words, self.history.begin(self.group, self._kind))


@lru_cache(maxsize=256)  # cached, because each step uses the same few names
def _start_of(kind: str, op_name: str) -> bytes:
    """Return the first bytes of a frame: a digest of the exchange's name, with complements."""
    return with_complements(digest_of(f"{kind}, {compared_name(op_name)}".encode()))
