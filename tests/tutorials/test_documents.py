"""What README, docs and docstrings say runs: every block of Python and shell, and every message.

A block of Python runs on two ranks, in a folder of its own, with the names that `surroundings`
gives it: what its reader has by then. Recipes are besides compared with the unwrapped model.
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import itertools
import linecache
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import api
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

import flatshard
import flatshard.checkpoint
from tests import forked_python
from tests.documents import Fence, before_and_after, build, data, examples, fences, surroundings
from tests.harness import ROOT, naming, run_ranks
from tests.oracle import assert_identical, assert_same, assert_same_gradients, change_all
from tests.scripts import HERE, run_code, torchrun

PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
DOCUMENTS = [*(ROOT / name for name in PAGES), *sorted((ROOT / "docs").glob("*.md"))]
pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(240)]


BLOCKS = [fence for path in DOCUMENTS for fence in fences(path)]
PYTHON = [fence for fence in BLOCKS if fence.language == "python"]
PROGRAMS = [fence for fence in PYTHON if "torchrun" in fence.text.splitlines()[0]]
FRAMEWORK = re.compile(r"^(?:from|import) (?:lightning|transformers)\b", re.MULTILINE)
DEADLOCKS = [f for f in BLOCKS if f.document == "troubleshooting.md" and f.heading == "Deadlocks"]
ELSEWHERE = [
    *DEADLOCKS,  # below, because every rank of this program raises
    # In tests/integrations: test_transformers.py and test_docstring_examples.py.
    *(f for f in BLOCKS if f.document == "huggingface.md" or FRAMEWORK.search(f.text)),
]
DIFFS = [fence for fence in BLOCKS if fence.language == "diff"]
SAVES = [f for f in DIFFS if f.document == "README.md" and "torch.save" in f.text]
PIECES = [
    *(f for f in PYTHON if f not in PROGRAMS and f not in ELSEWHERE),
    *(f._replace(text=before_and_after(f.text)[1]) for f in SAVES),
]
SHELL = [fence for fence in BLOCKS if fence.language in ("bash", "sh", "shell", "console")]


def test_every_block_is_of_a_known_kind() -> None:
    kinds = {"python", "bash", "diff", "text"}  # what draws "mermaid" is fetched from elsewhere
    assert not [fence for fence in BLOCKS if fence.language not in kinds]
    assert {fence.document for fence in PROGRAMS} == {"README.md", "gpus-and-nodes.md"}


def test_no_example_trains_on_the_cpu_of_a_gpu_machine() -> None:
    """An example names the CPU only in the branch of a machine without an accelerator."""
    names = r"torch\.device\(", r"\.to\(", r"init_device_mesh\(", "device_id=", "device = "
    named = re.compile(rf"""(?<!else:\n    device = )(?:{"|".join(names)})["']cpu""")
    every = [*BLOCKS, *(fence for path in MODULES for fence in examples(path))]
    assert not [(fence.document, fence.heading) for fence in every if named.search(fence.text)]


# ---------------------------------------------------------------- pieces of Python


def _run_pieces(rank: int, world_size: int, pieces: list[Fence], folder: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    has_vision = importlib.util.find_spec("torchvision") is not None
    # Compiling for real takes a compiler, and half a minute.
    eager = functools.partialmethod(nn.Module.compile, backend="eager")
    for number, fence in enumerate(pieces):
        if "import torchvision" in fence.text and not has_vision:
            continue
        place = Path(folder) / str(number)
        place.mkdir(exist_ok=True)
        with contextlib.chdir(place), naming(fence), mock.patch.object(nn.Module, "compile", eager):
            for text in _alternatives(fence.text):
                names = surroundings(text, rank)
                with warnings.catch_warnings(action="ignore"):
                    exec(compile(text, f"{fence.document}: {fence.heading}", "exec"), names)
                    if check := CHECKS.get((fence.document, fence.heading)):
                        check(names, rank)
        dist.barrier()


def _alternatives(text: str) -> list[str]:
    """Lines that each wrap anew are run one by one."""
    tree = ast.parse(text)
    if all(isinstance(node, ast.Expr) for node in tree.body):
        return [ast.unparse(node) for node in tree.body]
    return [text]


def test_every_piece_runs_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(_run_pieces, 2, PIECES, str(tmp_path), timeout=200.0, fresh=True)


MODULES = sorted((ROOT / "flatshard").rglob("*.py"))
# Those of integrations run in tests/integrations/test_docstring_examples.py.
EXAMPLES = [f for path in MODULES if path.parent.name != "integrations" for f in examples(path)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_example_in_a_docstring_runs(ranks: int, tmp_path: Path) -> None:
    assert len(EXAMPLES) >= 20
    run_ranks(_run_pieces, ranks, EXAMPLES, str(tmp_path), fresh=True)


def _deadlock(rank: int, world_size: int, program: str, message: str) -> None:
    names = surroundings(program, rank)
    lines = program.splitlines(keepends=True)
    linecache.cache["train.py"] = len(program), None, lines, "train.py"
    exec(compile(program, "train.py", "exec"), names)
    parts = message.partition("failed:")
    said = parts[2] if rank else message  # rank 1 says first where it is itself
    assert said.partition("...")[0].strip() in names["message"]
    assert names["message"].endswith("[FS-DEADLOCK]")


def test_a_deadlock_says_what_its_page_quotes() -> None:
    program, message, *_ = (one.text for one in DEADLOCKS)
    run_ranks(_deadlock, 2, program, " ".join(message.split()), fresh=True)


# ---------------------------------------------------------------- what recipes come to


Batches = Sequence[tuple[Tensor, Tensor]]
STEPS: list[Batches] = list(zip(data(0), data(1), strict=True))
"""For each step, the batches of both ranks."""


def _backward(model: nn.Module, batches: Batches, share: float = 1 / 2) -> nn.Module:
    for inputs, labels in batches:
        (share * nn.functional.cross_entropy(model(inputs), labels)).backward()
    return model


def _stepped(
    model: nn.Module, steps: Iterable[Batches], max_norm: float = math.inf, share: float = 1 / 2
) -> nn.Module:
    """The unwrapped model after steps on these batches."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for batches in steps:
        optimizer.zero_grad()
        _backward(model, batches, share)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model


# A first step of AdamW is as large for a small gradient as for a large one.
_assert_same = functools.partial(assert_same, rtol=1e-4, atol=1e-5)


def _check_same_gradients(names: dict[str, Any], rank: int) -> None:
    """The wrapped model's gradients are the plain one's."""
    model = _backward(names["model"], names["batches"][:1], share=1)
    plain = _backward(build(), STEPS[0])
    assert_same_gradients(model, plain, rtol=1e-5, atol=1e-6)


def _check_accumulated(names: dict[str, Any], rank: int) -> None:
    if "number" in names:  # not in the block without a loop, which lists ways to call no_sync
        _assert_same(names["model"], _stepped(build(), [[*data(0), *data(1)]], share=1 / 6))


def _check_token_mean(names: dict[str, Any], rank: int) -> None:
    """One step on the concatenated rows of all ranks."""
    is_uneven = len(names["batches"]) < len(data(0))
    batches = [*data(0)[: 1 if is_uneven else None], *data(1)[: 2 if is_uneven else None]]
    inputs, labels = map(torch.cat, zip(*batches, strict=True))
    most = 1.0 if is_uneven else math.inf
    _assert_same(names["model"], _stepped(build(), [[(inputs, labels)]], most, share=1))


def _check_clipped(names: dict[str, Any], rank: int, steps: Sequence[Batches] = STEPS) -> None:
    _assert_same(names["model"], _stepped(build(), steps, max_norm=1.0))


def _check_scaled(names: dict[str, Any], rank: int) -> None:
    """All ranks skip the first step, whose gradients overflow in float16, and lower the scale."""
    assert names["scaler"].get_scale() == 2.0**15
    expected = _stepped(build(), STEPS[1:], max_norm=1.0)
    _assert_same(names["model"], expected, rtol=1e-3, atol=1e-3)


def _check_shared_modules(names: dict[str, Any], rank: int) -> None:
    actor, critic = names["both"]
    assert actor[0] is critic[0]
    assert names["both"].state_dict()["0.0.weight"].shape == (8, 4)


def _check_restored(path: str, model: nn.Module, optimizers: Any) -> None:
    """`load` restores the weights that `save` has saved."""
    expected = model.state_dict()
    change_all(model, lambda param: param.zero_())
    flatshard.checkpoint.load(path, model, optimizers)
    assert_identical(model.state_dict(), expected)


def _check_two_models(names: dict[str, Any], rank: int) -> None:
    has_two = "optimizers" in names
    path, one = ("gan", "optimizers") if has_two else ("runs/step-3", "optimizer")
    _check_restored(path, names["both"], names[one])
    if has_two:
        return
    weights = flatshard.checkpoint.full_state_dict(names["average"].module)
    _check_average({"weights": weights}, rank)


def _check_average(names: dict[str, Any], rank: int) -> None:
    expected: dict[str, Tensor] = {}
    for steps in (1, 2, 3):
        for name, value in _stepped(build(), STEPS[:steps]).state_dict().items():
            expected[name] = expected[name].lerp(value, 0.01) if steps > 1 else value
    if rank == 0:
        assert_close(dict(names["weights"]), expected, rtol=1e-4, atol=1e-5)


def _check_engine(names: dict[str, Any], rank: int) -> None:
    if "average" in names:
        _check_average({"weights": names["average"]}, rank)
        return
    expected = names["model"].state_dict()
    if "changes" in names:
        assert_close(names["received"], {n: v.bfloat16() for n, v in expected.items()})
        return
    loaded = names["engine"].loaded
    if rank > 0 and "weights" not in names and "merged" not in names:
        assert not loaded
        return
    dtype = next(iter(loaded.values())).dtype
    assert dtype is (torch.bfloat16 if "weights" in names else torch.float32)
    assert_close(loaded, {n: v.to(dtype) for n, v in expected.items()}, rtol=0, atol=0)


def _check_norms(names: dict[str, Any], rank: int) -> None:
    plain = _backward(build(), STEPS[0])
    expected = {n: float(p.grad.norm()) for n, p in plain.named_parameters() if p.grad is not None}
    assert names["norms"] == pytest.approx(expected, rel=1e-4)


def _check_momentum_encoder(names: dict[str, Any], rank: int) -> None:
    if "byol" not in names:  # the block that edits full parameters
        state = names["model"].state_dict()
        assert all((v[0] == 0).all() and v[1:].any() for n, v in state.items() if "blocks" in n)
        return
    torch.manual_seed(0)
    plain = names["Byol"]()
    trained = [param for param in plain.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    for (inputs, _), (others, _) in zip(data(0), data(1), strict=True):
        optimizer.zero_grad()
        plain(torch.cat([inputs, others])).backward()
        optimizer.step()
        names["update_target"](plain)
    assert_close(names["byol"].state_dict(), dict(plain.state_dict()), rtol=1e-4, atol=1e-6)


def _check_frozen(names: dict[str, Any], rank: int) -> None:
    plain = build().requires_grad_(False)
    plain.head.requires_grad_(True)
    _assert_same(names["model"], _stepped(plain, STEPS))
    assert len(names["optimizer"].state) == 2
    assert all(p.grad is None for p in names["model"].parameters() if not p.requires_grad)


def _check_ranges(names: dict[str, Any], rank: int) -> None:
    if "ranges" in names:
        for what in ("unshard", "wait_unshard", "reduce"):
            # Small blocks are coalesced, and named from the first to the last.
            start = f"flatshard::{what} (blocks.0"
            assert any(one.startswith(start) for one in names["ranges"])
    else:
        assert len(names["reports"]) == 3


def _check_skipped(names: dict[str, Any], rank: int) -> None:
    plain = names["DropsBlocks"]()
    plain.load_state_dict(build().state_dict())
    draws = itertools.cycle(torch.Generator().manual_seed(both) for both in (0, 1))
    # Each forward of a batch draws by the generator of the batch's rank.
    plain.register_forward_pre_hook(lambda *_: setattr(plain, "draws", next(draws)))
    rand = torch.rand
    with mock.patch.object(torch, "rand", lambda *sizes: rand(*sizes, generator=plain.draws)):
        _assert_same(names["model"], _stepped(plain, STEPS))


def _check_experts(names: dict[str, Any], rank: int) -> None:
    norms = [nn.utils.get_total_norm([p.grad for p in names[part]]) for part in ("own", "shared")]
    squares = norms[0].square()
    dist.all_reduce(squares)
    assert names["total"] > 0.1
    assert_close((squares + norms[1].square()).sqrt(), torch.tensor(0.1))


def _check_batch_norm(names: dict[str, Any], rank: int) -> None:
    mean = names["resnet"].module.bn1.running_mean
    assert mean.abs().sum() > 0
    units = [unit.module for unit in flatshard.sharded_modules(names["resnet"])]
    assert any(type(one).__name__ == "BasicBlock" for one in units)


def _check_saved(names: dict[str, Any], rank: int) -> None:
    if not Path("runs").exists():  # the block that saves full state dicts
        return
    plain = build()
    flatshard.checkpoint.load("runs/step-1000", plain)
    assert_identical(names["model"].state_dict(), dict(plain.state_dict()))


def _check_several_optimizers(names: dict[str, Any], rank: int) -> None:
    """Both optimizers have stepped, and `load` restores what `save` has saved."""
    model, optimizers = names["model"], names["optimizers"]
    states = flatshard.checkpoint.full_optim_state_dict(model, optimizers)
    _check_restored("runs/step-2", model, optimizers)
    loaded = flatshard.checkpoint.full_optim_state_dict(model, optimizers)
    for name in ("muon", "adamw") if rank == 0 else ():
        assert states[name]["state"]
        assert_close(loaded[name]["state"], states[name]["state"])


CHECKS: dict[tuple[str, str], Callable[[dict[str, Any], int], None]] = {
    ("recipes.md", "Activation checkpointing"): _check_same_gradients,
    ("recipes.md", "Compiling blocks"): _check_same_gradients,
    ("profiling-and-performance.md", "Kernels"): _check_ranges,
    ("profiling-and-performance.md", "Where a step's time goes"): _check_ranges,
    ("recipes.md", "Accumulating gradients"): _check_accumulated,
    ("reference.md", "Accumulating gradients"): _check_accumulated,
    ("recipes.md", "Inputs that end sooner on some ranks"): (
        functools.partial(_check_clipped, steps=[*STEPS[:2], STEPS[2][1:]])
    ),
    ("recipes.md", "Different numbers of micro-batches on each rank"): _check_token_mean,
    ("recipes.md", "The mean over all tokens"): _check_token_mean,
    ("recipes.md", "Experts of one rank"): _check_experts,
    ("recipes.md", "Units that some ranks skip"): _check_skipped,
    ("recipes.md", "float16 with a scaler"): _check_scaled,
    ("recipes.md", "An average of the weights"): _check_average,
    ("recipes.md", "Several optimizers over one model"): _check_several_optimizers,
    ("recipes.md", "Two models in one checkpoint"): _check_two_models,
    ("recipes.md", "Two models that share modules"): _check_shared_modules,
    ("recipes.md", "Recipes"): _check_clipped,
    ("recipes.md", "A momentum encoder"): _check_momentum_encoder,
    ("recipes.md", "Fine-tuning with frozen weights"): _check_frozen,
    ("recipes.md", "A ResNet with BatchNorm"): _check_batch_norm,
    ("recipes.md", "All weights to an inference engine"): _check_engine,
    ("recipes.md", "Norms for a training log"): _check_norms,
    ("guide.md", "Save"): _check_saved,
}


def test_every_recipe_is_checked() -> None:
    recipes = {(one.document, one.heading) for one in PIECES if one.document == "recipes.md"}
    assert not recipes - set(CHECKS)
    assert not set(CHECKS) - {(one.document, one.heading) for one in PIECES}


# ---------------------------------------------------------------- programs and commands


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


@pytest.mark.versions
def test_quickstart(tmp_path: Path) -> None:
    """It trains, resumes on another number of ranks, and prints what README shows."""
    program = next(one for one in PROGRAMS if one.document == "README.md")
    assert len(program.text.splitlines()) <= 25
    path = tmp_path / "quickstart.py"
    path.write_text(program.text)
    printed: list[str] = []
    environment = {**HERE, "FORKED_PYTHON_FREES_OBJECTS": "1"}  # the end of a real program
    for ranks, last in ((2, 100), (1, 200)):
        status, out, err = torchrun(ranks, path, environment=environment, cwd=tmp_path)
        assert status == 0, err
        # Two ranks write to one pipe: the ends of their lines may change places.
        printed += sorted(re.findall(r"rank \d+, step .*? parameters", out))
        assert (tmp_path / "checkpoints" / f"step-{last}" / "flatshard.json").exists()
    texts = (f.text for f in BLOCKS if f[:2] == ("README.md", "text"))
    shown = next(text for text in texts if "rank 0, step" in text).splitlines()
    # The last digits of a loss depend on the machine and on torch.
    near = [re.sub(r"loss 0\.00\d+", "loss", line) for line in printed]
    assert near == [re.sub(r"loss 0\.00\d+", "loss", line) for line in shown if line[0] != "$"]


def test_migrated_script(tmp_path: Path) -> None:
    """It prints under both wrappers the same, and saves the same weights."""
    diff = next(fence.text for fence in DIFFS if fence.document == "migration.md")
    printed, saved = [], []
    for number, side in enumerate(before_and_after(diff)):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "script.py"
        path.write_text(side)
        status, out, err = torchrun(2, path, cwd=folder)
        assert status == 0, err
        printed.append(out)
        saved.append(torch.load(folder / "model.pt")["model"])
    assert printed[0] == printed[1]
    assert_close(saved[0], dict(saved[1]), rtol=1e-4, atol=1e-6)


def test_program_for_gpus_runs_on_a_cpu_too(tmp_path: Path) -> None:
    (program,) = (fence for fence in PROGRAMS if fence.document == "gpus-and-nodes.md")
    path = tmp_path / "train_gpu.py"
    text = program.text.replace("range(1, 41)", "range(1, 11)")
    fewer_rows = text.replace("(16, 1)", "(2, 1)")  # CPUs are slow in bfloat16
    assert fewer_rows != text
    path.write_text(fewer_rows)
    status, out, err = torchrun(2, path, cwd=tmp_path)
    assert status == 0, err
    shown = next(f.text for f in BLOCKS if f[:2] == ("gpus-and-nodes.md", "text")).splitlines()
    table = shown[: next(n for n, line in enumerate(shown) if line.startswith("step 10:"))]
    assert [line for line in table if line != "..." and line not in out] == []
    assert float(re.findall(r"step 10: loss ([0-9.]+)", out)[0]) < 4  # from 5.6
    assert (tmp_path / "gpu-checkpoint" / "flatshard.json").exists()


SHORTER = {
    "bash scripts/demo.sh": "--epochs 1 --data digits",
    "python scripts/evidence.py": "",
    "python scripts/benchmark.py": "--preset tiny --world-size 1 --rounds 1 --impl compute",
    "python -m flatshard plan": "--seq 16 --ranks 8 --strategy FULL_SHARD --checkpoint none",
    "torchrun --standalone --nproc-per-node 2 scripts/rollouts.py": "--steps 3",
}
"""What makes a command small; of an option that is given twice, the last one counts."""

RUNS_THESE = "bash scripts/test.sh"

LANGUAGE_MODEL = """
from torch import nn


def build():
    return nn.Sequential(nn.Embedding(64, 256), nn.Linear(256, 256), nn.Linear(256, 64))
"""


def commands() -> list[str]:
    lines = [line.split("  #")[0].strip() for fence in SHELL for line in fence.text.splitlines()]
    return sorted({line for line in lines if line} - {RUNS_THESE})


@pytest.mark.parametrize("command", commands())
def test_command(command: str, tmp_path: Path) -> None:
    """Each in a copy of the repository's files, with an environment that is there already."""
    short = [more for start, more in SHORTER.items() if command.startswith(start)]
    assert short, f"say in SHORTER how to run it in a second: {command}"
    for name in ("scripts", "tests", "flatshard", "pyproject.toml", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").mkdir()
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "models.py").write_text(LANGUAGE_MODEL)
    binaries = tmp_path / "venv" / "bin"
    binaries.mkdir(parents=True)
    # To install is not what this is about.
    python = f'#!/bin/sh\n[ "$2" = pip ] && exit\nexec {forked_python.PYTHON}'
    for name, module in (("python", ""), ("pip", ""), ("torchrun", "-m torch.distributed.run")):
        (binaries / name).write_text(f'{python} {module} "$@"\n')
        (binaries / name).chmod(0o755)
    venv, path = str(tmp_path / "venv"), f"{binaries}:{os.environ['PATH']}"
    where: dict[str, Any] = {"cwd": tmp_path, "env": _environment(FLATSHARD_VENV=venv, PATH=path)}
    shell = {"shell": True, "capture_output": True, "text": True, "timeout": 150}
    done = subprocess.run(f"{command} {short[0]}", **where, **shell)
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- messages and links


def _source_messages() -> str:
    """All string literals of the package, with one sign for what is filled in."""
    found = []
    for path in sorted((ROOT / "flatshard").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%\w", "…", node.value))
    return "\n".join(found)


def test_quoted_messages_exist() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    parts = re.split(r"^## ", text.partition("\n## Memory and speed\n")[0], flags=re.MULTILINE)[2:]
    quoted = [m for part in parts for m in re.findall(r"^\| `([^`]+)`", part, re.MULTILINE)]
    assert len(quoted) > 25
    source = _source_messages()
    patterns = [re.escape(one).replace("…", r"(?:…|[^\n]{1,40}?)") for one in quoted]
    assert not [pattern for pattern in patterns if not re.search(pattern, source)]


def test_codes_of_messages_are_explained() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    explained = re.findall(r'^\| <a id="(FS-[A-Z-]+)"></a>`\1` \|', text, re.MULTILINE)
    assert explained == sorted(set(re.findall(r"\[(FS-[A-Z-]+)\]", _source_messages())))


def test_links_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text()):
            name, _, anchor = target.partition("#")
            there = (path.parent / name) if name else path
            assert there.exists(), f"{path.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
                anchors = [re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings]
                assert anchor in anchors, f"{path.name}: {target}"


def test_tables_have_titles() -> None:
    """A blank line in a table would make text of the rows below it."""
    for path in DOCUMENTS:
        for table in re.findall(r"(?:^\|.*\n)+", path.read_text(), re.MULTILINE):
            titles, line = table.split("\n")[:2]
            assert set(line) <= set("|-: "), f"{path.name}: {titles}"
            assert not re.search(r"\| *\|", titles), f"{path.name}: {titles}"


def test_site(tmp_path: Path) -> None:
    """It builds, and no link of it leads nowhere."""
    build = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    where: dict[str, Any] = {"cwd": ROOT, "env": _environment(NO_MKDOCS_2_WARNING="1")}
    done = subprocess.run(build, **where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    fetched = r'(?:<script|<img|<link rel="stylesheet")[^>]* (?:src|href)="(http[^"]*)'
    for page in pages:  # a reader without a network sees all of it
        assert not re.findall(fetched, page.read_text()), page
    reference = re.sub(r"<[^>]+>", "", (tmp_path / "api.html").read_text())
    # A signature longer than a line has each argument on a line of its own.
    assert "no_sync(\n    *,\n    max_bytes: int | None = None,\n" in reference
    for page in tmp_path.glob("tutorials/*.html"):  # mkdocs does not look into notebooks
        for target in re.findall(r'href="([^"#:]+)[#"]', page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


# Largest number of words of each page, so that a reader finds what there is. `api.md` is generated.
WORDS = {
    "index": 300,
    "huggingface": 470,
    **dict.fromkeys(("README", "construction"), 700),
    "comparison": 800,
    "guide": 900,
    "choosing": 1300,
    "gpus-and-nodes": 1400,
    **dict.fromkeys(("CONTRIBUTING", "checkpoints", "frameworks"), 1500),
    **dict.fromkeys(("migration", "precision-and-offload", "reference"), 1900),
    **dict.fromkeys(("evidence", "recipes"), 2000),
    "profiling-and-performance": 1000,
    "architecture": 1700,
    "try": 1200,
    "troubleshooting": 2500,
}


def test_pages_are_short() -> None:
    pages = {path.stem: path for path in DOCUMENTS if path.stem not in ("api", "CHANGELOG")}
    texts = {name: re.sub("<!--.*?-->", "", path.read_text()) for name, path in pages.items()}
    words = {name: len(text.split()) for name, text in texts.items()}
    assert words.keys() == WORDS.keys()
    assert not {name: number for name, number in words.items() if number > WORDS[name]}
    assert sum(words.values()) <= 27_000


def test_docstring_of_the_wrapper_is_short() -> None:
    assert len((flatshard.ShardedWrapper.__doc__ or "").split()) <= 600


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/evidence.md", "CONTRIBUTING.md"])
def test_paths_exist(page: str) -> None:
    """Every path of this repository that a page names, in backquotes or in a block."""
    path = r"(?<![\w./])((?:flatshard|tests|scripts|tutorials|docs)/[\w./*]*)"
    named = re.findall(path, (ROOT / page).read_text())
    assert len(named) > 12
    assert not {path for path in named if not list(ROOT.glob(path.rstrip("./")))}


def test_versions_agree() -> None:
    newest = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    project = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert flatshard.__version__ == newest == project[0]


def test_changelog_is_short() -> None:
    """A line for each thing that a user must do, gains, or got wrong; old versions a paragraph."""
    parts = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert parts[0].startswith("Unreleased")
    kinds = ["### Breaking", "### New", "### Fixed"]
    for part in parts[:2]:
        lines = [line for line in part.splitlines()[1:] if line]
        assert len(lines) <= 40
        headings = [line for line in lines if line.startswith("#")]
        assert headings == [kind for kind in kinds if kind in headings]
        for line in lines:
            text = re.sub(r"\]\([^)]*\)", "]", line)
            assert line[:2] in ("- ", "##"), line
            assert len(text.split()) <= 26, line
    for part in parts[2:]:
        assert len(part.strip().split("\n\n")) == 2, part
        assert len(part.split()) <= 130, part


def _defined(path: Path) -> set[str]:
    """Public names that a module of an integration defines; its framework may be missing."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"}


def test_reference_names_all_that_is_public() -> None:
    """With the sentences of the docstrings; `python scripts/tables/api.py` writes them."""
    page = (ROOT / "docs" / "api.md").read_text()
    assert page == api.updated(page)
    named = [
        f"{section.partition(chr(10))[0]}.{name}"
        for section in page.split("\n## ")[1:]
        for name in re.findall(r"^\| `([\w.]+)", section, re.MULTILINE)
    ]
    members = {one for one in named if one.rpartition(".")[0] in named}
    public = {f"flatshard.{name}" for name in flatshard.__all__}
    for module in ("checkpoint", "collectives", "extras.plan", "weights", "wrap"):
        names = importlib.import_module(f"flatshard.{module}").__all__
        public |= {f"flatshard.{module}.{name}" for name in names}
    others = [f"integrations/{name}.py" for name in FRAMEWORKS]
    for path in ["extras/recording/step_report.py", *others]:
        prefix = "flatshard." + path.removesuffix(".py").replace("/", ".")
        public |= {f"{prefix}.{name}" for name in _defined(ROOT / "flatshard" / path)}
    assert len(named) == len(set(named))
    assert public - LEFT_OUT == set(named) - members


FRAMEWORKS = ("accelerate", "lightning", "pipelining", "transformers")
LEFT_OUT = {  # for the library itself
    f"flatshard.extras.recording.step_report.{name}" for name in ("MemorySample", "sum_up")
}


# ---------------------------------------------------------------- scripts


MAIN = 'if __name__ == "__main__":'

# Runs all scripts in one process, because importing what they import takes seconds.
HELP = """
import contextlib, io, runpy, sys
from pathlib import Path

for script in sys.argv[1:]:
    text = io.StringIO()
    sys.argv, sys.path[0] = [script, "--help"], str(Path(script).parent)
    try:
        with contextlib.redirect_stdout(text):
            runpy.run_path(script, run_name="__main__")
        status = "no exit"
    except SystemExit as error:
        status = error.code
    if status or not text.getvalue().startswith("usage: "):
        print(f"{script}: status {status}, printed {text.getvalue()!r}")
"""


def test_every_script_has_help() -> None:
    """``--help`` prints the script's options, does nothing else, and ends with status 0."""
    scripts = [path for path in (ROOT / "scripts").rglob("*.py") if MAIN in path.read_text()]
    assert len(scripts) > 10
    page = (ROOT / "docs" / "api.md").stat().st_mtime_ns
    assert run_code(HELP, *scripts) == (0, "", "")
    assert (ROOT / "docs" / "api.md").stat().st_mtime_ns == page
