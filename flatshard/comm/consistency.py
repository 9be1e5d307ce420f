"""Checks that all ranks build the same model and pass the same arguments.

After a check, either all ranks continue or all ranks raise. If only one rank raised, the other
ranks would wait for this rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import TypeVar

from flatshard.comm.communicator import Communicator
from flatshard.comm.host_exchange import digest_of

# Facts that must be equal on all ranks: the text of each fact, keyed by the fact's name.
Facts = dict[str, str]
T = TypeVar("T")


def raise_everywhere(
    error: Exception | None, *comms: Communicator, op_name: str = "comparing errors"
) -> None:
    """Raise the error of the first rank that has an error, on every rank.

    Collective: all ranks of each of ``comms``, with and without an error.

    Args:
        error: this rank's error. None: this rank has no error.
        comms: communicators whose ranks all raise. A rank that hears of an error in one
            communicator passes the error on to the ranks of the next communicators.
        op_name: name of this exchange, for the error about a rank that does not arrive.
    """
    # Take the maximum: `ALONE`, the communicator of a single rank, has the number 0.
    me = max(comm.global_rank for comm in comms)
    told = None if error is None else (*sendable(error), me)
    for comm in comms:
        told = next(filter(None, comm.host.gather(told, op_name)), None)
    if told is not None:
        kind, message, rank = told
        raise kind(f"{message} (rank {rank})") from error


def sendable(error: Exception) -> tuple[type[Exception], str]:
    """Return a class and a text, from which every rank can build the error."""
    try:
        kind, text = pickle.loads(pickle.dumps((type(error), str(error))))
        kind(text)
    except Exception:  # a class in a function, or a class that takes other arguments
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

    Collective: all ranks of each of ``comms``; without any, nothing is communicated.

    Args:
        prepare: function that returns a pair: the result for this rank, and facts (texts keyed by
            name), which must be equal on all ranks.
        comms: communicators whose ranks must agree. A rank that hears of a problem in one
            communicator passes the problem on to the ranks of the next communicators.
        op_name: name of the caller. Every error begins with this name.
        remedy: last sentence of the error about different facts.
        differ: first words of the error about different facts.

    Raises:
        ValueError: ``prepare`` raised on at least one rank, or facts differ. All ranks raise. A
            rank on which ``prepare`` raised an error of another type raises this error instead.
    """
    result: T | None = None
    facts: Facts = {}
    problem: Exception | None = None
    try:
        result, facts = prepare()
    except Exception as error:
        problem = error
    # The facts of a large model take megabytes, and are almost always equal: compare digests first.
    digest = digest_of(repr(sorted(facts.items())).encode())
    # Take the maximum: `ALONE`, the communicator of a single rank, has the number 0.
    me = max((comm.global_rank for comm in comms), default=0)
    text = None if problem is None else f"{op_name}, rank {me}: {problem}"
    for comm in comms:
        # Exchange even after a problem: if this rank raised before the exchange, the other ranks
        # would wait.
        answers = dict.fromkeys(comm.host.gather((text, digest), op_name))
        text = next((theirs for theirs, _ in answers if theirs is not None), None)
        if text is None and len(answers) > 1:
            different = differing_fact(comm.host.gather(facts, op_name), comm.ranks)
            assert different is not None, "the ranks' digests differ"
            text = f"{op_name}: {differ}: {different[1]}. {remedy}"
    if problem is not None and not isinstance(problem, ValueError):
        raise problem
    if text is not None:
        raise ValueError(text) from problem
    assert result is not None, "it was prepared"
    return result


def differing_fact(everyone: Sequence[Facts], ranks: Sequence[int]) -> tuple[str, str] | None:
    """Return the first fact with different values on different ranks, as a pair of texts, or None.

    The first text is the name of the fact. The second text contains two ranks and their values.

    Args:
        everyone: the facts of each rank.
        ranks: the number of each rank, in the same order.
    """
    if everyone.count(everyone[0]) == len(everyone):
        return None  # all ranks agree: skip the loop over their facts
    for key in dict.fromkeys(chain.from_iterable(everyone)):
        values = [facts.get(key, "nothing") for facts in everyone]
        for rank, value in zip(ranks, values, strict=True):
            if value != values[0]:
                first = f"{key} is {values[0]:.300} on rank {ranks[0]}"
                return key, f"{first}, {value:.300} on rank {rank}"
    return None
