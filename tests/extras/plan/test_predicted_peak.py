"""The peak of tensors that a plan predicts is the peak that ranks have."""

import shutil
import statistics

import pytest

pytest.importorskip("rich")
import planned


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_predicted_peak_is_measured() -> None:
    rows = planned.compare([planned.CASES[index] for index in planned.QUICK])
    errors = {row["name"]: row["error"] for row in rows}
    assert max(map(abs, errors.values())) <= planned.LARGEST, errors
    assert statistics.median(map(abs, errors.values())) <= planned.MEDIAN, errors
