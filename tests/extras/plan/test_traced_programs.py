"""``plan`` on what programs of others do: branches, experts, towers, recurrence, masks, caches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard.extras.plan import CannotTraceError, checkpoint_blocks, plan
from flatshard.extras.plan.replay import TracedModel
from flatshard.extras.plan.trace import Op
from tests.harness import Watching, assert_raises
from tests.models import Composed


def traced(build: Callable[[], nn.Module], step: Callable[[nn.Module], Tensor]) -> TracedModel:
    return TracedModel(build, step, checkpoint="none", on_gpu=False)


def experts() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        offsets = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
        return F.grouped_mm(x, model.weight.to(x.dtype), offs=offsets)

    return Composed(forward, weight=nn.Parameter(torch.empty(4, 64, 128)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_one_product(dtype: torch.dtype) -> None:
    """torch's rule for fake tensors refuses float32, and its FLOP counter counts nothing."""
    found = traced(experts, lambda m: m(torch.ones(32, 64, dtype=dtype)).float().sum()).trace
    ops = [one for one in found.events if isinstance(one, Op) and one.name == "aten._grouped_mm"]
    # The forward, and the gradient of the weight. The input needs no gradient.
    assert [one.flops for one in ops] == 2 * [2 * 32 * 64 * 128]
    read = (32 * 64 + 4 * 64 * 128) * dtype.itemsize + 4 * 4
    assert ops[0].nbytes == read + 32 * 128 * dtype.itemsize


WIDTH = 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.relu(self.up(x))))


def towers() -> nn.Module:
    """An encoder and a decoder of the same class."""
    both = {
        name: Composed(lambda m, x: m.blocks(x), blocks=nn.Sequential(*(Block() for _ in range(3))))
        for name in ("encoder", "decoder")
    }

    def forward(model: Any, x: Tensor) -> Tensor:
        return model.head(model.decoder(model.encoder(x)))

    return Composed(forward, **both, head=nn.Linear(WIDTH, 8))


def towers_step(model: nn.Module) -> Tensor:
    return model(torch.ones(64, WIDTH)).sum()


def test_checkpoints_are_the_blocks_of_all_towers() -> None:
    made = plan(towers, step=towers_step, checkpoint="block", ranks=2, strategy="FULL_SHARD")
    code = made.code()
    assert "checkpoint_blocks(model, 'block')" in code
    with torch.device("meta"):
        model = towers()
    exec(code.rpartition("\n")[0], {"model": model})
    chosen = {name for name, one in model.named_modules() if "forward" in one.__dict__}
    assert chosen == {f"{t}.blocks.{i}" for t in ("encoder", "decoder") for i in range(3)}


def test_predictions_leave_no_checkpoints() -> None:
    """Also if the function returns the same model each time."""
    model = towers()
    settings: Any = {"step": towers_step, "ranks": 2, "strategy": "FULL_SHARD", "memory": 1e9}
    fresh, found = (plan(build, **settings).changes for build in (towers, lambda: model))
    assert [one.outcome for one in found.values()] == [one.outcome for one in fresh.values()]
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_checkpoints_repeat_dropout() -> None:
    grads = []
    for kind in ("none", "block"):
        torch.manual_seed(0)
        block = Block()
        checkpoint_blocks([block], kind)  # type: ignore[arg-type]
        torch.manual_seed(1)
        block(torch.ones(4, WIDTH)).sum().backward()
        grads.append(block.up.weight.grad)
    assert torch.equal(*grads)


class Recurrent(nn.Module):
    """``nn.LSTM`` computes with a list of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(32, 32, num_layers=2), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def recurrent_step(model: nn.Module) -> Tensor:
    return model(torch.ones(6, 4, 32)).sum()


def test_model_of_the_program_stays_the_same() -> None:
    model = Recurrent()
    before = [{**module.__dict__} for module in model.modules()]
    tensors = [{**module._parameters} for module in model.modules()]
    assert plan(lambda: model, step=recurrent_step, ranks=2).best is not None
    assert [module.__dict__ for module in model.modules()] == before
    assert [module._parameters for module in model.modules()] == tensors
    recurrent_step(model).backward()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_workspaces_of_recurrent_layers_are_kept() -> None:
    found = traced(Recurrent, recurrent_step).trace
    planned = [
        nbytes
        for nbytes, maker in zip(found.sizes, found.makers, strict=True)
        if maker == "aten.mkldnn_rnn_layer" and nbytes > 6 * 4 * 32 * 4  # more than the output
    ]
    real = []  # bytes of oneDNN's workspaces

    def see(func: Any, out: Any) -> None:
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            real.append(out[3].nbytes)

    with Watching(see):
        recurrent_step(Recurrent())
    assert planned == pytest.approx(real, rel=0.3)  # larger layers differ by less


def narrow_values(model: nn.Module) -> Tensor:
    """The attention of DeepSeek: values have another width than queries. Flash attention cannot."""
    x = model(torch.ones(2, 4, 16, 24))
    return F.scaled_dot_product_attention(x, x, x[..., :16]).sum(-1).sum()


def masked(model: nn.Module) -> Tensor:
    """torch reads the mask to see whether it is causal."""
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    return model(torch.ones(6, 4, 32), mask=mask).sum()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 64)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


SPARSE = torch.eye(8).to_sparse()


@pytest.mark.parametrize(
    ("build", "step", "dtype"),
    [
        (partial(nn.Linear, 24, 24), narrow_values, "bf16"),
        (partial(nn.Linear, 24, 24), narrow_values, "fp32"),
        (encoder, masked, "fp32"),
        (partial(nn.Linear, 4, 4), lambda model: (SPARSE @ model(torch.ones(8, 4))).sum(), "fp32"),
    ],
    ids=["narrow-bf16", "narrow-fp32", "masked", "a sparse constant"],
)
def test_can_be_planned(build: Any, step: Any, dtype: str) -> None:
    assert plan(build, step=step, dtype=dtype, ranks=2).best is not None


class Growing(nn.Linear):
    """As if a cache of keys and values grew."""

    def forward(self, x: Tensor) -> Tensor:
        self.rows = getattr(self, "rows", 0) + 1
        return (super().forward(x).exp() @ torch.ones(4, self.rows)).exp()


def growing_pairs() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.other(model.one(x)[:, :1])

    pairs = (Composed(forward, one=Growing(4, 4), other=nn.Linear(1, 4)) for _ in range(2))
    return nn.Sequential(*pairs)


def test_no_advice_to_recompute_what_cannot_be_recomputed() -> None:
    def step(model: nn.Module) -> Tensor:
        return model(torch.ones(8000, 4)).sum()

    settings: Any = {"step": step, "ranks": 2, "memory": 1.00001e9}
    assert plan(growing_pairs, **settings).changes.keys() == {"twice the ranks (4)"}
    refused = "checkpointed forward differs"
    assert_raises(CannotTraceError, refused, plan, growing_pairs, checkpoint="block", **settings)


def positive_to_sum(x: Tensor) -> Tensor:
    """Its backward selects rows, whose number depends on values."""
    y = x.clone()
    y[x > 0] = x.sum()
    return y


@pytest.mark.parametrize(
    ("step", "message"),
    [
        # Only backward needs the values of the mask: there is no line of this program.
        (lambda m, x: m(x).masked_fill(x > 0, 0)[x[:, 0] > 0], r"aten.nonzero.*test_traced_pro"),
        (lambda m, x: m(x.relu().to_sparse()), r"test_traced_programs.*_to_sparse.*made before"),
        (lambda m, x: checkpoint(m, x, use_reentrant=False), r"checkpointed .*use_cache=False"),
        (lambda m, x: positive_to_sum(m(x)), r"in the backward of the root unit: aten\."),
    ],
)
def test_one_line_says_what_to_pass(step: Any, message: str) -> None:
    with pytest.raises(CannotTraceError, match=message) as caught:
        plan(lambda: Growing(4, 4), step=lambda m: step(m, torch.ones(8, 4)).sum())
    assert "\n" not in str(caught.value)
