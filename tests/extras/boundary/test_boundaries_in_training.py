"""Training with boundaries: the numbers of a model without, to the bit, wherever shards cut."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatshard import MixedPrecision, ShardedWrapper, checkpoint
from flatshard.extras.boundary import Boundary, block_numel
from flatshard.extras.plan.shards import plan_flats
from flatshard.module.wrappers import handles_in
from flatshard.units.layout import PAGED_BYTES
from flatshard.wrap import CustomPolicy, ModuleWrapPolicy
from tests.combinations import every
from tests.harness import assert_raises, naming, on_ranks, run_ranks
from tests.models import CASES
from tests.oracle import assert_identical, sgd, snapshot, step_and_zero, train_steps, trainable
from tests.ways import WAYS, ranks_of

BOUNDARIES: list[Boundary] = ["row", "tensor", 6]


def _train(name: str, rank: int, world_size: int, **keywords: Any) -> tuple[Any, list[float]]:
    case = CASES[name]
    model = case.wrap(**keywords)
    return model, train_steps(model, sgd(model), case, rank, world_size, steps=3)


def _check_cuts(model: nn.Module, boundary: Boundary) -> None:
    """Each rank's part begins where the boundary allows, and holds the values of the parameter."""
    names = {id(param): name for name, param in model.named_parameters()}
    for handle in handles_in(model):
        layout = handle.layout
        assert [names[id(one)] for one in handle.sharded] == [span.name for span in layout.spans]
        for param in handle.params:
            local, block = param.spec.local, block_numel(param.span, boundary)
            ends = {local.offset, local.offset + local.numel} - {param.span.numel}
            assert not local.numel or all(end % block == 0 for end in ends)


# ---------------------------------------------------------------- training


NAMES = ["transformer", "mlp-one-unit", "cnn-channels-last", "tied-in-unit", "tied-blocks"]
NAMES += ["nested", "odd-shapes", "mixed-types", "frozen", "unused"]
MODELS = {"full": NAMES, "full-3": every(2, NAMES, 1), "hybrid-op": ["transformer"]}
HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize("way", MODELS)
@on_ranks(ranks_of)
def test_same_losses_and_weights(rank: int, world_size: int, way: str) -> None:
    WAYS[way].set_nodes()
    for number, name in enumerate(MODELS[way]):
        more = {"collectives": "sockets"} if number % 2 else {}
        if name == "transformer" and way == "full":
            more = {"mixed_precision": HALF}
        keywords = {**WAYS[way].keywords, **more}
        plain, expected = _train(name, rank, world_size, **keywords)
        for boundary in BOUNDARIES:
            with naming(f"{name}, {boundary}"):
                model, losses = _train(name, rank, world_size, boundary=boundary, **keywords)
                assert losses == expected
                assert_identical(snapshot(model), snapshot(plain))
                assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
                _check_cuts(model, boundary)


@pytest.mark.parametrize("collectives", ["auto", "sockets"])
@on_ranks(3)
def test_large_shards(rank: int, world_size: int, collectives: str) -> None:
    """Of whole pages, and with gradients that are read where autograd made them."""
    found = []
    for boundary in ("element", *BOUNDARIES[:2], 2048):
        with naming(boundary):
            torch.manual_seed(0)
            layers = [*_large(), nn.Linear(8, 700), nn.Linear(700, 1000), nn.Linear(1000, 9)]
            keywords = {"boundary": boundary, "collectives": collectives}
            model = ShardedWrapper(nn.Sequential(*layers), **keywords)
            (handle,) = handles_in(model)
            assert handle.flat_param.nbytes > PAGED_BYTES
            inner = [end - start for _, start, end in handle.layout.gaps[:-1]]
            assert boundary == "element" or max(inner) > 4, "padding in the middle"
            optimizer = sgd(model)
            torch.manual_seed(rank)
            for _ in range(3):
                model(torch.randn(2, 512)).square().mean().backward()
                step_and_zero(optimizer)
            assert all(not handle.flat_param[a:b].any() for a, b in _own_gaps(handle))
            found.append(snapshot(model))
            assert_identical(found[-1], found[0])


def _own_gaps(handle: Any) -> list[tuple[int, int]]:
    first, last = handle.layout.shard_range(handle.topology.index)
    inside = [(max(a, first) - first, min(b, last) - first) for _, a, b in handle.layout.gaps]
    return [(a, b) for a, b in inside if a < b]


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 2)])
def test_checkpoints_are_those_of_any_boundary(tmp_path: Path, saving: int, loading: int) -> None:
    expected = run_ranks(_save, saving, tmp_path)[0]
    run_ranks(_load, loading, tmp_path, expected)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable(model), lr=0.01)


def _save(rank: int, world_size: int, folder: Path) -> Any:
    case = CASES["transformer"]
    model = case.wrap(boundary="row" if world_size == 3 else "tensor")
    optimizer = _adamw(model)
    train_steps(model, optimizer, case, rank, world_size, steps=2)
    checkpoint.save(folder / "training", model, optimizer)
    checkpoint.save_safetensors(model, folder / "model.safetensors")
    return snapshot(model), checkpoint.full_optim_state_dict(model, optimizer)


def _load(rank: int, world_size: int, folder: Path, expected: Any) -> None:
    case, (weights, state) = CASES["transformer"], expected
    for boundary in ("element", *BOUNDARIES):
        with naming(boundary):
            model = case.wrap(_moved(case.model()), boundary=boundary)
            assert checkpoint.load_safetensors(model, folder / "model.safetensors") == ([], [])
            assert_identical(snapshot(model), weights)
            model = case.wrap(_moved(case.model()), boundary=boundary)
            optimizer, other = _adamw(model), _adamw(model)
            checkpoint.load(folder / "training", model, optimizer)
            assert_identical(snapshot(model), weights)
            to_load = ShardedWrapper.optim_state_dict_to_load(model, other, state)
            other.load_state_dict(to_load)
            for one in (optimizer, other):
                actual = checkpoint.full_optim_state_dict(model, one)
                if rank == 0:
                    assert list(actual["state"]) == list(state["state"])
                    for name, entries in state["state"].items():
                        assert_identical(actual["state"][name], entries)


def _moved(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model


# ---------------------------------------------------------------- plans and errors


def _large() -> nn.Sequential:
    return nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512), nn.Linear(512, 8))


@on_ranks(2)
def test_plans_and_refusals(rank: int, world_size: int) -> None:
    linears = ModuleWrapPolicy([nn.Linear])
    module = _large()
    before = copy.deepcopy(module.state_dict())
    unbalanced = {"auto_wrap_policy": linears, "coalesce_bytes": 0, "boundary": "tensor"}
    refused = r"unit '0' would have 523,264 elements of padding, 100%"
    assert_raises(ValueError, refused, ShardedWrapper, module, **unbalanced)
    assert_raises(ValueError, refused, plan_flats, module, world_size=2, **unbalanced)
    assert all(type(one) is nn.Linear for one in module)
    assert_identical(module.state_dict(), before)
    with pytest.raises(ValueError, match=r"settings.*boundary='row'|boundary='row'.*settings"):
        ShardedWrapper(_large(), boundary="row" if rank else "element")

    # Together they are balanced, and a policy may say so for some alone.
    def wanted(one: nn.Module) -> Any:
        return {"boundary": "tensor"} if isinstance(one, nn.Linear) else False

    keywords = {"auto_wrap_policy": CustomPolicy(wanted), "coalesce_bytes": 1 << 30}
    model = ShardedWrapper(_large(), **keywords)
    assert "%)" in model.unit_report()
    for boundary, policy in (("element", keywords), ("row", {}), ("tensor", {}), (256, {})):
        _, flats = plan_flats(_large(), world_size=2, boundary=boundary, **policy)
        if policy == {}:
            model = ShardedWrapper(_large(), boundary=boundary)
        held = sum(handle.flat_param.nbytes for handle in handles_in(model))
        assert sum(flat.parameter_bytes for flat in flats) == held
