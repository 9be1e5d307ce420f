"""Models and parameters as objects: copies, averages, hooks, and what has to be refused."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from flatshard import FlatShardTensor, MixedPrecision, ShardedWrapper, sharded_modules
from flatshard.tensor import sharded_tensor
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import allow_warnings, assert_raises, naming, on_ranks, run_ranks
from tests.models import CASES
from tests.oracle import ROWS, assert_same, assert_same_state, local_loss, snapshot
from tests.side import Run, assert_same_model, pair
from tests.ways import BASIC, WAYS, on_ranks_each_way

pytestmark = pytest.mark.by_turns


@pytest.mark.uncoalesced  # a coalesced unit cannot be copied alone
@on_ranks_each_way(2)
def test_copy_of_one_unit(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    inputs = sharded.inputs(0)
    assert torch.equal(
        copy.deepcopy(sharded_modules(sharded.model.fc1)[0])(inputs), plain.model.fc1(inputs)
    )


@on_ranks(2)
def test_pickling_is_refused(rank: int, world_size: int) -> None:
    model = pair(rank, world_size, "full")[0].model
    calls: list[tuple[Callable[..., object], Any]] = [(pickle.dumps, model)]
    calls += [(_saved, one) for one in (model, model.module, model.fc1.weight)]
    for call, value in (*calls, (copy.deepcopy, model.module)):
        assert_raises(RuntimeError, r"flatshard\.checkpoint", call, value)


@on_ranks(3)
def test_lists_of_parameters_in_other_ranges(rank: int, world_size: int) -> None:
    sizes = (1, 1, 3, 3)  # the range of a parameter of one element differs only on some ranks
    layers = nn.Sequential(*(nn.Linear(size, size) for size in sizes))
    p, expected = ([*copy.deepcopy(layers[i::2]).parameters()] for i in (0, 1))
    model = ShardedWrapper(layers, coalesce_bytes=1 << 20)
    theirs, mine = ([*model.module[i::2].parameters()] for i in (0, 1))
    with torch.no_grad():
        for q, values in ((mine, theirs), (expected, p)):
            torch._foreach_lerp_(q, values, 0.25)
            for one, value in zip(q, values, strict=True):
                one.mul_(0.5).add_(value)
    assert all(map(torch.equal, [one.full_tensor() for one in mine], expected))


def _saved(value: Any) -> None:
    torch.save(value, io.BytesIO())


@pytest.mark.skipif(not hasattr(torch, "_foreach_powsum"), reason="newer torch")
@on_ranks(2)
def test_a_reduction_that_flatshard_does_not_know(rank: int, world_size: int) -> None:
    """It gets full tensors: the result for a range would be taken for a range of the result."""
    params = [*pair(rank, world_size, "full")[0].model.parameters()]
    with torch.no_grad(), allow_warnings():
        expected = [param.full_tensor().pow(2).sum() for param in params]
        torch.testing.assert_close(list(torch._foreach_powsum(params, 2.0)), expected)


@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_scalers_under_an_fp16_policy(kind: str) -> None:
    """Torch's own scaler, and the one that FSDP1 needs, which talks to the other ranks itself."""
    results = run_ranks(_fp16_scaler, 2, kind)
    assert results[0] == results[1]
    scales, skipped = results[0]
    # Halved by two overflows, the first of fp16 itself on all ranks; doubled by two good steps.
    assert scales == [2.0**19, 2.0**19, 2.0**20, 2.0**19, 2.0**19, 2.0**20]
    assert skipped == [0, 3]


def _fp16_scaler(rank: int, world_size: int, kind: str) -> tuple[list[float], list[int]]:
    case, precision = CASES["mlp"], MixedPrecision(torch.float16)
    model = case.wrap(case.model(torch.float32), mixed_precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    make: Any = {"plain": torch.amp.GradScaler, "sharded": ShardedGradScaler}[kind]
    scaler = make("cpu", init_scale=2.0**20, growth_interval=2)
    scales, skipped = [], []
    for step in range(6):
        before = snapshot(model)
        inputs, target = case.batch(step, ROWS * world_size, torch.float32)
        rows = slice(ROWS * rank, ROWS * (rank + 1))
        loss = 1e-4 * F.mse_loss(model(inputs[rows]).float(), target[rows])
        if step == 0 or (step == 3 and rank == 1):  # what gradients overflow on
            loss = loss * 1e6
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(1e-5)
        total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert bool(norm.isfinite()) is (step not in (0, 3))
        assert total <= 1.001e-5 or not norm.isfinite()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        if all(torch.equal(value, before[name]) for name, value in snapshot(model).items()):
            skipped.append(step)
    return scales, skipped


# ---------------------------------------------------------------- a module like the wrapped one


@on_ranks(2)
def test_apply(rank: int, world_size: int) -> None:
    """The same modules in the same order, the same numbers, and whole parameters."""
    for name in ("nested", "tied-across-units", "mlp"):
        case = CASES[name]
        plain, model = case.model(), case.wrap()
        seen: dict[nn.Module, list[str]] = {plain: [], model: []}
        with naming(name):
            for one, names in seen.items():
                torch.manual_seed(3)
                one.apply(partial(_initialise, names))
                names.append(str(torch.get_rng_state().sum()))
            assert seen[plain] == seen[model]
            assert_same_state(model.state_dict(), snapshot(plain), 0.0, 0.0)

            def fail(module: nn.Module) -> None:
                if isinstance(module, nn.Linear):
                    raise KeyError

            with pytest.raises(KeyError):
                model.apply(fail)
            assert_same_state(model.state_dict(), snapshot(plain), 0.0, 0.0)
            local_loss(model, case, 0, rank, world_size).backward()


def _initialise(names: list[str], module: nn.Module) -> None:
    """Draws, views that only whole parameters have, and a container that reaches into its parts."""
    names.append(type(module).__name__)
    if isinstance(module, nn.Linear):
        module.weight.data.normal_()
        module.weight.data[0].fill_(0.5)
    for name, param in module.named_parameters():
        if name.endswith("weight"):
            param.data.mul_(1.1).add_(torch.randn_like(param))


@on_ranks(1)
def test_isinstance_reaches_through(rank: int, world_size: int) -> None:
    module = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    with allow_warnings():
        model = ShardedWrapper(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert all(isinstance(model, kind) for kind in (nn.Sequential, ShardedWrapper, nn.Module))
    assert not isinstance(model, nn.Linear)
    assert [isinstance(child, nn.Linear) for child in model] == [True, False, True]
    assert type(model) is ShardedWrapper
    assert [type(child) for child in model.children()] == [nn.Linear, nn.ReLU, nn.Linear]
    assert all(child is model.module[number] for number, child in enumerate(model))
    assert isinstance(copy.deepcopy(model)[0], nn.Linear)
    assert repr(model).startswith("ShardedWrapper(")
    assert {"unit_report", "append", "module"} <= set(dir(model))
    # A hook that is installed by class runs once.
    calls: list[int] = []

    def install(module: nn.Module, key: int) -> None:
        for child in module.children():
            install(child, key)
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: calls.append(key))

    for key in (1, 2):
        install(model, key)
    model(torch.ones(2, 7))
    assert calls == [1, 2, 1, 2]
    # One checkpoint per layer: not one around the unit and one in it.
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    assert sum(type(module) is CheckpointWrapper for module in model.modules()) == 2
    assert all(isinstance(model[index], CheckpointWrapper) for index in (0, 2))
    model(torch.ones(2, 7)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


# ---------------------------------------------------------------- freed


class _Tagged(nn.Linear):
    """Reads and sets attributes of its weight, as quantized layers and K-FAC do."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.calls = getattr(self.weight, "calls", 0) + 1
        self.seen = getattr(self.weight, "between", None)
        return F.linear(x, self.weight * self.weight.scale, self.bias)


@on_ranks_each_way(2)
def test_attributes_of_parameters(rank: int, world_size: int, way: str) -> None:
    """Set before wrapping, in forward, in a hook or between steps, and read elsewhere."""
    module = nn.Sequential(_Tagged(4, 4), nn.Tanh(), _Tagged(4, 4))
    for layer in (module[0], module[2]):
        layer.weight.scale = torch.tensor(0.5)
    policy = ModuleWrapPolicy({_Tagged})
    model = ShardedWrapper(module, auto_wrap_policy=policy, coalesce_bytes=0, **BASIC[way].keywords)

    def keep(layer: nn.Module, *_: Any) -> None:
        layer.weight.grad_sample = torch.ones(3, 4, 4)  # type: ignore[union-attr]

    for layer in (model[0], model[2]):
        layer.register_full_backward_hook(keep)
    for step in range(2):
        model(torch.ones(3, 4, requires_grad=True)).sum().backward()
        for layer in (model[0], model[2]):
            weight = layer.weight
            assert weight.calls == step + 1
            assert weight.grad_sample.shape == (3, 4, 4)
            assert layer.seen == (None if step == 0 else 0)
            weight.between = step
        with ShardedWrapper.summon_full_params(model):
            assert model[0].weight.between == step
        if step == 0:
            model.double().float()


@on_ranks_each_way(2)
def test_tags_of_parameters(rank: int, world_size: int, way: str) -> None:
    """Tags such as ``p.role = "bias"`` stay, and change nothing of flatshard."""
    tags = {"role": "bias", "origin": "scratch", "flat": False, "is_parameter": False}
    tags |= {"tensor_parallel": True, "index": 3, "owner": None}
    case = CASES["mlp"]
    before, plain = case.model(), Run(case.model(), case, rank, world_size)
    for param in before.parameters():
        param.__dict__.update(tags)
    sharded = Run(case.wrap(before, **WAYS[way].keywords), case, rank, world_size)
    for step in range(3):
        for param in sharded.model.parameters():
            assert {name: param.__dict__[name] for name in tags} == tags
            for name, value in tags.items():
                setattr(param, name, value)
        for run in (sharded, plain):
            run.train(step, step + 1)
            assert all(param.detach().norm() >= 0 for param in run.model.parameters())
    assert_same_model(sharded, plain)
    assert_same(copy.deepcopy(sharded.model), plain.model, 0.0, 1e-12)
    weight = sharded.parameter("fc1.weight")
    if isinstance(weight, FlatShardTensor):
        assert sharded_tensor.attributes_of(copy.deepcopy(weight)).items() >= tags.items()
        # Every name that flatshard sets is known to `attributes_of`.
        assert sharded_tensor.attributes_of(weight).keys() == {*tags, "_is_param", "_full_of"}
        refused = "'local' of 'FlatShardTensor' object has no setter"
        with pytest.raises(AttributeError, match=refused):
            weight.local = True
        module = nn.Linear(4, 4)
        module.bias.text = "bias"
        with pytest.raises(ValueError, match="parameter 'bias' has an attribute 'text'"):
            ShardedWrapper(module)


class _Persistent(nn.Linear):
    """Pickles itself by a function, as the persistent classes of EDM and StyleGAN do."""

    def __reduce__(self) -> Any:
        return _restored, (super().__reduce__()[2],)


def _restored(state: dict[str, Any]) -> _Persistent:
    made = _Persistent.__new__(_Persistent)
    made.__dict__.update(state)
    return made


@on_ranks(2)
def test_copies_of_copies(rank: int, world_size: int) -> None:
    module = nn.Sequential(_Persistent(4, 4), nn.Tanh(), _Persistent(4, 4))
    policy = ModuleWrapPolicy({_Persistent})
    twin = model = ShardedWrapper(module, auto_wrap_policy=policy, coalesce_bytes=0)
    for _ in range(3):
        twin = copy.deepcopy(twin)
        twin.load_state_dict(model.state_dict())
    x = torch.randn(2, 4)
    assert torch.equal(twin(x), model(x))


@on_ranks(2)
def test_a_sharded_value_of_a_plain_tensors_data(rank: int, world_size: int) -> None:
    """As a teacher's average assigns it: reading the teacher names the reason."""
    model, teacher = ShardedWrapper(nn.Linear(8, 8)), nn.Linear(8, 8)
    teacher.weight.data = 0.5 * teacher.weight.data + 0.5 * model.module.weight.data
    with pytest.raises(RuntimeError, match=r"was assigned to \.data of a plain tensor.*copy_"):
        teacher(torch.ones(2, 8))


@on_ranks(2)
def test_state_of_another_optimizer(rank: int, world_size: int) -> None:
    model = ShardedWrapper(nn.Linear(4, 4))
    saved, loaded = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2, 4)).sum().backward()
    loaded.load_state_dict(saved.state_dict())
    assert_raises(RuntimeError, r"SGD.step\(\): a parameter group has no option", loaded.step)


def test_numbers_on_an_accelerator_are_not_compared() -> None:
    """So a tensor that was computed with one is not gathered: it may differ between ranks."""
    numbers = {device: torch.empty((), device=device) for device in ("cpu", "meta")}
    sources = {
        device: sharded_tensor.origin_of([number]).source for device, number in numbers.items()
    }
    assert sources == {"cpu": sharded_tensor.Source.OTHER, "meta": sharded_tensor.Source.DRAWN}
