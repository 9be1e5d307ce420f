"""Compiled blocks: one graph each, whose ends are those of the units."""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as activations

import flatshard
from flatshard import CPUOffload, MixedPrecision, ShardedWrapper, ShardingStrategy
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import every
from tests.harness import allow_warnings, assert_raises, naming, on_ranks
from tests.models import Composed, Residual
from tests.oracle import assert_identical, step_and_zero

pytestmark = pytest.mark.uncoalesced


def compiling(test: Callable[..., None]) -> Callable[..., None]:
    """Two ranks that have loaded the compiler run the test, which ignores Dynamo's own warnings."""
    return on_ranks(2, timeout=120.0, preload=("tests.compiler",))(allow_warnings()(test))


GRAPHS: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
NUM_BLOCKS = 3


class Block(Residual):
    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            raise ValueError("no rows")
        return super().forward(x)


class Network(nn.Module):
    """Without a loop over units, in which Dynamo compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 7)
        self.blocks = nn.ModuleList([Block(7, 9) for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](torch.tanh(self.stem(x)))
        x = self.blocks[2](self.blocks[1](x).sin())
        return self.head(x)


class Tied(Network):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.stem.weight
        self.blocks[1].up.weight = self.blocks[0].up.weight


def _model(cls: type[nn.Module] = Network) -> nn.Module:
    torch.manual_seed(0)
    return cls()


def _wrap(model: nn.Module, **keywords: Any) -> ShardedWrapper:
    keywords.setdefault("coalesce_bytes", 0)
    return ShardedWrapper(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **keywords)


def _in_place(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(**GRAPHS)
    return model


def _replaced(model: nn.Module) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, **GRAPHS)
    return model


def _forwards(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, **GRAPHS)
    return model


def _settled(step: int) -> contextlib.AbstractContextManager[Any]:
    """Nothing is compiled after the first two steps."""
    if step < 2:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("fail_on_recompile")


def _train(model: nn.Module, rank: int, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        rows = torch.linspace(-1, 1, 28).reshape(4, 7) + rank
        with _settled(step):
            with model.no_sync():
                model(rows + 1).square().mean().backward()
            model(rows).square().mean().backward()
            step_and_zero(optimizer)
            with ShardedWrapper.summon_full_params(model):
                pass
            model.eval()
            with torch.no_grad():
                model(rows)
            model.train()


@compiling
def test_units_of_torchs_own_classes(rank: int, world_size: int) -> None:
    """Dynamo compiles the forward of a torch.nn class only where another function calls it."""

    def made() -> ShardedWrapper:
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3)]
        policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
        return ShardedWrapper(nn.Sequential(*layers), auto_wrap_policy=policy, coalesce_bytes=0)

    results = {}
    for way in ("eager", "whole", "whole, in place", "layers", "layers in place"):
        torch.compiler.reset()
        counters.clear()
        model = run = made()
        if way == "whole":
            run = torch.compile(model, backend="aot_eager")
        elif way == "whole, in place":
            model.compile(backend="aot_eager")
        elif way == "layers in place":
            for layer in model.module:
                layer.compile(**GRAPHS)
        elif way == "layers":
            for index, layer in enumerate(model.module):
                model.module[index] = torch.compile(layer, backend="aot_eager")
        for step in range(3):
            run(torch.linspace(-1, 1, 48).reshape(2, 3, 8) + step).square().mean().backward()
        assert (counters["stats"]["calls_captured"] > 0) == (way != "eager"), way
        results[way] = [param.grad.full_tensor() for param in model.parameters()]
        torch.testing.assert_close(results[way], results["eager"])


@compiling
def test_one_graph_each(rank: int, world_size: int) -> None:
    """``fullgraph=True`` holds: Dynamo does not meet hooks of flatshard."""
    plain = _wrap(_model())
    _train(plain, rank, 4)
    builds: list[Callable[[], nn.Module]] = [
        lambda: _wrap(_in_place(_model())),
        lambda: _wrap(_replaced(_model())),
        lambda: _wrap(_forwards(_model())),
        lambda: _in_place(_wrap(_model())),
    ]
    for number, build in enumerate(every(2, builds)):
        with naming(f"build {number}"):
            torch.compiler.reset()
            counters.clear()
            model = build()
            _train(model, rank, 4)
            assert not counters["graph_break"]
            # One with gradients and one without, which all blocks share.
            assert counters["stats"]["unique_graphs"] == 2
            assert len(flatshard.sharded_modules(model)) == 1 + NUM_BLOCKS
            assert_identical(model, plain)


@compiling
def test_breaks_at_units_alone(rank: int, world_size: int) -> None:
    """Dynamo traces neither units nor hooks of saved tensors."""
    torch.compiler.reset()
    plain = _wrap(_model())
    _train(plain, rank, 4)
    model = _wrap(_model())
    model.compile(backend="aot_eager")
    counters.clear()
    model(torch.ones(4, 7))
    assert sum(counters["graph_break"].values()) == NUM_BLOCKS, counters["graph_break"]
    # The stem, a sine and the head, which the root computes, and the graph of all blocks.
    assert counters["stats"]["unique_graphs"] == 4
    torch.compiler.reset()
    _train(model, rank, 4)
    assert_identical(model, plain)
    torch.compiler.reset()
    outer = torch.compile(_wrap(_model()), backend="aot_eager")
    counters.clear()
    outer(torch.ones(4, 7))
    assert sum(counters["graph_break"].values()) == NUM_BLOCKS, counters["graph_break"]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
    penalty = sum(param.square().sum() for param in model.parameters())
    (model(rows).square().mean() + 0.01 * penalty).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    step_and_zero(optimizer)


@compiling
def test_compiled_steps(rank: int, world_size: int) -> None:
    """Dynamo traced what autograd calls, and read `is_nested` of a freed parameter."""
    models = []
    for parts in ([], *every(2, [["step"], ["optimizer"]])):
        with naming(str(parts)):
            torch.compiler.reset()
            model = _wrap(_model())
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            step = _step
            if "step" in parts:
                step = torch.compile(_step, backend="eager")
            if "optimizer" in parts:
                optimizer.step = torch.compile(optimizer.step, backend="eager")
            for number in range(4):
                step(model, optimizer, torch.linspace(-1, 1, 28).reshape(4, 7) + rank + number)
            models.append(model)
    for model in models[1:]:
        assert_identical(model, models[0])


@compiling
def test_compiled_blocks_with_other_options(rank: int, world_size: int) -> None:
    ways: dict[str, dict[str, Any]] = {
        "precision": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
        "grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        "coalesced": {"coalesce_bytes": 1 << 20},
        "tied": {},
        "offload": {"cpu_offload": CPUOffload(offload_params=True)},
        "reentrant": {},
        "not reentrant": {},
        "the whole model, before wrapping": {},
    }
    for way, keywords in every(4, ways.items(), 3):
        with naming(way):
            torch.compiler.reset()
            models = []
            for is_compiled in (False, True):
                model = _model(Tied if way == "tied" else Network)
                if is_compiled and way.startswith("the whole"):
                    model.compile(backend="aot_eager")
                elif is_compiled:
                    _in_place(model)
                model = _wrap(model, **keywords)
                if way.endswith("reentrant"):
                    impl = activations.CheckpointImpl[way.upper().replace("NOT ", "NO_")]
                    units = [unit.module for unit in flatshard.sharded_modules(model)[1:]]
                    wrap = partial(activations.checkpoint_wrapper, checkpoint_impl=impl)
                    activations.apply_activation_checkpointing(model, wrap, units.__contains__)
                _train(model, rank, 4)
                models.append(model)
            assert_identical(models[1], models[0])


@compiling
def test_copies_and_errors_of_compiled_blocks(rank: int, world_size: int) -> None:
    for compiled in every(2, (_in_place, _replaced)):
        with naming(compiled.__name__):
            torch.compiler.reset()
            model = _wrap(compiled(_model()))
            twin = copy.deepcopy(model)
            _train(model, rank, 3)
            _train(twin, rank, 3)
            assert_identical(twin, model)
            assert_raises(Exception, r"ShardedWrapper|shard", copy.deepcopy, model.blocks[0])
            # An error inside a compiled block leaves the model as one in another block does.
            assert_raises(Exception, "no rows", model, torch.ones(0, 7))
            _train(model, rank, 2)
            _train(twin, rank, 2)
            assert_identical(twin, model)


# ---------------------------------------------------------------- whole models that are compiled


def _sliced() -> nn.Module:
    """The slice is a new module, to which torch's global hooks see modules assigned."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers[:2]:
            x = layer(x).tanh()
        return net.layers[2](x)

    return Composed(forward, layers=nn.ModuleList([nn.Linear(7, 7) for _ in range(3)]))


@on_ranks(1)
def test_a_slice_in_a_compiled_model(rank: int, world_size: int) -> None:
    """Dynamo traced flatshard's hook: "already tracked for mutation" (Llama slices its layers)."""
    plain, rows = _sliced(), torch.ones(2, 7)
    for make in (
        lambda model: ShardedWrapper(torch.compile(model, backend="eager")),
        lambda model: model.compile(backend="eager") or ShardedWrapper(model),
    ):
        model = _sliced()
        model.load_state_dict(plain.state_dict())
        # Python 3.13.0: "Guards may run slower on Python 3.13.0".
        with torch.no_grad(), allow_warnings(RuntimeWarning):
            assert torch.equal(make(model)(rows), plain(rows))
