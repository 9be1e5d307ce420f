"""Gradients and parameters that travel as float8."""

import pytest
import torch
from torch import Tensor, nn

from flatshard import MixedPrecision, ShardedWrapper, collectives
from flatshard.options.precision import FLOAT8
from tests.harness import naming, on_ranks
from tests.models import Mlp
from tests.oracle import snapshot

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", FLOAT8)
@on_ranks(2)
def test_float8_gather(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Weights of linear layers are near the masters, all else is what it is in bfloat16."""
    digits, subnormal = {torch.float8_e4m3fn: (3, 2**-9), torch.float8_e5m2: (2, 2**-16)}[dtype]
    policies = [MixedPrecision(BF16, FP32), MixedPrecision(BF16, FP32, gather_dtype=dtype)]
    for keywords in ({}, {"sharding_strategy": "SHARD_GRAD_OP", "collectives": "native"}):
        nbytes, losses = [], []
        for policy in policies:
            torch.manual_seed(5)
            plain = nn.Sequential(nn.Linear(64, 90), nn.LayerNorm(90), nn.Linear(90, 33))
            seen: dict[str, Tensor] = {}
            for name, layer in plain.named_children():
                layer.register_forward_hook(
                    lambda module, *_, to=seen, name=name: to.update(
                        {
                            f"{name}.{key}": p.detach().clone()
                            for key, p in module.named_parameters()
                        }
                    )
                )
            model = ShardedWrapper(plain, mixed_precision=policy, **keywords)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            of_model = []
            for step in range(5):
                masters = snapshot(model)
                inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
                with collectives.record() as events:
                    loss = model(inputs).float().pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                largest = max(master.abs().max() for master in masters.values() if master.dim() > 1)
                for name, master in masters.items():
                    assert master.dtype == FP32
                    is_sent_in_float8 = policy.gather_dtype and master.dim() == 2
                    error = (seen[name].float() - master).abs()
                    relative = 2.0 ** -(digits + 1) if is_sent_in_float8 else 2.0**-8
                    # Half of the smallest step where the largest weight has the largest number.
                    smallest = subnormal / torch.finfo(dtype).max * largest
                    assert (error <= relative * master.abs() + smallest).all()
                    if is_sent_in_float8:
                        assert error.max() > 2.0**-8 * master.abs().max() / 2
                of_model.append(loss.item())
            losses.append((of_model[0], of_model[-1]))
            nbytes.append(sum(event.nbytes for event in events if event.kind == "gather"))
        weights = 64 * 90 + 90 * 33
        with naming(keywords):
            # One byte less for each weight, and 4 of a scale for 256 of them.
            assert nbytes[0] - nbytes[1] == pytest.approx(weights * (1 - 4 / 256), rel=0.02)
            (first, last), (_, last_in_float8) = losses
            assert last < 0.9 * first
            assert last_in_float8 == pytest.approx(last, rel=0.1)
    policy = policies[1]
    with pytest.raises(NotImplementedError, match=r"gather_dtype=.* with reshard_after_forward=k"):
        ShardedWrapper(Mlp(), mixed_precision=policy, reshard_after_forward=2)
