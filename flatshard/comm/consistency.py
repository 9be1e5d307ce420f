"""Checks that all ranks build the same model and ask for the same: all go on, or all raise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.comm.process_groups import as_bytes
from flatshard.plan.layout import memory_order, strides_of

# What ranks must agree on: names of things, and what they are.
Facts = dict[str, str]
T = TypeVar("T")

# Tells tensors apart by their bytes; see `checksum`.
Checksum = tuple[int, int]

_COLUMNS = 1 << 10


def check_same_model(
    named: Iterable[tuple[str, Tensor]],
    settings: str,
    units: Iterable[str],
    ignored: Iterable[str],
    comm: Communicator,
) -> None:
    """Compare names, shapes, dtypes, memory formats, units and settings with the other ranks.

    Collective: all ranks of ``comm``. ``named`` are parameters and buffers; of what is ignored
    only the names must agree.

    Raises:
        ValueError: on every rank, naming the first difference.
    """
    # By number: the order counts, too.
    facts = {f"setting {number}": text for number, text in enumerate(settings.split(", "))}
    facts["what is ignored"] = repr(list(ignored))
    tensors = [f"{name!r} ({_describe(tensor)})" for name, tensor in named]
    facts |= {f"tensor {number}": described for number, described in enumerate(tensors)}
    facts |= {f"unit {number}": described for number, described in enumerate(units)}
    remedy = "Every rank must wrap the same modules in the same order with the same settings."
    differ = "the ranks build different models. First difference"
    agreed(lambda: (True, facts), [comm], "ShardedWrapper", remedy, differ=differ)


def _describe(tensor: Tensor) -> str:
    shape = tuple(tensor.shape)
    text = f"shape {shape}, {tensor.dtype}, requires_grad={tensor.requires_grad}"
    if isinstance(tensor, nn.Parameter):
        # Those of the flat layout; buffers may have any, nothing depends on them.
        text += f", strides {strides_of(shape, memory_order(shape, tensor.stride()))}"
    return text


def raise_everywhere(
    error: Exception | None, comm: Communicator, op_name: str = "comparing errors"
) -> None:
    """Raise the first rank's error, if any has one, on every rank, where it is of the same type.

    Collective: all ranks of ``comm``. ``op_name`` names the call in errors about absent ranks.
    """
    mine = None if error is None else (type(error), str(error))
    everyone = comm.host.gather_unless_equal(mine, op_name)
    for rank, theirs in enumerate(everyone):
        if theirs is not None:
            kind, message = theirs
            raise kind(f"{message} (rank {comm.ranks[rank]})") from error


def agreed(
    prepare: Callable[[], tuple[T, Facts]],
    comms: Iterable[Communicator],
    op_name: str,
    remedy: str,
    *,
    differ: str = "ranks differ",
) -> T:
    """Run ``prepare`` on each rank; go on only if it succeeds everywhere, with equal facts.

    Collective: all ranks of each of ``comms``; none: this rank alone. ``op_name`` names the call in
    errors; where facts ``differ``, they end with ``remedy``.

    Raises:
        ValueError: on all ranks, where ``prepare`` raised on one or facts differ.
    """
    result: T | None = None
    facts: Facts = {}
    problem: Exception | None = None
    try:
        result, facts = prepare()
    except Exception as error:
        problem = error
    # Only digests: the facts of a large model are megabytes, and almost always the same.
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
    mine = None if problem is None else str(problem), digest
    problems: list[str] = []
    for comm in comms:
        # Also with a problem: a rank that raised before this would leave the others waiting.
        answers = comm.host.gather_unless_equal(mine, op_name)
        problems += [
            f"{op_name}, rank {rank}: {text}"
            for rank, (text, _) in zip(comm.ranks, answers, strict=False)
            if text is not None
        ]
        if not problems and len(answers) > 1:
            everyone = comm.host.gather(facts, op_name)
            _, first = differing_fact(everyone, comm.ranks)
            problems.append(f"{op_name}: {differ}: {first}. {remedy}")
    if problem is not None and not isinstance(problem, ValueError):
        raise problem
    if problems or problem is not None:
        raise ValueError(problems[0] if problems else f"{op_name}: {problem}") from problem
    assert result is not None, "it was prepared"
    return result


def differing_fact(everyone: Sequence[Facts], ranks: Sequence[int]) -> tuple[str, str]:
    """The first name whose facts differ between ``ranks``, and the difference in words."""
    for key in dict.fromkeys(chain.from_iterable(everyone)):
        values = [facts.get(key, "nothing") for facts in everyone]
        for rank, value in zip(ranks, values, strict=True):
            if value != values[0]:
                first = f"{key} is {values[0]:.300} on rank {ranks[0]}"
                return key, f"{first}, {value:.300} on rank {rank}"
    raise AssertionError("the digests differ, so the facts do")


def checksum(tensor: Tensor) -> Checksum:
    """A few sums over the bytes that tell tensors apart, also those of the same elements."""
    if tensor.numel() == 0:
        return (0, 0)
    data = as_bytes(tensor.detach().contiguous())
    is_wide = data.numel() % 8 == 0 and data.data_ptr() % 8 == 0
    words = data.view(torch.int64) if is_wide else data
    # Read as a table, whose sums of rows and of columns are weighted by place: plain sums would
    # not see that elements were exchanged.
    num_tabled = words.numel() // _COLUMNS * _COLUMNS
    table, rest = words[:num_tabled].view(-1, _COLUMNS), words[num_tabled:].to(torch.int64)
    columns, rows, last = (
        int((sums * torch.arange(1, sums.numel() + 1, device=sums.device)).sum())
        for sums in (table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64), rest)
    )
    return (columns + last, rows + int(rest.sum()))
