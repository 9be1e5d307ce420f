"""Before anything is sharded: do all ranks build the same model, with the same weights?"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from itertools import zip_longest

import torch
from torch import Tensor, nn

from flatshard.collectives import Communicator
from flatshard.layout import memory_order, strides_of

NamedTensors = Iterable[tuple[str, Tensor]]

_CHUNK_NUMEL = 1 << 20


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


def sync_weights(named: NamedTensors, sync: bool | None, comm: Communicator) -> None:
    """Make all ranks start from rank 0's weights.

    Collective: all ranks of ``comm``.

    Args:
        named: parameters and buffers with their names; written in place.
        sync: True sends always; None sends when a checksum finds a difference, with a warning;
            False only warns.
        comm: the ranks that train the model.
    """
    named = [(name, tensor.detach()) for name, tensor in named if tensor.device.type != "meta"]
    if comm.size == 1 or not named:
        return
    if sync is not True:
        sums = comm.gather_objects([_checksum(t) for _, t in named], label="comparing weights")
        different = [
            name
            for (name, _), values in zip(named, zip(*sums, strict=True), strict=True)
            if len(set(values)) > 1
        ]
        if not different:
            return
    else:
        different = []
    if sync is not False:
        with torch.no_grad():
            for name, tensor in named:
                contiguous = tensor.contiguous()
                comm.broadcast(contiguous, label=name)
                if contiguous is not tensor:
                    tensor.copy_(contiguous)
    # After the collectives: where warnings are errors, no other rank is left waiting in one.
    if different and comm.rank == 0:
        _warn_of_difference(different, sync)


def _warn_of_difference(names: list[str], sync: bool | None) -> None:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    outcome = (
        "Every rank now takes rank 0's. Seed all ranks alike, or pass sync_module_states=True to "
        "say that this is meant."
        if sync is None
        else "Each keeps its own part, as sync_module_states=False asks: the result is a mixture "
        "of different models."
    )
    warnings.warn(
        f"ShardedWrapper: the ranks start from different weights ({names[0]!r}{others}). {outcome}",
        stacklevel=4,
    )


def _checksum(tensor: Tensor) -> tuple[int, int]:
    """Two sums over the bytes, one of them weighted by position."""
    if tensor.numel() == 0:
        return (0, 0)
    data = tensor.detach().contiguous()
    if data.is_complex():
        data = torch.view_as_real(data)
    data = data.reshape(-1).view(torch.uint8)
    width = 8 if data.numel() % 8 == 0 and data.data_ptr() % 8 == 0 else 1
    words = data.view(torch.int64) if width == 8 else data
    plain, weighted = 0, 0
    for number, chunk in enumerate(words.split(_CHUNK_NUMEL)):
        wide = chunk.to(torch.int64)
        place = torch.arange(1, wide.numel() + 1, device=wide.device)
        plain += int(wide.sum())
        weighted += (number + 1) * int((wide * place).sum())
    return (plain, weighted)
