"""``save`` and ``load``: write a training checkpoint, and resume training from it.

Each rank writes its own shards, in the calling thread or in a background thread (``Save``). To
load, each rank reads its own shards directly into the memory of the model's shards.
"""

import contextlib
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
from torch.utils import _pytree as pytree, serialization

from flatshard.checkpoint import folder as folders, training as trainings
from flatshard.checkpoint.sources import leaves, load_safely, open_source
from flatshard.checkpoint.training import HostRanks, Kinds, Optimizers, PendingSave, Training
from flatshard.comm.consistency import Facts, agreed, sendable
from flatshard.comm.work import CollectiveError, named
from flatshard.optimizer.state_dicts import StateDict, check_same_state, copied, python_number
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

# ---------------------------------------------------------------- saving


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

        ranks, group, folder = self.ranks, self.ranks.group, folders.incomplete(self.path)
        writer = dcp_files.Writer(folder)
        try:
            where = named(f"{self.op_name}, rank {ranks.ranks[ranks.rank]}")
            # In a single process, DCP would warn that it saves without a process group.
            with where, warnings.catch_warnings(action="ignore", category=UserWarning):
                metadata = state_dict_saver.save(
                    self.tensors, storage_writer=writer, process_group=group, no_dist=group is None
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
            folders.finish(self.path, folders.Marker(len(ranks.ranks), self.step, files), self.keep)

        ranks.on_first(complete, self.op_name)


# ---------------------------------------------------------------- loading


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    scheduler: Any = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint of ``save`` to resume training, on any number of ranks.

    Each rank reads its own shards directly into their memory. No tensor is sent, and no rank holds
    the full model. Rank r also restores the states of rank r's random number generators. If the
    checkpoint was saved on fewer ranks, each additional rank seeds its generators from the states
    of rank 0 and from its own rank number.

    Collective: all ranks that train ``model`` call it, between steps.

    Example:
        ```python
        from flatshard import checkpoint

        checkpoint.save("runs/step-1000", model, optimizer, extra={"step": 1000})

        # When the program starts again:
        path = checkpoint.latest("runs")  # None before the first save
        extra = {} if path is None else checkpoint.load(path, model, optimizer)
        step = extra.get("step", 0)
        ```

    Args:
        path: the folder of the checkpoint. ``latest`` finds the most recent checkpoint.
        model: the model to restore. The units and the strategy may differ from the saved model's,
            and the model may have been wrapped on the meta device.
        optimizer: the optimizer to restore, with state and options; or several, in a list in the
            order of the saved list, or in a dict with the saved names. None: restore only the
            model.
        scheduler: the scheduler to restore, an object with ``load_state_dict()``.
        verify: compare the files with their checksums before any tensor is overwritten. Each rank
            reads some of the files to compute the checksums.

    Returns:
        The ``extra`` that was passed to ``save``.

    Raises:
        FileNotFoundError: on all ranks: the folder is no complete checkpoint, or lacks a file (the
            error names the most recent complete checkpoint), or ``path`` is None.
        ValueError: on all ranks, before any tensor is overwritten: names or shapes do not fit (the
            error lists all of them), a file is corrupted or truncated, or the folder has another
            format.
    """
    # Import here, because importing torch.distributed.checkpoint is slow.
    from flatshard.checkpoint.dcp_files import Saved

    training = Training(model, optimizer, "checkpoint.load()")
    op_name = f"checkpoint.load({path and str(path)!r})"
    is_given, path, ranks = path is not None, Path(path or ""), training.ranks

    def own_file(rank: int) -> StateDict:
        file = path / folders.own_file(rank)
        return load_safely(file, file)  # type: ignore[no-any-return]

    def prepare() -> tuple[tuple[folders.Marker, Saved, StateDict, StateDict], Facts]:
        # Call `sharded` first. The call is collective for some optimizers, so a rank that raised
        # before this line would leave the other ranks waiting.
        states = {name: one.sharded(None, None) for name, one in training.optimizers.items()}
        if not is_given:
            raise FileNotFoundError(
                "there is no checkpoint to load: the path is None. checkpoint.latest() returns "
                "None if a directory has no complete checkpoint. Then train from the start: call "
                "load() only if latest() returned a path."
            )
        marker = _require_complete(path)
        # Check the metadata file even with ``verify=False``: after a flipped bit, the metadata may
        # still parse, but describe other tensors.
        folders.check_sums(path, marker, [".metadata"])
        found = Saved(path)
        wanted = {"model": training.shards.state_dict(), "optimizer": trainings.joined(states)}
        if scheduler is not None and own_file(0)["scheduler"] is None:
            raise ValueError(f"{path} was saved without a scheduler. Leave out scheduler=.")
        facts = {"the time when the checkpoint was saved": str(marker.saved_at)}
        return (marker, found, wanted, found.targets(wanted)), facts

    # If one rank fails here, all ranks raise before any tensor is overwritten.
    remedy = f"Put {path} on a file system that all hosts share."
    marker, found, wanted, targets = agreed(prepare, [ranks], op_name, remedy)
    if verify:
        mine = sorted(marker.files)[ranks.rank :: len(ranks.ranks)]
        ranks.agree(lambda: folders.check_sums(path, marker, mine), op_name)

    def read() -> tuple[StateDict | None, StateDict]:
        first = own_file(0)
        _check_optimizers(path, first.get("optimizers"), training.kinds())
        found.read(targets)
        is_there = ranks.rank < marker.world_size
        return own_file(ranks.rank)["rng"] if is_there else None, first

    rng, first = ranks.agree(read, op_name)
    nested = found.nested(targets)
    training.plain.load_state_dict({**wanted["model"], **nested.get("model", {})})
    packed, rest = nested.get("optimizer", {}), first.get("optimizer") or {}
    state = trainings.unpack_optimizer(packed, rest) if training.optimizers else {}
    for one in training.optimizers.values():
        part = state
        if len(training.optimizers) > 1:
            fqns = {param.fqn for param in one.params}
            groups = [group for group in state["param_groups"] if fqns & set(group["params"])]
            own = {fqn: value for fqn, value in state["state"].items() if fqn in fqns}
            part = {"state": own, "param_groups": groups}
        one.optimizer.load_state_dict(one.to_load(part, by_name=False))
    if scheduler is not None:
        scheduler.load_state_dict(first["scheduler"])
    if rng is None:
        _seed_generators(ranks.rank, first["rng"])
    else:
        _restore_generators(rng, training.device)
    return first["extra"]  # type: ignore[no-any-return]


def _check_optimizers(path: Path, saved: Kinds | None, given: Kinds) -> None:
    """Raise ValueError unless the optimizers have the saved names, classes and parameters.

    If the checkpoint and the program have one optimizer each, name and class may differ. ``saved``
    is None if an older version saved the checkpoint, with at most one optimizer.
    """
    if not given or max(len(saved or {}), len(given)) == 1 or saved == given:
        return
    texts = []
    for kinds in (saved or {}, given):
        one = (f"{name!r}: {kind} of {len(own)} parameters" for name, (kind, own) in kinds.items())
        texts.append("; ".join(one) or "one optimizer without a name, or none")
    raise ValueError(
        f"{path} was saved with other optimizers: expected {texts[0]}; got {texts[1]}. Build the "
        "optimizers as in the program that saved them, with the same names and parameters."
    )


def _require_complete(path: Path) -> folders.Marker:
    """Read the marker of a checkpoint, and check that each file has its full length."""
    marker = folders.read_marker(path)
    if marker is None:
        inside = folders.latest(path)
        remedy = f"Last complete checkpoint: {inside or folders.latest(path.parent) or 'none'}."
        if not path.exists() or path.name.endswith(folders.INCOMPLETE):
            is_begun = folders.incomplete(path).exists() or path.exists()
            state = "is incomplete: its save did not finish" if is_begun else "does not exist"
            raise FileNotFoundError(f"the checkpoint {path} {state}. {remedy}")
        if inside is not None:
            raise ValueError(f"{path} is no checkpoint, but a directory of checkpoints. {remedy}")
        kind = "files of an unknown format"
        with contextlib.suppress(ValueError, OSError):
            kind = f"files of {open_source(path).kind}"
        raise ValueError(
            f"{path} was not saved by flatshard.checkpoint.save: expected the file "
            f"{folders.MARKER}, got {kind}. {remedy}"
        )
    remedy = "Load another checkpoint. All hosts must share its file system."
    folders.check_lengths(path, marker.lengths, remedy)
    return marker


def _restore_generators(found: StateDict, device: torch.device) -> None:
    torch.set_rng_state(found["torch"])
    random.setstate(found["python"])
    if "cuda" in found and device.type == "cuda":
        torch.cuda.set_rng_state(found["cuda"], device)
    if "numpy" in found and (numpy := sys.modules.get("numpy.random")):
        numpy.set_state(found["numpy"])


def _seed_generators(rank: int, found: StateDict) -> None:
    """Seed the random number generators of a rank whose states were not saved.

    The seed depends on rank 0's saved state and on this rank. So ranks have different seeds, and a
    rank has the same seed in each run that resumes from the checkpoint.
    """
    seed = zlib.crc32(bytes(found["torch"].tolist())) + rank
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed(seed % 2**32)
