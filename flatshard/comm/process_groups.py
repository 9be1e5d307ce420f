"""Process groups: how they are made, what backends they have, and names for their errors.

``Tags`` tell the flat parameters and models of one group apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from flatshard.comm.deadlock.detector import WaitCondition, explain
from flatshard.comm.deadlock.watchdog import watched
from flatshard.comm.work import CollectiveError


class named(watched):
    """Name the operation where a backend raises, or where it is slow.

    Args:
        op_name: names the operation.
        need: what it waits for, if it waits.

    Raises:
        CollectiveError: the backend raised.
    """

    __slots__ = ("_op_name",)

    def __init__(self, op_name: str, need: WaitCondition | None = None) -> None:
        super().__init__(lambda: op_name, need)
        self._op_name = op_name

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        error = raised[1]
        # No other rank has to do with a lack of memory, and who catches that knows it by its class.
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            reason = explain(self.wait)
            if reason is not None:
                raise CollectiveError(f"{self._op_name} failed: {reason}") from error
            remedy = "Look for the first error on the other ranks."
            if "Duplicate GPU" in str(error):  # NCCL's words
                remedy = (
                    "Ranks have the same GPU: call torch.cuda.set_device(local_rank) before the "
                    "model is made, or pass device_id=local_rank."
                )
            raise CollectiveError(
                f"{self._op_name} failed. {remedy} Reported by the backend: {error}"
            ) from error


def abort(group: dist.ProcessGroup) -> None:
    """Make all sends, receives and collectives of a gloo group fail, on all ranks.

    A receive that times out does that, as nothing else does.
    """
    nothing = torch.empty(1, dtype=torch.uint8)
    peer = (group.rank() + 1) % group.size()
    with contextlib.suppress(RuntimeError):
        group.recv([nothing], peer, _NO_TAG).wait(timedelta(milliseconds=1))


_NO_TAG = (1 << 31) - 1
"""Under which nothing is ever sent."""


def sibling(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks, backend and timeout, with an order of its own."""
    return new_group(group, dist.get_process_group_ranks(group))


def new_group(
    parent: dist.ProcessGroup, ranks: Sequence[int], backend: str | None = None
) -> dist.ProcessGroup:
    """A group of some ranks with the parent's timeout, and its backend unless another is named."""
    is_world = parent is dist.group.WORLD
    if backend is None and not is_world:
        backend = str(dist.get_backend_config(parent))
    has_all_ranks = is_world and len(ranks) == dist.get_world_size()
    with contextlib.nullcontext() if has_all_ranks else _not_split():
        group = dist.new_group(
            list(ranks),
            timeout=timeout_of(parent),
            backend=backend,
            use_local_synchronization=not has_all_ranks,
            group_desc="flatshard",
        )
    assert isinstance(group, dist.ProcessGroup), "this rank is a member of the new group"
    return group


@contextlib.contextmanager
def _not_split() -> Iterator[None]:
    """Make groups inside without the ranks that are no members.

    Where the default group is bound to a device, NCCL would split its communicator, for which all
    ranks are needed.
    """
    world = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if bound is None:
        yield
        return
    world.bound_device_id = None  # type: ignore[union-attr]
    try:
        yield
    finally:
        world.bound_device_id = bound  # type: ignore[union-attr]


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The group's timeout; ``new_group`` would otherwise take the backend's default."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None


def backend_for(group: dist.ProcessGroup, device_type: str) -> str | None:
    """The backend that moves tensors on such devices, or None."""
    try:
        return group._get_backend(torch.device(device_type)).name()
    except RuntimeError:
        return None


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether there are no other ranks, and collectives move nothing (torch's "fake" backend)."""
    return any(backend_for(group, device.type) == "fake" for device in group._device_types)


def host_backend(group: dist.ProcessGroup) -> str:
    """The backend of a group for host memory, beside one whose backend has none."""
    return "fake" if is_fake(group) else "gloo"


_controls: dict[dist.ProcessGroup, tuple[dist.ProcessGroup, torch.device]] = {}


def control_of(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, torch.device]:
    """The group, and the device, by which ranks say a few numbers that the host wants to know.

    Collective at the first call for a group without host memory.
    """
    if backend_for(group, "cpu") is not None:
        return group, torch.device("cpu")
    # Through host memory: to read them off an accelerator would wait for all of its work.
    if not dist.is_gloo_available():
        return group, current_cuda(group)
    if group not in _controls:
        for destroyed in [one for one in _controls if not exists(one)]:
            del _controls[destroyed]
        ranks = dist.get_process_group_ranks(group)
        control = new_group(group, ranks, backend=host_backend(group))
        _controls[group] = control, torch.device("cpu")
    return _controls[group]


def current_cuda(group: dist.ProcessGroup | None) -> torch.device:
    """The GPU that the group was made for, or else the one that this thread has set."""
    bound: torch.device | None = getattr(group, "bound_device_id", None)
    if bound is not None and bound.type == "cuda":
        return bound
    return torch.device("cuda", torch.cuda.current_device())


def exists(group: dist.ProcessGroup) -> bool:
    """Whether the group was not destroyed yet."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):
        return False
    return True


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
        self._num_tags = [0, 0]  # inside ``copying``: the second
        self._num_models = 0

    def new_tag(self) -> int:
        """A number that no other user of this communicator has.

        Ranks that call this in the same order get the same numbers; calls inside ``copying`` and
        outside of it count apart.
        """
        # Copies made on one rank alone must not shift the tags of the models that all ranks make.
        self._num_tags[_is_copying] += 1
        return 2 * self._num_tags[_is_copying] + _is_copying

    def new_model(self) -> int:
        """A number below 256 that tells a model from others; ranks construct them together."""
        self._num_models += 1
        return self._num_models % 256
