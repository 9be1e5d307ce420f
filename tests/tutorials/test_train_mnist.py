"""The main job, scripts/train_mnist.py.

`test_documents.py` starts it as its reader would, with scripts/demo.sh.
"""

import json
import os
import re
import shutil
import signal
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from tests.harness import ROOT, allow_warnings, run_ranks
from tests.scripts import run_script, torchrun

SCRIPT = ROOT / "scripts" / "train_mnist.py"

pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(240)]
if not find_spec("sklearn"):
    pytest.skip('needs pip install ".[examples]"', allow_module_level=True)


def _train_on_digits(folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """Train on two ranks; returns the output and the results."""
    options = ("--data", "digits", "--epochs", "1", "--json", "results.json", *options)
    status, out, err = torchrun(2, SCRIPT, *options, environment={}, cwd=folder)
    assert status == 0, out + err
    return out, json.loads((folder / "results.json").read_text())


def test_learns_as_with_ddp_in_a_part_of_the_memory(tmp_path: Path) -> None:
    out, sharded = _train_on_digits(tmp_path)
    lines = out.splitlines()
    assert lines[0] == "Data: scikit-learn digits, enlarged to 28x28 (1,437 / 360)"
    assert lines[1] == "ShardedWrapper("
    (last,) = sharded["epochs"]
    assert re.search(
        r"^Train Epoch: 1 \tLoss: \d\.\d{6}\n"
        rf"Test set: Average loss: \d\.\d{{4}}, Accuracy: {last['correct']}/360 \(\d+\.\d\d%\)$",
        out,
        re.MULTILINE,
    )
    assert last["accuracy"] > 80
    assert len(sharded["step_losses"]) == 12

    _, replicated = _train_on_digits(tmp_path, "--ddp")
    assert sharded["step_losses"] == pytest.approx(replicated["step_losses"], rel=1e-4)
    full, ranks = replicated["memory"][0], sharded["memory"]
    for name in ("parameter_bytes", "gradient_bytes"):
        assert sum(rank[name] for rank in ranks) == full[name]
    # A step count for each of the eight parameters may be on both ranks.
    optimizer_bytes = sum(rank["optimizer_bytes"] for rank in ranks)
    assert 0 <= optimizer_bytes - full["optimizer_bytes"] <= 8 * 4
    assert all(rank["parameter_bytes"] < 0.55 * full["parameter_bytes"] for rank in ranks)


def write_mnist(root: Path) -> None:
    """Writes 6 and 4 gray images in MNIST's files."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 6), ("t10k", 4)):
        images = struct.pack(">iiii", 0x803, count, 28, 28) + bytes([128]) * (count * 28 * 28)
        labels = struct.pack(">ii", 0x801, count) + bytes(range(count))
        (raw / f"{part}-images-idx3-ubyte").write_bytes(images)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(labels)


def test_one_rank_without_torchrun_trains_on_mnist_files(tmp_path: Path) -> None:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        pytest.skip(f"torchvision cannot be imported: {error}")
    write_mnist(tmp_path)
    options = ["--epochs", "1", "--data-root", str(tmp_path)]
    status, out, err = run_script(SCRIPT, *options, cwd=tmp_path)
    assert status == 0, err
    assert out.startswith("Data: MNIST (6 / 4)\n")
    assert re.search(r"Accuracy: \d/4 ", out)


def train_without_dropout(_rank: int, world_size: int, *options: str) -> None:
    """Trains three epochs of two steps on noise, without dropout, whose numbers each rank draws."""
    import train_mnist as script

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(24, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (24,), generator=generator)
    noise = TensorDataset(images, labels)
    job = ["--epochs", "3", "--lr", "0.1", "--gamma", "0.5", "--batch-size", "12", *options]
    with (
        allow_warnings(),
        mock.patch.object(script.mnist_data, "load", return_value=("noise", (noise, noise))),
        mock.patch.object(torch.nn.Dropout, "forward", lambda self, x: x),
        mock.patch.object(signal, "signal"),
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(world_size)),
    ):
        script.train(script.parse_args(job), torch.device("cpu"))


def begin(_rank: int, world_size: int, *options: str) -> None:
    import train_mnist as script

    torch.manual_seed(0)
    net = script.Net()
    images, labels = torch.randn(7, 1, 28, 28), torch.arange(7)
    # The ranks have different numbers of samples, and each sample is counted once.
    loss, correct = script.evaluate(net.eval(), TensorDataset(images, labels), torch.device("cpu"))
    output = net.eval()(images)
    assert loss == pytest.approx(F.nll_loss(output, labels).item(), rel=1e-5)
    assert correct == int((output.argmax(1) == labels).sum())
    train_without_dropout(_rank, world_size, *options)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "how", ["--ddp", "--strategy SHARD_GRAD_OP --min-num-params 0 --offload-path {}"]
)
def test_resumes_on_another_number_of_ranks(how: str, tmp_path: Path) -> None:
    files = ["--checkpoint-dir", str(tmp_path), "--checkpoint-every", "3", "--json"]
    run_ranks(begin, 2, *files, str(tmp_path / "whole"))
    # Step 3 is the first step of the second epoch.
    shutil.rmtree(tmp_path / "step-00000006")
    parts = [str(tmp_path / "parts"), "--resume", *how.format(tmp_path).split()]
    run_ranks(train_without_dropout, 1, *files, *parts)
    whole, parts = (json.loads((tmp_path / name).read_text()) for name in ("whole", "parts"))
    assert len(parts["step_losses"]) == 6
    assert parts["step_losses"] == pytest.approx(whole["step_losses"], rel=1e-4)
    expected = [epoch["test_loss"] for epoch in whole["epochs"]]
    assert [epoch["test_loss"] for epoch in parts["epochs"]] == pytest.approx(expected, rel=1e-4)
