"""Models built on the meta device: initialised, sent, or loaded part by part.

The oracle is the same model built on the CPU from the same seed: the same numbers, bit for bit.
"""

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatshard
from flatshard import ShardedWrapper, sharded_modules
from flatshard.collectives import record
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import Watching, assert_raises, naming, on_ranks, rank_0_warns
from tests.models import Residual
from tests.oracle import assert_identical, assert_same, sgd, snapshot, step_and_zero
from tests.ways import BASIC, WAYS, Way

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
    assert_identical(dict(model.state_dict()), state)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("sync", [None, True])
@pytest.mark.uncoalesced  # many small units are built together
@on_ranks(2)
def test_one_unit_at_a_time(rank: int, world_size: int, sync: bool | None) -> None:
    # Below 1 MiB: the buffers of larger ones are addresses, and no memory yet.
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(500, 500) for _ in range(10))))
    gc.collect()
    storages: weakref.WeakSet[Any] = weakref.WeakSet()  # those that were made and still live
    sizes: list[int] = []

    def see(_: Any, out: Any) -> None:
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if type(tensor) is Tensor and tensor.device.type == "cpu":
                storages.add(tensor.untyped_storage())
        # Now, as the unsharded buffers are resized without a word.
        sizes.append(sum(storage.nbytes() for storage in storages))

    with Watching(see):
        policy = ModuleWrapPolicy({nn.Linear})
        wrapped = ShardedWrapper(model, auto_wrap_policy=policy, sync_module_states=sync)
    numel = sum(p.numel() for p in wrapped.parameters())
    unit = 4 * numel // 10
    shards = 10 * unit // world_size
    assert max(sizes) <= shards + 1.2 * unit, (max(sizes) / unit, shards / unit)
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


# ---------------------------------------------------------------- besides reset_parameters()


class Norm(nn.Module):
    """Without ``reset_parameters()``, as transformers' are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Rotary(nn.Module):
    """A buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inv_freq.cos()


class Block(Residual):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.norm = Norm()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Pretrained(nn.Module):
    """Its constructor would end with ``self.apply(self._init_weights)``."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.blocks, self.head = Rotary(), nn.Sequential(Block(), Block()), Norm()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.rotary(x)))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)
            nn.init.zeros_(module.bias)
        elif isinstance(module, Block):
            nn.init.constant_(module.down.weight, 0.25)  # over what its own call gave
        elif isinstance(module, Norm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Rotary):
            module.inv_freq.copy_(torch.arange(4.0))


def _expected() -> Pretrained:
    model = Pretrained()
    with torch.no_grad():
        model.apply(model._init_weights)
    return model


RESET_CASES = [*(("full", number) for number in range(3)), ("no_shard", 2)]
RESET_POLICIES = (None, ModuleWrapPolicy({Block}), ModuleWrapPolicy({nn.Linear}))


@on_ranks(2)
def test_init_weights_or_a_function_that_recurses(rank: int, world_size: int) -> None:
    expected = _expected()

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu")
        module.apply(expected._init_weights)

    for (way, number), init_fn in itertools.product(RESET_CASES, (None, init)):
        keywords = {"auto_wrap_policy": RESET_POLICIES[number], "param_init_fn": init_fn}
        with naming(f"{way} {number} {init_fn}"):
            model = ShardedWrapper(on_meta(Pretrained), **keywords, **BASIC[way].keywords)
            names = ("blocks.0.norm.weight", "blocks.1.up.weight", "head.weight")
            if init_fn is None:
                names = expected.state_dict()
                torch.testing.assert_close(model(torch.ones(4)), expected(torch.ones(4)))
            for name in names:
                assert torch.equal(model.state_dict()[name], expected.state_dict()[name])
    # A part that has values keeps them.
    half = on_meta(Pretrained)
    half.blocks[0] = Block()
    before = snapshot(half.blocks[0])
    model = ShardedWrapper(half, auto_wrap_policy=ModuleWrapPolicy({Block}))
    torch.testing.assert_close(dict(model.blocks[0].state_dict()), before)
    assert model.state_dict()["blocks.1.up.weight"].unique().tolist() == [0.5]


@on_ranks(2)
def test_buffers_in_no_state_dict(rank: int, world_size: int) -> None:
    expected = _expected()
    for sync in (None, True):
        keywords = {"auto_wrap_policy": RESET_POLICIES[1], "param_init_fn": flatshard.leave_empty}
        model = ShardedWrapper(on_meta(Pretrained), sync_module_states=sync, **keywords)
        model.load_state_dict(expected.state_dict())
        torch.testing.assert_close(model(torch.ones(4)), expected(torch.ones(4)))
    # Where nothing says what it is, the error says how to.
    module = on_meta(lambda: nn.Sequential(Rotary(), nn.Linear(4, 4)))
    model = ShardedWrapper(module, param_init_fn=flatshard.leave_empty)
    model.load_state_dict(nn.Sequential(Rotary(), nn.Linear(4, 4)).state_dict())
    with pytest.raises(RuntimeError, match=r"'0.inv_freq': .*persistent=False are in no state"):
        model(torch.ones(4))


@on_ranks(2)
def test_ignored_modules_stay_as_they_are(rank: int, world_size: int) -> None:
    """`param_init_fn` is not called with ignored modules, whose tensors stay as they are."""
    seen = []

    def init(module: nn.Module) -> None:
        seen.append(module)
        module.to_empty(device="cpu", recurse=False)
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 7.0)

    for init_fn in (init, None):
        for policy in (None, ModuleWrapPolicy({nn.Sequential})):
            module = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3))))
            real, meta = nn.Linear(4, 4), on_meta(lambda: nn.Linear(4, 4))
            module[1].extend([real, nn.Sequential(meta)])
            before = real.weight.detach().clone()
            keywords = {"param_init_fn": init_fn, "auto_wrap_policy": policy}
            model = ShardedWrapper(module, ignored_modules=[real, module[1][2]], **keywords)
            assert torch.equal(model.module[1][1].weight, before)
            assert meta.weight.is_meta
            assert not {real, meta, module[1][2]} & set(seen)
            if init_fn is not None:
                assert model.state_dict()["1.0.weight"].unique().tolist() == [7.0]
    # A single parameter; functions for whole modules gave it theirs.
    module = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    module[0].weight = real = nn.Parameter(torch.eye(4))
    with pytest.raises(ValueError, match="param_init_fn would overwrite"):
        ShardedWrapper(module, param_init_fn=nn.Module.to_empty, ignored_states=[real])
    assert torch.equal(real, torch.eye(4))
