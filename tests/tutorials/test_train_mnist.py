"""The main job, scripts/train_mnist.py.

`test_documents.py` starts it as its reader would, with scripts/demo.sh.
"""

import contextlib
import gzip
import io
import json
import os
import re
import signal
import struct
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from tests.harness import allow_warnings, run_ranks
from tests.scripts import Started, run_script, torchrun

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "train_mnist.py"
NUM_STEPS = 14  # two steps into the second epoch

pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(240)]
if not all(map(find_spec, ("rich", "sklearn", "tqdm"))):
    pytest.skip('needs pip install ".[examples]"', allow_module_level=True)


def run(*options: str, cwd: Path, first: Sequence[Path] = ()) -> list[str]:
    """The script's output, `first` heading its path."""
    status, out, err = run_script(SCRIPT, *options, cwd=cwd, first=first)
    assert status == 0, out + err
    return out.splitlines()


def load_script() -> ModuleType:
    import train_mnist

    return train_mnist


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Job:
    """A finished run on two ranks: what it printed and wrote."""

    def __init__(self, folder: Path, *options: str, num_steps: int = NUM_STEPS) -> None:
        self.saved = folder / "net.pt"
        files = ["--json", str(folder / "results.json"), "--save", str(self.saved)]
        files += ["--log-file", str(folder / "log.jsonl")]
        steps = ["--max-steps", str(num_steps)]
        self.lines = run("--world-size", "2", *steps, *files, *options, cwd=folder)
        self.results = json.loads((folder / "results.json").read_text())
        self.log = records(folder / "log.jsonl")
        files = sorted(p.name for p in folder.iterdir())
        assert files == ["log.jsonl", "net.pt", "results.json"]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("sharded"))


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("replicated"), "--ddp")


def test_says_what_it_does(sharded: Job) -> None:
    data = "Data: scikit-learn digits, enlarged to 28x28 (1,437 / 360): MNIST files not found in "
    assert sharded.lines[0] == data + "data"
    assert sharded.lines[1].startswith("Ranks: 2 on ")
    assert sharded.lines[2] == "ShardedWrapper("
    assert "(fc1): ShardedWrapper(" in map(str.strip, sharded.lines)
    text = "\n".join(sharded.lines)
    for epoch in (1, 2):
        assert re.search(
            rf"^Train Epoch: {epoch} \tLoss: \d\.\d{{6}}\n"
            r"Test set: Average loss: \d\.\d{4}, Accuracy: \d+/360 \(\d+\.\d\d%\)$",
            text,
            re.MULTILINE,
        )
    assert re.search(r"^Elapsed: \d+\.\d\d seconds$", text, re.MULTILINE)
    assert sharded.lines[-1] == "Saved net.pt after epoch 1 and 2 steps"
    for row in ("0", "1", "DDP"):
        assert re.search(rf"│ +{row} │ +\d+\.\d\d │ +\d+\.\d\d │ +\d+\.\d\d │", text)


def test_results_file(sharded: Job) -> None:
    results = sharded.results
    assert results["parallel"] == "FULL_SHARD"
    assert (results["train_samples"], results["test_samples"]) == (1437, 360)
    assert [epoch["steps"] for epoch in results["epochs"]] == [12, 2]
    assert len(results["step_losses"]) == NUM_STEPS
    assert results["step_losses"][-1] < 1.5 < results["step_losses"][0]
    last = results["epochs"][-1]
    assert last["train_loss"] == pytest.approx(sum(results["step_losses"][12:]) / 2)
    assert last["accuracy"] == pytest.approx(100 * last["correct"] / 360)

    first, *lines = sharded.log
    assert first["settings"]["max_steps"] == NUM_STEPS
    assert [line for line in lines if "epoch" in line] == results["epochs"]
    steps = [(line["step"], line["loss"]) for line in lines if "step" in line]
    assert steps == list(enumerate(results["step_losses"], 1))


def test_saved_weights_fit_the_plain_network(sharded: Job) -> None:
    from lib import mnist_data

    net = load_script().Net().eval()
    net.load_state_dict(torch.load(sharded.saved)["model"])
    images, labels = mnist_data.load_digits()[1].tensors
    with torch.no_grad():
        output = net(images)
    last = sharded.results["epochs"][-1]
    assert F.nll_loss(output, labels).item() == pytest.approx(last["test_loss"], rel=1e-4)
    assert int((output.argmax(1) == labels).sum()) == last["correct"]


def test_ranks_share_what_ddp_repeats(sharded: Job, replicated: Job) -> None:
    full = sharded.results["ddp_memory"]
    for rank in replicated.results["memory"]:
        assert {name: rank[name] for name in full} == full

    ranks = sharded.results["memory"]
    assert len(ranks) == 2
    for name in ("parameter_bytes", "gradient_bytes"):
        assert sum(rank[name] for rank in ranks) == full[name]
    # A step count for each of the eight parameters may be on both ranks.
    optimizer_bytes = sum(rank["optimizer_bytes"] for rank in ranks)
    assert 0 <= optimizer_bytes - full["optimizer_bytes"] <= 8 * 4
    assert all(rank["parameter_bytes"] < 0.55 * full["parameter_bytes"] for rank in ranks)
    assert all(rank["peak_bytes"] > full["parameter_bytes"] for rank in ranks)


def test_same_losses_as_ddp(sharded: Job, replicated: Job) -> None:
    expected = replicated.results["step_losses"]
    assert sharded.results["step_losses"] == pytest.approx(expected, rel=1e-4)


def test_goes_on_sharded_where_ddp_was_left(replicated: Job, tmp_path: Path) -> None:
    options = ["--ddp", "--data", "digits", "--max-steps", "1", "--save", "one.pt"]
    status, out, err = torchrun(2, SCRIPT, *options, environment=os.environ, cwd=tmp_path)
    assert status == 0, out + err
    assert out.splitlines()[0] == "Data: scikit-learn digits, enlarged to 28x28 (1,437 / 360)"
    # The options change where the parameters are, not what they become.
    (tmp_path / "job").mkdir()
    spread = "--strategy SHARD_GRAD_OP --min-num-params 0 --offload-path .".split()
    job = Job(tmp_path / "job", *spread, "--resume", "../one.pt", num_steps=4)
    assert "Resumed after epoch 0 and 1 steps" in job.lines
    expected = replicated.results["step_losses"][1:4]
    assert job.results["step_losses"] == pytest.approx(expected, rel=1e-4)


def write_mnist(root: Path) -> None:
    """Writes 6 and 4 gray images in MNIST's files, packed as they are published."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 6), ("t10k", 4)):
        images = struct.pack(">iiii", 0x803, count, 28, 28) + bytes([128]) * (count * 28 * 28)
        labels = struct.pack(">ii", 0x801, count) + bytes(range(count))
        for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
            with gzip.open(raw / f"{part}-{kind}-ubyte.gz", "wb") as file:
                file.write(content)


def test_takes_mnist_where_it_is(tmp_path: Path) -> None:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        pytest.skip(f"torchvision cannot be imported: {error}")
    write_mnist(tmp_path)
    options = ["--ddp", "--world-size", "1", "--epochs", "1", "--data-root", str(tmp_path)]
    lines = run(*options, cwd=tmp_path)
    assert lines[0] == f"Data: MNIST (6 / 4) from {tmp_path}"
    assert any(re.search(r"Accuracy: \d/4 ", line) for line in lines)


def test_says_why_mnist_is_not_taken(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    broken = tmp_path / "path" / "torchvision"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('built for\\nanother torch')")
    options = ["--ddp", "--world-size", "1", "--max-steps", "1", "--data-root", "."]
    lines = run(*options, cwd=tmp_path, first=[broken.parent])
    assert lines[0].endswith(": torchvision cannot be imported (built for another torch)")


def evaluate_uneven() -> None:
    """Each sample is counted once, also where ranks have not equally many."""
    script = load_script()
    torch.manual_seed(0)
    net = script.Net()
    images, labels = torch.randn(7, 1, 28, 28), torch.arange(7)
    loss, correct = script.evaluate(net, TensorDataset(images, labels), 3, torch.device("cpu"))
    output = net(images)
    assert loss == pytest.approx(F.nll_loss(output, labels).item(), rel=1e-5)
    assert correct == int((output.argmax(1) == labels).sum())


def train_without_dropout(folder: Path, world_size: int, name: str, *options: str) -> None:
    """Trains on random images; each epoch has two steps. Dropout is each rank's own."""
    script = load_script()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(24, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (24,), generator=generator)
    data = TensorDataset(images, labels)
    files = ["--log-file", str(folder / name)]
    sizes = ["--world-size", str(world_size), "--batch-size", "12", "--test-batch-size", "12"]
    job = ["--epochs", "3", "--lr", "0.1", "--gamma", "0.5", *sizes, *files]
    args = script.parse_args([*job, *options])
    with (
        allow_warnings(),
        mock.patch.object(script, "load_data", return_value=script.Data("noise", "", data, data)),
        mock.patch.object(torch.nn.Dropout, "forward", lambda self, x: x),
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(world_size)}),
    ):
        script.run_job(args, torch.device("cpu"))


def begin(rank: int, world_size: int, folder: Path) -> list[str]:
    """Returns why this rank refuses other checkpoints."""
    evaluate_uneven()
    train_without_dropout(folder, world_size, "whole")
    amid = ["--max-steps", "3", "--save", str(folder / "three.pt")]  # a step into epoch 2
    train_without_dropout(folder, world_size, "parts", *amid)
    dist.barrier()  # rank 0 has written it
    state = {**torch.load(folder / "three.pt"), "optimizer": {}}
    broken = {
        "weights": state["model"],
        "other": {**state, "model": {"fc1.bias": state["model"]["fc1.bias"][:3]}},
        "smaller": {**state, "batch_size": 6},
        "number": {**state, "model": 7},
        "words": {**state, "epoch": "one"},
        "foreign": {**state, "optimizer": {"state": {"conv1.bias": 3}}},
        "list": [1, 2],
    }
    refusals = []
    for name, content in broken.items():
        path = folder / "three.pt"
        if rank == 1:  # broken on one rank, it is refused on all
            path = folder / name
            torch.save(content, path)
        said = io.StringIO()
        with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as stopped:
            train_without_dropout(folder, world_size, "refused", "--resume", str(path))
        assert stopped.value.code == 2
        refusals.append(said.getvalue())
    return refusals


ODD = (
    "number is not a checkpoint of this script: 'model' is not a dict",
    "words: 'epoch' is not a number of steps: 'one'",
    " is from another optimizer: ",
    "list is not a checkpoint of this script: no 'model'",
)


def go_on(rank: int, world_size: int, folder: Path) -> None:
    three = ["--resume", str(folder / "three.pt")]
    train_without_dropout(folder, world_size, "parts", *three, "--ddp")


@pytest.mark.distributed
def test_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    (weights, other, smaller, *odd), *others = run_ranks(begin, 2, tmp_path)
    assert others == [[""] * 7]  # one rank of a machine says why
    assert weights.endswith("weights is not a checkpoint of this script: no 'model'\n")
    assert other.endswith(
        "other is from another model: conv1.weight is missing in the file and [32, 1, 3, 3] in the "
        "model\n"
    )
    assert smaller.endswith(
        "smaller was saved in the middle of an epoch with --batch-size 6, got 12\n"
    )
    for said, message in zip(odd, ODD, strict=True):
        assert message in said
        assert said.count("\n") == 1

    run_ranks(go_on, 1, tmp_path)
    whole, parts = records(tmp_path / "whole"), records(tmp_path / "parts")
    found = [line["loss"] for line in parts if "loss" in line]
    assert len(found) == 6
    assert found == pytest.approx([line["loss"] for line in whole if "loss" in line], rel=1e-4)
    found = [line["test_loss"] for line in parts if "test_loss" in line]
    assert len(found) == 3 + 1
    del found[1]  # amid the second epoch
    expected = [line["test_loss"] for line in whole if "test_loss" in line]
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--epochs 0", "argument --epochs: must be at least 1, got 0"),
        ("--lr nan", "argument --lr: must be a number above 0, got nan"),
        ("--world-size 2 --batch-size 7", "--batch-size 7 cannot be split over 2 ranks"),
        ("--save missing/net.pt", "--save: not a file in an existing directory: missing/net.pt"),
        ("--save /dev/null", "--save: not a regular file: /dev/null"),
        ("--offload-path /proc", "--offload-path: cannot write in /proc: "),
        (f"--log-file {'x' * 300}", "File name too long"),
        ("--resume missing.pt", "--resume: there is no file missing.pt"),
        (f"--seed {2**70}", "argument --seed: must be at most 2147483647"),
        ("--ddp --cpu-offload", "--cpu-offload is for sharded parameters"),
        ("--offload-path missing", "--offload-path: not a directory: missing"),
        ("--data digits --download", "--download is for MNIST"),
        ("--colour", "unrecognized arguments: --colour"),
    ],
)
def test_refuses_options_in_one_line(
    options: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options.split()])
    with pytest.raises(SystemExit) as stop:
        load_script().parse_args()
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("train_mnist.py: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_missing_data_end_every_rank(tmp_path: Path) -> None:
    status, out, err = run_script(SCRIPT, "--world-size", "2", "--data", "mnist", cwd=tmp_path)
    assert (status, out) == (2, "")
    (said,) = [line for line in err.splitlines() if line.startswith("train_mnist.py: error: ")]
    assert "MNIST files not found in data. Looked for train-images-idx3-ubyte" in said
    assert "data/MNIST/raw" in said
    assert "--data-root" in said
    assert "Traceback" not in err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the rank in /proc")
def test_a_dead_rank_ends_the_job(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    options = ["--world-size", "2", "--ddp", "--epochs", "1000", "--log-file", str(log)]
    script = Started(SCRIPT, *options, cwd=tmp_path)
    try:
        while not log.exists() or not log.read_text():  # rank 0 writes first as training begins
            ranks = script.ranks()  # raises where the script has ended
            time.sleep(0.01)
        os.kill(ranks[1], signal.SIGKILL)
        start_time = time.monotonic()
    finally:
        status, _, err = script.finish(timeout=60)
    assert status == 1
    assert "error: rank 1 ended by SIGKILL, the job was stopped" in err.splitlines()
    assert time.monotonic() - start_time < 30
