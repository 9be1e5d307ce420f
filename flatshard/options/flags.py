"""``as_flags``: keywords that are True, False or left out."""

from __future__ import annotations

from typing import Any


def as_flags(**given: Any) -> dict[str, bool | None]:
    """Read what is True, False (or equals one of them, such as 0 from a command line) or None."""
    for keyword, value in given.items():
        # Any other value has a truth too, and "no" has the wrong one.
        if value is not None and value not in (True, False):
            raise TypeError(f"{keyword}: expected True or False, got {value!r}")
    return {keyword: None if value is None else bool(value) for keyword, value in given.items()}
