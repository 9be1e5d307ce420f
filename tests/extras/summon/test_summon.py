"""``summon_full_params``: whole tensors for a while, right for every strategy or refused."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from flatshard import FlatShardTensor, MixedPrecision, ShardedWrapper, collectives
from flatshard.comm import communicator
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import every
from tests.harness import assert_raises, naming, on_ranks
from tests.oracle import assert_identical, assert_same, assert_same_gradients, change_all, snapshot
from tests.side import Run, pair
from tests.ways import WAYS, on_ranks_each_way

pytestmark = pytest.mark.by_turns

summon = ShardedWrapper.summon_full_params


def assert_trains_alike(sharded: Run, plain: Run) -> None:
    assert_same(sharded.model, plain.model)
    for run in (sharded, plain):
        run.train(5, 7)
    assert_same(sharded.model, plain.model)


def backward(*runs: Run, step: int = 0) -> None:
    for run in runs:
        run.loss(step).backward()


def step_alike(sharded: Run, plain: Run) -> None:
    sharded.step()
    plain.step()
    assert_trains_alike(sharded, plain)


both_sizes = pytest.mark.parametrize("world_size", [2, 3])


def _whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _trainable(run: Run) -> list[bool]:
    return [param.requires_grad for param in run.model.parameters()]


# ---------------------------------------------------------------- what is shown


@both_sizes
@on_ranks_each_way()
def test_shows_the_unwrapped_model(rank: int, world_size: int, way: str) -> None:
    """Names, order, shapes, dtypes, values; afterwards everything is what it was."""
    names = ("mlp", "tied-across-units", "lstm", "odd-shapes", "mixed-types")
    for name in every(2, names, start=world_size):
        with naming(name):
            _shows(rank, world_size, way, name)


def _shows(rank: int, world_size: int, way: str, name: str) -> None:
    sharded, plain = pair(rank, world_size, way, name)
    before = list(sharded.model.named_parameters())
    for options in ({}, {"writeback": False}, {"offload_to_cpu": True, "with_grads": True}):
        with summon(sharded.model, **options):
            shown = dict(sharded.model.named_parameters())
            assert all(type(param) is nn.Parameter for param in shown.values())
            assert _trainable(sharded) == _trainable(plain)
            assert_identical(_whole(sharded.model), _whole(plain.model))
            assert_identical(snapshot(sharded.model), snapshot(plain.model))
        after = list(sharded.model.named_parameters())
        assert [n for n, _ in after] == [n for n, _ in before]
        assert all(new is old for (_, new), (_, old) in zip(after, before, strict=True))
    assert_trains_alike(sharded, plain)


@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList])
@on_ranks_each_way(2)
def test_container_of_units(rank: int, world_size: int, way: str, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 2)))
    expected = _whole(plain)
    units = [ShardedWrapper(part, **WAYS[way].keywords) for part in plain]
    container = nn.Sequential(*units) if kind is nn.Sequential else nn.ModuleList(units)
    with summon(container):
        assert_identical(_whole(container), expected)
        change_all(container, lambda param: param.mul_(2))
    doubled = {name: 2 * value for name, value in expected.items()}
    with summon(container, writeback=False):
        assert_identical(_whole(container), doubled)


@on_ranks_each_way(2)
def test_without_recursion(rank: int, world_size: int, way: str) -> None:
    """Only the given unit's own parameters, not those of the units inside it."""
    sharded, plain = pair(rank, world_size, way, "nested")
    with collectives_of("gather") as gathered, summon(sharded.model, recurse=False):
        pass
    assert set(gathered) == (set() if way == "no_shard" else {""})
    with summon(sharded.model, recurse=False), torch.no_grad():
        for run in (sharded, plain):
            run.submodule("head").weight.fill_(0.5)
        inner = sharded.submodule("outer").shift
        assert isinstance(inner, nn.Parameter if way == "no_shard" else FlatShardTensor)
    assert_trains_alike(sharded, plain)


@contextlib.contextmanager
def collectives_of(kind: str) -> Iterator[list[str]]:
    """The labels of the collectives of one kind that are issued meanwhile."""
    labels: list[str] = []
    with collectives.record() as events:
        yield labels
    labels += [event.unit_fqn for event in events if event.kind == kind]


# ---------------------------------------------------------------- what is kept


@both_sizes
@on_ranks_each_way()
def test_edits(rank: int, world_size: int, way: str) -> None:
    """Kept with writeback, undone without, for every way to write."""
    sharded, plain = pair(rank, world_size, way)

    def edit(run: Run) -> None:
        with torch.no_grad():
            run.submodule("fc1").weight.t().mul_(2)
            generator = torch.Generator().manual_seed(5)
            nn.init.orthogonal_(run.submodule("fc2").weight, generator=generator)
            run.submodule("fc2").bias.data = torch.arange(4.0, dtype=torch.float64)
            run.submodule("fc3").weight[1:, 2] = 7.0
        run.submodule("fc3").bias.requires_grad_(False)

    for run in (sharded, plain):
        run.train()
    with summon(sharded.model, writeback=False):
        edit(sharded)
    assert_trains_alike(sharded, plain)
    with summon(sharded.model):
        edit(sharded)
    edit(plain)
    assert _trainable(sharded) == _trainable(plain)
    for run in (sharded, plain):
        run.submodule("fc3").bias.requires_grad_(True)
    assert_trains_alike(sharded, plain)


@on_ranks_each_way(2)
def test_edits_in_mixed_precision(rank: int, world_size: int, way: str) -> None:
    """Shown in the parameters' own dtype, and written where forwards then gather from."""
    precision = MixedPrecision(param_dtype=torch.float32)
    run, plain_run = pair(rank, world_size, way, mixed_precision=precision)
    sharded, plain = run.model, plain_run.model
    run.loss(0)  # leaves buffers behind, where the strategy keeps them
    for writeback in (False, True):
        with summon(sharded, writeback=writeback), torch.no_grad():
            for param in sharded.parameters():
                assert param.dtype == torch.float64
                param.mul_(2)
    change_all(plain, lambda param: param.mul_(2))
    assert_same(sharded, plain)
    expected = plain_run.evaluate()
    torch.testing.assert_close(run.evaluate().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.uncoalesced  # one unit after another
@on_ranks_each_way(2)
def test_each_rank_keeps_its_slice(rank: int, world_size: int, way: str) -> None:
    """Ranks that write different values: as documented, each keeps what it wrote of its part."""
    sharded, _ = pair(rank, world_size, way)
    with summon(sharded.model), torch.no_grad():
        sharded.submodule("fc1").weight.fill_(rank)
    full = sharded.model.state_dict()["fc1.weight"]
    expected = {float(rank)} if way.startswith("no_shard") else {0.0, 1.0}
    assert set(full.flatten().tolist()) == expected


@on_ranks_each_way(2)
def test_exception_in_the_body(rank: int, world_size: int, way: str) -> None:
    """State is what it was, and what was written before the exception stays, as in a plain model.

    The exception is the user's own, also where the summon has something to complain about.
    """
    sharded, plain = pair(rank, world_size, way)

    def zero(module: nn.Module) -> None:
        module.weight.data.zero_()

    def replace(module: nn.Module) -> None:
        module.weight = nn.Parameter(torch.zeros_like(module.weight))

    def fail_after(change: Callable[[nn.Module], None], name: str) -> None:
        with summon(sharded.model):
            change(sharded.submodule(name))
            raise KeyError

    for change, name in ((zero, "fc1"), (replace, "fc2")):
        with pytest.raises(KeyError):
            fail_after(change, name)
    zero(plain.model.fc1)
    assert_trains_alike(sharded, plain)


# ---------------------------------------------------------------- rank 0 only


@both_sizes
@on_ranks_each_way()
def test_rank0_only(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    backward(sharded, plain)
    before = list(sharded.model.named_parameters())
    options = {"rank0_only": True, "offload_to_cpu": True, "with_grads": True}
    with summon(sharded.model, writeback=False, **options):
        if rank == 0:
            assert_identical(_whole(sharded.model), _whole(plain.model))
            # No other rank takes part.
            assert_identical(snapshot(sharded.model), snapshot(plain.model))
            assert_same_gradients(sharded.model, plain.model)
            change_all(sharded.model, lambda param: param.zero_())
        else:
            now = list(sharded.model.named_parameters())
            assert all(new is old for (_, new), (_, old) in zip(now, before, strict=True))
            if not way.startswith("no_shard"):
                assert_raises(RuntimeError, "rank0_only", sharded.model.state_dict)
        assert_raises(RuntimeError, "asked for summon_full", summon(sharded.model).__enter__)
    step_alike(sharded, plain)


@on_ranks(2)
def test_rank0_only_edits_on_other_ranks(rank: int, world_size: int) -> None:
    """Rank 0's edit is undone and the other's would stay: a mixture."""
    sharded, _ = pair(rank, world_size, "full")
    refused = pytest.raises(RuntimeError, match=r"rank 1.*rank0_only=False")
    shown = summon(sharded.model, rank0_only=True, writeback=False)
    with refused if rank == 1 else contextlib.nullcontext(), shown:
        change_all(sharded.model, lambda param: param.mul_(2))


@pytest.mark.uncoalesced  # one unit after another
@on_ranks(2)
def test_other_ranks_hold_one_unit_at_a_time(rank: int, world_size: int) -> None:
    """At each gather no other whole tensor is alive on rank 1, and none is once all is gathered."""
    width, depth = 64, 6
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)])
    sharded = ShardedWrapper(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))

    def count_whole() -> int:
        tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
        whole = [one for one in tensors if one.numel() == width * width]
        return sum(one.untyped_storage().nbytes() > 0 for one in whole)

    alive: list[int] = []

    def count_at_gathers(kind: str, *_: object) -> None:
        if kind == "gather":
            alive.append(count_whole())

    with mock.patch.object(communicator, "LISTENERS", [count_at_gathers]):
        with summon(sharded, rank0_only=True, writeback=False):
            alive.append(count_whole())
    # The gather's own buffer is there already when it is noted.
    expected = [*range(1, depth + 1), depth] if rank == 0 else [1] * depth + [0]
    assert alive == expected


# ---------------------------------------------------------------- gradients


@both_sizes
@pytest.mark.parametrize("name", ["mlp", "unused", "frozen-one-unit"])
@on_ranks_each_way()
def test_gradients(rank: int, world_size: int, way: str, name: str) -> None:
    """Shown whole; edited, dropped and added ones are what the optimizer then sees."""
    sharded, plain = pair(rank, world_size, way, name)
    with summon(sharded.model, with_grads=True):
        assert all(param.grad is None for param in sharded.model.parameters())
    backward(sharded, plain)
    for writeback in (False, True):
        with summon(sharded.model, writeback=writeback, with_grads=True):
            assert_same_gradients(sharded.model, plain.model)
            for param in sharded.model.parameters():
                if param.grad is not None:
                    param.grad.mul_(3).add_(param.detach())
                    if not writeback:
                        param.grad = None
    for param in plain.model.parameters():
        if param.grad is not None:
            param.grad.mul_(3).add_(param.detach())
    with summon(sharded.model, writeback=False, with_grads=True):
        assert_same_gradients(sharded.model, plain.model)
    step_alike(sharded, plain)


@on_ranks_each_way(2)
def test_gradients_dropped_and_added(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)

    def drop(run: Run) -> None:
        run.submodule("fc1").zero_grad()

    def add(run: Run) -> None:
        for param in run.submodule("fc1").parameters():
            param.grad = torch.linspace(0, 1, param.numel(), dtype=param.dtype).view(param.shape)

    for change in (drop, add):
        backward(sharded, plain)
        with summon(sharded.model, with_grads=True):
            change(sharded)
        change(plain)
        present = [param.grad is not None for param in sharded.model.parameters()]
        assert all(present) is (change is add)
        step_alike(sharded, plain)
    with summon(sharded.model, with_grads=True):
        assert all(param.grad is None for param in sharded.model.parameters())
        add(sharded)
    add(plain)
    step_alike(sharded, plain)


@on_ranks_each_way(2)
def test_gradients_that_are_not_reduced(rank: int, world_size: int, way: str) -> None:
    """Refused, also beside gradients that are; the accumulated ones are not lost by asking."""
    sharded, plain = pair(rank, world_size, way)
    for step in range(3):
        plain.loss(step).backward()
    sharded.loss(0).backward()
    with sharded.no_sync():
        sharded.loss(1).backward()
    assert_raises(RuntimeError, r"'fc\d.*no_sync", summon(sharded.model, with_grads=True).__enter__)
    sharded.loss(2).backward()
    with summon(sharded.model, with_grads=True):
        assert_same_gradients(sharded.model, plain.model)
    step_alike(sharded, plain)
