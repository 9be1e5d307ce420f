"""Programs of other frameworks on sharded models; each import of a framework takes seconds."""

import contextlib
import os
import warnings
from collections.abc import Iterator

PRELOAD = (
    "flatshard.integrations.lightning",
    "flatshard.integrations.transformers",
    "transformers.models.llama.modeling_llama",
    "trl",
)
"""What the fork server of these tests loads once. All of them run in one worker of pytest-xdist."""


@contextlib.contextmanager
def as_under_torchrun() -> Iterator[None]:
    """The environment of torchrun, without warnings: frameworks warn of much that tests lack."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
