"""A table of units."""

from flatshard.extras import tabulate


def test_columns_are_aligned() -> None:
    table = tabulate([("unit", "elements"), ("head", "1,000"), ("blocks.0", "5")], numbers={1})
    assert table == "unit      elements\nhead         1,000\nblocks.0         5"
