"""``boundary``: where the shards of a flat parameter may cut an original parameter."""

from __future__ import annotations

# "element", "row", "tensor", or a number of elements; see `ShardedWrapper`.
Boundary = str | int

_CHOICES = "element", "row", "tensor"


def as_boundary(value: object) -> Boundary:
    """Read ``boundary``. Raises TypeError, or ValueError, for what is none."""
    expected = f"boundary: expected {', '.join(map(repr, _CHOICES))} or a number of elements"
    # True is an int: it would mean one element.
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"{expected}, got {value!r}")
    if value not in _CHOICES if isinstance(value, str) else value < 1:
        raise ValueError(f"{expected}, at least 1, got {value!r}")
    return "element" if value == 1 else value
