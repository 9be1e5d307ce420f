"""Full tensors gathered on all ranks or on their owners, and divided among the ranks again."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatshard import CollectiveError, FlatShardTensor, ShardedWrapper
from flatshard.collectives import record
from flatshard.tensor import whole
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.whole import Moved
from tests.combinations import every
from tests.harness import on_ranks
from tests.ways import WAYS, ranks_of

pytestmark = pytest.mark.by_turns


def _gathered(parts: list[tuple[ShardSpec, Tensor]], op_name: str) -> list[Any]:
    """On every rank."""
    return whole.start_gather([(*part, None) for part in parts], op_name)()


SHARDED = sorted(way for way in WAYS if not way.startswith("no_shard"))


class _Everything(nn.Module):
    """Parameters of several dtypes, memory orders and sizes: none, one, and many elements."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.scalar = nn.Parameter(torch.tensor(3.0))
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.small = nn.Parameter(torch.randn(3))
        self.narrow = nn.Linear(9, 5, dtype=torch.bfloat16)
        self.wide = nn.Linear(7, 5, dtype=torch.complex128)
        self.mask = nn.Parameter(torch.rand(5, 6) > 0.5, requires_grad=False)


def _params(way: str, **keywords: Any) -> tuple[dict[str, Tensor], dict[str, FlatShardTensor]]:
    """The full parameters, and the sharded parameters."""
    WAYS[way].set_nodes()
    torch.manual_seed(0)
    plain = _Everything()
    full = {name: param.detach().clone() for name, param in plain.named_parameters()}
    model = ShardedWrapper(plain, **{**keywords, **WAYS[way].keywords})
    return full, {n: p for n, p in model.named_parameters() if isinstance(p, FlatShardTensor)}


@pytest.mark.parametrize(
    ("way", "transport"),
    [*((way, "auto") for way in every(2, SHARDED)), ("full-3", "native"), ("full-3", "sockets")],
)
@on_ranks(ranks_of)
def test_gathers_and_scatters(rank: int, world_size: int, way: str, transport: str) -> None:
    expected, params = _params(way, collectives=transport)
    parts = [(param.spec, param.local.detach()) for param in params.values()]
    found = _gathered(parts, "full tensors")
    for (name, param), full in zip(params.items(), found, strict=True):
        assert (full.stride(), full.dtype) == (expected[name].stride(), expected[name].dtype), name
        assert torch.equal(full, expected[name]), name
        assert torch.equal(param.full_tensor().detach(), full), name
    # Each tensor to one owner, twice as large back to the shards.
    owners = [number % param.spec.comm.size for number, param in enumerate(params.values())]
    owned = whole.start_gather(
        [(*part, owner) for part, owner in zip(parts, owners, strict=True)], "to owners"
    )()
    moved = []
    for (spec, part), owner, full in zip(parts, owners, owned, strict=True):
        assert (full is not None) == (owner == spec.comm.rank)
        moved.append(Moved(spec, part, None if full is None else full + full, owner))
    whole.scatter(moved, "to shards")
    for name, param in params.items():
        assert torch.equal(param.full_tensor(), expected[name] + expected[name]), name
    # Every rank has the full tensor: nothing is sent.
    with record() as events:
        whole.scatter([Moved(*part, one, None) for part, one in zip(parts, found, strict=True)], "")
    assert not events
    for name, param in params.items():
        assert torch.equal(param.full_tensor(), expected[name]), name


@on_ranks(4)
def test_owners_first_with_hybrid_shard_op(rank: int, world_size: int) -> None:
    """The first exchange of a model also finds out which rank holds which shard."""
    expected, params = _params("hybrid-op")
    parts = [(param.spec, param.local.detach(), 0) for param in params.values()]
    found = whole.start_gather(parts, "to rank 0")()
    for name, full in zip(params, found, strict=True):
        assert full is None if rank else torch.equal(full, expected[name]), name  # type: ignore[arg-type]


@on_ranks(3)
def test_each_element_is_sent_once_to_each_rank(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = ShardedWrapper(nn.Linear(64, 64))
    params = [param for param in model.parameters() if isinstance(param, FlatShardTensor)]
    parts = [(param.spec, param.local.detach()) for param in params]
    held = sum(part.nbytes for _, part in parts)
    with record() as events:
        _gathered(parts, "full tensors")
        whole.start_gather([(*part, 0) for part in parts], "to rank 0")()
        # Of a tensor that one rank holds, a sum sends less per rank.
        params[1].full_tensor()
    kinds = [(event.kind, event.nbytes) for event in events]
    bias = params[1].numel() * 4
    assert kinds == [
        ("all_to_all", held * (world_size - 1)),
        ("all_to_all", held if rank > 0 else 0),
        ("scalars", bias),
    ]


@on_ranks(2, group_timeout=60)
def test_different_tensors(rank: int, world_size: int) -> None:
    """All ranks raise, before any value is sent, and the ranks are in step afterwards."""
    model = ShardedWrapper(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))
    weight, bias, other, *_ = model.parameters()
    assert all(isinstance(param, FlatShardTensor) for param in (weight, bias, other))
    sets: list[Any] = [[weight], [bias], [other], [weight, other], [other, weight], []]
    for one, two in itertools.combinations(sets, 2):
        params = one if rank == 0 else two
        if one and two:
            with record() as events, pytest.raises(CollectiveError, match="different collectives"):
                _gathered([(p.spec, p.local.detach()) for p in params], "full tensors")
            assert not events
    local = weight.local.detach()  # type: ignore[attr-defined]
    with pytest.raises(CollectiveError, match="different collectives"):
        _gathered([(weight.spec, local.double() if rank else local)], "full")  # type: ignore[attr-defined]
    with pytest.raises(CollectiveError, match="different collectives"):
        whole.start_gather([(weight.spec, local, rank)], "full")()  # type: ignore[attr-defined]
    torch.testing.assert_close(weight.detach().norm(), weight.full_tensor().detach().norm())  # type: ignore[operator]
