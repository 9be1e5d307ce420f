"""``HostExchange``: exchanges small values between ranks, and compares the name of each exchange.

[Note: frames]
gloo matches collectives only by order. If two ranks begin different collectives, both ranks receive
wrong values, or wait forever, or end by SIGABRT if the sizes differ. Therefore every exchange
begins with the same collective: an all-reduce (MAX) of a message of fixed size, the frame. It
contains a digest of the exchange's name, and the complement (255 - byte) of each byte. If names
differ, the maxima of some byte and its complement add up to more than 255. Then all ranks send each
other the names, and raise before any rank has used a value. All ranks have run the same
collectives, so later exchanges still match. Values that do not fit into the frame follow in a
second collective, whose kind and size are part of the compared name.
"""

import pickle
import re
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm.work import REMEDY, CollectiveError, History, first_difference, named, watch

HOST = torch.device("cpu")
FRAME_BYTES = 1024
_DIGEST_BYTES = 8
# Maximum number of bytes of values in a frame, next to the digest and the digest's complements.
_ROOM = FRAME_BYTES - 2 * _DIGEST_BYTES
_ALL_REDUCE_MAX = partial(dist.all_reduce, op=dist.ReduceOp.MAX)
_DETAIL = re.compile(r"\(|: ")  # ranks compare only the part of a name before "(" or ": "


def with_complements(data: Iterable[int]) -> bytes:
    """Return each byte of ``data``, followed by its complement, for ``differ``."""
    return bytes(value for number in data for value in (number, 255 - number))


def differ(maxima: bytes) -> list[bool]:
    """Return, for each byte passed to ``with_complements``, whether the byte differs between ranks.

    ``maxima``: the result of an all-reduce (MAX) of each rank's ``with_complements(...)``. A rank
    without a value sends zeros, and does not count as different.
    """
    # The maxima add up to 255 if all ranks sent the same byte, and to 0 if no rank has a value.
    return [sum(pair) not in (0, 255) for pair in zip(maxima[::2], maxima[1::2], strict=True)]


def compared_name(op_name: str) -> str:
    """Return the part of a name that ranks compare: ``"saving"`` for ``"saving: /data/0"``."""
    return _DETAIL.split(op_name, maxsplit=1)[0]


def digest_of(data: bytes) -> bytes:
    """Return a hash of ``data``, with 64 bits."""
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
            device: device of the sent tensors: the CPU, if ``group`` can send CPU tensors.
            name: name of the ``History``, the same on all ranks. Empty: the name of ``group``.
        """
        self.group: Any = group
        self.device, self.ranks, self.global_rank = device, [0], 0
        if group is None:
            return
        # Kind of this exchange's collectives in the history. The kind contains the device, because
        # a group may have both gloo and NCCL, which match collectives separately.
        self._kind = f"{group.group_name} on {device.type}"
        self.ranks, self.global_rank = dist.get_process_group_ranks(group), dist.get_rank()
        self.history = History(name or group.group_name, self.ranks, self.global_rank, self._kind)

    def meet(self, op_name: str, kind: str = "meeting") -> None:
        """Wait until all ranks have called ``meet`` with the same ``op_name`` and ``kind``."""
        self.maxima(b"", op_name, kind)

    def maxima(self, values: bytes, op_name: str, kind: str = "maxima") -> bytes:
        """Return the maximum over the ranks for each byte of ``values``; see [Note: frames].

        ``kind`` names the exchanged values, their dtypes and their sizes. All ranks raise
        CollectiveError if ``kind``, ``op_name`` or the length of ``values`` differs between ranks.
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

        If all ranks' values have equal pickles, ranks send only digests. Otherwise ranks send the
        values: even equal values may have different pickles.
        """
        if len(self.ranks) == 1:
            return [value]
        digests = with_complements(digest_of(pickle.dumps(value)))
        if not any(differ(self.maxima(digests, op_name, "objects"))):
            return [value] * len(self.ranks)
        return self._gather(value, op_name)

    def run(self, collective: Callable[..., Any], tensor: Tensor, kind: str, op_name: str) -> None:
        """Compare ``kind`` and ``op_name``, call ``collective(tensor, group=...)``, and wait.

        The collective changes ``tensor``, which may be on any device, in place.
        """
        self.meet(op_name, kind)
        self._run(collective, tensor, op_name)

    # ------------------------------------------------------------ messages

    def announce(self, what: str) -> None:
        """Compare between ranks which collective begins next, unless the order is the usual one.

        ``what`` describes the collective that this rank is about to begin. If descriptions differ,
        all ranks raise CollectiveError.
        """
        # gloo ends the process with SIGABRT if ranks run collectives of different sizes. So a rank
        # that leaves the usual order first compares descriptions with all ranks (`meet`). If the
        # other ranks follow the usual order, they wait in their collective, and this rank waits in
        # `meet`, until deadlock detection ends both waits.
        if not self.history.is_usual(what):
            self.meet(what)
            self.history.learn(what)

    def _refuse(self, name: str) -> NoReturn:
        """Raise CollectiveError, with each rank's exchange and line of the program. Collective."""
        line = watch().program_line()
        places = self._gather(
            f"{name}, at {line}" if line else name, "comparing the names of different collectives"
        )
        began = {rank: [(0, place)] for rank, place in zip(self.ranks, places, strict=True)}
        raise CollectiveError(
            f"{name}, rank {self.global_rank} failed: the ranks are in different collectives. "
            f"{first_difference(began)}. {REMEDY} [FS-DEADLOCK]"
        )

    def _all_reduce_bytes(self, data: bytes, op_name: str) -> bytes:
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
