"""Process groups: how they are made, what their backends can send, and how they end."""

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

# Newer name of the same collective; some versions warn of the older one.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

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


def as_real(tensor: Tensor) -> Tensor:
    """The same memory without complex numbers, which not every backend knows."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, ``(nbytes,)`` uint8."""
    return tensor.view(-1).view(torch.uint8)


# ---------------------------------------------------------------- the end of the program

# [Note: end of the program]
# Once Python is ending, a thread that asks for the interpreter is unwound (from 3.14 on it stops
# for ever). Unwound in the middle of a backend's C++ code, it ends the process with SIGABRT,
# whatever the program's own end was. Two kinds of threads do: flatshard's own, when a wait for
# other ranks ends, and gloo's threads, which free the tensors of a collective after its end has
# been reported.

OUR_THREADS = "flatshard "  # how the names begin of those that wait for other ranks
_GLOO_THREADS = "Name:\tpt_gloo"
_SWITCHES = "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"

_REST_SECONDS = 0.01  # twice as long as a thread waits for the interpreter before it asks again
_END_SECONDS = 5.0  # all of it, at most


def come_to_rest(groups: Iterable[dist.ProcessGroup]) -> None:
    """Have all that is under way in these groups fail, and wait for the threads that see it.

    See the note. The other ranks see it, too: this one begins nothing any more.
    """
    for group in groups:
        abort(group)
    deadline = time.monotonic() + _END_SECONDS
    before: list[list[str]] | None = None
    # While this thread sleeps, it holds neither the GIL nor a core, so a thread that needs only one
    # of these can run. A thread that did nothing during the sleep waits for something else.
    while time.monotonic() < deadline:
        now = _what_threads_did()
        if not now or (now == before and all("State:\tS (sleeping)" in one for one in now)):
            return
        before = now
        time.sleep(_REST_SECONDS)


def _what_threads_did() -> list[list[str]]:
    """Of each thread its state, and how often it began to run."""
    ours = {one.native_id for one in threading.enumerate() if one.name.startswith(OUR_THREADS)}
    found = []
    for path in Path("/proc/self/task").glob("*/status"):  # none where the system is not Linux
        try:
            text = path.read_text()
        except OSError:  # it has ended
            continue
        if text.startswith(_GLOO_THREADS) or int(path.parent.name) in ours:
            lines = text.splitlines()
            found.append([line for line in lines if line.startswith(("State:", *_SWITCHES))])
    return found
