"""What is gathered next, and in which order reductions start."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from flatshard.engine.prefetch import ExecutionOrder
from flatshard.engine.reduce_queue import ReduceOrder


def _run(order: ExecutionOrder, units: list[int]) -> list[list[int]]:
    """One forward; returns what was predicted after each unit."""
    order.begin_forward()
    predictions = []
    for unit in units:
        order.record(unit)
        predictions.append(order.next_forward())
    return predictions


def test_first_forward_predicts_nothing() -> None:
    order = ExecutionOrder()
    assert _run(order, [2, 0, 1]) == [[], [], []]
    assert order.first_backward() == []


def test_second_forward_predicts_the_first() -> None:
    order = ExecutionOrder()
    _run(order, [2, 0, 1, 0])
    assert _run(order, [2, 0, 1, 0]) == [[0, 1, 0], [1, 0], [0], []]


def test_a_broken_order_is_not_guessed_and_recorded_afresh() -> None:
    order = ExecutionOrder()
    _run(order, [0, 1, 2, 3])
    assert _run(order, [0, 2, 3]) == [[1, 2, 3], [], []]
    assert _run(order, [0, 2, 3]) == [[2, 3], [3], []]


def test_backward_is_the_reverse_of_this_forward() -> None:
    order = ExecutionOrder()
    _run(order, [0, 1, 2])
    assert [order.next_backward(unit) for unit in (2, 1, 0)] == [[1, 0], [0], []]


def test_a_forward_computed_again_goes_the_same_way() -> None:
    order = ExecutionOrder()
    _run(order, [3, 0, 1])
    _run(order, [3, 1, 0, 1])
    assert [order.next_recomputed(unit) for unit in (3, 1, 0, 2)] == [[1, 0, 1], [0, 1], [1], []]


def test_backward_is_foreseen_once_forward_ran_as_before() -> None:
    order = ExecutionOrder()
    _run(order, [0, 1, 2])
    _run(order, [0, 1])
    assert order.first_backward() == []  # there may be more to come
    order.record(2)
    assert order.first_backward() == [2, 1, 0]
    order.record(3)
    assert order.first_backward() == []


def test_a_unit_run_twice_in_a_row_does_not_prefetch_itself() -> None:
    order = ExecutionOrder()
    _run(order, [0, 1, 1])
    assert order.next_backward(1) == []
    _run(order, [1, 2, 0, 2])
    assert order.next_backward(2) == [0]


def _turns(order: ReduceOrder, unit: int) -> list[int]:
    order.ready(unit)
    return list(order.turns())


@given(st.permutations(range(5)), st.permutations(range(5)))
def test_ranks_start_reductions_alike(first: list[int], second: list[int]) -> None:
    """Whatever the order in which units become ready, all ranks reduce in one sequence."""
    ranks = []
    for readiness in (first, second):
        order = ReduceOrder(5)
        order.begin_backward()
        ranks.append(list(itertools.chain.from_iterable(_turns(order, unit) for unit in readiness)))
        assert order.rest() == []
        assert order.suggested() == list(readiness)
    assert ranks[0] == ranks[1] == order.sequence


@given(st.sets(st.integers(0, 4)))
def test_an_incomplete_unit_holds_up_the_later_ones(ready: set[int]) -> None:
    order = ReduceOrder(5)
    order.begin_backward()
    started = list(itertools.chain.from_iterable(_turns(order, unit) for unit in sorted(ready)))
    assert started + order.rest() == order.sequence
    assert set(started) <= ready
    assert not order.rest() or order.rest()[0] not in ready


def test_adopted_order_counts_from_the_next_backward() -> None:
    order = ReduceOrder(3)
    order.adopt([0, 2, 1])
    order.begin_backward()
    assert [_turns(order, unit) for unit in (0, 1, 2)] == [[0], [], [2, 1]]
