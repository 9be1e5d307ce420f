"""Functions that create, abort and inspect process groups, and end gloo's threads at exit."""

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

_NO_TAG = (1 << 31) - 1  # tag for receives that must time out: no rank ever sends with this tag
_LISTED = 16  # maximum number of ranks that `ranks_text` lists in full


def abort(group: dist.ProcessGroup) -> None:
    """Make all sends, receives and collectives of a gloo group fail, on all ranks."""
    if backend_for(group, "cpu") != "gloo":
        return
    nothing = torch.empty(1, dtype=torch.uint8)
    # A gloo group is aborted only by a receive that times out. A receive from a rank that has ended
    # fails before the timeout, and leaves the connections to other ranks open. So try to receive
    # from every rank.
    for peer in set(range(group.size())) - {group.rank()}:
        with contextlib.suppress(RuntimeError):
            group.recv([nothing], peer, _NO_TAG).wait(timedelta(milliseconds=1))


def ranks_text(ranks: Iterable[int]) -> str:
    """Return a list of ranks for a message: up to 16 ranks in full, or a few and the total."""
    listed = list(ranks)
    if len(listed) <= _LISTED:
        return ", ".join(map(str, listed))
    first = ", ".join(map(str, listed[:4]))
    return f"{first}, ..., {listed[-1]} ({len(listed)} ranks)"


# Groups that ``new_group`` made, with the id of the making process. A forked process inherits the
# groups of its parent, but not the threads of the groups.
_made_in: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def made_here() -> set[dist.ProcessGroup]:
    """Return the groups that ``new_group`` made in this process and that still exist."""
    return {group for group, pid in list(_made_in.items()) if pid == os.getpid()}


def new_group(
    parent: dist.ProcessGroup, ranks: Sequence[int] | None = None, *, on_host: bool = False
) -> dist.ProcessGroup:
    """Make a group with the timeout and backend of ``parent``.

    Collectives on the new group match independently of collectives on ``parent``.

    Args:
        parent: the group from which timeout, backend and by default the ranks are taken.
        ranks: members of the new group, as ranks in the default group. None: all ranks of
            ``parent``.
        on_host: use a backend for tensors in host memory, if there is one.
    """
    ranks = dist.get_process_group_ranks(parent) if ranks is None else ranks
    is_world = parent is dist.group.WORLD
    backend = None if is_world else str(dist.get_backend_config(parent))
    if on_host and backend_for(parent, "cpu") is None and dist.is_gloo_available():
        backend = "fake" if is_fake(parent) else "gloo"
    has_all_ranks = is_world and len(ranks) == dist.get_world_size()
    # Only the members of the new group call this function. If the default group is bound to a
    # device, NCCL would split the default group's communicator, and a split must be called by all
    # ranks. So unbind the default group during the call.
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
    """The group's timeout, to pass to ``new_group``: torch does not inherit it."""
    for device in ("cpu", "cuda"):
        # Both errors mean that this device has no timeout, so try the next device: the group may
        # have no backend for the device (RuntimeError), or a backend without options.
        with contextlib.suppress(RuntimeError, AttributeError):
            return group._get_backend(torch.device(device)).options._timeout
    return None


def backend_for(group: dist.ProcessGroup, device_type: str) -> str | None:
    """Return the name of the group's backend for this type of device; None if there is none."""
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
    """Return a group of the same ranks for exchanging small values, and a device for the values.

    The backend of the returned group can send tensors on the returned device. The device is the
    CPU, except if gloo is not available. Collective at the first call for a group without a backend
    for host memory.
    """
    if backend_for(group, "cpu") is not None:
        return group, torch.device("cpu")
    if not dist.is_gloo_available():
        return group, current_cuda(group)
    # Make a gloo group, so that the values are exchanged in host memory: reading values from an
    # accelerator would wait for all work that is queued there.
    if group not in _controls:
        _controls[group] = new_group(group, on_host=True)
    return _controls[group], torch.device("cpu")


def current_cuda(group: dist.ProcessGroup | None) -> torch.device:
    """The GPU to which the group is bound; if there is none, this thread's current GPU."""
    bound: torch.device | None = getattr(group, "bound_device_id", None)
    if bound is not None and bound.type == "cuda":
        return bound
    return torch.device("cuda", torch.cuda.current_device())


def as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as real numbers: some backends do not support complex tensors."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, ``(nbytes,)`` uint8."""
    return tensor.view(-1).view(torch.uint8)


# ---------------------------------------------------------------- the end of the program

# [Note: end of the program]
# While Python shuts down, Python ends every other thread that requests the GIL, by unwinding the
# thread's stack (from Python 3.14 on, the thread blocks for ever instead). If the thread is in the
# middle of a backend's C++ code at this time, the process ends with SIGABRT, even if the program
# was successful. Two kinds of threads request the GIL: flatshard's own threads, when a wait for
# other ranks ends, and gloo's threads, which free the tensors of a collective after gloo has
# reported the end of the collective. So both kinds must be idle before Python shuts down.

OUR_THREADS = "flatshard "  # name prefix of flatshard's threads, which wait for other ranks
_GLOO_THREADS = "Name:\tpt_gloo"
_SWITCHES = "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"

_REST_SECONDS = 0.01  # twice the interval at which a waiting thread requests the GIL
_END_SECONDS = 5.0  # maximum time that `come_to_rest` waits


def come_to_rest(groups: Iterable[dist.ProcessGroup]) -> None:
    """Abort all collectives of ``groups``, and wait until flatshard's and gloo's threads are idle.

    See [Note: end of the program]. The collectives fail on the other ranks too. This rank must not
    begin another collective on ``groups`` afterwards.
    """
    for group in groups:
        abort(group)
    deadline = time.monotonic() + _END_SECONDS
    before: list[list[str]] | None = None
    # While this thread sleeps, any thread that only needs the GIL or a core can run. So a thread
    # that did not run during the sleep waits for another event, and will not request the GIL.
    while time.monotonic() < deadline:
        now = _what_threads_did()
        if not now or (now == before and all("State:\tS (sleeping)" in one for one in now)):
            return
        before = now
        time.sleep(_REST_SECONDS)


def _what_threads_did() -> list[list[str]]:
    """Return the state and the context switches of each thread of flatshard and gloo.

    Two results are equal if none of the threads ran between the two calls.
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
