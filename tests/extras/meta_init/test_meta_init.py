"""Models built on the meta device: initialised, sent, or loaded part by part.

The oracle is the same model built on the CPU from the same seed: the same numbers, bit for bit.
"""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import flatshard
from flatshard import ShardedWrapper, sharded_modules
from flatshard.collectives import record
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import assert_raises, naming, on_ranks, rank_0_warns
from tests.oracle import assert_equal, assert_same, sgd, step_and_zero
from tests.ways import WAYS, Way

pytestmark = pytest.mark.by_turns

SEED = 5


class Attending(nn.Module):
    """Attention, whose ``_reset_parameters`` also sets its child's bias, and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


class Zoo(nn.Module):
    """One of each: tied, recurrent, frozen, with buffers, convolution, two dtypes, a 0-d scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(Attending(8), Attending(8))
        self.rnn = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(8)
        self.scale = Scale()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[0].norm.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.rnn(self.blocks(self.embedding(tokens)))[0]
        x = self.norm(self.conv(x.transpose(1, 2).double()).to(x.dtype)).transpose(1, 2)
        return self.head(self.scale(x))


class Scale(nn.Module):
    """A 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def on_meta(build: Any) -> Any:
    with torch.device("meta"):
        return build()


def on_cpu(build: Any) -> Any:
    torch.manual_seed(SEED)
    return build()


def same(model: nn.Module, expected: nn.Module, tolerance: float = 0.0) -> None:
    assert_same(model, expected, rtol=0.0, atol=tolerance)


POLICY = ModuleWrapPolicy({Attending, nn.LSTM, nn.Conv1d, Scale})
# Policy and way.
SETTINGS: dict[str, tuple[Any, Way]] = {
    "units": (POLICY, WAYS["full"]),
    "one-unit": (None, WAYS["full-3"]),
    "replicated": (POLICY, WAYS["no_shard"]),
    "replicated-one-unit": (None, WAYS["no_shard"]),
    "alone": (POLICY, Way({}, world_size=1)),
    "hybrid": (POLICY, WAYS["hybrid"]),
    "hybrid-op": (POLICY, WAYS["hybrid-op"]),
}


@pytest.mark.parametrize("way", SETTINGS)
@on_ranks(lambda way: SETTINGS[way][1].world_size)
def test_same_numbers_as_built_on_the_device(rank: int, world_size: int, way: str) -> None:
    policy, chosen = SETTINGS[way]
    chosen.set_nodes()
    expected = on_cpu(Zoo)
    state, tokens = torch.get_rng_state(), torch.arange(12).view(3, 4) % 11

    def wrap(model: nn.Module, **more: Any) -> ShardedWrapper:
        return ShardedWrapper(model, auto_wrap_policy=policy, **chosen.keywords, **more)

    with naming("every rank for itself, nothing sent"):
        torch.manual_seed(SEED)
        with record() as events:
            model = wrap(on_meta(Zoo))
        assert not [event for event in events if event.kind == "broadcast"]
        same(model, expected)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(not t.is_meta for t in (*model.parameters(), *model.buffers()))
        frozen = model.module.blocks[0].norm
        assert [p.requires_grad for p in frozen.parameters()] == [False, False]

    for has_weights in (True, False):
        with naming(f"only rank 0 has weights: {has_weights}; otherwise only rank 0 initialises"):
            plain = on_cpu(Zoo) if has_weights and rank == 0 else on_meta(Zoo)
            torch.manual_seed(SEED + rank)
            received = wrap(plain, sync_module_states=True)
            same(received, expected)

    if world_size > 1:
        with naming("seeds that differ"):
            torch.manual_seed(SEED + rank)
            with pytest.raises(ValueError, match=r"the ranks initialised .* different values"):
                wrap(on_meta(Zoo))

    with naming("left empty, then loaded"):
        for sync in (None, True):
            model = wrap(on_meta(Zoo), param_init_fn=flatshard.leave_empty, sync_module_states=sync)
            partial = expected.state_dict()
            del partial["norm.running_mean"], partial["head.weight"], partial["embedding.weight"]
            model.load_state_dict(partial, strict=False)
            assert_raises(RuntimeError, r"'embedding.weight' and 1 more: left empty", model, tokens)
            model.load_state_dict(expected.state_dict())
            same(model, expected)

    with naming("training"):
        for trained in (received, expected):
            trained(tokens).square().mean().backward()
            step_and_zero(sgd(trained))
        same(received, expected, 1e-6)


# ---------------------------------------------------------------- param_init_fn, sync=False


@on_ranks(2)
def test_param_init_fn(rank: int, world_size: int) -> None:
    seen: list[str] = []

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        if any(True for _ in module.parameters(recurse=False)):
            module.weight.marked = True
            module.to_empty(device="cpu", recurse=False)
            nn.init.constant_(module.weight, 1 + rank)
            nn.init.zeros_(module.bias)

    net = on_meta(lambda: nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)))
    policy = ModuleWrapPolicy({nn.Linear})
    with rank_0_warns(rank, "weights are a mixture"):
        keywords = {"param_init_fn": init, "sync_module_states": False}
        model = ShardedWrapper(net, auto_wrap_policy=policy, **keywords)
    # Units first, then what is left, which lacks nothing.
    assert seen == ["Linear", "Linear"]
    assert model.state_dict()["0.weight"].unique().tolist() == [1.0, 2.0]

    net = on_meta(lambda: nn.Linear(7, 5))
    model = ShardedWrapper(net, param_init_fn=init, sync_module_states=True)
    assert model.state_dict()["weight"].unique().tolist() == [1.0]


# ---------------------------------------------------------------- loaded


def resident(path: Path) -> int:
    """Bytes of the file that this process has in memory through its mappings."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
@on_ranks(4)
def test_a_rank_reads_its_parts_of_a_file(rank: int, world_size: int, tmp_path: Path) -> None:
    """Of a file that is mapped, not the parts of the other ranks."""
    path = tmp_path / "weights"
    if rank == 0:
        torch.save({f"{n}.weight": torch.randn(4000, 2000) for n in range(2)}, path)
    torch.distributed.barrier()

    model = ShardedWrapper(
        on_meta(lambda: nn.Sequential(*(nn.Linear(2000, 4000, bias=False) for _ in range(2)))),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        param_init_fn=flatshard.leave_empty,
    )
    size = path.stat().st_size
    state = torch.load(path, mmap=True)
    before = resident(path)
    model.load_state_dict(state)
    # The kernel maps up to 2 MiB around each fault.
    assert resident(path) - before <= size / world_size + 2 * 2 * 2**21
    assert_equal(dict(model.state_dict()), state)


# ---------------------------------------------------------------- memory


class Peak(TorchDispatchMode):
    """The most bytes in storages that were made under this mode and lived at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if type(tensor) is Tensor and tensor.device.type == "cpu":
                self._storages.add(tensor.untyped_storage())
        # Now, as the unsharded buffers are resized without a word.
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._storages))
        return out


@pytest.mark.parametrize("sync", [None, True])
@pytest.mark.uncoalesced  # many small units are built together
@on_ranks(2)
def test_one_unit_at_a_time(rank: int, world_size: int, sync: bool | None) -> None:
    # Below 1 MiB: the buffers of larger ones are addresses, and no memory yet.
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(500, 500) for _ in range(10))))
    gc.collect()
    with Peak() as peak:
        policy = ModuleWrapPolicy({nn.Linear})
        wrapped = ShardedWrapper(model, auto_wrap_policy=policy, sync_module_states=sync)
    numel = sum(p.numel() for p in wrapped.parameters())
    unit = 4 * numel // 10
    shards = 10 * unit // world_size
    assert peak.peak <= shards + 1.2 * unit, (peak.peak / unit, shards / unit)
    assert len(sharded_modules(wrapped)) == 11


# ---------------------------------------------------------------- bad input


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(3), persistent=False)


def forgets() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.register_buffer("mask", torch.ones(3))
    return layer


class FailsOnRank1(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if torch.distributed.get_rank() == 1 and not self.weight.is_meta:
            raise ArithmeticError("no luck")


def half_real() -> nn.Module:
    linear = nn.Linear(3, 3)
    linear.bias = nn.Parameter(torch.ones(3, device="cpu"))
    return linear


def forgetful(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)


def other_shape(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.to_empty(device="cpu", recurse=False)
        module.weight = nn.Parameter(torch.ones(2, 2))


NO_WAY = r"no reset_parameters\(\): 0.gain \(NoReset\), 0.table \(NoReset\)\. Pass a param_init_fn"
FORGOT = r"reset_parameters\(\) of module .* left '0.mask' without values"
ON_META = "param_init_fn left '0.weight' on the meta device. In the function, call module.to_empty"
SHAPES = r"'0.weight': expected shape \(3, 3\), got shape \(2, 2\)"
# How a module is built, the wrapper's `param_init_fn`, and words of the error.
ERRORS: list[tuple[Any, Any, type[Exception], str]] = [
    (NoReset, None, ValueError, NO_WAY),
    (forgets, None, RuntimeError, FORGOT),
    (half_real, None, ValueError, "module '0' has some parameters on the meta device"),
    (lambda: FailsOnRank1(3, 3), None, RuntimeError, r"module '0' .*failed: no luck \(rank 1\)"),
    (lambda: nn.Linear(3, 3), forgetful, RuntimeError, ON_META),
    (lambda: nn.Linear(3, 3), other_shape, RuntimeError, SHAPES),
    (
        lambda: nn.Linear(3, 3),
        3,
        TypeError,
        "param_init_fn: expected a function that takes a module, got 3",
    ),
]


@on_ranks(2)
def test_errors_are_named_on_all_ranks(rank: int, world_size: int) -> None:
    for build, init_fn, kind, message in ERRORS:
        model = on_meta(lambda build=build: nn.Sequential(build()))
        assert_raises(kind, message, ShardedWrapper, model, param_init_fn=init_fn)
    with naming("only rank 0 would have to, and can't"), pytest.raises(ValueError, match="rank 0"):
        ShardedWrapper(on_meta(lambda: nn.Sequential(NoReset())), sync_module_states=True)
    with naming("rank 0 has them"):
        model = nn.Sequential(NoReset()) if rank == 0 else on_meta(lambda: nn.Sequential(NoReset()))
        state = ShardedWrapper(model, sync_module_states=True)
        assert state[0].table.tolist() == [1.0, 1.0, 1.0]
        assert state.state_dict()["0.gain"].tolist() == [1.0, 1.0, 1.0]
