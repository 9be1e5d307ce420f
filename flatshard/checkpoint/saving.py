"""``Save``: a model in training becomes a checkpoint, at once or while training goes on."""

from __future__ import annotations

import atexit
import io
import logging
import os
import random
import shutil
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatshard.checkpoint import folder as folders
from flatshard.checkpoint.folder import FileRecord, Marker
from flatshard.checkpoint.host_ranks import HostRanks, Training
from flatshard.checkpoint.ranges import Progress
from flatshard.checkpoint.sources import leaves
from flatshard.comm.work import CollectiveError, named
from flatshard.tensor.sharded_tensor import FlatShardTensor

logger = logging.getLogger("flatshard.checkpoint")

_DESTROYED = (
    "the process group was destroyed before it was saved. Call wait() on what save() returned "
    "before destroy_process_group()."
)
_ARGUMENTS = "Pass the same on every rank; gather what differs into a list first."
_TENSORS = (
    "Each rank saves its part of every sharded tensor, and here parts are missing. An optimizer "
    "that keeps the state of some parameters on some ranks only cannot be saved: use one that "
    "steps all parameters on every rank, such as torch.optim.Muon."
)


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    extra: dict[str, Any] | None = None,
    async_: bool = False,
    keep: int | None = None,
) -> PendingSave | None:
    """Save a training in the folder ``path``, which any number of ranks can ``load``.

    Each rank writes what it holds; no tensor is sent. The folder appears under its name when all
    is on the disk, so that a kill at any moment leaves the one saved before. It is a folder of
    ``torch.distributed.checkpoint`` (DCP), with keys ``model`` and ``optimizer`` as from torch's
    ``get_state_dict``. Random number generators of each rank are saved as well.

    Collective: all ranks that train ``model``, between steps. The hosts share the file system.

    Example:
        ```python
        from flatshard import checkpoint

        step = 1000
        checkpoint.save(
            f"runs/step-{step:08}",
            model,
            optimizer,
            extra={"step": step},
            keep=3,
        )
        ```

    Args:
        path: the checkpoint's folder, such as ``"runs/step-00001000"``. A name is used once.
        model: a wrapper, a module that contains some, or an unwrapped model (under
            DistributedDataParallel, or the same on all ranks).
        optimizer: an optimizer over its parameters.
        scheduler: has ``state_dict()``, the same on all ranks.
        extra: what else to keep (the step, the position in the data), the same on all ranks:
            numbers, strings, tensors, lists and dicts of them. ``extra["step"]`` names the
            step where the checkpoint is listed.
        async_: copy to host memory and return; a thread writes. The next save or load waits for
            it, and the end of the program. Call ``wait()`` on the result before the process group
            is destroyed.
        keep: delete older checkpoints beside ``path`` whose names differ in their number alone,
            but for this many.

    Returns:
        With ``async_`` what to wait for. Its errors are raised by ``wait()``, else by the next
        save or load, else at the end of the program.

    Raises:
        OSError: on all ranks: no space left, no permission, ``path`` exists (FileExistsError). No
            checkpoint has changed.
        TypeError: on all ranks: ``extra`` holds what loads only by running code.
        ValueError: on all ranks: ranks pass different arguments.
        NotImplementedError: on all ranks: a unit trains on some of the ranks alone.
        CollectiveError: another rank has ended. No checkpoint has changed.
    """

    def take() -> Snapshot:
        tensors: dict[str, Any] = {"model": training.model_state()}
        if optimizer is not None:
            tensors["optimizer"] = training.optim_state()
        states = None if scheduler is None else scheduler.state_dict()
        return Snapshot(tensors, generators(training.device), states, dict(extra or {}))

    training = Training(model, optimizer, "checkpoint.save()")
    return Save(Path(path), training.ranks, keep).run(take, async_=async_)


@dataclass(frozen=True)
class Snapshot:
    """What this rank saves.

    Attributes:
        tensors: nested; DCP asks each tensor for the boxes that this rank holds.
        rng: this rank's generators.
        scheduler: a scheduler's state, if there is one.
        extra: what the user gave, the same on all ranks.
    """

    tensors: dict[str, Any]
    rng: dict[str, Any]
    scheduler: dict[str, Any] | None
    extra: dict[str, Any]

    def own_file(self, rank: int) -> bytes:
        """What is not sharded, as ``torch.save`` writes it. Raises TypeError for code."""
        own: dict[str, Any] = {"rng": self.rng}
        if rank == 0:
            own |= {"scheduler": self.scheduler, "extra": self.extra}
        others = {f"extra[{name!r}]": value for name, value in self.extra.items()}
        for name, value in {"the scheduler's state": self.scheduler, **others}.items():
            error = _load_error(value)
            if error is not None:
                unsafe = (leaf for _, leaf in leaves(value) if _load_error(leaf) is not None)
                raise TypeError(
                    f"{name} holds {next(unsafe, value)!r:.200}. Loading this object would run "
                    "code: pass numbers, strings, tensors, and lists and dicts with these, such as "
                    "a state_dict()."
                ) from error
        return _saved(own)

    def staged(self) -> Snapshot:
        """The same with copies of the tensors in host memory."""

        def copied(tensor: Tensor) -> Tensor:
            return tensor.detach().to("cpu", copy=True)

        return replace(self, tensors=pytree.tree_map_only(Tensor, copied, self.tensors))

    def sharded(self) -> dict[str, str]:
        """Shapes of the sharded tensors, by name. Every rank saves a part of each tensor."""
        return {
            ".".join(names): f"a sharded tensor of shape {tuple(leaf.shape)}"
            for names, leaf in leaves(self.tensors)
            if isinstance(leaf, FlatShardTensor)
        }

    def num_bytes(self) -> int:
        """About how many bytes this rank writes."""
        tensors = (leaf for _, leaf in leaves(self.tensors) if isinstance(leaf, Tensor))
        return sum(getattr(tensor, "local", tensor).nbytes for tensor in tensors)


def _load_error(value: object) -> Exception | None:
    """Why ``torch.load(weights_only=True)`` does not load a value, or None."""
    try:
        torch.load(io.BytesIO(_saved(value)), weights_only=True)
    except Exception as error:
        return error
    return None


def _saved(value: object) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def generators(device: torch.device) -> dict[str, Any]:
    """The states of this process's generators, in what ``weights_only`` loads."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy.random")  # nobody drew from it if nobody imported it
    if numpy is not None:
        kind, key, *rest = numpy.get_state()
        found["numpy"] = (kind, key.tolist(), *rest)
    return found


def _remedy(name: str) -> str:
    return _TENSORS if name.startswith(("model.", "optimizer.")) else _ARGUMENTS


class PendingSave:
    """A checkpoint that a thread writes while training goes on.

    Example:
        ```python
        from flatshard import checkpoint

        pending = checkpoint.save("runs/step-1", model, optimizer, async_=True)
        loss_fn(model(inputs), labels).backward()  # training continues
        optimizer.step()
        pending.wait()
        ```
    """

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        self.path = path
        # Python waits for the thread at the end of the program.
        thread = ThreadPoolExecutor(1, "flatshard-checkpoint")
        self._written = thread.submit(write)
        thread.shutdown(wait=False)  # the thread ends with the save

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._written.done()

    def wait(self) -> None:
        """Wait until the checkpoint is complete; raises, once, what ``save`` raises."""
        global _pending
        if _pending is self:
            _pending = None
        self._written.result()


_pending: PendingSave | None = None


def wait_for_pending() -> None:
    """Wait for the save that is going on; raises its error if nobody has seen it."""
    if _pending is not None:
        if not _pending.done():
            logger.info("waiting until %s is saved", _pending.path)
        _pending.wait()


@atexit.register
def _at_exit() -> None:
    try:
        wait_for_pending()
    except Exception:
        # Python would print it and end with status 0.
        traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


@dataclass(frozen=True)
class Save:
    """One save: where to, by whom, and how many checkpoints to keep."""

    path: Path
    ranks: HostRanks
    keep: int | None

    def run(self, take: Callable[[], Snapshot], *, async_: bool) -> PendingSave | None:
        """Write what ``take`` returns on each rank, at once or in a thread. Collective."""
        global _pending
        wait_for_pending()
        # Errors of one rank are raised on all, before anything is written.
        prepare = partial(self._prepare, take, async_)
        snapshot, own = self.ranks.agree(prepare, self.op_name)
        self._check_same(snapshot)
        self.ranks.on_first(partial(folders.begin, self.path, self.keep), self.op_name)
        write = partial(self._write, snapshot, own)
        _pending = PendingSave(self.path, write) if async_ else None
        if not async_:
            write()
        return _pending

    @property
    def op_name(self) -> str:
        return f"checkpoint.save({str(self.path)!r})"

    def _prepare(self, take: Callable[[], Snapshot], async_: bool) -> tuple[Snapshot, bytes]:
        snapshot = take()
        own = snapshot.own_file(self.ranks.rank)
        return snapshot.staged() if async_ else snapshot, own

    def _check_same(self, snapshot: Snapshot) -> None:
        """Raise ValueError on all ranks if they pass different arguments, or lack a tensor's part.

        Collective.
        """
        mine = {f"extra[{key!r}]": repr(value) for key, value in snapshot.extra.items()}
        mine |= {"the path": str(self.path.absolute()), "keep": str(self.keep)}
        mine |= snapshot.sharded()
        self.ranks.compare(mine, self.op_name, _remedy)

    def _write(self, snapshot: Snapshot, own: bytes) -> None:
        """Write the files, and make them a checkpoint. Collective."""
        try:
            self._write_files(snapshot, own)
        except Exception as error:
            # After a CollectiveError the ranks that are still there may be writing.
            if not isinstance(error, CollectiveError) and self.ranks.rank == 0:
                shutil.rmtree(folders.incomplete(self.path), ignore_errors=True)
            last = folders.latest(self.path.parent)
            outcome = f"{self.path} was not saved. The last complete one is {last}."
            if self.ranks.group is not None and not dist.is_initialized():
                raise RuntimeError(f"{self.op_name}: {_DESTROYED} {outcome}") from error
            error.add_note(outcome)
            raise

    def _write_files(self, snapshot: Snapshot, own: bytes) -> None:
        # Here, as the package is slow to load.
        from torch.distributed.checkpoint import api, filesystem, state_dict_saver

        from flatshard.checkpoint import dcp_files

        ranks, folder = self.ranks, folders.incomplete(self.path)
        progress = Progress("saving", snapshot.num_bytes(), is_shown=ranks.rank == 0)
        try:
            with named(f"{self.op_name}, rank {ranks.global_rank}"), dcp_files.without_warning():
                metadata = state_dict_saver.save(
                    snapshot.tensors,
                    storage_writer=filesystem.FileSystemWriter(folder),
                    planner=dcp_files.SavePlanner(progress.advance),
                    process_group=ranks.group,
                    no_dist=ranks.group is None,
                )
        except api.CheckpointException as raised:  # on all ranks
            rank, (error, _) = next(iter(raised.failures.items()))
            raise ranks.told_by(rank, error, self.op_name) from raised

        def sum_up() -> dict[str, FileRecord]:
            own_file = folder / folders.own_file(ranks.rank)
            own_file.write_bytes(own)
            folders.sync(own_file)
            folders.sync(folder)
            # The files of torch's writer: `__RANK_NUMBER.distcp`, and `.metadata` of rank 0.
            mine = [own_file, *folder.glob(f"__{ranks.rank}_*")]
            mine += [folder / ".metadata"] if ranks.rank == 0 else []
            return {file.name: folders.record_of(file, lambda _: None) for file in mine}

        records = ranks.gather(ranks.agree(sum_up, self.op_name), self.op_name)

        def complete() -> None:
            if missing := dcp_files.incomplete_tensors(metadata):
                raise ValueError(f"the files lack values of {', '.join(missing):.300}")
            files = {name: record for one in records for name, record in one.items()}
            step = snapshot.extra.get("step")
            marker = Marker(ranks.size, step if isinstance(step, int) else None, files)
            folders.finish(self.path, marker, self.keep)
            progress.end(self.path, marker.bytes)

        ranks.on_first(complete, self.op_name)
