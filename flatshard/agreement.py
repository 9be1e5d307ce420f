"""Before anything is sharded: do all ranks build the same model?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import zip_longest

from torch import Tensor, nn

from flatshard.collectives import Communicator
from flatshard.layout import memory_order, strides_of

NamedTensors = Iterable[tuple[str, Tensor]]


def check_same_model(
    named: NamedTensors,
    settings: str,
    units: Iterable[str],
    ignored: Iterable[str],
    comm: Communicator,
) -> None:
    """Compare names, shapes, dtypes, memory formats, units and settings with the other ranks.

    Collective: all ranks of ``comm``.

    Args:
        named: parameters and buffers with their names.
        settings: what else must agree, as text.
        units: the names of the units.
        ignored: the names of what the user ignores; what it holds may differ.
        comm: the ranks that train the model.

    Raises:
        ValueError: on every rank, naming the first difference.
    """
    lines = [f"settings {settings}"]
    lines += [f"{name!r} to be ignored" for name in ignored]
    lines += [f"{name!r}: {_describe(tensor)}" for name, tensor in named]
    lines += [f"unit {name!r}" for name in units]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(comm.gather_objects(digest, label="comparing models"))) == 1:
        return
    everyone = comm.gather_objects(lines, label="comparing models")
    for versions in zip_longest(*everyone, fillvalue="nothing"):
        if len(set(versions)) > 1:
            other = next(r for r, line in enumerate(versions) if line != versions[0])
            raise ValueError(
                "ShardedWrapper: the ranks build different models. First difference: "
                f"rank 0 has {versions[0]}; rank {other} has {versions[other]}. Every rank must "
                "wrap the same modules in the same order with the same settings."
            )


def _describe(tensor: Tensor) -> str:
    shape = tuple(tensor.shape)
    text = f"shape {shape}, {tensor.dtype}, requires_grad={tensor.requires_grad}"
    if isinstance(tensor, nn.Parameter):
        # Those of the flat layout; buffers may have any, nothing depends on them.
        text += f", strides {strides_of(shape, memory_order(shape, tensor.stride()))}"
    return text


def raise_everywhere(error: Exception | None, comm: Communicator) -> None:
    """Raise the first rank's error, if any has one, on every rank, where it is of the same type.

    Collective: all ranks of ``comm``.
    """
    mine = None if error is None else (type(error), str(error))
    for rank, told in enumerate(comm.gather_objects(mine, label="comparing errors")):
        if told is not None:
            kind, message = told
            raise kind(f"{message} (rank {comm.ranks[rank]})") from error
