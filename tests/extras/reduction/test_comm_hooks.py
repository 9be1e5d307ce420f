"""`register_comm_hook`: torch's own hooks by what they mean, others in the place of a reduction."""

import copy
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import ddp_comm_hooks as ddp
from torch.distributed.algorithms._comm_hooks import default_hooks as fsdp_hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as ddp_hooks
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import _hook_then_optimizer
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

from flatshard import MixedPrecision, ShardedWrapper, collectives, sharded_modules
from flatshard.module.wrappers import handles_in
from flatshard.options.precision import FLOAT8
from tests.comm_hooks import Averaging
from tests.harness import allow_warnings, assert_raises, naming, on_ranks
from tests.models import CASES, Case, Mlp
from tests.oracle import assert_identical, assert_same, local_loss, snapshot, train
from tests.side import Run
from tests.ways import BASIC, WAYS

MLP = CASES["mlp"]

# ---------------------------------------------------------------- hooks of a user


def _registered(case: Case, hook: Callable[..., Any], **keywords: Any) -> ShardedWrapper:
    model = case.wrap(**keywords)
    model.register_comm_hook("state", hook)
    return model


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.uncoalesced
@on_ranks()
def test_a_hook_reduces(rank: int, world_size: int) -> None:
    for name, ways in (("mlp", list(BASIC)), ("unused", ["full", "no_shard"])):
        case = CASES[name]
        expected = train(case, world_size, steps=3)
        for way in map(WAYS.__getitem__, ways):
            hook = Averaging()
            model = _registered(case, hook, **way.keywords)
            with collectives.record() as events:
                Run(model, case, rank, world_size).train(0, 3)
            assert_same(model, expected.state, rtol=1e-10, atol=1e-10)
            assert {event.kind for event in events} <= {"gather", "scalars", "broadcast"}
            # What no rank uses is not reduced.
            used = [u for u in _layouts(model) if u[0] != "idle"]
            sharded = way.strategy != "NO_SHARD"
            calls = [(torch.float64, full, part if sharded else None) for _, full, part in used]
            assert Counter(hook.calls) == Counter(calls * 3)


def _layouts(model: ShardedWrapper) -> list[tuple[str, int, int]]:
    """Name, padded elements and a shard's elements of every flat parameter."""
    handles = handles_in(model)
    return [(h.unit.name, h.layout.padded_numel, h.layout.shard_numel) for h in handles]


@pytest.mark.uncoalesced
@on_ranks(2)
def test_with_other_features(rank: int, world_size: int) -> None:
    """Norms, accumulation, conversions, copies, units of their own; reduce dtype of the unit."""
    for way in (WAYS["full"], WAYS["no_shard"]):
        hook = Averaging(noise=7.0)  # only padding is exactly zero, and must stay it
        model = _registered(MLP, hook, **way.keywords)
        sharded = Run(model, MLP, rank, world_size)
        plain = Run(MLP.model(), MLP, rank, world_size)
        for run in (sharded, plain):
            for step in range(2):
                with run.no_sync():
                    run.loss(2 * step).backward()
                assert not run.is_sharded or len(hook.calls) == 3 * step
                run.loss(2 * step + 1).backward()
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
                run.step()
        assert len(hook.calls) == 6
        assert_same(sharded.model, plain.model, rtol=1e-10, atol=1e-10)

        hook.calls.clear()
        twin = copy.deepcopy(sharded.model)
        local_loss(twin, MLP, 0, rank, world_size).backward()
        assert not hook.calls
        twin.register_comm_hook("state", hook)
        sharded.model.float()
        local_loss(sharded.model, MLP, 0, rank, world_size, torch.float32).backward()
        local_loss(twin, MLP, 0, rank, world_size).backward()
        assert [dtype for dtype, *_ in hook.calls] == [torch.float32] * 3 + [torch.float64] * 3

    hook = Averaging()
    wide = MixedPrecision(reduce_dtype=torch.float64)
    model = MLP.wrap(MLP.model(torch.float32), mixed_precision=wide)
    sharded_modules(model.fc2)[0].register_comm_hook("state", hook)
    with collectives.record() as events:
        local_loss(model, MLP, 0, rank, world_size, torch.float32).backward()
    assert [event.unit_fqn for event in events if event.kind == "reduce"] == ["fc3", "fc1"]
    ((dtype, *_),) = hook.calls
    assert dtype == torch.float64
    with pytest.raises(RuntimeError, match="unit 'fc2' already has a hook"):
        model.register_comm_hook("state", hook)
    with pytest.raises(RuntimeError, match="of unit 'fc1' came after the model's first"):
        sharded_modules(model.fc1)[0].register_comm_hook("state", hook)
    twin = copy.deepcopy(model)
    local_loss(twin, MLP, 0, rank, world_size, torch.float32).backward()
    twin.register_comm_hook(None, ddp_hooks.allreduce_hook)  # the outermost one, at any time


# ---------------------------------------------------------------- torch's own


@on_ranks(2)
def test_compression_is_a_reduce_dtype(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    low_precision = fsdp_hooks.LowPrecisionState(group)
    spelled: dict[torch.dtype | None, list[tuple[Any, Callable[..., Any]]]] = {
        None: [
            (group, ddp_hooks.allreduce_hook),
            (fsdp_hooks.DefaultState(group), fsdp_hooks.allreduce_hook),
            (fsdp_hooks.DefaultState(group), fsdp_hooks.reduce_scatter_hook),
        ],
        torch.float16: [
            (group, ddp_hooks.fp16_compress_hook),
            (low_precision, fsdp_hooks.fp16_compress_hook),
        ],
        torch.bfloat16: [
            (None, ddp_hooks.bf16_compress_hook),
            (low_precision, fsdp_hooks.bf16_compress_hook),
        ],
    }
    # In `mixed-types` a complex parameter, which keeps its dtype.
    for name, strategy in (("mlp", "FULL_SHARD"), ("mlp", "HYBRID_SHARD"), ("mixed-types", None)):
        case = CASES[name]
        for dtype, hooks in spelled.items():
            precision = MixedPrecision(reduce_dtype=dtype)
            runs = []
            for state, hook in [(None, None), *hooks]:
                own = {} if hook else {"mixed_precision": precision}
                model = case.wrap(sharding_strategy=strategy, **own)
                if hook is not None:
                    model.register_comm_hook(state, hook)
                with collectives.record() as events:
                    Run(model, case, rank, world_size).train()
                runs.append((snapshot(model), [tuple(event) for event in events]))
            for state_dict, events in runs[1:]:
                assert_identical(state_dict, runs[0][0])
                assert events == runs[0][1]

    half = dist.new_group([0])
    model = MLP.wrap()
    with pytest.raises(ValueError, match="of ranks 0, but the model"):
        model.register_comm_hook(half if rank == 0 else None, ddp_hooks.allreduce_hook)
    ddp.register_ddp_comm_hook(ddp.DDPCommHookType.FP16_COMPRESS, model)  # nothing was registered


# ---------------------------------------------------------------- what is refused


def _two(state: Any, grad: Tensor) -> None: ...
def _three(state: Any, full: Tensor, out: Tensor) -> None: ...
def _buckets(state: Any, bucket: Any) -> None: ...


_BUCKETS = {
    powerSGD_hook: "powerSGD_hook takes .* buckets",
    post_localSGD_hook: "MixedPrecision",
    ddp_hooks.fp16_compress_wrapper(powerSGD_hook): "fp16_compress_wrapper_hook takes",
    _hook_then_optimizer(ddp_hooks.allreduce_hook, None): "hook_then_optimizer_wrapper takes",
}
_OTHER_DTYPE = r"in torch.float16, but unit 'fc1' was .*reduce_dtype=torch.bfloat16"
_OTHER_SHAPE = r"expected hook\(state, full, out\) for unit 'fc1', .*, got _two\(state: .*, grad"
REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    *(("FULL_SHARD", hook, NotImplementedError, words) for hook, words in _BUCKETS.items()),
    ("NO_SHARD", _buckets, NotImplementedError, "_buckets takes .* buckets"),
    ("HYBRID_SHARD", _three, NotImplementedError, "unit 'fc1' has a HYBRID strategy"),
    ("HYBRID_SHARD_OP", _three, NotImplementedError, "use FULL_SHARD"),
    ("FULL_SHARD", "hook", TypeError, "expected a callable as hook, got 'hook'"),
    ("FULL_SHARD", _two, TypeError, _OTHER_SHAPE),
    ("NO_SHARD", _three, TypeError, r"expected hook\(state, grad\) for unit 'fc1'"),
    ("FULL_SHARD", ddp_hooks.fp16_compress_hook, ValueError, _OTHER_DTYPE),
]


@pytest.mark.parametrize(("strategy", "hook", "error", "message"), REFUSED)
@pytest.mark.uncoalesced
def test_refused(strategy: str, hook: Any, error: type[Exception], message: str) -> None:
    """Alone, so the shapes of hooks go by the strategy and not by the number of ranks."""
    narrow = MixedPrecision(reduce_dtype=torch.bfloat16)
    with allow_warnings(UserWarning, "ShardedWrapper: no process group"):
        model = MLP.wrap(sharding_strategy=strategy, mixed_precision=narrow)
    assert_raises(error, message, model.register_comm_hook, None, hook)
    local_loss(model, MLP, 0, 0, 1).backward()
    model.register_comm_hook(None, ddp_hooks.bf16_compress_hook)
    with model.no_sync():
        local_loss(model, MLP, 0, 0, 1).backward()
    with pytest.raises(RuntimeError, match="already has a hook"):
        model.register_comm_hook(None, ddp_hooks.bf16_compress_hook)


@pytest.mark.uncoalesced
def test_refused_while_gradients_wait() -> None:
    with allow_warnings(UserWarning, "ShardedWrapper: no process group"):
        model = MLP.wrap()
    handle = model.fc1.register_forward_pre_hook(lambda *_: model.register_comm_hook(None, _three))
    with pytest.raises(RuntimeError, match="register_comm_hook\\(\\) was called while a forward"):
        local_loss(model, MLP, 0, 0, 1)
    handle.remove()
    with model.no_sync():
        local_loss(model, MLP, 0, 0, 1).backward()
    with pytest.raises(RuntimeError, match="unit 'fc1' holds gradients accumulated under no_sync"):
        model.register_comm_hook(None, _three)


# ---------------------------------------------------------------- ranks and failures


@on_ranks(2)
def test_ranks_register_alike(rank: int, world_size: int) -> None:
    model = MLP.wrap()
    expected = "^register_comm_hook, rank 1: expected a callable as hook, got 1"
    with pytest.raises(TypeError, match=expected):
        model.register_comm_hook("state", Averaging() if rank == 0 else 1)
    differs = r"hook of unit .* is an average, .* on rank 0, called on rank 1"
    hook = Averaging() if rank else ddp_hooks.allreduce_hook
    assert_raises(ValueError, differs, model.register_comm_hook, "state", hook)
    model.register_comm_hook("state", Averaging())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.uncoalesced
@on_ranks(2)
def test_a_hook_raises(rank: int, world_size: int, strategy: str) -> None:
    """In the middle and at the end of backward; then training goes on."""
    case = CASES["unused"]
    average, calls = Averaging(), []
    fails_at, resizes = 0, False

    def hook(state: Any, full: Tensor, out: Tensor | None = None) -> Any:
        calls.append(full.numel())
        if len(calls) == fails_at:
            raise KeyError("a user's own")
        if len(calls) == -fails_at:
            return dist.all_reduce(full, async_op=True)
        if resizes and out is not None:
            out.resize_(full.numel())
            return None
        return average(state, full, out)

    sharded = Run(_registered(case, hook, sharding_strategy=strategy), case, rank, world_size)
    plain = Run(case.model(), case, rank, world_size)
    sharded.train()
    calls.clear()
    fails_at = -1
    with pytest.raises(TypeError, match=r"returned a \w*Work, .* Call wait\(\) in the hook"):
        sharded.loss(9).backward()
    if strategy == "FULL_SHARD":
        fails_at, resizes = 0, True
        with pytest.raises(ValueError, match=r"resized `out`: expected shape \(\d+,\), got"):
            sharded.loss(9).backward()
        resizes = False
    # fc3 has an unused parameter, so it comes at the end, when the others are reduced already.
    for fails_at, unit in enumerate(["fc2", "fc1", "fc3"], 1):  # noqa: B007 read by the hook
        calls.clear()
        with pytest.raises(KeyError, match="a user's own") as caught:
            sharded.loss(9).backward()
        (note,) = caught.value.__notes__
        name = "test_a_hook_raises.<locals>.hook"
        assert note == f"unit '{unit}', rank {rank}: communication hook {name}"
        sharded.optimizer.zero_grad()
    fails_at = 0
    plain.train()
    sharded.train(2, 4)
    plain.train(2, 4)
    assert_same(sharded.model, plain.model, rtol=1e-10, atol=1e-10)


@pytest.mark.uncoalesced
@on_ranks(2, group_timeout=2.0)
def test_a_hook_raises_on_one_rank(rank: int, world_size: int) -> None:
    """The others learn by the timeout of the hook's own collective, in the same unit."""
    average = Averaging()

    def hook(state: Any, full: Tensor, out: Tensor) -> None:
        if rank == 1:
            raise KeyError("a user's own")
        average(state, full, out)

    model = _registered(MLP, hook)
    start = time.monotonic()
    with pytest.raises(KeyError if rank else RuntimeError) as caught:
        local_loss(model, MLP, 0, rank, world_size).backward()
    assert time.monotonic() - start < 10
    assert caught.value.__notes__[0].startswith(f"unit 'fc3', rank {rank}: communication hook")


# ---------------------------------------------------------------- float8


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", FLOAT8)
@on_ranks(2)
def test_float8_gather(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Weights of linear layers are near the masters, all else is what it is in bfloat16."""
    digits, subnormal = {torch.float8_e4m3fn: (3, 2**-9), torch.float8_e5m2: (2, 2**-16)}[dtype]
    policies = [MixedPrecision(BF16, FP32), MixedPrecision(BF16, FP32, gather_dtype=dtype)]
    for keywords in ({}, {"sharding_strategy": "SHARD_GRAD_OP", "collectives": "native"}):
        nbytes = []
        for policy in policies:
            torch.manual_seed(5)
            plain = nn.Sequential(nn.Linear(64, 90), nn.LayerNorm(90), nn.Linear(90, 33))
            seen: list[Tensor] = []

            def note(module: nn.Module, *_: Any, seen: list[Tensor] = seen) -> None:
                seen.extend(param.detach().clone() for param in module.parameters())

            for layer in plain:
                layer.register_forward_hook(note)
            model = ShardedWrapper(plain, mixed_precision=policy, **keywords)
            for _ in range(2):
                masters = snapshot(model)
                seen.clear()
                with collectives.record() as events:
                    loss = model(torch.randn(8, 64)).float().pow(2).mean()
                loss.backward()
                torch.optim.SGD(model.parameters(), lr=0.5).step()
                model.zero_grad()
            largest = max(master.abs().max() for master in masters.values() if master.dim() > 1)
            for used, master in zip(seen, masters.values(), strict=True):
                assert master.dtype == FP32
                is_sent_in_float8 = policy.gather_dtype and master.dim() == 2
                error = (used.float() - master).abs()
                relative = 2.0 ** -(digits + 1) if is_sent_in_float8 else 2.0**-8
                # Half of the smallest step where the largest weight has the largest number.
                smallest = subnormal / torch.finfo(dtype).max * largest
                assert (error <= relative * master.abs() + smallest).all()
                if is_sent_in_float8:
                    assert error.max() > 2.0**-8 * master.abs().max() / 2
            nbytes.append(sum(event.nbytes for event in events if event.kind == "gather"))
        weights = 64 * 90 + 90 * 33
        with naming(keywords):
            # One byte less for each weight, and 4 of a scale for 256 of them.
            assert nbytes[0] - nbytes[1] == pytest.approx(weights * (1 - 4 / 256), rel=0.02)
    policy = policies[1]
    with pytest.raises(NotImplementedError, match=r"gather_dtype=.* with reshard_after_forward=k"):
        ShardedWrapper(Mlp(), mixed_precision=policy, reshard_after_forward=2)
