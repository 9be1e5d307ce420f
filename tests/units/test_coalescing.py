"""Small units that share a flat parameter: the numbers of a plain model, and fewer collectives."""

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from flatshard import ShardedWrapper, sharded_modules
from flatshard.collectives import record
from flatshard.extras.plan.shards import plan_flats
from flatshard.module import model_plan
from flatshard.module.wrappers import handles_in
from flatshard.wrap import CustomPolicy, ModuleWrapPolicy
from tests.combinations import diagonal
from tests.harness import assert_raises, naming, on_ranks
from tests.models import CASES, Composed, Residual, loss_of
from tests.oracle import ROWS, assert_same, assert_same_gradients, sgd, step_and_zero

WIDTH = 6
NUM_BLOCKS = 5


class Model(nn.Module):
    """Small blocks, of which each forward names those that run; a large one in their midst."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            Residual(WIDTH, 300 if n == 2 else WIDTH) for n in range(NUM_BLOCKS)
        )

    def forward(self, x: Tensor, order: list[int], checkpointed: bool = False) -> Tensor:
        x = self.first(x)
        for number in order:
            block = self.blocks[number]
            x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return x


def made() -> Model:
    torch.manual_seed(3)
    return Model().double()


def wrapped(**keywords: Any) -> ShardedWrapper:
    # Two of the small ones fit together, and a third does not; the large one goes alone.
    keywords = {"coalesce_bytes": 1500, **keywords}
    return ShardedWrapper(made(), auto_wrap_policy=ModuleWrapPolicy({Residual}), **keywords)


def rows(step: int, world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(world_size * ROWS, WIDTH, generator=generator, dtype=torch.float64)


# What runs in which step, on a rank.
ORDERS: dict[str, Callable[[int, int], list[int]]] = {
    "all": lambda step, rank: [0, 1, 2, 3, 4],
    "otherwise on each rank": lambda step, rank: [0, 1, 2, 3, 4] if rank else [1, 0, 2, 4, 3],
    "twice": lambda step, rank: [0, 1, 0, 2, 3, 4, 3][: 7 - step],
    "dropped": lambda step, rank: [[0, 1, 2, 3, 4], [0, 2, 4], [1, 2, 3], [3, 4]][step],
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_equals_the_plain_model(rank: int, world_size: int) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"sharding_strategy": "SHARD_GRAD_OP", "collectives": "sockets"},
        {"sharding_strategy": "NO_SHARD", "collectives": "native"},
    ]
    for keywords, name, accumulates in diagonal(4, settings, list(ORDERS), (False, True)):
        with naming(f"{keywords}, {name}, accumulates={accumulates}"):
            _train(wrapped(**keywords), ORDERS[name], rank, accumulates)


def _train(
    model: ShardedWrapper, order: Callable[[int, int], list[int]], rank: int, accumulates: bool
) -> None:
    models = model, DistributedDataParallel(made(), find_unused_parameters=True)
    optimizers = [sgd(one) for one in models]
    for step in range(4):
        x = rows(step, dist.get_world_size()).chunk(dist.get_world_size())[rank]
        for one in models:
            if accumulates:
                with one.no_sync():
                    one(x, order(step, rank)).square().mean().backward()
            checkpointed = step == 2 and one is model
            one(x, order(step, rank), checkpointed).square().mean().backward()
        used, expected = ([param.grad is not None for param in one.parameters()] for one in models)
        assert used == expected
        step_and_zero(*optimizers)
        with torch.no_grad():  # one of a unit's modules alone
            torch.testing.assert_close(*(one.module.blocks[1](x) for one in models))
    assert_same(model, models[1].module)


@on_ranks(2)
def test_collectives_and_report(rank: int, world_size: int) -> None:
    model = wrapped()
    units = ["", "blocks.0 to blocks.1", "blocks.2", "blocks.3 to blocks.4"]
    names = [line.split("  ")[0] for line in model.unit_report().splitlines()[1:-2]]
    assert names == ["(root)", *units[1:]]
    assert ", 2 coalesced" in model.unit_report()
    for _ in range(2):
        with record() as events:
            model(rows(0, 1), list(range(NUM_BLOCKS))).sum().backward()
    gathers = [event.unit_fqn for event in events if event.kind == "gather"]
    reductions = [event.unit_fqn for event in events if event.kind == "reduce"]
    assert sorted(gathers) == sorted(units + units[1:])  # the root once: it stays
    assert sorted(reductions) == sorted(units)
    policy = ModuleWrapPolicy({Residual})
    planned, flats = plan_flats(made(), world_size=2, auto_wrap_policy=policy, coalesce_bytes=1500)
    assert [unit.name for unit in planned.units] == [*units[1:], ""]
    held = sum(handle.flat_param.nbytes for handle in handles_in(model))
    assert sum(flat.parameter_bytes for flat in flats) == held
    assert "to blocks" not in wrapped(coalesce_bytes=0).unit_report()


@on_ranks(2)
def test_large_parameters_of_the_root(rank: int, world_size: int) -> None:
    """The head is reduced before the blocks, the embedding after them."""
    case = CASES["transformer"]
    with mock.patch.object(model_plan, "LARGE_BYTES", 8 * 11 * 8):
        model = case.wrap()
        policy = ModuleWrapPolicy(case.units)
        _, flats = plan_flats(case.model(), world_size=2, auto_wrap_policy=policy)
    root = model._sharded_unit.context.root
    assert len(root.handles) == 3  # the two large parameters, and the rest
    planned = sum(flat.parameter_bytes for flat in flats if flat.name == "")
    assert planned == sum(handle.flat_param.nbytes for handle in root.handles)
    inputs, target = case.batch(0, ROWS)
    for _ in range(2):  # the first finds the order
        with record() as events:
            loss_of(model(inputs), target).backward()
    reduced = [event.unit_fqn for event in events if event.kind == "reduce"]
    assert [reduced[0], reduced[-1], reduced.count("")] == ["", "", 3]
    sizes = [event.nbytes for event in events if event.kind == "reduce" and not event.unit_fqn]
    assert sizes[0] >= 8 * 11 * 8


def looking() -> nn.Module:
    """Its root looks up an embedding, and may compute with the parameter besides."""

    def forward(net: Any, tokens: Tensor, ties: bool, checkpoints: bool) -> Tensor:
        def looked_up(tokens: Tensor) -> Tensor:
            return torch.tanh(net.embed(tokens))

        run = functools.partial(checkpoint, looked_up, use_reentrant=False)
        x = net.blocks(run(tokens) if checkpoints else looked_up(tokens))
        return net.head(x) + (x @ net.embed.weight.t() if ties else 0)

    torch.manual_seed(0)
    embed, blocks = nn.Embedding(9, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    return Composed(forward, embed=embed, blocks=blocks, head=nn.Linear(6, 9)).double()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_root_embedding_is_freed_after_forward(rank: int, world_size: int, strategy: str) -> None:
    """Backward gathers it only where it looks up again, not for what one rank may have saved."""
    plain, model = looking(), looking()
    policy = CustomPolicy(lambda module: getattr(module, "out_features", 0) == 6)
    with mock.patch.object(model_plan, "LARGE_BYTES", 8 * 9 * 6):
        model = ShardedWrapper(model, sharding_strategy=strategy, auto_wrap_policy=policy)
    handles = model._sharded_unit.context.root.handles
    embedding = next(h for h in handles if h.params[0].name == "embed.weight")
    optimizers = [sgd(one) for one in (plain, model)]
    stays = strategy == "SHARD_GRAD_OP"
    ways = itertools.product((set(), {0}, {0, 1}), (False, True))  # who ties
    for step, (ties, checkpoints) in enumerate(ways):
        tokens = torch.randint(9, (world_size, 4), generator=torch.Generator().manual_seed(step))
        with naming((ties, checkpoints)):
            loss = model(tokens[rank : rank + 1], rank in ties, checkpoints).square().mean()
            assert [h.is_current for h in handles] == [stays or h is not embedding for h in handles]
            with record() as events:
                loss.backward()
            sizes = [e.nbytes for e in events if e.kind == "gather" and not e.unit_fqn]
            again = checkpoints and not stays
            assert sizes == ([embedding.layout.padded_numel * 8] if again else [])
            for one in range(world_size):
                plain_loss = plain(tokens[one : one + 1], one in ties, checkpoints).square().mean()
                (plain_loss / world_size).backward()
            step_and_zero(*optimizers)
            assert_same(model, plain)


@on_ranks(2)
def test_one_of_several(rank: int, world_size: int) -> None:
    """What is done with one module of a unit is about it alone, or refused."""
    model, plain = wrapped(), made()
    own = rows(0, world_size)[rank * ROWS : (rank + 1) * ROWS]
    model(own, [0, 1, 2, 3, 4]).square().mean().backward()
    plain(rows(0, world_size), [0, 1, 2, 3, 4]).square().mean().backward()
    units = [sharded_modules(block)[0] for block in model.blocks]
    norm = units[1].clip_grad_norm_(0.01)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.blocks[1].parameters(), 0.01))
    assert_same_gradients(model, plain, 1e-7, 1e-7)
    assert_same(model.blocks[1], plain.blocks[1])
    with ShardedWrapper.summon_full_params(model.blocks[3]), torch.no_grad():
        model.blocks[3].up.weight.fill_(1.0)
    plain.blocks[3].up.weight.data.fill_(1.0)
    assert_same(model, plain)
    first, last = units[0], units[4]
    register = functools.partial(first.register_comm_hook, None, lambda state, full, out: None)
    for call, refused in (
        (lambda: copy.deepcopy(last), "unit 'blocks.3 to blocks.4': 'blocks.4' cannot be copied"),
        (first.float, "'blocks.0' cannot be converted separately"),
        (register, "'blocks.0' cannot be given a hook separately"),
    ):
        assert_raises(RuntimeError, refused, call)
    twin = copy.deepcopy(model).float()
    twin.load_state_dict(plain.float().state_dict())
    twin(own.float(), [0, 1, 2, 3, 4]).sum().backward()
    assert_same(twin, plain)
