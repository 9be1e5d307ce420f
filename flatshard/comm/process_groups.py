"""Functions that create, abort and inspect process groups, and wait for gloo's threads at exit."""

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

# Tag of the receives in `abort`, which must time out: no rank sends a message with this tag.
_NO_TAG = (1 << 31) - 1
_LISTED = 16  # maximum number of ranks that `ranks_text` lists in full


def abort(group: dist.ProcessGroup) -> None:
    """Make all sends, receives and collectives of a gloo group fail, on all ranks."""
    if backend_for(group, "cpu") != "gloo":
        return
    nothing = torch.empty(1, dtype=torch.uint8)
    # gloo aborts a group only if a receive times out. Receive from all peers, because a receive
    # from a dead rank fails before the timeout.
    for peer in set(range(group.size())) - {group.rank()}:
        with contextlib.suppress(RuntimeError):
            group.recv([nothing], peer, _NO_TAG).wait(timedelta(milliseconds=1))


def ranks_text(ranks: Iterable[int]) -> str:
    """Return a list of ranks as text for messages: a long list is shortened."""
    listed = list(ranks)
    if len(listed) <= _LISTED:
        return ", ".join(map(str, listed))
    first = ", ".join(map(str, listed[:4]))
    return f"{first}, ..., {listed[-1]} ({len(listed)} ranks)"


# For each group from `new_group`: ID of the process that made the group. A forked process inherits
# groups, but not the groups' threads, so the forked process must not abort them.
_made_in: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def made_here() -> set[dist.ProcessGroup]:
    """Return the groups that this process, not a parent process, has made."""
    return {group for group, pid in list(_made_in.items()) if pid == os.getpid()}


def new_group(
    parent: dist.ProcessGroup, ranks: Sequence[int] | None = None, *, on_host: bool = False
) -> dist.ProcessGroup:
    """Make a process group with the timeout and backend of ``parent``.

    Collective: all members of the new group, and no other ranks.

    Args:
        parent: the group whose timeout, backend and, by default, ranks the new group gets.
        ranks: members of the new group, as ranks in the default group.
        on_host: if ``parent`` cannot send CPU tensors, use gloo, unless torch lacks gloo.
    """
    ranks = dist.get_process_group_ranks(parent) if ranks is None else ranks
    is_world = parent is dist.group.WORLD
    backend = None if is_world else str(dist.get_backend_config(parent))
    if on_host and backend_for(parent, "cpu") is None and dist.is_gloo_available():
        backend = "fake" if is_fake(parent) else "gloo"
    has_all_ranks = is_world and len(ranks) == dist.get_world_size()
    # If the default group is bound to a device, torch splits the default group's NCCL communicator,
    # for which it needs all ranks, not only the members. So unbind the default group for now.
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
    """Return the timeout of a group's collectives, or None if the backend has no timeout."""
    for device in ("cpu", "cuda"):
        # RuntimeError: the group has no backend for this device. AttributeError: no timeout.
        with contextlib.suppress(RuntimeError, AttributeError):
            return group._get_backend(torch.device(device)).options._timeout
    return None


def backend_for(group: dist.ProcessGroup, device_type: str) -> str | None:
    """Return the name of the group's backend for a device type such as ``"cpu"``, or None."""
    with contextlib.suppress(RuntimeError):
        return group._get_backend(torch.device(device_type)).name()
    return None


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether the group uses torch's "fake" backend: no other ranks exist, and nothing is sent."""
    return any(backend_for(group, device.type) == "fake" for device in group._device_types)


# Groups that `control_of` has made, keyed by the argument `group`.
_controls = weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]()


def control_of(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, torch.device]:
    """Return a process group of the same ranks, for small values, and the device to send from.

    Collective at the first call for a group that cannot send CPU tensors: all ranks of ``group``.
    """
    if backend_for(group, "cpu") is not None:
        return group, torch.device("cpu")
    if not dist.is_gloo_available():
        return group, current_cuda(group)
    # Use gloo. With NCCL, the host would have to wait for all kernels queued on the GPU.
    if group not in _controls:
        _controls[group] = new_group(group, on_host=True)
    return _controls[group], torch.device("cpu")


def current_cuda(group: dist.ProcessGroup | None) -> torch.device:
    """Return the GPU to which the group is bound, or this thread's current GPU."""
    bound: torch.device | None = getattr(group, "bound_device_id", None)
    if bound is not None and bound.type == "cuda":
        return bound
    return torch.device("cuda", torch.cuda.current_device())


# ---------------------------------------------------------------- the end of the program

# [Note: end of the program]
# While Python shuts down, Python ends every other thread that requests the GIL, by unwinding the
# thread's stack (from Python 3.14 on, the thread blocks forever). If the thread is in a backend's
# C++ code, the process ends with SIGABRT, even if the program was successful. Two kinds of threads
# request the GIL: flatshard's threads, when a wait for other ranks ends, and gloo's threads, when
# they free the tensors of a finished collective. `come_to_rest` waits until both are idle.

OUR_THREADS = "flatshard "  # name prefix of flatshard's threads, which wait for other ranks

# Beginnings of lines in Linux's `/proc/self/task/*/status`.
_GLOO_THREADS = "Name:\tpt_gloo"
_SWITCHES = "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"

_REST_SECONDS = 0.01  # twice the time after which Python gives the GIL to a waiting thread
_END_SECONDS = 5.0  # maximum time that `come_to_rest` waits


def come_to_rest(groups: Iterable[dist.ProcessGroup]) -> None:
    """Abort all collectives of ``groups``, also on other ranks, and wait until threads are idle.

    Called when the program ends; see [Note: end of the program].
    """
    for group in groups:
        abort(group)
    deadline = time.monotonic() + _END_SECONDS
    before: list[list[str]] | None = None
    # While this thread sleeps, the GIL is free. So a thread that did not run meanwhile was not
    # waiting for the GIL, and is idle.
    while time.monotonic() < deadline:
        now = _what_threads_did()
        if not now or (now == before and all("State:\tS (sleeping)" in one for one in now)):
            return
        before = now
        time.sleep(_REST_SECONDS)


def _what_threads_did() -> list[list[str]]:
    """Return the states and numbers of context switches of flatshard's and gloo's threads.

    If two results are equal, none of the threads has run in between.
    """
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
