"""Memory that comes back once nobody else has it."""

import pytest
import torch

from flatshard import memory
from flatshard.memory import BufferCache

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "GLIBC_LIMIT_BYTES", 5)


def test_the_same_memory_comes_back_once_it_is_unused() -> None:
    cache = BufferCache()
    first = cache.take(10, torch.float32, CPU)
    place = first.data_ptr()
    second = cache.take(10, torch.float32, CPU)
    assert second.data_ptr() != place
    view = first[3:].view(-1)
    del first
    assert cache.take(10, torch.float32, CPU).data_ptr() != place  # a view is a use
    del view
    assert cache.take(10, torch.float32, CPU).data_ptr() == place


def test_what_is_unused_is_given_back() -> None:
    cache = BufferCache()
    used = cache.take(10, torch.float32, CPU)
    cache.give_back()
    assert cache.take(10, torch.float32, CPU).data_ptr() != used.data_ptr()
    del used
    cache.take(5, torch.float32, CPU)
    cache.give_back()
    assert not cache._kept
