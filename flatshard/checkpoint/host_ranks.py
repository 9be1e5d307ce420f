"""``HostRanks``: ranks that exchange objects in an order of their own, also in another thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from flatshard.comm.consistency import Facts, differing_fact
from flatshard.comm.host_exchange import HostExchange
from flatshard.comm.process_groups import is_fake, new_group
from flatshard.comm.work import named

T = TypeVar("T")

# By the group whose ranks they connect.
_exchanges: weakref.WeakKeyDictionary[dist.ProcessGroup, HostExchange] = weakref.WeakKeyDictionary()
# Types that an error keeps on ranks that did not meet it; any other becomes a RuntimeError.
_KINDS = (
    *(FileNotFoundError, FileExistsError, PermissionError, OSError, ValueError, TypeError),
    NotImplementedError,
)


class HostRanks:
    """The ranks of a process group, through host memory; None is this rank alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Collective: all ranks of the group, at the first call for it."""
        self._exchange: HostExchange | None = None
        # This rank's index in the group, and the group's ranks in the default group.
        self.rank, self.ranks = 0, [0]
        if group is not None and group.size() > 1 and not is_fake(group):
            self.rank, self.ranks = group.rank(), dist.get_process_group_ranks(group)
            if group not in _exchanges:
                with named(f"flatshard.checkpoint, rank {self.global_rank}: meeting the ranks"):
                    own = new_group(group, on_host=True)
                _exchanges[group] = HostExchange(own, torch.device("cpu"))
            self._exchange = _exchanges[group]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank]

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
        """The result of this rank's ``work``; if ``work`` raises on a rank, all raise that error.

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

    def compare(self, facts: Facts, op_name: str, remedy: Callable[[str], str]) -> None:
        """Raise ValueError on all ranks if their ``facts`` differ. Collective: all ranks.

        ``remedy`` is called with the first name whose facts differ, and ends the message.
        """
        # Ranks may have collected the same facts in another order.
        everyone = self.gather_unless_equal(dict(sorted(facts.items())), op_name)
        if len(everyone) > 1:
            key, difference = differing_fact(everyone, self.ranks)
            raise ValueError(f"{op_name}: ranks differ: {difference}. {remedy(key)}")

    def told_by(self, rank: int, error: BaseException, op_name: str) -> Exception:
        """A rank's error as all ranks raise it."""
        return self._as_raised(rank, _told(error), op_name)

    def _as_raised(self, rank: int, told: tuple[type[Exception], str], op_name: str) -> Exception:
        kind, text = told
        return kind(f"{op_name}, rank {self.ranks[rank]}: {text}")


def _told(error: BaseException) -> tuple[type[Exception], str]:
    for kind in _KINDS:
        if isinstance(error, kind):
            return kind, str(error)
    name = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
    return RuntimeError, f"{name}{error}"
