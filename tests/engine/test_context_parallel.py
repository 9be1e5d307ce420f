"""A sequence split over a dimension of the mesh, whose ranks share parameters and gradients."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import on_ranks
from tests.oracle import assert_same, sgd, step_and_zero

pytestmark = pytest.mark.by_turns

TOKENS = 6


class _Attention(nn.Module):
    """Causal; each rank has the queries of its tokens, and gathers all keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        first = 0
        if self.mesh is not None:
            parts = (DTensor.from_local(one, self.mesh, [Shard(1)]) for one in (k, v))
            k, v = (one.full_tensor(grad_placements=[Partial()]) for one in parts)
            first = self.mesh.get_local_rank() * x.size(1)
        mine = torch.arange(first, first + x.size(1))
        mask = torch.arange(k.size(1)) <= mine[:, None]
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, mask))


def _build() -> nn.Sequential:
    torch.default_generator.manual_seed(7)
    return nn.Sequential(_Attention(), _Attention(), nn.Linear(4, 3)).double()


def _batch(step: int) -> Tensor:
    return torch.randn(4, TOKENS, 4, generator=torch.Generator().manual_seed(step)).double()


@on_ranks(4)
def test_training(rank: int, world_size: int) -> None:
    """The loss of a rank is the mean over its tokens; the wrapper averages over both dimensions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    dp, cp = (mesh[name].get_local_rank() for name in ("dp", "cp"))
    model = _build()
    for attention in model[:2]:
        attention.mesh = mesh["cp"]
    both, policy = mesh["dp", "cp"]._flatten("dp_cp"), ModuleWrapPolicy({_Attention})
    sharded = ShardedWrapper(model, device_mesh=both, auto_wrap_policy=policy, coalesce_bytes=0)
    plain = _build()
    optimizers = [sgd(sharded), sgd(plain)]
    for step in range(3):
        mine = _batch(step).chunk(2)[dp].chunk(2, dim=1)[cp]
        sharded(mine).pow(2).mean().backward()
        plain(_batch(step)).pow(2).mean().backward()
        step_and_zero(*optimizers)
    assert_same(sharded.state_dict(), plain.state_dict())
