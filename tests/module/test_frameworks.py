"""What frameworks read of a model, assign to it and call on parts of it."""

import copy
import functools
import inspect
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from flatshard import BackwardPrefetch, CPUOffload, MixedPrecision, ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import naming, on_ranks

LINEARS = ModuleWrapPolicy({nn.Linear})


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        self.seen = self.fc1(ids).dtype
        return self.norm(self.fc2(self.fc1(ids))) * scale


@on_ranks(2)
def test_frameworks(rank: int, world_size: int) -> None:
    _signature()
    _parts_are_moved_where_they_are()
    _attributes_of_fsdp(rank, world_size)


def _signature() -> None:
    """A trainer drops the columns of a batch that the signature of forward does not name."""
    model = ShardedWrapper(_Net(), auto_wrap_policy=LINEARS)
    expected = inspect.signature(_Net().forward)
    for one in (model, copy.deepcopy(model)):
        assert inspect.signature(one.forward) == expected
        assert inspect.signature(one.fc1.forward) == inspect.signature(nn.Linear(1, 1).forward)
        assert one.forward.__name__ == "forward"
        assert one.forward.__self__ is one
    # Accelerate wraps the function, and puts the method in the place of the old one.
    function = model.forward.__func__

    @functools.wraps(function)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return function(*args, **kwargs)

    model.forward = types.MethodType(under_autocast, model)
    assert inspect.signature(model.forward) == expected
    model(torch.ones(2, 4), scale=2.0)
    assert model.seen is torch.bfloat16


def _parts_are_moved_where_they_are() -> None:
    """As teardowns do; it raised for units that are coalesced."""
    model = ShardedWrapper(_Net(), auto_wrap_policy=LINEARS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.module.cpu()
    model.module.to(torch.float32)
    model.fc1.float()
    for child in model.children():
        child.to("cpu")
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for change in (nn.Module.double, nn.Module.share_memory):
        with naming(change), pytest.raises(RuntimeError, match="cannot be converted separately"):
            change(model.fc1)


def _attributes_of_fsdp(rank: int, world_size: int) -> None:
    theirs = FullyShardedDataParallel(_Net(), device_id=torch.device("cpu"))
    public = {name for name in vars(theirs) if not name.startswith("_")} - set(vars(nn.Module()))
    missing = {"params", "training_state"}
    ours = ShardedWrapper(
        _Net(), auto_wrap_policy=LINEARS, mixed_precision=MixedPrecision(torch.bfloat16)
    )
    assert {name for name in public if not hasattr(ours, name)} == missing
    assert (ours.rank, ours.world_size) == (rank, world_size)
    assert ours.process_group is dist.group.WORLD
    assert ours.compute_device == theirs.compute_device
    assert ours.mixed_precision == MixedPrecision(torch.bfloat16)
    assert ours.cpu_offload == CPUOffload()
    assert ours.backward_prefetch is BackwardPrefetch.AUTO
    assert ours.forward_prefetch is True
    for name in (*missing, "_fsdp_wrapped_module"):
        with pytest.raises(AttributeError, match=f"{name} is not available .*: use"):
            getattr(ours, name)
