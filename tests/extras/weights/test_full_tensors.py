"""`full_tensors`: the unwrapped model's tensors, one unit at a time, on every rank or on one."""

import contextlib
import functools
import gc
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import flatshard
from flatshard import ShardedWrapper, checkpoint, collectives
from flatshard.extras import weights as weights_extra
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import every
from tests.harness import assert_raises, on_ranks
from tests.models import CASES
from tests.oracle import snapshot
from tests.scripts import run_code
from tests.side import Run, pair
from tests.ways import WAYS, ranks_of

pytestmark = pytest.mark.by_turns

NAMES = "mlp tied-in-unit tied-across-units tied-blocks nested odd-shapes mixed-types".split()
NAMES += "batch-norm frozen cnn-channels-last lstm".split()


# In any order: a unit's tensors come together.
_assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def _tensors(model: nn.Module, **keywords: Any) -> dict[str, Tensor]:
    """All tensors under all their names, kept by a clone."""
    found: dict[str, Tensor] = {}
    for name, tensor in flatshard.full_tensors(model, **keywords):
        assert name == name.names[0]
        found.update(dict.fromkeys(name.names, tensor.clone()))
    return found


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "full-3") for name in NAMES), *(("batch-norm", w) for w in every(2, sorted(WAYS)))],
)
@on_ranks(ranks_of)
def test_has_the_state_dicts_tensors(rank: int, world_size: int, name: str, way: str) -> None:
    """On all ranks or on one, in other dtypes; and a consumer may write to them."""
    WAYS[way].set_nodes()
    run, _ = pair(rank, world_size, way, name)
    model = run.model
    for _ in range(2):
        expected = snapshot(model)
        _assert_same(_tensors(model), expected)
        half = {k: v.half() if v.is_floating_point() else v for k, v in expected.items()}
        _assert_same(_tensors(model, dtype=torch.float16), half)
        for chosen in range(world_size):
            _assert_same(_tensors(model, ranks=chosen), expected if rank == chosen else {})
        for _, tensor in flatshard.full_tensors(model):
            tensor.zero_()
        _assert_same(_tensors(model), expected)
        run.train()


@on_ranks(2)
def test_names_are_ordered(rank: int, world_size: int) -> None:
    model = CASES["nested"].wrap()
    mine, all_names = [name for name, _ in flatshard.full_tensors(model)], [None] * world_size
    name = pickle.loads(pickle.dumps(mine[0]))
    assert name == mine[0]
    assert name.names == mine[0].names
    dist.all_gather_object(all_names, mine)
    assert all_names == [mine] * world_size
    unwrapped = CASES["tied-in-unit"].model()
    _assert_same(_tensors(unwrapped), snapshot(unwrapped))


# ---------------------------------------------------------------- what is sent


@on_ranks(2)
def test_sends_each_chosen_unit_once_in_the_narrower_dtype(rank: int, world_size: int) -> None:
    model = CASES["mlp"].wrap(coalesce_bytes=0)  # float64
    parts = list(model.flat_parameters())
    sizes = {part.params[0].spec.unit: part.flat_layout.padded_numel for part in parts}
    assert len(sizes) > 1

    def gathered(**keywords: Any) -> dict[str, int]:
        with collectives.record() as events:
            _tensors(model, **keywords)
        found = [(one.unit_fqn, one.nbytes) for one in events if one.kind == "gather"]
        assert len(found) == len(dict(found))
        return dict(found)

    assert gathered() == {unit: 8 * numel for unit, numel in sizes.items()}
    assert gathered(dtype=torch.bfloat16) == {unit: 2 * numel for unit, numel in sizes.items()}
    chosen = "fc2.weight"
    (part,) = (part for part in parts if chosen in [param.name for param in part.params])
    assert gathered(names=[chosen]).keys() == {part.params[0].spec.unit}
    biases = [name for name in _tensors(model) if name.endswith("bias")]
    assert [*_tensors(model, names=lambda name: name.endswith("bias"))] == biases


def _layers(width: int, depth: int, **keywords: Any) -> ShardedWrapper:
    """A model with a unit for each layer."""
    layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    policy = ModuleWrapPolicy({nn.Linear})
    return ShardedWrapper(layers, auto_wrap_policy=policy, coalesce_bytes=0, **keywords)


@on_ranks(2)
def test_the_next_all_gather_runs_while_a_consumer_works(rank: int, world_size: int) -> None:
    model = _layers(40, 4)
    with collectives.record() as events:
        items = flatshard.full_tensors(model)
        next(items)
        assert len([one for one in events if one.kind == "gather"]) == 2  # of four units
        list(items)


@on_ranks(2)
def test_memory(rank: int, world_size: int) -> None:
    """At most three units beside the shards, and a consumer that keeps tensors keeps the values."""
    width = 1700  # 11 MiB in float32; large enough to be no free memory of the allocator
    model = _layers(width, 6)
    alive = 0
    for _ in flatshard.full_tensors(model):
        gc.collect()
        storages = {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
            for one in gc.get_objects()
            if type(one) is Tensor and one.numel() == width * width
        }
        alive = max(alive, sum(storages.values()))
    assert 0 < alive <= 3 * 4 * width * width
    kept = dict(flatshard.full_tensors(model))  # without clones
    _assert_same(kept, snapshot(model))


# ---------------------------------------------------------------- which ranks


@on_ranks(2)
def test_a_copy_that_fails_on_one_rank(rank: int, world_size: int) -> None:
    """As if there were no memory for it: the other ranks do not wait, and the next call works."""
    model = CASES["nested"].wrap()
    expected, numbers = snapshot(model), itertools.count()

    def finish(options: Any, lora: Any, *item: Any) -> Any:
        if next(numbers) == 2:
            raise torch.OutOfMemoryError("no memory")
        return item

    if rank == 0:
        with mock.patch.object(weights_extra, "_finish", finish):
            assert_raises(torch.OutOfMemoryError, "no memory", _tensors, model)
    else:
        with pytest.raises(RuntimeError, match=r"rank 0 raised OutOfMemoryError: no memory\. Read"):
            _tensors(model)
    _assert_same(_tensors(model), expected)


# ---------------------------------------------------------------- a consumer that does not read on


def _raises(items: Iterator[Any]) -> None:
    for _ in items:
        raise LookupError("the consumer's own")


STOPS: dict[str, Callable[[Any], object]] = {
    "never": lambda items: None,
    "breaks": next,
    "raises": _raises,
    "closes": lambda items: (next(items), items.close()),
}


@pytest.mark.parametrize("name", STOPS)
@on_ranks(3)
def test_one_rank_stops(rank: int, world_size: int, name: str) -> None:
    case = CASES["nested"]
    model = case.wrap(coalesce_bytes=0)
    items = flatshard.full_tensors(model)
    if rank == 1:
        with pytest.raises(LookupError) if name == "raises" else contextlib.nullcontext():
            STOPS[name](items)
        del items
    else:
        place = "before the first item" if name == "never" else "after '"
        assert_raises(RuntimeError, f"rank 1 stopped reading {place}", list, items)
    Run(model, case, rank, world_size).train()
    _assert_same(_tensors(model), snapshot(model))


def test_the_interpreter_exits_before_the_last_item() -> None:
    program = "import torch, flatshard\nitems = flatshard.full_tensors(torch.nn.Linear(2, 2))\n"
    program += "print(next(items)[0])"
    assert run_code(program) == (0, "weight\n", "")


# ---------------------------------------------------------------- refusals


@on_ranks(2)
def test_a_forward_or_a_write_between_two_items(rank: int, world_size: int) -> None:
    case = CASES["nested"]
    model = case.wrap()
    inputs = case.batch(0, 4, torch.float64)[0]
    items = flatshard.full_tensors(model)
    next(items)
    assert_raises(RuntimeError, r"a forward began before full_tensors\(\) was read", model, inputs)
    with pytest.raises(ValueError, match=r"another full_tensors\(\) of this model is not finished"):
        flatshard.full_tensors(model)
    list(items)
    # Operations on parameters are allowed, and so are forwards of units that are not read.
    params = dict(model.named_parameters())
    for name, tensor in flatshard.full_tensors(model):
        if name in params:
            torch.testing.assert_close(params[name].detach().norm(), tensor.norm())
    mlp = CASES["mlp"].wrap()
    items = flatshard.full_tensors(mlp.fc1)
    next(items)
    assert list(flatshard.full_tensors(mlp.fc2))
    list(items)
    items = flatshard.full_tensors(model)
    next(items)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert_raises(RuntimeError, r"wrote parameter '.*' .* before the last item", list, items)
    model(inputs).sum().backward()


@pytest.mark.parametrize("transport", ["auto", "native", "sockets"])
@on_ranks(2)
def test_other_collectives_between_two_items(rank: int, world_size: int, transport: str) -> None:
    """They must not meet the all-gather for the next item, which is under way."""
    model = _layers(7, 4, collectives=transport)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    expected, norms = snapshot(model), model.norms()

    def summon() -> None:
        with ShardedWrapper.summon_full_params(model, writeback=False):
            assert torch.equal(model.get_parameter("0.weight"), expected["0.weight"])

    others: list[Callable[[], Any]] = [
        lambda: _assert_same(snapshot(model), expected),
        lambda: checkpoint.full_state_dict(model),
        lambda: checkpoint.full_optim_state_dict(model, optimizer),
        lambda: model.clip_grad_norm_(1e9),
        lambda: model.get_parameter("1.weight").full_tensor(),  # type: ignore[operator]
        summon,
    ]
    for other in others:
        found = {}
        for name, tensor in flatshard.full_tensors(model):
            found[name] = tensor.clone()
            other()
            assert model.norms() == norms
        _assert_same(found, expected)


@on_ranks(2)
def test_refusals_reach_all_ranks_before_the_first_all_gather(rank: int, world_size: int) -> None:
    model = CASES["nested"].wrap()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"names": ["no.such"]}, "no parameter or persistent buffer 'no.such'"),
        ({"dtype": torch.int8}, "dtype must be a floating-point dtype"),
        ({"dtype": "bfloat16"}, "dtype must be a floating-point dtype, got 'bfloat16'"),
        ({"ranks": 2}, "ranks must be 'all', 'local' or below 2"),
        ({"ranks": "some"}, "ranks must be 'all', 'local' or below 2"),
    ]
    with collectives.record() as events:
        for keywords, message in wrong:
            with pytest.raises(ValueError, match=message):
                flatshard.full_tensors(model, **keywords if rank == 0 else {})
        with pytest.raises(ValueError, match="ranks differ: the call"):
            flatshard.full_tensors(model, ranks=rank)
        with pytest.raises(ValueError, match="ranks differ: the list of tensors"):
            flatshard.full_tensors(model, names=lambda name: rank == 0)
    assert not [one for one in events if one.kind == "gather"]
    with ShardedWrapper.summon_full_params(model), pytest.raises(RuntimeError, match="summon"):
        flatshard.full_tensors(model)
    _assert_same(_tensors(model), snapshot(model))
