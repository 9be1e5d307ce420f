"""Memory that comes back once nobody else has it."""

import torch

from flatshard.spare import Spare

CPU = torch.device("cpu")


def test_the_same_memory_comes_back_once_it_is_unused() -> None:
    spare = Spare()
    first = spare.take(10, torch.float32, CPU)
    place = first.data_ptr()
    second = spare.take(10, torch.float32, CPU)
    assert second.data_ptr() != place
    view = first[3:].view(-1)
    del first
    assert spare.take(10, torch.float32, CPU).data_ptr() != place  # a view is a use
    del view
    assert spare.take(10, torch.float32, CPU).data_ptr() == place


def test_other_kinds_are_other_memory() -> None:
    spare = Spare()
    spare.take(10, torch.float32, CPU)
    for numel, dtype in ((11, torch.float32), (10, torch.int32)):
        taken = spare.take(numel, dtype, CPU)
        assert (taken.numel(), taken.dtype) == (numel, dtype)


def test_what_is_unused_is_given_back() -> None:
    spare = Spare()
    used = spare.take(10, torch.float32, CPU)
    spare.give_back()
    assert spare.take(10, torch.float32, CPU).data_ptr() != used.data_ptr()
    del used
    spare.take(5, torch.float32, CPU)
    spare.give_back()
    assert not spare._kept
