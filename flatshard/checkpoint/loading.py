"""``load``: resumes training from a checkpoint. Each rank reads its own shards in place."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatshard.checkpoint import folder as folders
from flatshard.checkpoint.sources import load_safely, open_source
from flatshard.checkpoint.training import Optimizers, Training, joined, unpack_optimizer
from flatshard.comm.consistency import Facts, agreed
from flatshard.optimizer.state_dicts import StateDict


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
        wanted = {"model": training.shards.state_dict(), "optimizer": joined(states)}
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
    state = unpack_optimizer(packed, rest) if training.optimizers else {}
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


def _check_optimizers(
    path: Path, saved: dict[str, list[Any]] | None, given: dict[str, list[Any]]
) -> None:
    """Raise ValueError unless the optimizers have the saved names, classes and parameters.

    If the checkpoint and the program have one optimizer each, name and class may differ. ``saved``
    is None if an older version saved the checkpoint, with at most one optimizer.
    """
    if not given or max(len(saved or {}), len(given)) == 1 or saved == given:
        return
    texts = []
    for kinds in (saved or {}, given):
        one = (f"{name!r}: {kind} of {len(own)} parameters" for name, (kind, own) in kinds.items())
        texts.append("; ".join(one) or "at most one optimizer")
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
            raise ValueError(
                f"{path} is not a checkpoint, but a directory of checkpoints. {remedy}"
            )
        kind = "files of an unknown format"
        with contextlib.suppress(ValueError, OSError):
            kind = f"files of {open_source(path).kind}"
        raise ValueError(
            f"{path} was not saved by flatshard.checkpoint.save: expected a {folders.MARKER}, got "
            f"{kind}. {remedy}"
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
