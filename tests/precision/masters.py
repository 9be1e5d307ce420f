"""The plain model with masters, and models with norms and routers, for tests of precision.

Each step casts the plain model's float32 parameters by hand, runs every rank's rows with the
copies, casts their gradients to the reduce dtype, averages, and steps the masters.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flatshard import collectives
from flatshard.module.wrappers import handles_in
from tests.harness import allow_warnings
from tests.models import Case, loss_of, vectors
from tests.oracle import ROWS, assert_same_state, snapshot, step_and_zero

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

DtypeOf = Callable[[str], torch.dtype]
OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def momentum_sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Training:
    """How a plain model with masters, and the wrapped one, are trained on two ranks.

    Attributes:
        grad_dtype: of the parameters' gradients; None: the parameters' own.
    """

    steps: int = 3
    optimizer_of: OptimizerOf = momentum_sgd
    grad_dtype: torch.dtype | None = None
    autocast: bool = False


USUAL = Training()
WORLD = 2


def always(dtype: torch.dtype) -> DtypeOf:
    return lambda name: dtype


def trained_by_hand(
    case: Case, model: nn.Module, dtype_of: DtypeOf, reduce_dtype_of: DtypeOf, how: Training = USUAL
) -> tuple[dict[str, Tensor], Tensor]:
    """Train ``model`` with masters; returns its state, and an output in evaluation after that."""
    masters = dict(model.named_parameters())
    optimizer = how.optimizer_of(masters.values())
    first = dtype_of(next(iter(masters)))
    for step in range(how.steps):
        sums: dict[str, Tensor] = {}
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        after: dict[str, Tensor] = {}
        for rank in range(WORLD):
            copies = _cast(masters, dtype_of)
            buffers = {name: buffer.clone() for name, buffer in before.items()}
            inputs, target = rows_of(case, step, rank)
            with torch.autocast("cpu", BF16, enabled=how.autocast):
                output = functional_call(model, {**copies, **buffers}, _float_to(inputs, first))
                loss = loss_of_rows(output, target)
            loss.backward()
            for name, cast in copies.items():
                # Rounded to what they travel in, and added in no less than fp32.
                grad = cast.grad.to(reduce_dtype_of(name))
                grad = grad.to(torch.promote_types(grad.dtype, FP32))
                sums[name] = sums[name] + grad if name in sums else grad
            after = after or buffers  # rank 0's
        for name, buffer in model.named_buffers():
            buffer.copy_(after[name])
        for name, master in masters.items():
            master.grad_dtype = how.grad_dtype or master.dtype
            master.grad = (sums[name] / WORLD).to(master.grad_dtype)
        optimizer.step()
    with torch.no_grad(), torch.autocast("cpu", BF16, enabled=how.autocast):
        model.eval()
        inputs, _ = case.batch(100, 3, FP32)
        output = functional_call(model, _cast(masters, dtype_of), _float_to(inputs, first))
    return snapshot(model), output


def _cast(masters: Mapping[str, Tensor], dtype_of: DtypeOf) -> dict[str, Tensor]:
    cast = {name: one.detach().to(dtype_of(name), copy=True) for name, one in masters.items()}
    return {name: one.requires_grad_() for name, one in cast.items()}


def _float_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def rows_of(case: Case, step: int, rank: int) -> tuple[Tensor, Tensor]:
    inputs, target = case.batch(step, ROWS * WORLD, FP32)
    return inputs.chunk(WORLD)[rank], target.chunk(WORLD)[rank]


def loss_of_rows(output: Tensor, target: Tensor) -> Tensor:
    return loss_of(output.float(), target)


def trained(
    case: Case, model: nn.Module, rank: int, how: Training = USUAL
) -> tuple[dict[str, Tensor], Tensor]:
    """The same with a wrapped model, of which a forward gathers what the policy says."""
    handles = handles_in(model)
    bytes_to_gather = sum(h.layout.padded_numel * h.buffer.dtype.itemsize for h in handles)
    optimizer = how.optimizer_of(model.parameters())
    for step in range(how.steps):
        inputs, target = rows_of(case, step, rank)
        with collectives.record() as events, torch.autocast("cpu", BF16, enabled=how.autocast):
            loss = loss_of_rows(model(inputs), target)
        gathered = [event.nbytes for event in events if event.kind == "gather"]
        if gathered:
            assert sum(gathered) == bytes_to_gather
        loss.backward()
        assert all(p.grad.dtype == (how.grad_dtype or p.dtype) for p in model.parameters())
        step_and_zero(optimizer)
    # A reentrant checkpoint has something to say about evaluation.
    with (
        torch.no_grad(),
        torch.autocast("cpu", BF16, enabled=how.autocast),
        allow_warnings(UserWarning, "None of the inputs"),
    ):
        model.eval()
        output = model(case.batch(100, 3, FP32)[0])
    return snapshot(model), output


def assert_bitwise(actual: tuple[Any, Tensor], expected: tuple[Any, Tensor]) -> None:
    assert_same_state(actual[0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=0)


class Layer(nn.Module):
    """Norms, a router and a gain that a policy can keep in float32.

    Args:
        in_float32: names of children whose inputs and outputs the layer casts itself, as a policy
            does for the wrapped model.
    """

    def __init__(self, in_float32: Collection[str] = ()) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(8)
        self.norm = nn.LayerNorm(8)
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.gain = nn.Parameter(torch.ones(8))
        self.register_buffer("table", torch.linspace(0.9, 1.1, 8))
        self.in_float32 = in_float32

    def call(self, name: str, x: Tensor) -> Tensor:
        child = getattr(self, name)
        return child(x.float()).to(x.dtype) if name in self.in_float32 else child(x)

    def forward(self, x: Tensor, *, seen: list[torch.dtype]) -> Tensor:
        normed = self.call("norm", self.call("batch_norm", x))
        weights = self.call("router", normed).softmax(-1)
        seen.append(normed.dtype)
        mixed = sum(weights[:, i : i + 1] * one(normed) for i, one in enumerate(self.experts))
        return x + (mixed * self.gain * self.table).to(x.dtype)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 8)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.down = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        seen: list[torch.dtype] = []
        for layer in self.layers:
            x = layer(x, seen=seen)
        assert seen == [x.dtype] * 2  # the list that the layers appended to, and the norms' dtype
        return self.down(x)


ROUTED = Case("routed", Routed, vectors, (Layer,), row_wise=False)
NORMS = ("batch_norm", "norm")


def routed_by_hand(in_float32: Collection[str]) -> nn.Module:
    """The plain model, whose layers cast the inputs and outputs of these children."""
    model = ROUTED.model(FP32)
    for layer in model.layers:
        layer.in_float32 = in_float32
    return model
