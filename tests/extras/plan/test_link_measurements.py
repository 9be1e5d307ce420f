"""`scripts/measure/planned.py --links` compares ratios of step times, and estimates their noise."""

import pytest

pytest.importorskip("rich")
import planned


def test_a_slow_machine_changes_no_ratio() -> None:
    rounds = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [2.0, 4.0, 6.0]]
    assert planned.relative(rounds) == pytest.approx([0.5, 1.0, 1.5])
    assert planned.noise_of(rounds) == pytest.approx(0)


def test_noise_is_the_difference_of_a_strategy_from_itself() -> None:
    rounds = [[1.1, 0.9], [0.9, 1.1]] * 4
    assert planned.noise_of(rounds) == pytest.approx(0.205, abs=0.01)


def test_close_strategies_get_more_rounds() -> None:
    close, clear = [[1.0, 1.04]] * 8, [[1.0, 1.2]] * 8
    assert not planned.is_enough(close)
    assert planned.is_enough(clear)
