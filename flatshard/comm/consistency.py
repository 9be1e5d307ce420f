"""Checks that all ranks build the same model and pass the same arguments.

After a check, either all ranks continue or all ranks raise. If only one rank raised, the others
would wait for this rank in their next collective.
"""

import pickle
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import TypeVar, cast

from flatshard.comm.communicator import Communicator
from flatshard.comm.host_exchange import HostExchange, digest_of
from flatshard.comm.process_groups import ranks_text

# Facts that must be equal on all ranks: a text for each fact, keyed by the fact's name.
Facts = dict[str, str]
T = TypeVar("T")


def raise_everywhere(
    error: Exception | None, *comms: Communicator, op_name: str = "comparing errors"
) -> None:
    """If any rank passes an ``error``, raise the first such rank's error on all ranks of ``comms``.

    Collective. A rank that receives an error in one of ``comms`` also sends it in the next ones.
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
    hosts: Collection[HostExchange],
    op_name: str,
    remedy: str,
    *,
    differ: str = "ranks differ",
) -> T:
    """Run ``prepare`` on each rank, and return its result if all ranks succeed with equal facts.

    Facts are texts, keyed by name. If facts differ between ranks, all ranks raise a ValueError that
    contains ``op_name``, ``differ``, the first difference and ``remedy``. If ``prepare`` raises on
    one rank, all ranks raise an error of the same class.

    Collective: all ranks of each of ``hosts``. A rank that receives a problem in one exchange sends
    the problem to the ranks of the next exchanges.
    """
    result: T | None = None
    facts: Facts = {}
    problem: Exception | None = None
    told: tuple[type[Exception], str] | None = None
    try:
        result, facts = prepare()
    except Exception as error:
        problem, (kind, text) = error, sendable(error)
        rank = max((host.global_rank for host in hosts), default=0)
        told = kind, f"{op_name}, rank {rank}: {text}"
    # Compare digests first: the facts of a large model take megabytes, and are almost always equal.
    digest = digest_of(repr(sorted(facts.items())).encode())
    for host in hosts:
        # Exchange even if `prepare` has raised: without this rank, the other ranks would wait.
        answers = dict.fromkeys(host.gather((told, digest), op_name))
        told = next((theirs for theirs, _ in answers if theirs is not None), None)
        if told is None and len(answers) > 1:
            different = differing_fact(host.gather(facts, op_name), host.ranks)
            told = ValueError, f"{op_name}: {differ}: {different}. {remedy}"
    if told is not None:
        kind, text = told
        raise kind(text) from problem
    return cast(T, result)


def differing_fact(everyone: Sequence[Facts], ranks: Sequence[int]) -> str | None:
    """Return a text about the first fact that differs between ranks, or None.

    ``everyone``: the facts of each of ``ranks``.
    """
    if everyone.count(everyone[0]) == len(everyone):
        return None  # all ranks agree: skip the loop, whose time grows with the number of ranks
    for key in dict.fromkeys(chain.from_iterable(everyone)):
        ranks_of: dict[str, list[int]] = {}
        for rank, facts in zip(ranks, everyone, strict=True):
            ranks_of.setdefault(facts.get(key, "nothing"), []).append(rank)
        if len(ranks_of) > 1:
            values = (f"{one:.300} on rank {ranks_text(some)}" for one, some in ranks_of.items())
            return f"{key} is {', '.join(values)}"
    return None
