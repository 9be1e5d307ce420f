"""Tensor-parallel parameters (DTensors), whose local parts are sharded over another dimension."""

import contextlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint as recomputed

from flatshard import CPUOffload, MixedPrecision, ShardedWrapper, checkpoint, full_tensors
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import every
from tests.harness import allow_warnings, assert_raises, naming, on_ranks
from tests.oracle import OPTIMIZERS, assert_same, step_and_zero

pytestmark = pytest.mark.by_turns


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.recomputes = False
        self.seen: list[type] = []

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.seen = [type(param) for param in (self.up.weight, self.down.bias)]
            assert isinstance(self.up.weight, nn.Parameter)
            assert self.up.weight is next(self.up.parameters())
        inner = partial(recomputed, self._inner, use_reentrant=False)
        return x + (inner(x) if self.recomputes else self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.blocks = nn.Sequential(_Block(), _Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


def _build() -> _Model:
    torch.default_generator.manual_seed(3)
    return _Model().double()


def _plan(*, sequence: bool) -> dict[str, Any]:
    """With ``sequence`` ranks split the sequence between blocks, and norms are replicated."""
    between = Shard(1) if sequence else Replicate()
    plan = {
        "first": ColwiseParallel(output_layouts=between),
        "blocks.*.up": ColwiseParallel(input_layouts=between),
        "blocks.*.down": RowwiseParallel(output_layouts=between),
        "last": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),  # 3 rows over 2
    }
    return plan | ({"blocks.*.norm": SequenceParallel()} if sequence else {})


def _wrap(mesh: DeviceMesh, *, sequence: bool = True, **options: Any) -> ShardedWrapper:
    model = parallelize_module(_build(), mesh["tp"], _plan(sequence=sequence))
    options = {"auto_wrap_policy": ModuleWrapPolicy({_Block}), "coalesce_bytes": 0, **options}
    if "device_mesh" not in options:
        options["device_mesh"] = mesh["dp"]
    return ShardedWrapper(model, **options)


def _mesh(dp: int = 2, tp: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def _batch(step: int) -> Tensor:
    return torch.randn(8, 4, 5, generator=torch.Generator().manual_seed(step)).double()


Make = Callable[[Any], torch.optim.Optimizer]
_sgd, _adamw = OPTIMIZERS["sgd"], OPTIMIZERS["adamw"]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, size: int) -> list[Any]:
    """Clipped steps on chunk ``number`` of ``size``; the norms of the gradients."""
    norms = []
    for step in range(3):
        model(_batch(step).chunk(size)[number]).pow(2).mean().backward()
        clip = getattr(model, "clip_grad_norm_", partial(clip_grad_norm_, model.parameters()))
        norms.append(clip(0.2).item())
        step_and_zero(optimizer)
    return norms


def _trained(make: Make) -> tuple[_Model, torch.optim.Optimizer, list[Any]]:
    model = _build()
    optimizer = make(model.parameters())
    return model, optimizer, _train(model, optimizer, 0, 1)


@pytest.mark.parametrize("sequence", [False, True], ids=["replicated", "sequence"])
@on_ranks(4)
def test_training(rank: int, world_size: int, sequence: bool) -> None:
    mesh = _mesh()
    for kind in every(2, ("sgd", "adamw"), sequence):
        with naming(kind):
            make = OPTIMIZERS[kind]
            model = _wrap(mesh, sequence=sequence)
            if kind == "sgd":
                model.module.blocks[0].recomputes = True
            optimizer = make(model.parameters())
            plain, plain_optimizer, expected = _trained(make)
            norms = _train(model, optimizer, mesh["dp"].get_local_rank(), 2)
            assert norms == pytest.approx(expected, rel=1e-12)
            assert model.module.blocks[1].seen == [DTensor, DTensor]
            assert_same(model.state_dict(), plain.state_dict())
            whole = {str(name): one.clone() for name, one in full_tensors(model)}
            assert_same(whole, plain.state_dict())
            local = {str(name): one.clone() for name, one in full_tensors(model, ranks="local")}
            part = plain.blocks[0].up.weight.chunk(2)[mesh["tp"].get_local_rank()]
            assert_same(local["blocks.0.up.weight"], part.detach())
            found = ShardedWrapper.optim_state_dict(model, optimizer)
            wanted = ShardedWrapper.optim_state_dict(plain, plain_optimizer)
            for name, state in wanted["state"].items():
                assert_same(found["state"][name], state)
            again = _wrap(mesh, sequence=sequence)
            again.load_state_dict(plain.state_dict())
            other = make(again.parameters())
            ShardedWrapper.optim_state_dict_to_load(again, other, wanted, load_directly=True)
            assert_same(again.state_dict(), plain.state_dict())
            _train(again, other, mesh["dp"].get_local_rank(), 2)
            _train(plain, plain_optimizer, 0, 1)
            assert_same(again.state_dict(), plain.state_dict())


@on_ranks(8)
def test_hybrid(rank: int, world_size: int) -> None:
    """Replicas, shards and tensor parallelism, one dimension of the mesh each."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    number = 2 * mesh["dp_replicate"].get_local_rank() + mesh["dp_shard"].get_local_rank()
    model = _wrap(mesh, device_mesh=mesh["dp_replicate", "dp_shard"])
    plain, _, expected = _trained(_sgd)
    norms = _train(model, _sgd(model.parameters()), number, 4)
    assert norms == pytest.approx(expected, rel=1e-12)
    assert_same(model.state_dict(), plain.state_dict())


WAYS: dict[str, dict[str, Any]] = {
    "kept": {"sharding_strategy": "SHARD_GRAD_OP"},
    "secondary": {"reshard_after_forward": 2},
    "diverging": {"allow_divergence": [_Block]},
    "disk": {},
    "compiled": {},
    "float32": {"mixed_precision": MixedPrecision(param_dtype=torch.float32)},
}


@on_ranks(4)
def test_ways(rank: int, world_size: int, tmp_path: Path) -> None:
    mesh = _mesh()
    number = mesh["dp"].get_local_rank()
    plain = _trained(_sgd)[0]
    for name, options in every(2, WAYS.items(), 1):
        # Dynamo's own warnings.
        quiet = allow_warnings() if name == "compiled" else contextlib.nullcontext()
        with naming(name), quiet:
            if name == "disk":
                options = {"cpu_offload": CPUOffload(path=tmp_path)}
            model = _wrap(mesh, **options)
            if name == "compiled":
                for unit in model.module.blocks:
                    unit.compile(backend="eager")
            optimizer = _sgd(model.parameters())
            for step in range(3):
                first, second = _batch(step).chunk(2)[number].chunk(2)
                with model.no_sync():
                    (model(first).pow(2).mean() / 2).backward()
                (model(second).pow(2).mean() / 2).backward()
                clip_grad_norm_(model.parameters(), 0.2)
                step_and_zero(optimizer)
            tolerance = 1e-5 if name == "float32" else 1e-12
            assert_same(model.state_dict(), plain.state_dict(), tolerance, tolerance)
            with pytest.raises(NotImplementedError, match="would see only this rank's part"):
                ShardedWrapper.summon_full_params(model).__enter__()


@on_ranks(4)
def test_outside_of_forward(rank: int, world_size: int) -> None:
    """Parameters and gradients in parts: a hook's norm is of all, what sees one part raises."""
    mesh = _mesh()
    plain, model = _build(), _wrap(mesh)
    for one in (plain, model):
        first, *others = one.parameters()
        first.register_hook(lambda grad: grad / grad.norm())
        for param in others:
            param.register_hook(lambda grad: grad * 2 if grad.dim() > 1 else None)
        one(_batch(0)).pow(2).mean().backward()  # all rows, as the norm is of each rank's
    for order in (2.0, math.inf):
        grads = [(name, param.grad) for name, param in plain.named_parameters()]
        norms = {name: torch.linalg.vector_norm(grad, order).item() for name, grad in grads}
        assert model.norms("grad", norm_type=order) == pytest.approx(norms, rel=1e-9)
    for one in (plain, model):
        _sgd(one.parameters()).step()
    assert_same(model.state_dict(), plain.state_dict())
    before = model.state_dict()
    weight = model.module.blocks[0].up.weight
    for name, call in {
        "normal_": lambda: nn.init.normal_(weight),
        "uniform_": model.module.blocks[0].down.reset_parameters,
        "orthogonal_": lambda: nn.init.orthogonal_(weight),
        "randn_like": lambda: torch.randn_like(weight),
        "std": weight.std,
        "vector_norm": lambda: torch.linalg.vector_norm(weight, float("inf")),
        "parameters_to_vector": lambda: nn.utils.parameters_to_vector(model.parameters()),
    }.items():
        with naming(name):
            assert_raises(NotImplementedError, r"this rank.s part \(.* of a DTensor of", call)
    assert_same(model.state_dict(), before)
    nn.init.normal_(model.module.blocks[0].norm.weight)  # the same on all ranks


@on_ranks(4)
def test_torch_checkpoint(rank: int, world_size: int, tmp_path: Path) -> None:
    """Saved by 2 x 2 ranks, loaded by 1 x 4 and 4 x 1 and by the unwrapped model."""
    model = _wrap(_mesh())
    optimizer = _adamw(model.parameters())
    _train(model, optimizer, torch.distributed.get_rank() // 2, 2)
    kept = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(kept, checkpoint_id=tmp_path)
    wanted = model.state_dict()
    states = ShardedWrapper.optim_state_dict(model, optimizer)["state"]
    loaded = {key: torch.zeros_like(value) for key, value in wanted.items()}
    dcp.load({"model": loaded}, checkpoint_id=tmp_path)
    assert_same(loaded, wanted)
    wide = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    for other in (_wrap(wide), ShardedWrapper(_build())):
        its_own = _adamw(other.parameters())
        parts = dict(zip(("model", "optimizer"), get_state_dict(other, its_own), strict=True))
        dcp.load(parts, checkpoint_id=tmp_path)
        set_state_dict(
            other, its_own, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
        )
        assert_same(other.state_dict(), wanted)
        for name, state in ShardedWrapper.optim_state_dict(other, its_own)["state"].items():
            assert_same(state, states[name])


@on_ranks(4)
def test_refusals(rank: int, world_size: int, tmp_path: Path) -> None:
    mesh = _mesh()
    for options, match in (
        ({"device_mesh": None}, r"'first.weight' is a DTensor over ranks .*device_mesh=mesh"),
        ({"boundary": "row"}, r"parameter '.*' is a DTensor with boundary='row'"),
        ({"sharding_strategy": "NO_SHARD"}, r"is a DTensor in a shard group of one rank"),
        ({"device_mesh": mesh}, r"named \('dp', 'tp'\)"),
    ):
        assert_raises((ValueError, NotImplementedError), match, _wrap, mesh, **options)
    model = parallelize_module(_build(), mesh["tp"], _plan(sequence=True))
    early = _sgd(model.parameters())
    plain = ShardedWrapper(_build())
    late, plan = r"cannot follow ShardedWrapper: .*parallelize_module", _plan(sequence=False)
    assert_raises(ValueError, late, parallelize_module, plain, mesh["tp"], plan)
    assert_raises(ValueError, late, distribute_module, plain.module.last, mesh["tp"])
    wrapped = ShardedWrapper(model, device_mesh=mesh["dp"])
    assert_raises(RuntimeError, r"made before wrapping, and still has the DTensor", early.step)
    refused, path = "was a DTensor before", f"{tmp_path}/it"
    assert_raises(NotImplementedError, refused, checkpoint.save, path, wrapped)
    assert_raises(NotImplementedError, refused, checkpoint.save_safetensors, wrapped, path)
    wrapped(_batch(0)).mean().backward()
    with pytest.raises(NotImplementedError, match=r"was a DTensor\. Muon needs full"):
        torch.optim.Muon([p for p in wrapped.parameters() if p.dim() == 2]).step()
