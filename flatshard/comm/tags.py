"""``Tags``: numbers that tell flat parameters and models apart, alike on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_is_copying = False


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Inside, models are copied: perhaps on one rank alone, which then lets the copy rest."""
    global _is_copying
    before, _is_copying = _is_copying, True
    try:
        yield
    finally:
        _is_copying = before


class Tags:
    """Numbers given out over one group; ranks ask for them in the same order."""

    def __init__(self) -> None:
        self._num_tags = [0, 0]  # inside ``copying``: the second
        self._num_models = 0

    def new_tag(self) -> int:
        """A number that no other user of this communicator has.

        Ranks that call this in the same order get the same numbers; calls inside ``copying`` and
        outside of it count apart.
        """
        self._num_tags[_is_copying] += 1
        return 2 * self._num_tags[_is_copying] + _is_copying

    def new_model(self) -> int:
        """A number below 256 that tells a model from others; ranks construct them together."""
        self._num_models += 1
        return self._num_models % 256
