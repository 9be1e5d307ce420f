"""Free memory goes back when there is much more of it than before, and only then."""

import pytest
import torch

from flatshard.memory import heap, mapped_files

MIB = 1 << 20


@pytest.mark.parametrize(
    ("free", "given_back"),
    [
        ([10, 100, 100, 100, 131, 120], []),  # little more
        ([10, 100, 100, 133, 160, 166], [3, 5]),  # again only when it has grown again
        ([10, 900, 400, 480, 500, 501], [5]),  # a quarter of what there was
        ([0, 0, 0, 0, 0, 0], []),
    ],
)
def test_when(free: list[int], given_back: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    steps: list[int] = []
    monkeypatch.setattr(heap, "_free_bytes", lambda: free[steps[-1]] * MIB)
    monkeypatch.setattr(mapped_files, "give_back_freed", lambda: calls.append(steps[-1]))
    watched = heap.Heap()
    for step in range(len(free)):
        steps.append(step)
        watched.end_forward()
    assert calls == given_back


def test_what_is_free_is_seen() -> None:
    if heap._mallinfo is None:
        pytest.skip("not glibc")
    pieces = [torch.empty(16 * 1024, dtype=torch.uint8) for _ in range(400)]
    before = heap._free_bytes()
    del pieces[::2]  # so that none lies at the heap's end, which may shrink
    assert heap._free_bytes() - before > 2 * MIB


def test_small_places_beside_tensors_are_let_go() -> None:
    if heap._mallinfo is None:
        pytest.skip("not glibc")
    watched = heap.Heap()
    for nbytes in range(24, 96, 16):
        # What is free of the size is in use, as it is in a forward, and then these are cached.
        held = [heap._malloc(nbytes) for _ in range(20_000)]
        cached = {held.pop() for _ in range(7)}
        for place in cached:
            heap._free(place)
        watched.begin_forward()
        next_ones = [heap._malloc(nbytes) for _ in range(7)]
        for place in next_ones + held:
            heap._free(place)
        assert cached.isdisjoint(next_ones)
