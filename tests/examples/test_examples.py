"""Scripts written for torch's own wrappers train the same with one line changed: the import."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.testing import assert_close

from tests.harness import allow_warnings, naming, run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
IMPORTS = {
    "ddp_example.py": (
        "from torch.nn.parallel import DistributedDataParallel as DDP\n",
        "from flatshard import ShardedWrapper as DDP\n",
    ),
    "fsdp_example.py": (
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n",
        "from flatshard import ShardedWrapper as FSDP\n",
    ),
}


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("ddp_example.py", []),
        ("fsdp_example.py", ["--strategy=SHARD_GRAD_OP"]),
        (
            "fsdp_example.py",
            ["--wrap=transformer", "--checkpoint-activations", "--use-orig-params"],
        ),
    ],
    ids=["ddp", "fsdp", "fsdp-checkpointing"],
)
def test_only_the_import_changes(script: str, options: list[str], tmp_path: Path) -> None:
    run_ranks(_run_both, 2, script, options, str(tmp_path), init_group=False)
    theirs, ours = (_results(tmp_path / name) for name in ("torch", "flatshard"))
    if "again" in ours:
        # The epoch after the checkpoint, and once more from the checkpoint.
        assert ours["again"] == ours["steps"][-len(ours["again"]) :]
    assert list(ours.pop("model_names")) == list(theirs.pop("model_names"))
    assert ours.keys() == theirs.keys()
    for key in theirs:
        with naming(key):
            assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-6)


def _run_both(rank: int, world_size: int, script: str, options: list[str], folder: str) -> None:
    text = (EXAMPLES / script).read_text()
    theirs, ours = IMPORTS[script]
    assert text.count(theirs) == 1
    # On the CPU, FSDP1 frees what it offloaded there: wrong state, or a crash.
    without = ["--no-offload"] if script == "fsdp_example.py" else []
    with allow_warnings():
        _run(text, script, [*options, *without, *_places(folder, "torch")])
    # The line that ignored keywords get, and nothing else.
    with allow_warnings(UserWarning, "ShardedWrapper ignores (find_unused|use_orig)_param"):
        _run(text.replace(theirs, ours), script, [*options, *_places(folder, "flatshard")])


def _places(folder: str, name: str) -> list[str]:
    return [f"--out={folder}/{name}", f"--dist-url=file://{folder}/{name}-store"]


def _run(text: str, script: str, options: list[str]) -> None:
    """As ``python script options`` does."""
    with mock.patch.object(sys, "argv", [script, *options]):
        exec(compile(text, script, "exec"), {"__name__": "__main__"})


def _results(folder: Path) -> dict[str, Any]:
    curves = json.loads((folder / "curves.json").read_text())
    checkpoint = torch.load(folder / "checkpoint.pt")
    curves["model"], curves["model_names"] = dict(checkpoint["model"]), list(checkpoint["model"])
    if "optimizer" in checkpoint:
        curves["optimizer"] = checkpoint["optimizer"]["state"]
    return curves
