"""``Save``: writes a training checkpoint, in the calling thread or in a background thread."""

from __future__ import annotations

import io
import os
import random
import shutil
import sys
import warnings
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils import serialization

from flatshard.checkpoint import folder as folders
from flatshard.checkpoint import training as trainings
from flatshard.checkpoint.sources import leaves
from flatshard.checkpoint.training import HostRanks, Optimizers, PendingSave, Training
from flatshard.comm.consistency import Facts, agreed, sendable
from flatshard.comm.work import CollectiveError, named
from flatshard.optimizer.state_dicts import check_same_state, copied, python_number
from flatshard.tensor.flat_parameter import is_wrapped
from flatshard.tensor.sharded_tensor import FlatShardTensor, StateShard

_DESTROYED = (
    "the process group was destroyed before the save was complete. Call wait() on the object that "
    "save() returned, and only then destroy_process_group()."
)
# Values of these types need no trial save in `_check_loads`: they load without running code.
_PLAIN = {int, float, bool, str, type(None), Tensor, StateShard}
_REMEDY = (
    "Pass equal values on every rank, and step the same optimizer, with the same options. To save "
    "values that differ, gather them into a list."
)
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
    """Save model and optimizer in the folder ``path``, for ``load`` on any number of ranks.

    Each rank writes its own shards and optimizer state; no tensor is sent. The folder gets its name
    only when all files are on the disk: if the program is killed earlier, the previous checkpoint
    stays intact. The files have the format of ``torch.distributed.checkpoint`` (DCP), with the keys
    ``model`` and ``optimizer`` of torch's ``get_state_dict``. Buffers and ignored parameters have
    rank 0's values. The random number generators of each rank are saved too.

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
            next save or load (also of safetensors), and the end of the program, wait for the
            thread. Call ``wait()`` on the result before you destroy the process group.
        keep: number of checkpoints to keep. Older checkpoints beside ``path`` whose names differ
            only in their numbers are deleted.

    Returns:
        With ``async_``, an object with ``wait()``; otherwise None. ``wait()`` raises the thread's
        errors. If the program does not call ``wait()``, the next save or load raises the errors, or
        the program prints the errors at its end and exits with status 1.

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
    training = Training(model, optimizer, "checkpoint.save()")
    ranks, one = training.ranks, Save(Path(path), training.ranks, keep)
    # If one rank fails here, all ranks raise before any file is written.
    take = partial(one.take, training, scheduler, extra, copies=async_)
    for kind, values in agreed(take, [ranks], one.op_name, _REMEDY):
        # A rank may lack the state of a parameter. Then DCP saves this state from another rank.
        check_same_state(values, ranks, kind, some_may_lack=True)
    ranks.on_first(partial(folders.begin, one.path, keep), one.op_name)
    if async_:
        return PendingSave(one.path, one.write)
    # Turn off torch's checksums: `dcp_files.Files` computes its own. The setting is global, so an
    # async save must not change it: the program may call torch.save while the thread is writing.
    config: Any = serialization.config
    with config.patch("save.compute_crc32", False):
        one.write()
    return None


def _text_of(tensor: Tensor) -> str:
    """Return a text for a tensor in ``extra``. Equal tensors get equal texts, on any device."""
    if tensor.is_meta:
        return repr(tensor)
    # A text of all elements of a large tensor would take more time than the save.
    if tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel() <= 100:
        return repr(tensor.tolist())
    digest = zlib.crc32(_saved(tensor.detach().cpu().clone()))
    return f"a tensor {tuple(tensor.shape)} of {tensor.dtype} with checksum {digest:08x}"


def _check_loads(name: str, value: object) -> None:
    """Raise TypeError if ``value`` contains an object whose loading would run code."""
    # Check `value` itself too: a container may be unsafe although all of its leaves are safe.
    for one in (*(leaf for _, leaf in leaves(value) if type(leaf) not in _PLAIN), value):
        try:
            torch.load(io.BytesIO(_saved(one)), weights_only=True)
        except Exception as error:
            raise TypeError(
                f"{name} holds {one!r:.200}. Loading this object would run code: pass numbers, "
                "strings, tensors, and lists and dicts with these, such as a state_dict()."
            ) from error


def _saved(value: object) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def generators(device: torch.device) -> dict[str, Any]:
    """Return the states of all random number generators, loadable with ``weights_only=True``."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    # If nothing has imported numpy, its generator is not in use.
    if numpy := sys.modules.get("numpy.random"):
        kind, key, *rest = numpy.get_state()
        found["numpy"] = (kind, key.tolist(), *rest)
    return found


class Save:
    """Saves one checkpoint."""

    # Nested dicts of tensors. DCP saves only this rank's part of a sharded tensor.
    tensors: dict[str, Any]
    own: bytes  # this rank's values that DCP's files do not contain
    step: int | None  # the user's `extra["step"]`, if it is a number

    def __init__(self, path: Path, ranks: HostRanks, keep: int | None) -> None:
        self.path, self.ranks, self.keep = path, ranks, keep
        self.op_name = f"checkpoint.save({str(path)!r})"

    def take(
        self, training: Training, scheduler: Any, extra: dict[str, Any] | None, *, copies: bool
    ) -> tuple[list[tuple[str, dict[str, Any]]], Facts]:
        """Set ``tensors``, ``own`` and ``step``, and return values that ranks must compare.

        The values are each optimizer's class and unsharded state, and texts (``Facts``). With
        ``copies``, ``tensors`` are copies in host memory: training may continue after this call.
        """
        rest = None
        # Call `sharded` first. The call is collective for some optimizers, so a rank that raised
        # before this line would leave the other ranks waiting.
        states = {name: one.sharded(None, None) for name, one in training.optimizers.items()}
        model = training.shards.state_dict()
        if self.ranks.rank > 0:
            # DCP would save buffers and ignored parameters of an arbitrary rank. Save rank 0's, as
            # a program with DistributedDataParallel does.
            params = training.plain.named_parameters(remove_duplicate=False)
            alike = {name for name, p in params if is_wrapped(p) or not training.shards.units}
            model = {n: v for n, v in model.items() if isinstance(v, FlatShardTensor) or n in alike}
        self.tensors = {"model": model}
        if (state := trainings.joined(states)) is not None:
            self.tensors["optimizer"], rest = trainings.pack_optimizer(state)
        own: dict[str, Any] = {"rng": generators(training.device)}
        of_scheduler = None if scheduler is None else scheduler.state_dict()
        of_scheduler, extra = pytree.tree_map(python_number, (of_scheduler, dict(extra or {})))
        self.step = step if isinstance(step := extra.get("step"), int) else None
        named = {f"extra[{name!r}]": value for name, value in extra.items()}
        for name, value in {"the scheduler's state": of_scheduler, **named}.items():
            _check_loads(name, value)
        compared = pytree.tree_map_only(Tensor, _text_of, named)
        facts = {name: repr(value) for name, value in compared.items()}
        facts |= {"the path": str(self.path.absolute()), "keep": str(self.keep)}
        kinds = training.kinds()
        facts["the list of optimizers"] = str({name: kind for name, (kind, _) in kinds.items()})
        for names, leaf in leaves([self.tensors.get("optimizer", {}), rest or {}]):
            name = f"the optimizer's {'.'.join(names[1:])}"
            if type(leaf) not in _PLAIN:
                _check_loads(name, leaf)
            if not isinstance(leaf, Tensor):
                facts[name] = repr(leaf)
            elif leaf.numel() == 1 and not isinstance(leaf, FlatShardTensor):
                facts[name] = repr(leaf.tolist())
        if self.ranks.rank == 0:
            own |= {"scheduler": of_scheduler, "extra": extra}
            own |= {"optimizers": kinds, "optimizer": rest}
        self.own = _saved(own)
        same = [(kinds[n][0], one.unsharded(states[n])) for n, one in training.optimizers.items()]
        if copies:
            self.tensors = copied(self.tensors, torch.device("cpu"))
        return same, facts

    def write(self) -> None:
        """Write the files, and turn the folder into a complete checkpoint. Collective."""
        try:
            self._write_files()
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

    def _write_files(self) -> None:
        # Import here, because importing torch.distributed.checkpoint is slow.
        from torch.distributed.checkpoint import api, state_dict_saver

        from flatshard.checkpoint import dcp_files

        ranks, folder = self.ranks, folders.incomplete(self.path)
        writer = dcp_files.Writer(folder)
        try:
            where = named(f"{self.op_name}, rank {ranks.ranks[ranks.rank]}")
            # In a single process, DCP would warn that it saves without a process group.
            with where, warnings.catch_warnings(action="ignore", category=UserWarning):
                metadata = state_dict_saver.save(
                    self.tensors,
                    storage_writer=writer,
                    process_group=ranks.group,
                    no_dist=ranks.group is None,
                )
        except api.CheckpointException as raised:  # DCP raises this error on all ranks
            rank, (error, _) = next(iter(raised.failures.items()))
            kind, text = sendable(error if isinstance(error, Exception) else RuntimeError(error))
            raise kind(f"{self.op_name}, rank {ranks.ranks[rank]}: {text}") from raised

        def sum_up() -> dict[str, folders.FileRecord]:
            own_file = folder / folders.own_file(ranks.rank)
            with writer.fs.create_stream(own_file, "wb") as stream:
                stream.write(self.own)
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
            marker = folders.Marker(len(ranks.ranks), self.step, files)
            folders.finish(self.path, marker, self.keep)

        ranks.on_first(complete, self.op_name)
