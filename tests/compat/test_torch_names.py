"""Every public name of torch's own wrappers has its fate here, also in a newer torch."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from flatshard import ShardedWrapper
from flatshard.compat import torch_names
from flatshard.compat.torch_names import Fate

DOCS = Path(__file__).resolve().parents[2] / "docs" / "migration.md"
WRAPPERS = [DistributedDataParallel, FullyShardedDataParallel]
OURS = inspect.signature(ShardedWrapper.__init__).parameters


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_keyword(wrapper: Any) -> None:
    theirs = [name for name in inspect.signature(wrapper.__init__).parameters if name != "self"]
    assert not set(theirs) - set(torch_names.KEYWORDS), "torch has new keywords: give each a fate"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_method(wrapper: Any) -> None:
    own = set(dir(wrapper)) - set(dir(nn.Module)) - {"module", "broadcast_buffers"}
    public = {name for name in own if not name.startswith("_")}
    assert not public - set(torch_names.METHODS), "torch has new methods: give each a fate"


def test_methods_are_there_as_told() -> None:
    for name, entry in torch_names.METHODS.items():
        has = hasattr(ShardedWrapper, name)
        assert has is (entry.fate is Fate.SAME), f"{name} is {'' if has else 'not '}there"


def test_same_keywords_are_the_constructors() -> None:
    same = {name for name, entry in torch_names.KEYWORDS.items() if entry.fate is Fate.SAME}
    assert not same - set(OURS)


def test_defaults_are_torchs() -> None:
    theirs = inspect.signature(DistributedDataParallel.__init__).parameters
    for name, entry in torch_names.KEYWORDS.items():
        if name in theirs and entry.fate in (Fate.IGNORED, Fate.RAISES):
            assert entry.default == theirs[name].default, name


def test_docs_have_the_tables() -> None:
    text = DOCS.read_text()
    fates = "|".join(fate.value for fate in Fate)
    told = re.findall(rf"^\| `\w+` \| (?:{fates}) \| .*$", text, re.MULTILINE)
    rows = {**torch_names.KEYWORDS, **torch_names.METHODS}
    expected = {f"| `{name}` | {one.fate.value} | {one.text} |" for name, one in rows.items()}
    assert not expected - set(told)
    for name, (words, _) in torch_names.DDP_ATTRIBUTES.items():
        assert f"`{name}` ({words})" in text


def test_ignored_keywords_warn_once() -> None:
    given = torch_names.read_keywords(
        {"bucket_cap_mb": 25, "static_graph": True, "find_unused_parameters": False}, OURS
    )
    assert given.ours == {}
    assert [note.split(":")[0] for note in given.notes] == ["bucket_cap_mb", "static_graph"]


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"device_ids": [0, 1]}, ValueError, "one device"),
        ({"device_ids": [0], "output_device": 1}, ValueError, "outputs stay where the module"),
        ({"dim": 1}, NotImplementedError, "not scattered"),
        ({"param_to_hook_all_reduce": 1}, NotImplementedError, "complete"),
        ({"bucket_cap_mbs": 1}, TypeError, "Did you mean 'bucket_cap_mb'"),
        ({"shardingstrategy": 1}, TypeError, "Did you mean 'sharding_strategy'"),
    ],
)
def test_refused_keywords(keywords: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        torch_names.read_keywords(keywords, OURS)


def test_other_names() -> None:
    given = torch_names.read_keywords(
        {
            "device_ids": [1],
            "output_device": "cuda:1",
            "forward_sync_buffers": False,
            "init_sync": False,
        },
        OURS,
    )
    assert given.ours == {
        "device_id": 1,
        "broadcast_buffers": False,
        "sync_module_states": False,
    }
    given.check_against(device_id=None, broadcast_buffers=False, sync_module_states=None)
    with pytest.raises(ValueError, match=re.escape("broadcast_buffers=True contradicts")):
        given.check_against(device_id=None, broadcast_buffers=True, sync_module_states=None)


def test_attributes_and_refused_methods() -> None:
    with pytest.warns(UserWarning, match="trains alone"):
        model = ShardedWrapper(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    for name in torch_names.DDP_ATTRIBUTES:
        getattr(model, name)
    assert model.require_backward_grad_sync
    assert model.will_sync_module_buffers()
    with model.no_sync():
        assert not model.require_backward_grad_sync
        assert not model.will_sync_module_buffers()
    assert model.check_is_root()
    assert ShardedWrapper.fsdp_modules(model) == [model]
    with ShardedWrapper.state_dict_type(model, "FULL_STATE_DICT"):
        assert next(iter(model.state_dict())) == "0.weight"
    with pytest.raises(NotImplementedError, match="got SHARDED_STATE_DICT"):
        ShardedWrapper.set_state_dict_type(model, "SHARDED_STATE_DICT")
    for name in ("join", "scatter", "full_optim_state_dict"):
        with pytest.raises(AttributeError, match=f"{name} is not available"):
            getattr(model, name)
