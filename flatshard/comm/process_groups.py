"""Making and ending process groups, and the abilities of their backends."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Newer torch names this collective `all_gather_single`, and some versions warn about the older
# name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_NO_TAG = (1 << 31) - 1  # no message is ever sent under this tag
_LISTED = 16  # largest number of ranks that a message lists in full


def abort(group: dist.ProcessGroup) -> None:
    """Make all sends, receives and collectives of a gloo group fail, on all ranks."""
    if backend_for(group, "cpu") != "gloo":
        return
    nothing = torch.empty(1, dtype=torch.uint8)
    # Only a receive that times out aborts a gloo group. A receive from a rank that has left fails
    # earlier, and does not affect the connections to other ranks. So receive from every rank.
    for peer in set(range(group.size())) - {group.rank()}:
        with contextlib.suppress(RuntimeError):
            group.recv([nothing], peer, _NO_TAG).wait(timedelta(milliseconds=1))


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in words, for messages: up to 16 ranks, or some ranks and the number of ranks."""
    listed = list(ranks)
    if len(listed) <= _LISTED:
        return ", ".join(map(str, listed))
    first = ", ".join(map(str, listed[:4]))
    return f"{first}, ..., {listed[-1]} ({len(listed)} ranks)"


# Groups that ``new_group`` made, with the id of the making process. A forked process inherits the
# groups of its parent, but not the threads of the groups.
_made_in: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def made_here() -> set[dist.ProcessGroup]:
    """The groups that ``new_group`` made in this process, without deleted groups."""
    return {group for group, pid in list(_made_in.items()) if pid == os.getpid()}


def new_group(
    parent: dist.ProcessGroup, ranks: Sequence[int] | None = None, *, on_host: bool = False
) -> dist.ProcessGroup:
    """A group with its own order of collectives; by default with the parent's ranks and backend.

    The timeout is the parent's. With ``on_host`` the backend moves tensors in host memory, if such
    a backend is available.
    """
    ranks = dist.get_process_group_ranks(parent) if ranks is None else ranks
    is_world = parent is dist.group.WORLD
    backend = None if is_world else str(dist.get_backend_config(parent))
    if on_host and backend_for(parent, "cpu") is None and dist.is_gloo_available():
        backend = "fake" if is_fake(parent) else "gloo"
    has_all_ranks = is_world and len(ranks) == dist.get_world_size()
    # Only members call this function. If the default group is bound to a device, NCCL would split
    # the communicator of the default group, and a split needs all ranks. So unbind the default
    # group meanwhile.
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
        # Some groups have no backend for the device, and some backends have no options.
        with contextlib.suppress(RuntimeError, AttributeError):
            return group._get_backend(torch.device(device)).options._timeout
    return None


def backend_for(group: dist.ProcessGroup, device_type: str) -> str | None:
    """Name of the backend that moves tensors on devices of this type, or None."""
    with contextlib.suppress(RuntimeError):
        return group._get_backend(torch.device(device_type)).name()
    return None


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether no other ranks exist and collectives move nothing (torch's "fake" backend)."""
    return any(backend_for(group, device.type) == "fake" for device in group._device_types)


_controls: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)


def control_of(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, torch.device]:
    """The group, and the device of its tensors, for exchanges of a few numbers that the host needs.

    Collective at the first call for a group without a backend for host memory.
    """
    if backend_for(group, "cpu") is not None:
        return group, torch.device("cpu")
    if not dist.is_gloo_available():
        return group, current_cuda(group)
    # Exchange through host memory: reading the numbers from an accelerator would wait for all of
    # its queued work.
    if group not in _controls:
        _controls[group] = new_group(group, on_host=True)
    return _controls[group], torch.device("cpu")


def current_cuda(group: dist.ProcessGroup | None) -> torch.device:
    """The GPU of the group if the group is bound to a GPU; otherwise this thread's current GPU."""
    bound: torch.device | None = getattr(group, "bound_device_id", None)
    if bound is not None and bound.type == "cuda":
        return bound
    return torch.device("cuda", torch.cuda.current_device())


def as_real(tensor: Tensor) -> Tensor:
    """A view of the same memory as real numbers: some backends do not support complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, ``(nbytes,)`` uint8."""
    return tensor.view(-1).view(torch.uint8)


# ---------------------------------------------------------------- the end of the program

# [Note: end of the program]
# While Python shuts down, a thread that requests the GIL is unwound (from Python 3.14 on, the
# thread blocks for ever). A thread that is unwound in the middle of a backend's C++ code ends the
# process with SIGABRT, whatever the exit code of the program was. Two kinds of threads request the
# GIL: flatshard's own threads, when a wait for other ranks ends, and gloo's threads, which free the
# tensors of a collective after the end of the collective has been reported.

OUR_THREADS = "flatshard "  # name prefix of flatshard's threads, which wait for other ranks
_GLOO_THREADS = "Name:\tpt_gloo"
_SWITCHES = "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"

_REST_SECONDS = 0.01  # twice the time after which a thread requests the GIL again
_END_SECONDS = 5.0  # longest total time


def come_to_rest(groups: Iterable[dist.ProcessGroup]) -> None:
    """Make all unfinished collectives of these groups fail, and wait until threads are at rest.

    See the note. Other ranks see the failures too, but this rank begins no further collective.
    """
    for group in groups:
        abort(group)
    deadline = time.monotonic() + _END_SECONDS
    before: list[list[str]] | None = None
    # While this thread sleeps, it holds neither the GIL nor a core. So another thread that only
    # needs the GIL or a core can run meanwhile. A thread that did nothing during the sleep waits
    # for something else.
    while time.monotonic() < deadline:
        now = _what_threads_did()
        if not now or (now == before and all("State:\tS (sleeping)" in one for one in now)):
            return
        before = now
        time.sleep(_REST_SECONDS)


def _what_threads_did() -> list[list[str]]:
    """For each thread, the state and the number of times that the thread started to run."""
    ours = {one.native_id for one in threading.enumerate() if one.name.startswith(OUR_THREADS)}
    found = []
    for path in Path("/proc/self/task").glob("*/status"):  # no files if the system is not Linux
        try:
            text = path.read_text()
        except OSError:  # the thread has ended
            continue
        if text.startswith(_GLOO_THREADS) or int(path.parent.name) in ours:
            lines = text.splitlines()
            found.append([line for line in lines if line.startswith(("State:", *_SWITCHES))])
    return found
