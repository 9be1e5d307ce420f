"""Parameters gathered, and gradients reduced, in another dtype than they are kept in.

The oracle is the plain model with masters: each step casts its float32 parameters by hand, runs
every rank's rows with the copies, casts their gradients to the reduce dtype, averages, and steps
the masters. On two ranks nothing may differ by a bit: a sum of two has one order.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp

from flatshard import MixedPrecision, ShardedWrapper
from flatshard.module.wrappers import handles_in
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import allow_warnings, assert_raises, naming, on_ranks
from tests.models import CASES, MixedTypes
from tests.oracle import assert_same_state, snapshot
from tests.precision import masters
from tests.precision.masters import BF16, FP16, FP32, FP64, ROUTED, Training, always, trained
from tests.ways import BASIC, WAYS

# ---------------------------------------------------------------- one policy


SMALL = [
    ("mlp", MixedPrecision(BF16)),
    ("mlp", MixedPrecision(BF16, FP32)),
    ("mlp", fsdp.MixedPrecision(FP16, FP32)),
    ("mlp", MixedPrecision(FP64)),
    ("mlp", MixedPrecision(None, BF16)),
    ("lstm", MixedPrecision(FP16, FP32)),
]
LARGE = [
    ("tied-across-units", fsdp.MixedPrecisionPolicy(BF16, FP32)),
    ("checkpointed", MixedPrecision(BF16, FP32)),
    ("checkpointed-reentrant", MixedPrecision(BF16, FP32)),
    ("checkpointed-in-unit-reentrant", MixedPrecision(BF16, FP32)),
    ("nested", MixedPrecision(BF16, FP32)),
]


@pytest.mark.parametrize("way", BASIC)
@on_ranks(2)
def test_like_casts_by_hand(rank: int, world_size: int, way: str) -> None:
    for name, policy in [*SMALL, *(LARGE if way.startswith("full") else [])]:
        case, compute = CASES[name], policy.param_dtype or FP32
        reduce = policy.reduce_dtype or compute
        plain = CASES["transformer"] if "checkpointed" in name else case
        expected = masters.trained_by_hand(
            plain, plain.model(FP32), always(compute), always(reduce)
        )
        model = case.wrap(case.model(FP32), **WAYS[way].keywords, mixed_precision=policy)
        with naming((way, name, policy)):
            actual = trained(case, model, rank)
            assert actual[1].dtype == compute
            masters.assert_bitwise(actual, expected)
            # Evaluation of the masters themselves: what the optimizer steps, whole and uncast.
            with ShardedWrapper.summon_full_params(model, writeback=False):
                for key, master in model.named_parameters():
                    torch.testing.assert_close(master.detach(), expected[0][key], rtol=0, atol=0)


# ---------------------------------------------------------------- norms and routers


POLICY = MixedPrecision(BF16, module_classes_to_ignore=(nn.BatchNorm1d, nn.LayerNorm))


@on_ranks(2)
def test_norms_in_full_precision(rank: int, world_size: int) -> None:
    def dtype_of(name: str) -> torch.dtype:
        return FP32 if "norm" in name else BF16

    by_hand = masters.routed_by_hand(masters.NORMS)
    expected = masters.trained_by_hand(ROUTED, by_hand, dtype_of, dtype_of)
    for name, way in BASIC.items():
        plain = ROUTED.model(FP32)
        called_with: list[torch.dtype] = []
        norm = plain.layers[0].norm
        norm.register_forward_hook(lambda _, args, output, to=called_with: to.append(output.dtype))
        model = ROUTED.wrap(plain, **way.keywords, mixed_precision=POLICY)
        assert list(model.state_dict()) == list(by_hand.state_dict())
        # One flat parameter for what is in bfloat16, one for all that is not.
        dtypes = {handle.buffer.dtype for handle in model.layers[0]._sharded_unit.handles}
        assert dtypes == {FP32, BF16}
        twin = copy.deepcopy(model)
        with naming(name):
            masters.assert_bitwise(trained(ROUTED, model, rank), expected)
            assert set(called_with) == {BF16}  # a user's hook sees what the caller sees
            masters.assert_bitwise(trained(ROUTED, twin, rank), expected)
    compiled = ROUTED.model(FP32)
    layer = compiled.layers[0]
    layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
    model = ROUTED.wrap(compiled, mixed_precision=POLICY)
    with allow_warnings():  # torch's own
        masters.assert_bitwise(trained(ROUTED, model, rank), expected)

    # An ignored module that would be a unit of its own.
    units = ModuleWrapPolicy({nn.LayerNorm, masters.Layer})
    model = ShardedWrapper(ROUTED.model(FP32), auto_wrap_policy=units, mixed_precision=POLICY)
    masters.assert_bitwise(trained(ROUTED, model, rank), expected)


# ---------------------------------------------------------------- autocast


@on_ranks(2)
def test_autocast(rank: int, world_size: int) -> None:
    """Around forward and loss, as of the plain model, with a policy and without."""
    for name in ("tied-in-unit", "checkpointed", "checkpointed-reentrant"):
        case = CASES[name]
        plain = CASES["transformer"] if "checkpointed" in name else case
        for policy in (None, MixedPrecision(BF16, FP32)):
            compute = policy.param_dtype if policy else FP32
            reduce = policy.reduce_dtype if policy else FP32
            dtypes, how = (always(compute), always(reduce)), Training(steps=2, autocast=True)
            expected = masters.trained_by_hand(plain, plain.model(FP32), *dtypes, how)
            for way in ("full", "grad_op"):
                model = case.wrap(case.model(FP32), **WAYS[way].keywords, mixed_precision=policy)
                with naming((name, way, policy)):
                    masters.assert_bitwise(trained(case, model, rank, how), expected)


# ---------------------------------------------------------------- inputs, outputs, buffers


class Traced(nn.Module):
    """Two layers that keep the dtypes of what they are called with, and a rotary table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.linspace(0, 1, 4) + 1e-4)
        self.register_buffer("also", self.table)
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.dtypes: list[torch.dtype] = []
        for layer in (self.first, self.second):
            layer.register_forward_pre_hook(lambda _, args: self.dtypes.append(args[0].dtype))

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        self.dtypes.append(scale.dtype)
        h = self.first(x)
        return {"out": self.second((h * scale).to(FP32)), "ids": scale.long()}


@on_ranks(1)
def test_conversion_after_a_cast_buffer_was_deleted(rank: int, world_size: int) -> None:
    inner = Traced()
    model = ShardedWrapper(inner, mixed_precision=MixedPrecision(BF16, buffer_dtype=FP16))
    del inner.also
    model.to(torch.float64)
    assert inner.table.dtype is FP16
    assert {param.dtype for param in model.parameters()} == {torch.float64}


@on_ranks(2)
def test_inputs_outputs_and_buffers(rank: int, world_size: int) -> None:
    inputs, scale = torch.randn(3, 4), torch.ones(4)
    units = ModuleWrapPolicy({nn.Linear})
    precision = MixedPrecision(BF16, output_dtype=FP32, buffer_dtype=FP16)
    model = ShardedWrapper(Traced(), auto_wrap_policy=units, mixed_precision=precision)
    table = Traced().table
    output = model(inputs, scale=scale)
    assert model.dtypes == [BF16] * 3
    found = {name: value.dtype for name, value in output.items()}
    assert found == {"out": FP32, "ids": torch.int64}
    output["out"].sum().backward()
    assert {name: b.dtype for name, b in model.named_buffers(remove_duplicate=False)} == {
        "table": FP16,
        "also": FP16,
        "scratch": FP16,
        "norm.running_mean": FP32,
        "norm.running_var": FP32,
        "norm.num_batches_tracked": torch.int64,
    }
    # In their own dtypes where they are saved, whatever became of the model since.
    own = {"table", "also"}
    for converted, dtype in (
        (model, FP32),
        (copy.deepcopy(model).double(), FP64),
        (copy.deepcopy(model).to(BF16), BF16),
    ):
        saved = converted.state_dict()
        assert {saved[name].dtype for name in own} == {dtype}
        assert converted.table.dtype == FP16
        assert "scratch" not in saved
        torch.testing.assert_close(saved["table"], table.half().to(dtype), rtol=0, atol=0)
        converted.load_state_dict(saved)
        converted(inputs, scale=scale)
    assert model.state_dict(keep_vars=True)["table"] is model.table

    # Left alone otherwise: a rotary table keeps its digits.
    model = ShardedWrapper(Traced(), mixed_precision=MixedPrecision(BF16))
    assert torch.equal(model.table, table)

    # FSDP1 casts the root's inputs alone; where that is off, none at all.
    for policy, expected in (
        (fsdp.MixedPrecision(BF16), BF16),
        (fsdp.MixedPrecision(BF16, cast_root_forward_inputs=False), FP32),
        (fsdp.MixedPrecisionPolicy(BF16, cast_forward_inputs=False), FP32),
    ):
        model = ShardedWrapper(Traced(), auto_wrap_policy=units, mixed_precision=policy)
        # torch's own error: a layer is given what it cannot multiply
        assert_raises(RuntimeError, "dtype", model, inputs, scale=scale)
        assert model.dtypes[:2] == [expected] * 2


# ---------------------------------------------------------------- gradients in low precision


TAKES_LOW: list[masters.OptimizerOf] = [
    partial(torch.optim.SGD, lr=0.05),
    partial(torch.optim.RMSprop, lr=0.01),
    partial(torch.optim.Adagrad, lr=0.05),
]
REFUSES_LOW: list[masters.OptimizerOf] = [
    masters.momentum_sgd,
    partial(torch.optim.SGD, lr=0.05, fused=True),
    partial(torch.optim.AdamW, foreach=True),
    partial(torch.optim.AdamW, fused=True),
    torch.optim.Adafactor,
]


@on_ranks(2)
def test_low_precision_gradients(rank: int, world_size: int) -> None:
    case, policy = CASES["mlp"], MixedPrecision(BF16, keep_low_precision_grads=True)
    for name, way in BASIC.items():
        for optimizer_of in TAKES_LOW:
            how = Training(optimizer_of=optimizer_of, grad_dtype=BF16)
            expected = masters.trained_by_hand(
                case, case.model(FP32), always(BF16), always(BF16), how
            )
            model = case.wrap(case.model(FP32), **way.keywords, mixed_precision=policy)
            with naming((name, optimizer_of)):
                masters.assert_bitwise(trained(case, model, rank, how), expected)

        model.train()
        for optimizer_of in REFUSES_LOW:
            optimizer = optimizer_of(model.parameters())
            before = snapshot(model)
            inputs, target = masters.rows_of(case, 0, rank)
            masters.loss_of_rows(model(inputs), target).backward()
            with naming((way, optimizer_of)):
                with pytest.raises(RuntimeError, match="keep_low_precision_grads out, or use an"):
                    optimizer.step()
                assert_same_state(snapshot(model), before, rtol=0, atol=0)
                # Upcast by hand, they are as good as any.
                norm = model.clip_grad_norm_(1e9)
                assert norm.dtype == BF16
                for param in model.parameters():
                    param.grad = param.grad.float()
                if not isinstance(optimizer, torch.optim.Adafactor):  # not element-wise
                    optimizer.step()
                    assert not torch.equal(snapshot(model)["fc1.weight"], before["fc1.weight"])
            model.zero_grad()


# ---------------------------------------------------------------- what is said


@on_ranks(2)
def test_what_is_said(rank: int, world_size: int) -> None:
    def wrap(model: nn.Module, **fields: Any) -> ShardedWrapper:
        return ShardedWrapper(model, mixed_precision=MixedPrecision(BF16, **fields))

    class Counted(MixedTypes):
        def __init__(self) -> None:
            super().__init__()
            self.count = nn.Parameter(torch.tensor([3]), requires_grad=False)

    model = wrap(Counted().double())
    model(torch.randn(2, 7, dtype=FP64)).sum().backward()
    assert {h.buffer.dtype for h in handles_in(model)} == {BF16, torch.complex128, torch.int64}

    # Tied: one of the two places is in a module of an ignored class.
    tied = CASES["tied-in-unit"].model(FP32)
    match = r"'embed.weight' and 'head.weight' are tied, but are to be unsharded in param_dtype and"
    assert_raises(ValueError, match, wrap, tied, module_classes_to_ignore=(nn.Linear,))
