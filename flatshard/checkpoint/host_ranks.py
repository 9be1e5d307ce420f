"""``HostRanks``: ranks that exchange objects in an order of their own, also in another thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from flatshard.comm.host_exchange import HostExchange
from flatshard.comm.process_groups import is_fake, new_group
from flatshard.comm.work import named

T = TypeVar("T")

# By the group whose ranks they connect.
_exchanges: weakref.WeakKeyDictionary[dist.ProcessGroup, HostExchange] = weakref.WeakKeyDictionary()
# What an error is on ranks that did not meet it: one of these, or a RuntimeError.
_KINDS = (
    *(FileNotFoundError, FileExistsError, PermissionError, OSError, ValueError, TypeError),
    NotImplementedError,
)


class HostRanks:
    """The ranks of a process group, through host memory; None is this rank alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Collective: all ranks of the group, at the first call for it."""
        self._exchange: HostExchange | None = None
        self.rank, self.global_rank, self.size = 0, 0, 1
        if group is not None and group.size() > 1 and not is_fake(group):
            self.rank, self.size = group.rank(), group.size()
            self.global_rank = dist.get_rank()
            if group not in _exchanges:
                with named(f"flatshard.checkpoint, rank {self.global_rank}: meeting the ranks"):
                    own = new_group(group, on_host=True)
                _exchanges[group] = HostExchange(own, torch.device("cpu"))
            self._exchange = _exchanges[group]
            self._global_ranks = dist.get_process_group_ranks(group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, with an order of its own, for torch's collectives of objects."""
        return None if self._exchange is None else self._exchange.group

    def gather(self, value: Any, op_name: str) -> list[Any]:
        """Every rank's ``value`` (picklable), in rank order.

        Collective: all ranks.

        Raises:
            CollectiveError: another rank has ended, or did not come within the group's timeout.
        """
        return [value] if self._exchange is None else self._exchange.gather(value, op_name)

    def gather_unless_equal(self, value: Any, op_name: str) -> list[Any]:
        """As ``gather``; only one value if all ranks have the same."""
        exchange = self._exchange
        return [value] if exchange is None else exchange.gather_unless_equal(value, op_name)

    def agree(self, work: Callable[[], T], op_name: str) -> T:
        """What this rank's ``work`` returns; where it raises on one rank, all raise that error.

        Collective: all ranks, after ``work``.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        for rank, told in enumerate(self.gather_unless_equal(error and _told(error), op_name)):
            if told is not None:
                raise self._as_raised(rank, told, op_name) from error
        return cast(T, result)

    def told_by(self, rank: int, error: BaseException, op_name: str) -> Exception:
        """A rank's error as all ranks raise it."""
        return self._as_raised(rank, _told(error), op_name)

    def _as_raised(self, rank: int, told: tuple[type[Exception], str], op_name: str) -> Exception:
        kind, text = told
        return kind(f"{op_name}, rank {self.global_rank_of(rank)}: {text}")

    def global_rank_of(self, rank: int) -> int:
        return rank if self._exchange is None else self._global_ranks[rank]


def _told(error: BaseException) -> tuple[type[Exception], str]:
    for kind in _KINDS:
        if isinstance(error, kind):
            return kind, str(error)
    name = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
    return RuntimeError, f"{name}{error}"
