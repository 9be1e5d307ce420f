"""Memory that comes back once nobody else has it."""

import pytest
import torch

from flatshard.memory import buffers as cache_module
from flatshard.memory.buffers import BufferCache

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "GLIBC_LIMIT_BYTES", 5)


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


def test_other_kinds_are_other_memory() -> None:
    cache = BufferCache()
    cache.take(10, torch.float32, CPU)
    for numel, dtype in ((11, torch.float32), (10, torch.int32)):
        taken = cache.take(numel, dtype, CPU)
        assert (taken.numel(), taken.dtype) == (numel, dtype)


def test_what_is_unused_is_given_back() -> None:
    cache = BufferCache()
    used = cache.take(10, torch.float32, CPU)
    cache.give_back()
    assert cache.take(10, torch.float32, CPU).data_ptr() != used.data_ptr()
    del used
    cache.take(5, torch.float32, CPU)
    cache.give_back()
    assert not cache._kept


def test_what_the_allocator_keeps_is_not_kept_twice() -> None:
    for cache, is_kept in (
        (BufferCache(), False),
        (BufferCache(new=lambda numel, dtype: torch.zeros(numel, dtype=dtype)), True),
    ):
        cache.take(4, torch.uint8, CPU)
        assert (cache._kept is not None) is is_kept
