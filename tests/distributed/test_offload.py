"""Offload to a disk changes where things live and nothing else."""

from pathlib import Path

import torch
from torch import nn

from flatshard import CPUOffload, ShardedWrapper
from flatshard.disk_memory import is_on_disk
from tests.harness import naming, run_ranks
from tests.models import CASES
from tests.oracle import OPTIMIZERS, local_loss, snapshot, trainable


def _train(model: nn.Module, name: str, kind: str, rank: int, world_size: int) -> tuple:
    case = CASES[name]
    optimizer = OPTIMIZERS[kind](trainable(model))
    norms = []
    for step in range(4):
        if step == 1:
            with model.no_sync():
                local_loss(model, case, 50, rank, world_size).backward()
        if step == 2:  # accumulate outside of no_sync
            local_loss(model, case, 51, rank, world_size).backward()
        local_loss(model, case, step, rank, world_size).backward()
        norms.append(model.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    state = ShardedWrapper.optim_state_dict(model, optimizer)
    return snapshot(model), norms, state, optimizer


def _same(rank: int, world_size: int, folder: str, names: list[str]) -> None:
    for name in names:
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            for use_orig_params in (True, False):
                for kind in ("adamw", "sgd"):
                    with naming(f"{name} {strategy} {use_orig_params} {kind}"):
                        results = []
                        for offload in (None, CPUOffload(path=folder)):
                            case = CASES[name]
                            model = case.wrap(
                                case.model(),
                                sharding_strategy=strategy,
                                cpu_offload=offload,
                                use_orig_params=use_orig_params,
                            )
                            results.append(_train(model, name, kind, rank, world_size))
                        (state, norms, optim, _), (state2, norms2, optim2, optimizer) = results
                        for key in state:
                            assert torch.equal(state[key], state2[key]), key
                        assert norms == norms2
                        for p, st in optimizer.state.items():
                            for k, v in st.items():
                                if isinstance(v, torch.Tensor) and v.dim() and v.numel():
                                    assert is_on_disk(v), k


def test_same(tmp_path: Path) -> None:
    run_ranks(_same, 2, str(tmp_path), list(CASES), timeout=500.0)
