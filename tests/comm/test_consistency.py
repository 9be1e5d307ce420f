"""An error of one rank reaches the others, whatever its class."""

import os
import pickle
from unittest import mock

import pytest
from torch import nn

from flatshard import FlatShardTensor, ShardedWrapper
from flatshard.comm.consistency import raise_everywhere
from flatshard.tensor.shard_spec import NeedsFullTensor
from tests.harness import on_ranks


@on_ranks(2)
def test_errors_that_take_other_arguments(rank: int, world_size: int) -> None:
    class Local(Exception):
        pass

    errors = {
        "'a'": KeyError("a"),
        "UnicodeDecodeError: .*no text": UnicodeDecodeError("utf-8", b"a", 0, 1, "no text"),
        "Local: of a function": Local("of a function"),
        "sharded": NeedsFullTensor("sharded"),
    }
    (param,) = ShardedWrapper(nn.Linear(2, 2, bias=False)).parameters()
    assert isinstance(param, FlatShardTensor)
    for text, error in errors.items():
        with pytest.raises(Exception, match=f"{text}.*rank 1"):
            raise_everywhere(error if rank == 1 else None, param.spec.comm)


@on_ranks(4)
def test_an_error_crosses_groups(rank: int, world_size: int) -> None:
    """Ranks of other replicas raise too, and do not wait for the rank that failed."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        model = ShardedWrapper(nn.Linear(2, 2, bias=False), sharding_strategy="HYBRID_SHARD")
    (param,) = model.parameters()
    assert isinstance(param, FlatShardTensor)
    error = ValueError("no memory") if rank == 3 else None
    with pytest.raises(ValueError, match=r"no memory \(rank 3\)"):
        raise_everywhere(error, param.spec.comm, param.spec.replicas)


def test_needs_full_tensor_between_processes() -> None:
    error = NeedsFullTensor("sharded")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (NeedsFullTensor, "sharded")
