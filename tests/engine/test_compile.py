"""``torch.compile`` of a model with units inside: the same numbers."""

import torch
from torch import Tensor, nn

from flatshard import ShardedWrapper
from tests.harness import allow_warnings, on_ranks


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
