"""The first gradient that is not finite: one warning, on the rank where the value arose."""

import pytest
import torch
from torch import nn

from flatshard import MixedPrecision, ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import on_ranks


@pytest.mark.uncoalesced  # the message names one layer
@on_ranks(3)
def test_warns_of_the_first_gradient_that_is_not_finite(rank: int, world_size: int) -> None:
    """Only where it came from, with the name in the unwrapped model, and once."""
    model = ShardedWrapper(
        nn.Sequential(nn.Linear(7, 16), nn.Linear(16, 5)),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16),
    )
    model[1].weight.register_hook(lambda grad: grad * (float("nan") if rank == 1 else 1.0))

    def backward() -> None:
        model(torch.ones(4, 7)).sum().backward()

    backward()  # nobody asked
    model.warn_non_finite()
    if rank == 1:
        match = r"unit '1', rank 1: the gradient of parameter '1.weight' contains nan"
        with pytest.warns(UserWarning, match=match):
            backward()
    else:
        backward()
    assert model[1].weight.grad.full_tensor().isnan().all()
    backward()  # it was said once
    model.warn_non_finite()
    model.warn_non_finite(False)
    backward()
