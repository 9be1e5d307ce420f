"""A script written for torch's own wrapper trains the same with one line changed: the import."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.testing import assert_close

from tests.harness import allow_warnings, naming, run_ranks

SCRIPT = Path(__file__).parents[1] / "examples" / "fsdp_example.py"
THEIRS = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
OURS = "from flatshard import ShardedWrapper as FSDP\n"


@pytest.mark.parametrize(
    "options",
    [
        ["--strategy=SHARD_GRAD_OP"],
        ["--wrap=transformer", "--checkpoint-activations", "--use-orig-params"],
    ],
    ids=["fsdp", "fsdp-checkpointing"],
)
def test_only_the_import_changes(options: list[str], tmp_path: Path) -> None:
    run_ranks(_run_both, 2, options, str(tmp_path))
    theirs, ours = (_results(tmp_path / name) for name in ("torch", "flatshard"))
    # The epoch after the checkpoint, and once more from the checkpoint.
    assert ours["again"] == ours["steps"][-len(ours["again"]) :]
    assert list(ours.pop("model_names")) == list(theirs.pop("model_names"))
    assert ours.keys() == theirs.keys()
    for key in theirs:
        with naming(key):
            assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-6)


def _run_both(rank: int, world_size: int, options: list[str], folder: str) -> None:
    text = SCRIPT.read_text()
    assert text.count(THEIRS) == 1
    with allow_warnings():
        # On the CPU, FSDP1 frees what it offloaded there: wrong state, or a crash.
        _run(text, [*options, "--no-offload", f"--out={folder}/torch"])
    # The line that ignored keywords get, and nothing else.
    with allow_warnings(UserWarning, "ShardedWrapper ignores use_orig_param"):
        _run(text.replace(THEIRS, OURS), [*options, f"--out={folder}/flatshard"])


def _run(text: str, options: list[str]) -> None:
    """As ``python script options`` does."""
    with mock.patch.object(sys, "argv", [SCRIPT.name, *options]):
        exec(compile(text, SCRIPT.name, "exec"), {"__name__": "__main__"})


def _results(folder: Path) -> dict[str, Any]:
    curves = json.loads((folder / "curves.json").read_text())
    checkpoint = torch.load(folder / "checkpoint.pt")
    names = list(checkpoint["model"])
    state = checkpoint["optimizer"]["state"]
    return {**curves, "model": dict(checkpoint["model"]), "model_names": names, "optimizer": state}
