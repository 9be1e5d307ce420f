"""`mapping`: ranks map one another's shards, small as these are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from flatshard import memory
from flatshard.engine import gradients
from flatshard.extras import mapped_files
from flatshard.extras.page_pool import PooledBuffer
from flatshard.units import layout


@contextmanager
def mapping(kind: type = PooledBuffer) -> Iterator[list[Any]]:
    """Small shards are mapped, and small gradients copied at once; yields what was mapped.

    Over sockets that is this rank's own, in a ``PooledBuffer``; other small buffers are such, too.
    """
    made: list[Any] = []
    init = kind.__init__

    def counted(self: Any, *args: Any, **keywords: Any) -> None:
        init(self, *args, **keywords)
        if self.shard is not None:
            made.append(type(self))

    with (
        mock.patch.object(layout, "PAGED_BYTES", 1),
        mock.patch.object(memory, "PAGED_BYTES", 1),
        mock.patch.object(mapped_files, "PAGED_BYTES", 1),
        mock.patch.object(gradients, "_SMALL_BYTES", 0),
        mock.patch.object(kind, "__init__", counted),
    ):
        yield made
