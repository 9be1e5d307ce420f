"""``ProgramCollective``: a collective of the program's own, of which it waits for the end.

Nothing here is called by the program. What a thread of it waits in is seen in its stack, and how
many collectives of a group it has begun in torch's own count, which goes up at the beginning.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

_NAMES = ("barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""How those begin that no rank leaves before all have come. A broadcast's source does."""


class ProgramCollective(NamedTuple):
    """What a thread of the program waits in.

    Attributes:
        name: of torch's function.
        place: where the program calls it.
        group: the group's name.
        number: the how manieth collective of the group it is on this rank.
        ranks: of the group, by their numbers in the default group.
    """

    name: str
    place: str
    group: str
    number: int
    ranks: tuple[int, ...]

    def describe(self) -> str:
        """Name it in messages."""
        ranks = ", ".join(map(str, self.ranks))
        return f"the program's own {self.name}(), {self.place}, over ranks {ranks}"


def waited_for_in(thread: int) -> ProgramCollective | None:
    """The collective of the program in which a thread waits, if it is in one.

    Args:
        thread: its number, as ``threading.get_ident`` says.
    """
    # The thread goes on meanwhile, and the group may be gone.
    with contextlib.suppress(Exception):
        return _of_frame(_frame_of(thread))
    return None


def _of_frame(frame: FrameType | None) -> ProgramCollective | None:
    if frame is None or not _is_collective(frame):
        return None
    group = frame.f_locals.get("group") or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) or frame.f_locals.get("async_op"):
        return None
    number = begun().get(group.group_name)
    if number is None:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    return ProgramCollective(frame.f_code.co_name, _place(frame), group.group_name, number, ranks)


def _frame_of(thread: int) -> FrameType | None:
    # Before Python 3.12 a garbage collection in the middle of this, which may let another thread
    # run, can stop the process for ever: python/cpython#106883.
    was_enabled = gc.isenabled() and sys.version_info < (3, 12)
    if was_enabled:
        gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if was_enabled:
            gc.enable()


def _is_collective(frame: FrameType) -> bool:
    code = frame.f_code
    is_torchs = code.co_filename == distributed_c10d.__file__
    return is_torchs and code.co_name.startswith(_NAMES)


def _place(frame: FrameType) -> str:
    """Where what is not torch called the function of a frame."""
    torchs = str(Path(dist.__file__).parents[1])
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.startswith(torchs):
        caller = caller.f_back
    if caller is None:
        return "from torch"
    return f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"


def begun() -> dict[str, int]:
    """How many collectives this rank has begun, by the group's name; groups that count alone."""
    counts: dict[str, int] = {}
    for group, name in distributed_c10d._world.pg_names.copy().items():
        with contextlib.suppress(Exception):  # not every backend counts
            counts[name] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return counts
