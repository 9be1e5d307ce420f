"""Several optimizers over one model, as Muon for matrices and AdamW for the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatshard import ShardedWrapper, checkpoint
from flatshard.checkpoint.command_line import describe
from tests.harness import allow_warnings, naming, on_ranks, run_ranks
from tests.oracle import assert_same, snapshot

ROWS = 6
# The strategy, the number of ranks, and the container of the optimizers. None: not wrapped.
STAGES = (
    ("FULL_SHARD", 2, "list"),
    ("NO_SHARD", 3, "tuple"),
    (None, 1, "list"),
    ("SHARD_GRAD_OP", 3, "list"),
    ("DDP", 2, "list"),
)
NAMED = (("FULL_SHARD", 3, "dict"), ("NO_SHARD", 2, "reversed"), ("FULL_SHARD", 1, "dict"))


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def _optimizers(model: nn.Module, container: str) -> Any:
    params = list(model.parameters())
    muon = torch.optim.Muon([one for one in params if one.dim() == 2], lr=0.02)
    # Two groups: an optimizer's groups stay together.
    biases = [{"params": [one], "lr": 0.01 / n} for n, one in enumerate(params[1::2], 1)]
    adamw = torch.optim.AdamW(biases)
    if container in ("list", "tuple"):
        return [muon, adamw] if container == "list" else (muon, adamw)
    named = {"matrices": muon, "rest": adamw}
    return named if container == "dict" else dict(reversed(named.items()))


def _train(model: nn.Module, optimizers: Any, steps: range, rank: int, world_size: int) -> None:
    each = list(optimizers.values()) if isinstance(optimizers, dict) else optimizers
    for step in steps:
        inputs = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step)).double()
        model(inputs.chunk(world_size)[rank]).square().mean().backward()
        for optimizer in each:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("stages", [STAGES, NAMED], ids=["list", "dict"])
def test_resumes_anywhere(stages: Any, tmp_path: Path) -> None:
    """Each stage loads what the one before it saved; together they are one training."""
    plain = _model()
    optimizers = _optimizers(plain, "list")
    for number, (strategy, world_size, container) in enumerate(stages):
        with naming(f"stage {number}: {strategy} on {world_size}"):
            found = run_ranks(_stage, world_size, number, strategy, container, tmp_path)[0]
            _train(plain, optimizers, range(2 * number, 2 * number + 2), 0, 1)
            assert_same(found, snapshot(plain))
    path = checkpoint.latest(tmp_path)
    assert path is not None
    assert "(Muon), " in describe(str(path))
    checkpoint.convert(path, tmp_path / "model.pt")
    assert_same(torch.load(tmp_path / "model.pt"), snapshot(plain))


def _stage(
    rank: int, world_size: int, number: int, strategy: str | None, container: str, folder: Path
) -> dict[str, Tensor]:
    model = plain = _model(seed=number)
    if strategy == "DDP":
        model = DistributedDataParallel(plain)
    elif strategy is not None:
        model = plain = ShardedWrapper(plain, sharding_strategy=strategy)
    optimizers = _optimizers(model, container)
    if number:
        checkpoint.load(folder / f"step-{number - 1}", model, optimizers)
    with allow_warnings():
        _train(model, optimizers, range(2 * number, 2 * number + 2), rank, world_size)
    pending = checkpoint.save(folder / f"step-{number}", model, optimizers, async_=number % 2 == 1)
    if pending is not None:
        pending.wait()
    return snapshot(plain)


@on_ranks(2)
def test_full_state_and_errors(rank: int, world_size: int, tmp_path: Path) -> None:
    model = ShardedWrapper(_model())
    optimizers = _optimizers(model, "dict")
    with allow_warnings():
        _train(model, optimizers, range(2), rank, world_size)
    checkpoint.save(tmp_path / "both", model, optimizers)
    weights = model.state_dict()
    sent = [checkpoint.full_optim_state_dict(model, optimizers)]
    dist.broadcast_object_list(sent)
    other = ShardedWrapper(_model(seed=1))
    other.load_state_dict(weights)
    others = _optimizers(other, "dict")
    for name, one in others.items():
        one.load_state_dict(ShardedWrapper.optim_state_dict_to_load(other, one, sent[0][name]))
    for one, its in ((model, optimizers), (other, others)):
        with allow_warnings():
            _train(one, its, range(2, 4), rank, world_size)
    assert_same(other, model)

    muon, adamw = optimizers.values()
    twice = torch.optim.SGD([next(model.parameters())], lr=0.1)
    with pytest.raises(ValueError, match=r"'0.weight' belongs to optimizers '0' and '1'"):
        checkpoint.save(tmp_path / "twice", model, [muon, twice])
    other_class = {"matrices": muon, "rest": torch.optim.Adam(adamw.param_groups)}
    for wrong in ([muon, adamw], muon, other_class, {"matrices": adamw, "rest": muon}):
        before = snapshot(model)
        with pytest.raises(ValueError, match=r"saved with other optimizers: expected 'matrices'"):
            checkpoint.load(tmp_path / "both", model, wrong)
        assert_same(before, model)
    assert checkpoint.load(tmp_path / "both", model) == {}  # without an optimizer
    checkpoint.save(tmp_path / "one", model, muon)
    with pytest.raises(ValueError, match=r"expected '0': Muon of 2 parameters; got '0': Muon of"):
        checkpoint.load(tmp_path / "one", model, [muon, adamw])
    swapped = [muon, adamw] if rank else [adamw, muon]
    with pytest.raises(ValueError, match=r"the list of optimizers is .*Muon.* on rank 1"):
        checkpoint.save(tmp_path / "swapped", model, swapped)
