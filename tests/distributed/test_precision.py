"""Parameters gathered, and gradients reduced, in another dtype than they are kept in."""

import pytest
import torch
import torch.nn.functional as F

from flatshard import MixedPrecision, collectives
from tests.distributed.test_training import WAYS
from tests.harness import run_ranks
from tests.models import CASES

CASE = CASES["mlp"]


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16(way: str) -> None:
    run_ranks(_bfloat16, 2, way)


def _bfloat16(rank: int, world_size: int, way: str) -> None:
    """Close to the run in fp32, with half the bytes, and fp32 in optimizer and state dict."""
    strategy, use_orig_params = WAYS[way]
    losses, gathered = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        model = CASE.wrap(
            CASE.model(torch.float32),
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(5):
            inputs, target = CASE.batch(step, 4, torch.float32)
            with collectives.record() as events:
                output = model(inputs)
                loss = F.mse_loss(output.float(), target)
                loss.backward()
            assert output.dtype == dtype
            assert all(p.grad.dtype == torch.float32 for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        losses[dtype] = loss.detach()
        gathered[dtype] = sum(event.nbytes for event in events if event.kind == "gather")
        assert {t.dtype for t in model.state_dict().values()} == {torch.float32}
    torch.testing.assert_close(losses[torch.bfloat16], losses[torch.float32], rtol=0.05, atol=0.02)
    assert 2 * gathered[torch.bfloat16] == gathered[torch.float32]
