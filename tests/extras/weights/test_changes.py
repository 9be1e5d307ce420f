"""``WeightChanges`` and ``apply_changes``, bit for bit against ``full_tensors``."""

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatshard
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import usual_and_every
from tests.harness import assert_raises, naming, on_ranks
from tests.models import CASES, loss_of
from tests.oracle import ROWS, assert_identical, change_all, step_and_zero
from tests.ways import WAYS, ranks_of


def _full(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    return {str(name): t.clone() for name, t in flatshard.full_tensors(model, dtype=dtype)}


def _empty(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.full_like(t, 7) for name, t in _full(model, dtype).items()}


@pytest.mark.by_turns
@pytest.mark.parametrize("way", usual_and_every(3, WAYS))
@on_ranks(ranks_of)
def test_after_steps(rank: int, world_size: int, way: str) -> None:
    WAYS[way].set_nodes()
    for name in ("batch-norm", "tied-across-units", "cnn-channels-last"):
        case = CASES[name]
        model = case.wrap(case.model(torch.float32), **WAYS[way].keywords)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        changes = flatshard.WeightChanges(model)
        received = _empty(model, torch.bfloat16)
        for step in range(8):
            inputs, target = case.batch(10 * step + rank, ROWS, torch.float32)
            loss_of(model(inputs), target).backward()
            step_and_zero(optimizer)
            some = list(changes.changes(digests=True))
            pickles = [pickle.dumps(one) for one in some]
            for one, text in zip(some, pickles, strict=True):
                numbers = 0 if one.indices is None else one.indices.nbytes
                assert len(text) < one.values.nbytes + numbers + 2000
            some = [*map(pickle.loads, pickles)]
            flatshard.apply_changes(received, some)
        with naming(name):
            assert_identical(received, _full(model, torch.bfloat16))
        assert any(one.indices is not None for one in some), "all units were sent whole"
        assert list(changes.changes()) == []


@on_ranks(2)
def test_arguments_and_early_stops(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    policy = ModuleWrapPolicy({nn.Linear})
    model: Any = flatshard.ShardedWrapper(plain, auto_wrap_policy=policy, coalesce_bytes=0)

    def set_one(row: int, column: int) -> None:
        with torch.no_grad(), flatshard.ShardedWrapper.summon_full_params(model):
            model[0].weight[row, column] = 1.0

    changes = flatshard.WeightChanges(model, dtype=torch.float32)
    received = _empty(model, torch.float32)
    flatshard.apply_changes(received, changes.changes())
    assert_identical(received, _full(model, torch.float32))
    set_one(3, 5)
    with torch.no_grad():
        model[1].bias.add_(1)
    first, second = changes.changes(ranks=1) if rank else [None, *changes.changes(ranks=1), None]
    if rank:
        assert (first.name, first.indices.tolist()) == ("0.weight", [125])
        assert first.values.tolist() == [1.0]
        assert (second.name, second.indices.tolist()) == ("1.bias", [*range(20)])
    # A rank that stops early takes part in the rest, and then all ranks get all weights.
    change_all(model, lambda param: param.add_(1))
    stopped = pytest.raises(RuntimeError, match="rank 0 stopped reading") if rank else nullcontext()
    with stopped:
        for number, _ in enumerate(changes.changes()):
            if rank == 0 and number == 1:
                break
    flatshard.apply_changes(received, changes.changes(digests=True))
    assert_identical(received, _full(model, torch.float32))
    # A receiver that missed a pass finds out by the digest.
    set_one(0, 0)
    list(changes.changes())
    set_one(0, 1)
    with pytest.raises(ValueError, match=r"'0.weight' differs from the trained model"):
        flatshard.apply_changes(received, list(changes.changes(digests=True)))
    with pytest.raises(ValueError, match=r"'0.weight': expected .*, got none"):
        flatshard.apply_changes({}, list(flatshard.WeightChanges(model).changes()))
    unread = changes.changes()
    unfinished = r"another WeightChanges.changes\(\) of this model is not finished"
    assert_raises(ValueError, unfinished, changes.changes)
    list(unread)
    assert_raises(ValueError, "ranks differ: the call is", changes.changes, digests=rank == 0)
    refused = "ranks must be 'all', 'local' or below 2, got 2"
    assert_raises(ValueError, refused, changes.changes, ranks=2)
    refused = "floating-point dtype, got torch.int8"
    assert_raises(ValueError, refused, flatshard.WeightChanges, model, torch.int8)
    both = nn.ModuleDict({"one": model, "two": copy.deepcopy(model)})  # names in the whole model
    received = _empty(both, torch.bfloat16)
    flatshard.apply_changes(received, flatshard.WeightChanges(both).changes(digests=True))
    assert_identical(received, _full(both, torch.bfloat16))
    unwrapped = nn.Linear(3, 2)
    (weight, bias) = flatshard.WeightChanges(unwrapped).changes()
    assert torch.equal(weight.values, unwrapped.weight.bfloat16())
    assert (bias.name, bias.indices) == ("bias", None)


def _wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(torch.complex128) for name, tensor in tensors.items()}


class _Mixed(nn.Module):
    """Many dtypes, a scalar, and an image in another memory order."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float64, torch.float16, torch.complex64, torch.complex128)
        for number, dtype in enumerate(dtypes):
            setattr(self, f"p{number}", nn.Parameter(torch.randn(40, 3).to(dtype)))
        self.scalar = nn.Parameter(torch.randn(()))
        image = torch.randn(5, 2, 3, 3).to(memory_format=torch.channels_last)
        self.image = nn.Parameter(image)
        for number, dtype in enumerate((torch.bool, torch.int64, torch.complex128)):
            self.register_buffer(f"b{number}", torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("collectives", ["native", "auto"])
@on_ranks(3)
def test_every_dtype(rank: int, world_size: int, collectives: str) -> None:
    torch.manual_seed(0)
    model: Any = flatshard.ShardedWrapper(_Mixed(), collectives=collectives)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float64):
        changes = flatshard.WeightChanges(model, dtype)
        received = _empty(model, dtype)
        for step in range(4):
            some = list(changes.changes(digests=step != 2))
            are_whole = [one.indices is None for one in some if one.name.startswith("p")]
            assert are_whole == [step in (0, 3)] * 4  # everything, and more than a tenth
            flatshard.apply_changes(received, some)
            with naming(f"{dtype}, step {step}"):
                assert_identical(*map(_wide, (received, _full(model, dtype))))
            # One element on one rank, in every tensor; in the last step, half of the elements.
            with torch.no_grad(), flatshard.ShardedWrapper.summon_full_params(model):
                for tensor in (*model.parameters(), *model.buffers()):
                    some = torch.arange(1 if step < 2 else (tensor.numel() + 1) // 2)
                    tensor.put_(some, torch.full_like(some, step + 2).to(tensor.dtype))
        assert list(changes.changes()) != []
