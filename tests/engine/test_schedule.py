"""In which order reductions start."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from flatshard.engine.reduce_queue import ReduceOrder


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
