"""`mapping`: ranks map one another's shards, small as these are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from flatshard.engine import gradients
from flatshard.extras import shared_memory
from flatshard.extras.shared_memory import MappedShards
from flatshard.units import layout


@contextmanager
def mapping() -> Iterator[list[Any]]:
    """Small shards are mapped, and small gradients copied at once; yields what was mapped."""
    made: list[Any] = []
    init = MappedShards.__init__

    def counted(self: Any, *args: Any) -> None:
        init(self, *args)
        made.append(type(self))

    with (
        mock.patch.object(layout, "PAGED_BYTES", 1),
        mock.patch.object(shared_memory, "PAGED_BYTES", 1),
        mock.patch.object(gradients, "_SMALL_BYTES", 0),
        mock.patch.object(MappedShards, "__init__", counted),
    ):
        yield made
