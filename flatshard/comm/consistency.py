"""Checks that all ranks build the same model and pass the same arguments.

After a check, either all ranks continue or all ranks raise. If only one rank raised, the others
would wait for this rank in their next collective.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import TypeVar

from flatshard.comm.communicator import Communicator
from flatshard.comm.host_exchange import digest_of

# Facts that must be equal on all ranks: a text for each fact, keyed by the fact's name.
Facts = dict[str, str]
T = TypeVar("T")


def raise_everywhere(
    error: Exception | None, *comms: Communicator, op_name: str = "comparing errors"
) -> None:
    """Raise the error of the first rank that has an error, on every rank.

    Collective: all ranks of each of ``comms``, with and without an error.

    Args:
        error: this rank's error. None: this rank has no error.
        comms: communicators whose ranks all raise. A rank that receives an error in one
            communicator sends the error to the ranks of the next communicators.
        op_name: name of this exchange, for the error about a rank that does not arrive.
    """
    # `global_rank` is the rank of this process in every communicator except `ALONE`, where it is 0.
    me = max(comm.global_rank for comm in comms)
    told = None if error is None else (*sendable(error), me)
    for comm in comms:
        told = next(filter(None, comm.host.gather(told, op_name)), None)
    if told is not None:
        kind, message, rank = told
        raise kind(f"{message} (rank {rank})") from error


def sendable(error: Exception) -> tuple[type[Exception], str]:
    """Return a class and a text from which every rank can make a copy of ``error``."""
    try:
        kind, text = pickle.loads(pickle.dumps((type(error), str(error))))
        kind(text)
    except Exception:  # the class cannot be pickled, or needs other arguments than a text
        return RuntimeError, f"{type(error).__name__}: {error}"
    return kind, text


def agreed(
    prepare: Callable[[], tuple[T, Facts]],
    comms: Collection[Communicator],
    op_name: str,
    remedy: str,
    *,
    differ: str = "ranks differ",
) -> T:
    """Run ``prepare`` on each rank, and return its result if all ranks succeed with equal facts.

    Collective: all ranks of each of ``comms``. If ``comms`` is empty, nothing is communicated.

    Args:
        prepare: function that returns a pair: the result for this rank, and facts (texts keyed by
            name), which must be equal on all ranks.
        comms: communicators whose ranks must agree. A rank that receives a problem in one
            communicator sends the problem to the ranks of the next communicators.
        op_name: name of the caller. Every error begins with this name.
        remedy: last sentence of the error about different facts.
        differ: first words of the error about different facts.

    Raises:
        ValueError: ``prepare`` raised on at least one rank, or facts differ. All ranks raise. A
            rank on which ``prepare`` raised another type of error raises this error instead.
    """
    result: T | None = None
    facts: Facts = {}
    problem: Exception | None = None
    try:
        result, facts = prepare()
    except Exception as error:
        problem = error
    # Compare digests first: the facts of a large model take megabytes, and are almost always equal.
    digest = digest_of(repr(sorted(facts.items())).encode())
    # `global_rank` is the rank of this process in every communicator except `ALONE`, where it is 0.
    me = max((comm.global_rank for comm in comms), default=0)
    text = None if problem is None else f"{op_name}, rank {me}: {problem}"
    for comm in comms:
        # Exchange even if `prepare` has raised: without this rank, the other ranks would wait.
        answers = dict.fromkeys(comm.host.gather((text, digest), op_name))
        text = next((theirs for theirs, _ in answers if theirs is not None), None)
        if text is None and len(answers) > 1:
            different = differing_fact(comm.host.gather(facts, op_name), comm.ranks)
            assert different is not None, "the ranks' digests differ"
            text = f"{op_name}: {differ}: {different}. {remedy}"
    if problem is not None and not isinstance(problem, ValueError):
        raise problem
    if text is not None:
        raise ValueError(text) from problem
    assert result is not None, "it was prepared"
    return result


def differing_fact(everyone: Sequence[Facts], ranks: Sequence[int]) -> str | None:
    """Return a text about the first fact that differs between ranks, or None.

    The text contains the name of the fact, two ranks and their values.
    ``everyone``: the facts of each rank. ``ranks``: the number of each rank, in the same order.
    """
    if everyone.count(everyone[0]) == len(everyone):
        return None  # all ranks agree: skip the loop over their facts
    for key in dict.fromkeys(chain.from_iterable(everyone)):
        values = [facts.get(key, "nothing") for facts in everyone]
        for rank, value in zip(ranks, values, strict=True):
            if value != values[0]:
                first = f"{key} is {values[0]:.300} on rank {ranks[0]}"
                return f"{first}, {value:.300} on rank {rank}"
    return None
