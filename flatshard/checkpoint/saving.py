"""``Save``: saves a model in training as a checkpoint, at once or while training continues."""

from __future__ import annotations

import atexit
import io
import logging
import os
import random
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils import serialization

from flatshard.checkpoint import folder as folders
from flatshard.checkpoint.folder import FileRecord, Marker
from flatshard.checkpoint.host_ranks import HostRanks, Optimizers, Training, class_and_text
from flatshard.checkpoint.nesting import pack_optimizer
from flatshard.checkpoint.sources import leaves
from flatshard.comm.consistency import check_same_state
from flatshard.comm.work import CollectiveError, named
from flatshard.optimizer.state_dicts import copied, python_number
from flatshard.tensor.sharded_tensor import FlatShardTensor, StateShard

logger = logging.getLogger("flatshard.checkpoint")

_DESTROYED = (
    "the process group was destroyed before the save was complete. Call wait() on the object that "
    "save() returned before destroy_process_group()."
)
# Types that load without running code. A trial save of each tensor would take long.
_PLAIN = {int, float, bool, str, type(None), Tensor, StateShard}
_OPTIMIZERS = "the optimizer's "
_ARGUMENTS = "Pass equal values on every rank. To save values that differ, gather them into a list."
_TENSORS = (
    "Each rank saves its part of every sharded tensor, and a part is missing. An optimizer that "
    "keeps the state of a parameter on only some ranks cannot be saved: use an optimizer that "
    "steps all parameters on every rank, such as torch.optim.Muon."
)


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    scheduler: Any = None,
    extra: dict[str, Any] | None = None,
    async_: bool = False,
    keep: int | None = None,
) -> PendingSave | None:
    """Save a model in training in the folder ``path``, for ``load`` on any number of ranks.

    Each rank writes its own shards and optimizer state; no tensor is sent. The folder gets its name
    only when all files are on the disk: if the program is killed earlier, the previous checkpoint
    stays intact. The files have the format of ``torch.distributed.checkpoint`` (DCP), with the keys
    ``model`` and ``optimizer`` of torch's ``get_state_dict``. The random number generators of each
    rank are saved too.

    Collective: all ranks that train ``model`` call it, between steps. All hosts must share the file
    system.

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
        path: the folder of the checkpoint, such as ``"runs/step-00001000"``. It must not exist.
        model: a wrapper, a module that contains wrappers, or an unwrapped model (under
            DistributedDataParallel, or with the same values on all ranks).
        optimizer: an optimizer over the model's parameters; or several, which share no parameter,
            in a list or in a dict from names to optimizers.
        scheduler: an object with ``state_dict()``. The state must be the same on all ranks.
        extra: more values to save, such as the step and the position in the data: numbers, strings,
            tensors, and lists and dicts of these, the same on all ranks. ``flatshard inspect``
            shows ``extra["step"]`` as the checkpoint's step.
        async_: copy the tensors to host memory and return, while a thread writes the files. The
            next save, the next load and the end of the program wait for the thread. Call ``wait()``
            on the result before you destroy the process group.
        keep: number of checkpoints to keep. Older checkpoints beside ``path`` whose names differ
            only in their numbers are deleted.

    Returns:
        With ``async_``, an object with ``wait()``; otherwise None. Errors of the thread are raised
        by ``wait()``; if nothing calls ``wait()``, by the next save or load, or at the end of the
        program.

    Raises:
        OSError: on all ranks: the disk is full, permission is missing, or ``path`` exists
            (FileExistsError). Earlier checkpoints stay intact.
        TypeError: on all ranks: ``extra``, or an option or state of the optimizer, is an object
            whose loading would run code.
        ValueError: on all ranks: ranks passed different arguments, or a parameter belongs to
            several optimizers.
        NotImplementedError: on all ranks: a unit trains only on some of the ranks.
        CollectiveError: another rank has ended. Earlier checkpoints stay intact.
    """

    def take() -> Snapshot:
        tensors: dict[str, Any] = {"model": training.model_state()}
        rest = None
        if (state := training.optim_state()) is not None:
            tensors["optimizer"], rest = pack_optimizer(state)
        kinds, rng = training.kinds(state), generators(training.device)
        states = None if scheduler is None else scheduler.state_dict()
        states, more = pytree.tree_map(python_number, (states, dict(extra or {})))
        whole = training.unsharded_state(state)
        return Snapshot(tensors, rng, states, more, kinds, rest, whole)

    training = Training(model, optimizer, "checkpoint.save()")
    return Save(Path(path), training.ranks, keep).run(take, async_=async_)


@dataclass(frozen=True)
class Snapshot:
    """The values that this rank saves.

    Attributes:
        tensors: nested dicts of tensors. DCP saves only this rank's part of a sharded tensor.
        rng: the states of this rank's random number generators.
        scheduler: the state of the scheduler; None without a scheduler.
        extra: the user's values, the same on all ranks.
        optimizers: for each optimizer, its class and the names of its parameters.
        optimizer: the part of the optimizers' state that DCP would not restore.
        unsharded: for each optimizer, its class, and state that must be equal on all ranks.
    """

    tensors: dict[str, Any]
    rng: dict[str, Any]
    scheduler: dict[str, Any] | None
    extra: dict[str, Any]
    optimizers: dict[str, list[Any]]
    optimizer: dict[str, Any] | None
    unsharded: list[tuple[str, dict[str, Any]]]

    def own_file(self, rank: int) -> bytes:
        """Return this rank's values that DCP's files do not contain, as bytes of ``torch.save``.

        The random number generators; on rank 0 also ``extra``, the scheduler, the kinds of the
        optimizers, and their state that DCP would not restore.

        Raises:
            TypeError: ``extra``, or the state of the scheduler or the optimizer, contains an object
                whose loading would run code.
        """
        own: dict[str, Any] = {"rng": self.rng}
        if rank == 0:
            own |= {"scheduler": self.scheduler, "extra": self.extra}
            own |= {"optimizers": self.optimizers, "optimizer": self.optimizer}
        others = {f"extra[{name!r}]": value for name, value in self.extra.items()}
        for name, value in {"the scheduler's state": self.scheduler, **others}.items():
            _check_loads(name, value)
        for name, leaf in self._of_optimizer():
            if type(leaf) not in _PLAIN:
                _check_loads(name, leaf)
        return _saved(own)

    def _of_optimizer(self) -> Iterator[tuple[str, Any]]:
        """Yield all values in the optimizer's state, each with a name for errors."""
        for part in (self.tensors.get("optimizer"), self.optimizer):
            for names, leaf in leaves(part or {}):
                yield f"{_OPTIMIZERS}{'.'.join(names)}", leaf

    def sharded(self) -> dict[str, str]:
        """Return a text with the shape of each sharded tensor, by name. Ranks compare the texts."""
        return {
            ".".join(names): f"a sharded tensor of shape {tuple(leaf.shape)}"
            for names, leaf in leaves(self.tensors)
            if isinstance(leaf, FlatShardTensor)
        }

    def numbers(self) -> dict[str, str]:
        """Return the numbers in the optimizer's state as texts, which ranks compare."""
        return {
            name: repr(leaf.tolist() if isinstance(leaf, Tensor) else leaf)
            for name, leaf in self._of_optimizer()
            if not isinstance(leaf, Tensor)
            or (leaf.numel() == 1 and not isinstance(leaf, FlatShardTensor))
        }


def _check_loads(name: str, value: object) -> None:
    """Raise TypeError if ``value`` contains an object whose loading would run code."""
    error = _load_error(value)
    if error is not None:
        unsafe = (leaf for _, leaf in leaves(value) if _load_error(leaf) is not None)
        raise TypeError(
            f"{name} holds {next(unsafe, value)!r:.200}. Loading this object would run code: pass "
            "numbers, strings, tensors, and lists and dicts with these, such as a state_dict()."
        ) from error


def _load_error(value: object) -> Exception | None:
    """Return the error of ``torch.load(weights_only=True)`` for ``value``; None if it loads."""
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
    """Return the states of all random number generators, as ``weights_only`` can load them."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    # If nothing has imported numpy, its generator is not in use.
    if numpy := sys.modules.get("numpy.random"):
        kind, key, *rest = numpy.get_state()
        found["numpy"] = (kind, key.tolist(), *rest)
    return found


def _remedy(name: str) -> str:
    if name.startswith(("the list of optimizers", _OPTIMIZERS)):
        return "Every rank must step the same optimizer, with the same options."
    return _TENSORS if name.startswith(("model.", "optimizer.")) else _ARGUMENTS


class PendingSave:
    """A checkpoint that a thread writes while training continues.

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
        # Python waits for the threads of executors at the end of a program.
        thread = ThreadPoolExecutor(1, "flatshard-checkpoint")
        self._written = thread.submit(write)
        thread.shutdown(wait=False)  # the thread ends when the save ends

    def done(self) -> bool:
        """Whether the save has ended, so that ``wait`` would return at once."""
        return self._written.done()

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises the errors that ``save`` lists. The next save or load does not raise them again.
        """
        global _pending
        if _pending is self:
            _pending = None
        self._written.result()


_pending: PendingSave | None = None


def wait_for_pending() -> None:
    """Wait for an unfinished save. Raises the save's error, unless ``wait()`` has raised it."""
    if _pending is not None:
        if not _pending.done():
            logger.info("waiting until %s is saved", _pending.path)
        _pending.wait()


@atexit.register
def _at_exit() -> None:
    try:
        wait_for_pending()
    except Exception:
        # Python only prints an exception of an exit handler, and ends with status 0.
        traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


@dataclass(frozen=True)
class Save:
    """Saves one checkpoint: holds its folder, the ranks, and how many checkpoints to keep."""

    path: Path
    ranks: HostRanks
    keep: int | None

    def run(self, take: Callable[[], Snapshot], *, async_: bool) -> PendingSave | None:
        """Write the snapshot that ``take`` returns, at once or in a thread. Collective."""
        global _pending
        wait_for_pending()
        # If one rank fails here, all ranks raise before any file is written.
        snapshot, own = self.ranks.agree(partial(self._prepare, take, async_), self.op_name)
        self._check_same(snapshot)
        self.ranks.on_first(partial(folders.begin, self.path, self.keep), self.op_name)
        write = partial(self._write, snapshot, own)
        _pending = PendingSave(self.path, write) if async_ else None
        if not async_:
            # `dcp_files.Files` computes checksums already. An async save leaves the setting alone:
            # the program may call torch.save meanwhile.
            config: Any = serialization.config
            with config.patch("save.compute_crc32", False):
                write()
        return _pending

    @property
    def op_name(self) -> str:
        return f"checkpoint.save({str(self.path)!r})"

    def _prepare(self, take: Callable[[], Snapshot], async_: bool) -> tuple[Snapshot, bytes]:
        snapshot = take()
        own = snapshot.own_file(self.ranks.rank)
        if async_:  # training continues, so the thread saves copies in host memory
            snapshot = replace(snapshot, tensors=copied(snapshot.tensors, torch.device("cpu")))
        return snapshot, own

    def _check_same(self, snapshot: Snapshot) -> None:
        """Raise ValueError, on all ranks, if arguments differ or a rank lacks a sharded tensor.

        Collective.
        """
        mine = {f"extra[{key!r}]": repr(value) for key, value in snapshot.extra.items()}
        mine |= {"the path": str(self.path.absolute()), "keep": str(self.keep)}
        kinds = {name: kind for name, (kind, _) in snapshot.optimizers.items()}
        mine |= {"the list of optimizers": str(kinds)} | snapshot.sharded() | snapshot.numbers()
        self.ranks.compare(mine, self.op_name, _remedy)
        for kind, values in snapshot.unsharded:
            # A rank may have no state of a parameter: DCP then saves the state of another rank.
            gather, ranks = self.ranks.gather, self.ranks.ranks
            check_same_state(values, gather, ranks, kind, some_may_lack=True)

    def _write(self, snapshot: Snapshot, own: bytes) -> None:
        """Write the files, and turn the folder into a complete checkpoint. Collective."""
        try:
            self._write_files(snapshot, own)
        except Exception as error:
            # Do not delete files after a CollectiveError: remaining ranks may still be writing.
            if not isinstance(error, CollectiveError) and self.ranks.rank == 0:
                shutil.rmtree(folders.incomplete(self.path), ignore_errors=True)
            last = folders.latest(self.path.parent)
            outcome = f"{self.path} was not saved. Last complete checkpoint: {last or 'none'}."
            if self.ranks.group is not None and not dist.is_initialized():
                raise RuntimeError(f"{self.op_name}: {_DESTROYED} {outcome}") from error
            error.add_note(outcome)
            raise

    def _write_files(self, snapshot: Snapshot, own: bytes) -> None:
        # Import here, because torch.distributed.checkpoint loads slowly.
        from torch.distributed.checkpoint import api, state_dict_saver

        from flatshard.checkpoint import dcp_files

        ranks, folder = self.ranks, folders.incomplete(self.path)
        writer, begun = dcp_files.Writer(folder), time.monotonic()
        try:
            where = named(f"{self.op_name}, rank {ranks.global_rank}")
            # DCP warns in a single process, where saving without others is intended.
            with where, warnings.catch_warnings(action="ignore", category=UserWarning):
                metadata = state_dict_saver.save(
                    snapshot.tensors,
                    storage_writer=writer,
                    process_group=ranks.group,
                    no_dist=ranks.group is None,
                )
        except api.CheckpointException as raised:  # DCP raises this error on all ranks
            rank, (error, _) = next(iter(raised.failures.items()))
            kind, text = class_and_text(error)
            raise kind(f"{self.op_name}, rank {ranks.ranks[rank]}: {text}") from raised

        def sum_up() -> dict[str, FileRecord]:
            own_file = folder / folders.own_file(ranks.rank)
            with writer.fs.create_stream(own_file, "wb") as stream:
                stream.write(own)
            folders.sync(own_file)
            folders.sync(folder)
            return writer.fs.records

        records = ranks.gather(ranks.agree(sum_up, self.op_name), self.op_name)

        def complete() -> None:
            if missing := dcp_files.incomplete_tensors(metadata):
                raise ValueError(
                    f"checkpoint {self.path} is incomplete: the ranks did not save all values of "
                    f"{', '.join(missing):.300}. {_TENSORS}"
                )
            files = {name: record for one in records for name, record in one.items()}
            step = snapshot.extra.get("step")
            marker = Marker(ranks.size, step if isinstance(step, int) else None, files)
            folders.finish(self.path, marker, self.keep)
            folders.log_speed("saved", self.path, marker.bytes, begun)

        ranks.on_first(complete, self.op_name)
