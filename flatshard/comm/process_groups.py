"""Process groups: how they are made, and what backends they have.

``Tags`` tell the flat parameters and models of one group apart.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_NO_TAG = (1 << 31) - 1  # nothing is ever sent under it
_LISTED = 16  # the most ranks listed in full in a message


def abort(group: dist.ProcessGroup) -> None:
    """Make all sends, receives and collectives of a gloo group fail, on all ranks."""
    if backend_for(group, "cpu") != "gloo":
        return
    nothing = torch.empty(1, dtype=torch.uint8)
    # A receive that times out does that, as nothing else does. From a rank that has left it fails
    # before, and leaves the connections to others as they are.
    for peer in set(range(group.size())) - {group.rank()}:
        with contextlib.suppress(RuntimeError):
            group.recv([nothing], peer, _NO_TAG).wait(timedelta(milliseconds=1))


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in words, for messages: at most 16 ranks, otherwise some ranks and their number."""
    listed = list(ranks)
    if len(listed) <= _LISTED:
        return ", ".join(map(str, listed))
    first = ", ".join(map(str, listed[:4]))
    return f"{first}, ..., {listed[-1]} ({len(listed)} ranks)"


# Those that ``new_group`` made, and in which process: a fork has its parent's, without threads.
_made_in: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def made_here() -> set[dist.ProcessGroup]:
    """The groups that ``new_group`` made in this process and that are still there."""
    return {group for group, pid in list(_made_in.items()) if pid == os.getpid()}


def new_group(
    parent: dist.ProcessGroup, ranks: Sequence[int] | None = None, *, on_host: bool = False
) -> dist.ProcessGroup:
    """A group with an order of its own, and the parent's ranks, timeout and backend by default.

    With ``on_host`` its backend moves tensors in host memory, if there is such a backend.
    """
    ranks = dist.get_process_group_ranks(parent) if ranks is None else ranks
    is_world = parent is dist.group.WORLD
    backend = None if is_world else str(dist.get_backend_config(parent))
    if on_host and backend_for(parent, "cpu") is None and dist.is_gloo_available():
        backend = "fake" if is_fake(parent) else "gloo"
    has_all_ranks = is_world and len(ranks) == dist.get_world_size()
    # Only members call this. Where the default group is bound to a device, NCCL would split its
    # communicator, for which all ranks are needed.
    world: Any = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if bound is not None and not has_all_ranks:
        world.bound_device_id = None
    try:
        group = dist.new_group(
            list(ranks),
            timeout=timeout_of(parent),
            backend=backend,
            use_local_synchronization=not has_all_ranks,
            group_desc="flatshard",
        )
    finally:
        if bound is not None:
            world.bound_device_id = bound
    assert isinstance(group, dist.ProcessGroup), "this rank is a member of the new group"
    _made_in[group] = os.getpid()
    return group


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The group's timeout; ``new_group`` would otherwise take the backend's default."""
    for device in ("cpu", "cuda"):
        # Not every group has a backend for the device, nor every backend options.
        with contextlib.suppress(RuntimeError, AttributeError):
            return group._get_backend(torch.device(device)).options._timeout
    return None


def backend_for(group: dist.ProcessGroup, device_type: str) -> str | None:
    """The backend that moves tensors on such devices, or None."""
    with contextlib.suppress(RuntimeError):
        return group._get_backend(torch.device(device_type)).name()
    return None


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether there are no other ranks, and collectives move nothing (torch's "fake" backend)."""
    return any(backend_for(group, device.type) == "fake" for device in group._device_types)


_controls: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)


def control_of(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, torch.device]:
    """The group, and the device, by which ranks say a few numbers that the host wants to know.

    Collective at the first call for a group without host memory.
    """
    if backend_for(group, "cpu") is not None:
        return group, torch.device("cpu")
    if not dist.is_gloo_available():
        return group, current_cuda(group)
    # Through host memory: to read them off an accelerator would wait for all of its work.
    if group not in _controls:
        _controls[group] = new_group(group, on_host=True)
    return _controls[group], torch.device("cpu")


def current_cuda(group: dist.ProcessGroup | None) -> torch.device:
    """The GPU that the group was made for, or else the one that this thread has set."""
    bound: torch.device | None = getattr(group, "bound_device_id", None)
    if bound is not None and bound.type == "cuda":
        return bound
    return torch.device("cuda", torch.cuda.current_device())


# ---------------------------------------------------------------- tags

_is_copying = False


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Inside, models are copied, perhaps on one rank alone, where the copy stays unused."""
    global _is_copying
    before, _is_copying = _is_copying, True
    try:
        yield
    finally:
        _is_copying = before


class Tags:
    """Numbers given out over one group; ranks ask for them in the same order."""

    def __init__(self) -> None:
        self._num_tags = [0, 0]  # inside `copying`: the second
        self._num_models = 0

    def new_tag(self) -> int:
        """A number that no other user of this communicator has; the same on all ranks."""
        # Copies made on one rank alone must not shift the tags of the models that all ranks make.
        self._num_tags[_is_copying] += 1
        return 2 * self._num_tags[_is_copying] + _is_copying

    def new_model(self) -> int:
        """A number below 256 that tells a model from others; ranks construct them together."""
        self._num_models += 1
        return self._num_models % 256
