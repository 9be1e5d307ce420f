"""The command ``flatshard plan`` and ``plan``: what they print, and what bad input gets."""

import json
import re
from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flatshard import MixedPrecision
from flatshard.checkpoint.command_line import main
from flatshard.extras.plan import CannotTraceError, plan
from flatshard.extras.plan.report import Target, add_arguments, read_spec
from tests.extras.plan import Block
from tests.harness import assert_raises

WIDTH = 256


class Small(nn.Module):
    """A language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, factor=4) for _ in range(4))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Branching(Small):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x) if x.sum() > 0 else self.head(-x)  # needs a value


def with_step() -> tuple[nn.Module, object]:
    return nn.Linear(4, 4), lambda model: model(torch.zeros(2, 4)).sum()


SPEC = f"{__name__}:Small"
SMALL = (SPEC, "--batch", "4", "--seq", "32", "--ranks", "2..8", "--per-node", "4")


def test_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(one["fits"] for one in found)
    ways = {(one["strategy"], one["ranks"]): one["outcome"] for one in found}
    peaks = {way: sum(outcome["peak"].values()) for way, outcome in ways.items()}
    assert {ranks for _, ranks in ways} == {2, 4, 8}
    # A hybrid strategy needs more than one node.
    assert [ranks for name, ranks in ways if name == "HYBRID_SHARD"] == [8]
    numel = sum(param.numel() for param in Small().parameters())
    sharded, whole = ways["FULL_SHARD", 4], ways["NO_SHARD", 4]
    assert whole["persistent"]["parameters"] == 4 * numel
    assert sharded["persistent"]["parameters"] == pytest.approx(numel, rel=0.01)
    assert peaks["FULL_SHARD", 4] < peaks["SHARD_GRAD_OP", 4] < peaks["NO_SHARD", 4]
    # Between nodes: nothing with four ranks in a node, and everything with two nodes.
    assert sharded["sent_bytes"][1] == 0 < ways["FULL_SHARD", 8]["sent_bytes"][1]


def test_options_have_the_names_of_the_keywords() -> None:
    parser = ArgumentParser()
    add_arguments(parser)
    options = {*vars(parser.parse_args([SPEC]))} - {"json"}
    keywords = {one.name for one in fields(Target)} | {"spec"}
    assert options <= keywords
    # Only these keywords have no option: their values cannot be written on a command line.
    assert keywords - options == {"build", "step", "auto_wrap_policy"}
    # The docstring of `plan` explains each keyword, and is the help of each option.
    for action in parser._actions:
        assert action.help, action.dest
    text = " ".join(parser.format_help().split())
    assert "tokens per sequence, if step is None. Default 2048." in text


def test_memory_is_printed_in_the_unit_of_the_option() -> None:
    for size in ("1.03GB", "0.959GiB", 1.03e9):
        made = plan(Small, memory=size, ranks=2, strategy="FULL_SHARD", batch=64, seq=64)
        assert "Nothing fits into 1.0 GB." in str(made)
    exact = plan(Small, memory="1GiB", ranks="2..4", strategy="FULL_SHARD", batch=64)
    assert exact.target.machine.device.memory_bytes == 2**30
    assert [one.ranks for one in exact.choices] == [2, 4]


def test_what_to_change_and_the_code_to_paste() -> None:
    settings = {"batch": 64, "seq": 64, "strategy": "FULL_SHARD"}
    few = plan(Small, ranks=2, memory=1.03e9, **settings)
    assert few.best is None
    assert not few.code()
    text = str(few)
    assert "Nothing fits into" in text
    for change in few.changes:
        assert f"- {change}: " in text
    smaller = few.changes["checkpoint='block'"].outcome.peak_bytes
    enough = plan(Small, ranks=2, checkpoint="selective", **settings)
    largest = few.choices[0].outcome.peak_bytes
    assert smaller < enough.choices[0].outcome.peak_bytes < largest
    before, _, last = enough.code().rpartition("\n")
    assert last.startswith("model = ShardedWrapper(model, auto_wrap_policy='auto', sharding_")
    names: dict[str, object] = {"model": Small()}
    exec(before, names)  # all but wrapping, which needs a process group
    model = names["model"]
    assert isinstance(model, nn.Module)
    assert model(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 8, 64)


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ([f"{__name__}:Nothing"], "is neither a config.json nor a function"),
        (["os.path"], "os.path is a module"),
        ([*SMALL, "--batch", "0"], "batch must be at least 1, got 0"),
        ([*SMALL, "--ranks", "8..2"], "ranks must be at least 1, got 0"),
        ([*SMALL, "--memory", "much"], "expected an amount such as 80GB or 990T, got 'm"),
        ([SPEC, "--strategy", "HYBRID_SHARD"], "needs several nodes"),
        ([f"{__name__}:Branching", "--seq", "8"], "test_plan_command.py:"),
    ):
        assert main(["plan", *arguments]) == 2, message
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1, said


def test_architectures_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is unknown is named; one without fused attention is built."""
    pytest.importorskip("transformers")
    assert main(["plan", "nowhere.json"]) == 2
    assert "No such file or directory: 'nowhere.json'" in capsys.readouterr().err
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "nonsense"}')
    assert main(["plan", str(config)]) == 2
    message = "cannot make a language model of this configuration. .*: nonsense"
    assert re.search(message, capsys.readouterr().err)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "state_size": 4}
    config.write_text(json.dumps({"model_type": "mamba", **sizes}))
    with torch.device("meta"):
        assert type(read_spec(str(config))()).__name__ == "MambaForCausalLM"


def test_a_model_of_another_kind() -> None:
    with pytest.raises(TypeError, match="Give `plan` a `step`"):
        plan(lambda: nn.Sequential(nn.Embedding(64, 8), nn.Flatten()), dtype=MixedPrecision())
    made = plan(with_step, ranks=2)
    assert made.best is not None
    assert "batch" not in str(made)  # the batch of the step is not known
    assert_raises(CannotTraceError, r"needs real values.*: aten\._local", plan, Branching, seq=8)
