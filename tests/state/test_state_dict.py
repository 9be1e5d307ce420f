"""Model state dicts: full tensors under the unwrapped model's names, on every rank."""

import io

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp.api import StateDictSettings

from flatshard import ShardedWrapper
from flatshard.state.model_state import without_ddp_prefix
from tests.harness import assert_raises, naming, on_ranks
from tests.models import CASES, Case
from tests.oracle import assert_identical, local_loss, sgd, snapshot, train_steps
from tests.ways import WAYS, on_ranks_each_way

pytestmark = pytest.mark.by_turns


# ---------------------------------------------------------------- saving


MODELS = (
    *("mlp", "tied-in-unit", "tied-across-units", "tied-blocks", "nested", "odd-shapes"),
    *("mixed-types", "batch-norm", "frozen", "cnn-channels-last", "lstm", "multihead"),
)


@on_ranks_each_way(2)
def test_equals_the_plain_models(rank: int, world_size: int, way: str) -> None:
    for name in MODELS:
        with naming(name):
            _equals_the_plain_models(rank, world_size, CASES[name], way)


def _equals_the_plain_models(rank: int, world_size: int, case: Case, way: str) -> None:
    plain = case.model()
    model = case.wrap(**WAYS[way].keywords)
    with naming("before the first forward"):
        _assert_same_everywhere(model, plain)
    model.eval()  # leaves batch norm's buffers alone
    loss = local_loss(model, case, 0, rank, world_size)
    with naming("between forward and backward"):
        _assert_same_everywhere(model, plain)
    loss.backward()
    with naming("after backward"):
        _assert_same_everywhere(model, plain)
    with torch.no_grad(), naming("under no_grad"):
        local_loss(model, case, 0, rank, world_size)
        _assert_same_everywhere(model, plain)


def _assert_same_everywhere(model: ShardedWrapper, plain: nn.Module) -> None:
    """For the wrapper, the module in it, and the parts of the model."""
    assert_identical(model.state_dict(), plain.state_dict())
    assert_identical(model.module.state_dict(), plain.state_dict())
    for name, _ in plain.named_modules():
        with naming(f"part {name!r}"):
            part = plain.get_submodule(name)
            assert_identical(model.get_submodule(name).state_dict(), part.state_dict())
    for one, other in ((model, plain), (model.module, plain)):
        listed, expected = (
            [
                [name for name, _ in each.named_buffers()],
                [(name, param.shape) for name, param in each.named_parameters()],
                [(name, type(module)) for name, module in each.named_modules()],
            ]
            for each in (one, other)
        )
        assert listed == expected


@on_ranks_each_way(2)
def test_loaded_on_one_rank_alone(rank: int, world_size: int, way: str) -> None:
    """Its parts would be of one model, and those of the other ranks of another model."""
    case = CASES["tied-in-unit"]
    model = case.wrap(**WAYS[way].keywords)
    early = model.state_dict()
    train_steps(model, sgd(model), case, rank, world_size)
    assert_identical(early, case.model().state_dict())  # training left it alone
    expected = snapshot(model)
    if rank == 0:
        model.load_state_dict(expected)
    loss = model(case.batch(0, 2)[0]).sum()
    text = r"numbers of times. .* a state dict of .*unit.* is \d on rank 0, nothing on rank 1"
    assert_raises(RuntimeError, text, loss.backward)
    if rank == 1:
        model.load_state_dict(expected)
    model(case.batch(0, 2)[0]).sum().backward()


@on_ranks(2)
def test_prefix_and_pickling(rank: int, world_size: int) -> None:
    case = CASES["nested"]
    plain = case.model()
    model = case.wrap()
    assert_identical(model.state_dict(prefix="net."), plain.state_dict(prefix="net."))
    parent, plain_parent = nn.ModuleDict({"a": model}), nn.ModuleDict({"a": plain})
    assert_identical(parent.state_dict(), plain_parent.state_dict())

    state = model.state_dict()
    saved = _saved(state)
    assert_identical(torch.load(io.BytesIO(saved), weights_only=True), plain.state_dict())
    assert all(type(value) is Tensor for value in state.values())
    # Views of one gathered buffer would each be saved with all of it.
    assert len(saved) < 2 * len(_saved(plain.state_dict()))


def _saved(state: dict[str, Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


# ---------------------------------------------------------------- FSDP1's settings

FULL = fsdp.StateDictType.FULL_STATE_DICT
ON_RANK_0 = fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


@on_ranks_each_way(2)
def test_on_rank_0_alone(rank: int, world_size: int, way: str) -> None:
    """Of the wrapper, the module in it and the parts: whole on rank 0, empty elsewhere."""
    for name in ("nested", "tied-across-units", "batch-norm"):
        case = CASES[name]
        plain, model = case.model(), case.wrap(**WAYS[way].keywords)
        with naming(name), ShardedWrapper.state_dict_type(model, FULL, ON_RANK_0):
            for part, whole in plain.named_modules():
                expected = whole.state_dict() if rank == 0 else {}
                assert_identical(model.get_submodule(part).state_dict(), expected)
            state = nn.ModuleDict({"a": model, "b": nn.Linear(1, 1)}).state_dict()
            assert "b.bias" in state
            assert any(key.startswith("a.") for key in state) is (rank == 0)
            assert (len(model.state_dict(keep_vars=True)) > 0) is (rank == 0)
        # As before the context, on all ranks.
        assert_identical(model.state_dict(), plain.state_dict())


@on_ranks(2)
def test_settings_of_state_dicts(rank: int, world_size: int) -> None:
    case = CASES["nested"]
    model = case.wrap()
    optimizer = sgd(model)
    train_steps(model, optimizer, case, rank, world_size, steps=1)
    on_rank_0 = fsdp.FullOptimStateDictConfig(rank0_only=True)
    default = StateDictSettings(FULL, fsdp.FullStateDictConfig(), fsdp.FullOptimStateDictConfig())
    chosen = StateDictSettings(FULL, ON_RANK_0, on_rank_0)
    get, optim_state = ShardedWrapper.get_state_dict_type, ShardedWrapper.optim_state_dict

    def leave_by_an_error() -> None:
        with ShardedWrapper.state_dict_type(model, FULL, ON_RANK_0, on_rank_0):
            assert get(model) == get(model.outer) == chosen
            assert bool(optim_state(model, optimizer)) is (rank == 0)
            assert optim_state(model, optimizer, rank0_only=False)["state"]
            raise KeyError

    with pytest.raises(KeyError):
        leave_by_an_error()
    assert get(model) == get(nn.Sequential(model)) == get(nn.Linear(1, 1)) == default
    assert ShardedWrapper.set_state_dict_type(model, FULL, ON_RANK_0, on_rank_0) == default
    assert ShardedWrapper.set_state_dict_type(model, "FULL_STATE_DICT") == chosen
    assert optim_state(model, optimizer)["state"]

    ShardedWrapper.set_state_dict_type(model.outer, FULL, ON_RANK_0)
    assert_raises(RuntimeError, "differ", get, model)
    for wrong in ("FULL", fsdp.StateDictType.LOCAL_STATE_DICT):
        with pytest.raises(NotImplementedError, match=r"SHARDED\w+, got (FULL|LOCAL_)"):
            ShardedWrapper.set_state_dict_type(model, wrong)
    sharded = StateDictSettings(
        fsdp.StateDictType.SHARDED_STATE_DICT,
        fsdp.ShardedStateDictConfig(),
        fsdp.ShardedOptimStateDictConfig(),
    )
    with ShardedWrapper.state_dict_type(model, "SHARDED_STATE_DICT"):
        assert get(model) == sharded
    for configs in ((fsdp.ShardedStateDictConfig(),), (on_rank_0,), (None, ON_RANK_0)):
        with pytest.raises(TypeError, match=r"must be torch's Full\w+Config"):
            ShardedWrapper.set_state_dict_type(model, FULL, *configs)


# ---------------------------------------------------------------- loading


def _other_weights(name: str) -> dict[str, Tensor]:
    """Weights, and buffers, that differ from the case's own."""
    state = {}
    for key, value in CASES[name].model().state_dict().items():
        offset = torch.arange(value.numel(), dtype=torch.float64).view(value.shape) / 100
        state[key] = value + offset.to(value.dtype)
    model = CASES[name].model()
    model.load_state_dict(state)  # so that tied weights agree
    return snapshot(model)


def test_ddp_prefix_and_a_child_named_module() -> None:
    assert without_ddp_prefix({"module.module.w": 1}, {"module.w"}) == {"module.w": 1}
    assert without_ddp_prefix({"module.module.w": 1}, {"module.module.w"}) == {"module.module.w": 1}


PLAIN = ("mlp", "tied-across-units", "nested", "odd-shapes", "mixed-types", "batch-norm")


@on_ranks_each_way(2)
def test_load_from_a_plain_model_or_ddp(rank: int, world_size: int, way: str) -> None:
    for name, prefix in [*((name, "") for name in PLAIN), ("batch-norm", "module.")]:
        with naming((name, prefix)):
            _load(rank, world_size, name, way, prefix)


def _load(rank: int, world_size: int, name: str, way: str, prefix: str) -> None:
    case = CASES[name]
    model = case.wrap(**WAYS[way].keywords)
    # Something is gathered, and perhaps kept, that has to be forgotten.
    local_loss(model, case, 0, rank, world_size)
    state = _other_weights(name)
    given = {prefix + key: value for key, value in state.items()}
    before = dict(given)
    result = model.load_state_dict(given)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert list(given) == list(before), "the caller's dict was changed"
    assert_identical(model.state_dict(), state)

    plain = case.model()
    plain.load_state_dict(state)
    inputs = case.batch(1, 3)[0]
    model.eval()
    plain.eval()
    torch.testing.assert_close(model(inputs), plain(inputs), rtol=0.0, atol=1e-14)


@on_ranks_each_way(2)
def test_missing_and_unexpected_keys(rank: int, world_size: int, way: str) -> None:
    case = CASES["nested"]
    model = case.wrap(**WAYS[way].keywords)
    plain = case.model()
    state = _other_weights("nested")
    for gone in ("outer.first.gain", "head.bias"):
        del state[gone]
    state["outer.first.linear.extra"] = torch.ones(1)
    state["other"] = torch.ones(1)

    expected = plain.load_state_dict(dict(state), strict=False)
    result = model.load_state_dict(dict(state), strict=False)
    assert result == expected  # missing and unexpected keys
    assert_identical(model.state_dict(), plain.state_dict())
    for key in ("outer.first.gain", "head.bias", "outer.first.linear.extra", "other"):
        assert_raises(RuntimeError, rf'"{key}"', model.load_state_dict, dict(state))


@on_ranks_each_way(2)
def test_a_refused_load_changes_nothing(rank: int, world_size: int, way: str) -> None:
    """The error about a wrong shape names the parameter."""
    model = CASES["nested"].wrap(**WAYS[way].keywords)
    before = snapshot(model)
    # Transposed, flattened: the number of elements alone must not decide.
    for wrong in (torch.ones(3, 8), torch.ones(7, 3), torch.ones(21), torch.tensor(1.0)):
        for others in (before, {}):
            given = {**others, "head.weight": wrong}
            with pytest.raises((RuntimeError, ValueError), match=r"\bhead\.weight\b"):
                model.load_state_dict(given, strict=bool(others))
    for target in (model, model.module, model.outer):
        with pytest.raises(ValueError, match="assign=True"):
            target.load_state_dict(target.state_dict(), assign=True)
    assert_identical(model, before)
