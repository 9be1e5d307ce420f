"""``torch.compile`` of a model with units inside: the same numbers."""

import pytest
import torch
from torch import Tensor, nn

from flatshard import ShardedWrapper
from tests.harness import allow_warnings, on_ranks
from tests.oracle import assert_same
from tests.side import pair


class _Sliced(nn.Module):
    """The slice is a new module, to which torch's global hooks see modules assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x).tanh()
        return self.layers[2](x)


@on_ranks(1)
def test_a_slice_in_a_compiled_model(rank: int, world_size: int) -> None:
    """Dynamo traced flatshard's hook: "already tracked for mutation" (Llama slices its layers)."""
    plain, rows = _Sliced(), torch.ones(2, 7)
    for make in (
        lambda model: ShardedWrapper(torch.compile(model, backend="eager")),
        lambda model: model.compile(backend="eager") or ShardedWrapper(model),
    ):
        model = _Sliced()
        model.load_state_dict(plain.state_dict())
        # Python 3.13.0: "Guards may run slower on Python 3.13.0".
        with torch.no_grad(), allow_warnings(RuntimeWarning):
            assert torch.equal(make(model)(rows), plain(rows))


@pytest.mark.parametrize("whole", [True, False], ids=["model", "block"])
@on_ranks(2)
def test_compiled_with_units_inside(rank: int, world_size: int, whole: bool) -> None:
    """Tracing ran into the gathering of parameters, and kept tensors that were freed later."""
    sharded, plain = pair(rank, world_size, "full")
    with allow_warnings():
        if whole:
            forward = torch.compile(sharded.model, backend="eager")
        else:
            sharded.submodule("fc2").compile(backend="eager")
            forward = sharded.model
        for step in range(3):
            outputs = [forward(sharded.inputs(step)), plain.model(sharded.inputs(step))]
            torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
            outputs[0].pow(2).mean().backward()
            plain.model(plain.inputs(step)).pow(2).mean().backward()
            plain.step()
            sharded.step()
            assert_same(sharded.model, plain.model, 1e-12)
