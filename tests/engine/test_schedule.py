"""What is gathered next, and in which order reductions start."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatshard.engine.prefetch import ExecutionOrder
from flatshard.engine.reduce_queue import ReduceOrder


def _run(order: ExecutionOrder, *forwards: list[int]) -> list[list[int]]:
    """Return what was predicted after each unit of the last forward."""
    for units in forwards:
        order.begin_forward()
        predictions = []
        for unit in units:
            order.record(unit)
            predictions.append(order.next_forward())
    return predictions


@pytest.mark.parametrize(
    ("forwards", "predictions"),
    [
        ([[2, 0, 1]], [[], [], []]),
        ([[2, 0, 1, 0]] * 2, [[0, 1, 0], [1, 0], [0], []]),
        ([[0, 1, 2, 3], [0, 2, 3]], [[1, 2, 3], [], []]),  # a broken order is not guessed
        ([[0, 1, 2, 3], [0, 2, 3], [0, 2, 3]], [[2, 3], [3], []]),
    ],
)
def test_forward(forwards: list[list[int]], predictions: list[list[int]]) -> None:
    assert _run(ExecutionOrder(), *forwards) == predictions


def test_backward_and_recomputation() -> None:
    order = ExecutionOrder()
    _run(order, [0, 1, 2])
    assert [order.next_backward(unit) for unit in (2, 1, 0)] == [[1, 0], [0], []]
    _run(order, [0, 1, 1])  # a unit that runs twice in a row does not prefetch itself
    assert order.next_backward(1) == []
    _run(order, [1, 2, 0, 2])
    assert order.next_backward(2) == [0]
    _run(order, [3, 1, 0, 1])
    assert [order.next_recomputed(unit) for unit in (3, 1, 0, 2)] == [[1, 0, 1], [0, 1], [1], []]


def test_backward_is_foreseen_once_forward_ran_as_before() -> None:
    order = ExecutionOrder()
    _run(order, [0, 1, 2])
    assert order.first_backward() == []
    _run(order, [0, 1])
    assert order.first_backward() == []  # there may be more to come
    order.record(2)
    assert order.first_backward() == [2, 1, 0]
    order.record(3)
    assert order.first_backward() == []


def _turns(order: ReduceOrder, unit: int) -> list[int]:
    order.ready(unit)
    return list(order.turns())


@given(st.permutations(range(5)), st.permutations(range(5)), st.integers(0, 5))
def test_ranks_start_reductions_alike(sequence: list[int], ready: list[int], number: int) -> None:
    """Whatever the order in which units become ready, all ranks reduce in one sequence."""
    order = ReduceOrder(5)
    order.adopt(sequence)
    order.begin_backward()
    complete = ready[:number]
    started = list(itertools.chain.from_iterable(_turns(order, unit) for unit in complete))
    # A unit that is not ready holds up the later ones.
    assert set(started) <= set(complete)
    assert started + order.rest() == sequence
    assert not order.rest() or order.rest()[0] not in complete
    assert order.suggested()[:number] == complete
