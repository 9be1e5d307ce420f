"""Every public name of torch's own wrappers has its fate here, also in a newer torch."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from flatshard import CPUOffload, MixedPrecision, ShardedWrapper, wrapper
from flatshard.extras import torch_names
from tests.harness import allow_warnings, assert_raises, on_ranks
from tests.oracle import assert_identical

DOCS = Path(__file__).resolve().parents[3] / "docs" / "migration.md"
WRAPPERS = [DistributedDataParallel, fsdp.FullyShardedDataParallel]
OURS = {*inspect.signature(ShardedWrapper.__init__).parameters, *wrapper.RARE}


@pytest.mark.parametrize("wrapper", [*(one.__init__ for one in WRAPPERS), fsdp.fully_shard])
def test_every_keyword(wrapper: Any) -> None:
    theirs = {name for name in inspect.signature(wrapper).parameters if name != "self"}
    others = {*torch_names.IGNORED, *torch_names.REFUSED, *torch_names.OTHER_NAMES}
    assert not theirs - others - OURS, "torch has new keywords: give each a fate"
    assert {name for name, fate, _ in _told() if fate == "same"} >= theirs & OURS


@pytest.mark.parametrize("wrapper", [*WRAPPERS, fsdp.FSDPModule])
def test_every_method(wrapper: Any) -> None:
    own = set(dir(wrapper)) - set(dir(nn.Module)) - {"module", "broadcast_buffers"}
    public = {name for name in own if not name.startswith("_")}
    missing = {name for name in public if not hasattr(ShardedWrapper, name)}
    assert not missing - set(torch_names.MISSING_METHODS), "torch has new methods: give each a fate"
    is_of_module = wrapper is fsdp.FSDPModule
    assert is_of_module or {name for name, fate, _ in _told() if fate == "same"} >= public - missing
    assert not [name for name in torch_names.MISSING_METHODS if hasattr(ShardedWrapper, name)]


def test_defaults_are_torchs() -> None:
    theirs = inspect.signature(DistributedDataParallel.__init__).parameters
    for name in torch_names.IGNORED | torch_names.REFUSED:
        if name in theirs:
            assert theirs[name].default in (None, torch_names.DEFAULTS.get(name, False)), name


def _told() -> list[tuple[str, ...]]:
    """Name, fate and note of every name in the tables for torch's wrappers."""
    rows = r"^\| (`[^|]*`) \|[^|]*\| (same|other name|ignored|raises) \| (.*) \|$"
    found = re.findall(rows, DOCS.read_text(), re.MULTILINE)
    return [(name, *rest) for names, *rest in found for name in re.findall(r"`(\w+)`", names)]


def test_docs_have_the_tables() -> None:
    expected = {(name, "ignored", why) for name, why in torch_names.IGNORED.items()}
    expected |= {(name, "raises", why) for name, why in torch_names.REFUSED.items()}
    expected |= {(name, "raises", why) for name, why in torch_names.MISSING_METHODS.items()}
    assert not expected - set(_told())
    renamed = {name for name, fate, _ in _told() if fate == "other name"}
    assert renamed >= set(torch_names.OTHER_NAMES)
    for name in torch_names.ATTRIBUTES:
        assert f"`{name}`" in DOCS.read_text()


def test_ignored_keywords_warn_once() -> None:
    keywords = {"bucket_cap_mb": 25, "find_unused_parameters": False, "shard_placement_fn": len}
    meant, notes = torch_names.read_keywords(keywords, {})
    assert meant == {}
    assert [note.split(":")[0] for note in notes] == ["bucket_cap_mb", "shard_placement_fn"]


MESHES = "mesh=1 contradicts another keyword, which gives device_mesh=2. Pass"


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"device_ids": [0, 1]}, ValueError, "one device"),
        ({"device_ids": [0], "output_device": 1}, ValueError, "contradicts .* device_id=0"),
        ({"mesh": 1}, ValueError, MESHES),
        ({"dp_mesh_dims": 1}, NotImplementedError, "pass these dimensions of the mesh"),
        ({"dim": 1}, NotImplementedError, "not scattered"),
        ({"param_to_hook_all_reduce": 1}, NotImplementedError, "complete"),
        ({"bucket_cap_mbs": 1}, TypeError, "Did you mean 'bucket_cap_mb'"),
        ({"shardingstrategy": 1}, TypeError, "Did you mean 'sharding_strategy'"),
        ({"ignore_modules": []}, TypeError, "Did you mean 'ignored_modules'"),
    ],
)
def test_refused_keywords(keywords: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        torch_names.read_keywords(keywords, dict.fromkeys(OURS) | {"device_mesh": 2})


@on_ranks(2)
def test_keywords_of_fully_shard(rank: int, world_size: int) -> None:
    """A program for FSDP2 keeps its keywords, and trains as with ours."""
    mesh, dtypes = init_device_mesh("cpu", (2,)), (torch.float32, torch.bfloat16)

    def trained(ignored_name: str, **keywords: Any) -> ShardedWrapper:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        ignored = {ignored_name: {module[1].bias}}
        with allow_warnings(message="cpu_offload has no effect on parameters"):
            model = ShardedWrapper(module, reshard_after_forward=False, **ignored, **keywords)
        assert type(module[1].bias) is nn.Parameter, "it is sharded"
        model(torch.full((2, 4), 1.0 + rank)).sum().backward()
        torch.optim.SGD([p for p in model.parameters() if p is not module[1].bias], 0.1).step()
        return model

    policies = fsdp.MixedPrecisionPolicy(*dtypes), fsdp.CPUOffloadPolicy()
    own = MixedPrecision(*dtypes), CPUOffload(offload_params=True)
    theirs = trained("ignored_params", mesh=mesh, mp_policy=policies[0], offload_policy=policies[1])
    ours = trained("ignored_states", device_mesh=mesh, mixed_precision=own[0], cpu_offload=own[1])
    assert_identical(theirs.state_dict(), ours.state_dict())
    assert (theirs.mixed_precision, theirs.cpu_offload) == (ours.mixed_precision, ours.cpu_offload)
    with pytest.raises(ValueError, match=r"mesh=DeviceMesh.* contradicts another keyword"):
        ShardedWrapper(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)), device_mesh=mesh)
    with pytest.raises(ValueError, match="pass either process_group or device_mesh, not both"):
        ShardedWrapper(nn.Linear(2, 2), torch.distributed.group.WORLD, mesh=mesh)
    with pytest.raises(AttributeError, match=r"set_requires_gradient_sync is not .*no_sync"):
        theirs.set_requires_gradient_sync(False)


def test_devices_as_the_second_argument() -> None:
    """It is DistributedDataParallel's ``device_ids``."""
    with pytest.raises(TypeError, match=r"got \[0\]\. Pass a list of devices, .*as device_ids="):
        ShardedWrapper(nn.Linear(2, 2), [0])  # type: ignore[arg-type]


def test_other_names() -> None:
    names = {"device_ids": [1], "output_device": "cuda:1", "forward_sync_buffers": False}
    own = {"device_id": None, "broadcast_buffers": False, "sync_module_states": None}
    expected = {"device_id": 1, "broadcast_buffers": False, "sync_module_states": True}
    assert torch_names.read_keywords(names, own) == (expected, [])
    with pytest.raises(ValueError, match="contradicts another keyword, which"):
        torch_names.read_keywords(names, own | {"broadcast_buffers": True})
    own_values = torch_names.read_keywords({"init_sync": False}, own)
    assert own_values == (own | {"sync_module_states": False}, [])


def test_attributes_and_refused_methods() -> None:
    with pytest.warns(UserWarning, match="trains alone"):
        model = ShardedWrapper(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    for name in torch_names.ATTRIBUTES:
        getattr(model, name)
    assert model.require_backward_grad_sync
    assert model.will_sync_module_buffers()
    with model.no_sync():
        assert not model.require_backward_grad_sync
        assert model.will_sync_module_buffers()  # the first forward inside does
    assert model.check_is_root()
    assert ShardedWrapper.fsdp_modules(model) == [model]
    with ShardedWrapper.state_dict_type(model, "FULL_STATE_DICT"):
        assert next(iter(model.state_dict())) == "0.weight"
    with pytest.raises(NotImplementedError, match="got LOCAL_STATE_DICT"):
        ShardedWrapper.set_state_dict_type(model, "LOCAL_STATE_DICT")
    for name in ("join_hook", "scatter", "full_optim_state_dict"):
        for owner in (model, ShardedWrapper):
            assert_raises(AttributeError, f"{name} is not available", getattr, owner, name)
    with pytest.raises(AttributeError, match="type object 'ShardedWrapper' has no attribute 'fo'"):
        ShardedWrapper.fo  # noqa: B018
