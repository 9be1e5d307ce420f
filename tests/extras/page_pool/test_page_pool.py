"""Pages go from one buffer to the next one, and what a buffer shows is right, or cannot be read."""

import mmap
import resource

import pytest
import torch

from flatshard.extras import mapped_files, page_pool
from flatshard.extras.page_pool import POOL, PooledBuffer

MIB = 1 << 20
PAGE = mmap.PAGESIZE

pytestmark = pytest.mark.skipif(not mapped_files.CAN_MAP, reason="this system maps no files")


def num_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def used(buffer: PooledBuffer) -> int:
    """How many pages it took from the system to be written and freed."""
    buffer.take()
    before = num_faults()
    buffer.buffer.fill_(1)
    after = num_faults()
    buffer.free()
    return after - before


@pytest.mark.parametrize("sizes", [(8 * MIB, 8 * MIB), (5 * MIB + 3 * PAGE, 7 * MIB - PAGE, 3)])
def test_pages_go_round(sizes: tuple[int, ...]) -> None:
    """Buffers of whatever sizes use the same ones, in any order."""
    buffers = [PooledBuffer(size, torch.uint8) for size in sizes]
    for buffer in buffers:
        used(buffer)
    before = resident_bytes()
    for buffer in (*buffers, *reversed(buffers)):
        assert used(buffer) < 64
    assert resident_bytes() - before < MIB


def test_as_many_as_are_in_use_at_once_and_none_after() -> None:
    POOL.give_back()
    before = resident_bytes()
    one, other = PooledBuffer(16 * MIB, torch.uint8), PooledBuffer(16 * MIB, torch.uint8)
    one.take()
    one.buffer.fill_(1)
    assert used(other) >= 16 * MIB // PAGE // 512  # pages may be huge
    one.free()
    assert 30 * MIB < resident_bytes() - before < 40 * MIB
    POOL.give_back()
    assert resident_bytes() - before < 8 * MIB
    assert used(one) > 0


def test_a_buffer_that_ends_in_use() -> None:
    """Its pages are gone, the places for pages are not."""
    used(PooledBuffer(4 * MIB, torch.uint8))
    chunks, idle = len(POOL._chunks), len(POOL._idle)
    for _ in range(40):
        buffer = PooledBuffer(4 * MIB, torch.uint8)
        buffer.take()
        del buffer
    assert (len(POOL._chunks), len(POOL._idle)) == (chunks, idle)


@pytest.fixture(params=[True, False], ids=["moves", "copies"])
def _pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pages can be moved, and where they can't."""
    if not request.param:
        monkeypatch.setattr(page_pool, "_move_pages", lambda *_: False)


@pytest.mark.usefixtures("_pages")
def test_the_own_part() -> None:
    """It shows what the shard holds; what is written there stays out of the shard."""
    numel = 2 * PAGE // 4
    buffer = PooledBuffer(3 * numel, torch.float32, own=range(numel, 2 * numel))
    shard, own = buffer.shard, buffer.buffer[numel : 2 * numel]
    assert shard is not None
    shard.fill_(2)
    buffer.take()
    assert buffer.held_bytes == 2 * numel * 4
    buffer.buffer[:numel] = 5
    buffer.buffer[2 * numel :] = 6
    assert buffer.buffer.view(3, numel).unique(dim=1).flatten().tolist() == [5, 2, 6]
    own[7] = 3
    shard.fill_(4)
    assert own.unique().tolist() == [2, 3, 4]  # of the page it is a copy now
    buffer.free()
    buffer.take()
    assert own.unique().tolist() == [4]
    buffer.snapshot()
    assert buffer.held_bytes == 3 * numel * 4
    shard.fill_(5)
    assert own.unique().tolist() == [4]
    buffer.free()
    buffer.free()
    assert buffer.held_bytes == 0
    buffer.take()
    assert own.unique().tolist() == [5]


def test_no_more_pages_than_may_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer then has its own ones, and gives them back."""
    monkeypatch.setattr(page_pool, "_MAX_CHUNKS", 0)
    monkeypatch.setattr(POOL, "_idle", POOL._idle[:2])
    buffer = PooledBuffer(16 * MIB, torch.uint8)
    before = resident_bytes()
    assert used(buffer) >= 14 * MIB // PAGE // 512
    assert resident_bytes() - before < 4 * MIB


def allowed(address: int) -> str:
    """What this process may do at an address: "rw-p", say."""
    with open("/proc/self/maps") as file:
        for line in file:
            places, modes = line.split()[:2]
            start, end = (int(place, 16) for place in places.split("-"))
            if start <= address < end:
                return modes
    raise AssertionError("nothing is mapped there")


@pytest.mark.usefixtures("_pages")
def test_a_freed_buffer_is_not_zeros() -> None:
    """Nobody can read it, but for the shard."""
    numel = PAGE // 4
    buffer = PooledBuffer(3 * numel, torch.float32, own=range(numel, 2 * numel))
    places = [buffer.buffer.data_ptr() + number * PAGE for number in range(3)]
    for _ in range(2):
        assert [allowed(place) for place in places] == ["---p", "rw-p", "---p"]
        buffer.take()
        assert [allowed(place) for place in places] == ["rw-p"] * 3
        buffer.buffer.fill_(1)
        buffer.free()
    assert allowed(places[0]) == "---p"
