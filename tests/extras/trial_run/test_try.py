"""`flatshard try`: every verdict, bad input, planted faults, and no false alarms."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from flatshard.checkpoint.command_line import main
from flatshard.extras.trial_run import COSTS, DIFFERS, NOT_COMPARED, RAISES, SAME, cost_table
from tests.combinations import THOROUGH
from tests.extras.trial_run.trained import FAULTS
from tests.forked_python import PYTHON
from tests.harness import ROOT
from tests.scripts import torchrun

HEAD = """
import os, sys, time
import torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel as DDP

def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

def train(model, optimizer, steps=4, after=lambda step: None):
    torch.manual_seed(100 + int(os.environ["RANK"]))
    for step in range(steps):
        x = torch.rand(8, 16)
        (model(x) - x.sort().values).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)

def start(wrap=DDP):
    dist.init_process_group("gloo")
    model = wrap(make())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
"""

SCRIPTS = {
    # By verdict: the name and the options of a script; texts of the report follow "#: ".
    RAISES: {
        "only_rank_0": """
#: The same numbers, within rounding. But as it is, the script raises
#: model.module.state_dict() / write flatshard.checkpoint.full_state_dict(model), which needs
#  every rank (calls by rank: [1, 0])
#: state = model.state_dict() / write flatshard.checkpoint.full_state_dict(model)
#: model(torch.ones(2, 16)) / forward() needs every rank
#: model.module(torch.ones(3, 16)) / forward() needs every rank
#: model(torch.ones(4, 16)) / forward() needs every rank: evaluate equal numbers of batches on all
#  ranks (calls by rank: [6, 9])
#: optimizer.state_dict() / optimizer.state_dict() contains only this rank's parts
class KeepsLoss(nn.Sequential):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last
model, _ = start(lambda model: DDP(KeepsLoss(nn.utils.weight_norm(model[0]), *model[1:])))
optimizer = torch.optim.Adam(model.parameters())
def after(step):
    if step == 1 and dist.get_rank() == 0:
        model.module.state_dict()
        state = model.state_dict()
        assert all(value.norm() > 0 for value in state.values())
        optimizer.state_dict()
        with torch.no_grad():
            model(torch.ones(2, 16))
            assert len(model.module.last) == 2
            model.module(torch.ones(3, 16))
    with torch.no_grad():
        for _ in range(2 + dist.get_rank()): model(torch.ones(4, 16))
train(model, optimizer, after=after)
""",
        "raises_here_only": """
#: Raises under flatshard
#: at raises_here_only.py
model, optimizer = start()
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
model.register_comm_hook(powerSGD_hook.PowerSGDState(None, 1), powerSGD_hook.powerSGD_hook)
train(model, optimizer)
""",
    },
    NOT_COMPARED: {
        "unseeded": """
#: input 'input 0' of rank 0 at step 1
#: Seed random numbers
model, optimizer = start()
for _ in range(4):
    torch.seed()
    (model(torch.rand(8, 16)) - 1).square().mean().backward()
    optimizer.step()
""",
        "other_steps_with_noise --nproc-per-node 3": """
#: input 'input 0 (2)' of rank 0 at step 1 differs
#: step sizes (of an adaptive solver) not on the last digit
model, optimizer = start()
initial = make()
torch.manual_seed(dist.get_rank())
x = torch.rand(8, 16)
for _ in range(4):
    out = model(x)
    # As in an adaptive solver, the last digit of a weight decides on the next step size.
    step = 1.0 if torch.equal(out, initial(x)) else 2.0
    (model(step * x) + out).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        "fails_by_itself": """
#: ends early without flatshard, too: RuntimeError: no data
#: at 
start()
raise RuntimeError('no data')
""",
        "exits": """
#: exit status 7
sys.exit(7)
""",
        "a_rank_dies": """
#: rank 1 ended with status 9
if os.environ['RANK'] == '1': os._exit(9)
start()
""",
        "a_rank_is_killed": """
# The other rank fails, too: its connection is closed.
#: rank 0 ended with status -9
model, optimizer = start()
if dist.get_rank() == 0: os.kill(os.getpid(), 9)
train(model, optimizer)
""",
        "a_rank_ends_in_a_step": """
# The process that rank 1 has forked keeps the connection open, so the other rank waits.
#: rank 1 ended with status 0
#: bye
model, optimizer = start()
def after(step):
    if step == 1 and dist.get_rank() == 1:
        print("bye", flush=True)
        fork = torch.multiprocessing.get_context("fork")
        fork.Process(target=time.sleep, args=(1000,), daemon=True).start()
        os._exit(0)
train(model, optimizer, after=after)
""",
        "no_optimizer --wrap": """
# The run does not wait for the process that the script has forked.
#: it made no optimizer of a module's parameters, so --wrap did not wrap a model
fork = torch.multiprocessing.get_context("fork")
fork.Process(target=time.sleep, args=(1000,), daemon=True).start()
model = make()
for _ in range(4):
    model(torch.rand(8, 16)).square().mean().backward()
    with torch.no_grad():
        for param in model.parameters(): param -= 0.1 * param.grad
torch.optim.SGD([torch.zeros(1)], lr=0.1)
""",
        "hangs --timeout 4": """
#: Timeout (0:00:04)!
#: hangs.py", line
time.sleep(1000)
""",
        "never_steps": """
#: it took 0 optimizer steps, not 4
start()
""",
        "no_wrapper": """
#: it used no DistributedDataParallel
#: --wrap
model = make()
train(model, torch.optim.SGD(model.parameters(), lr=0.1))
""",
        "too_short": """
#: it took 2 optimizer steps, not 4
train(*start(), 2)
""",
        "resumes": """
# The run under DDP leaves a file, from which the run under flatshard resumes.
#: Cannot be compared: under flatshard, it took 2 optimizer steps, not 4
#: resume from files of an earlier run?
import pathlib
saved = pathlib.Path(sys.argv[0]).with_suffix(f".rank{os.environ['RANK']}")
steps = 2 if saved.exists() else 4
saved.touch()
train(*start(), steps)
""",
        "other_number_of_ranks": """
#: starts 3 ranks by itself: --nproc-per-node 3
torch.multiprocessing.spawn(print, nprocs=3)
""",
    },
    DIFFERS: {
        "input_of_one_run": """
#: Differs: step 1, input 'input 0, input_of_one_run.py
#: rank 0: in one run only
model, optimizer = start()
with torch.no_grad():
    if not hasattr(model, "unit_report"): model(torch.ones(1, 16))
train(model, optimizer)
"""
    },
    SAME: {
        "wraps --wrap --exact": """
#: The same numbers
#: wraps the model (--wrap)
first, second = make(), make()
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
assert all(type(model) is not nn.Sequential for model in (first, second))
train(lambda x: second(first(x)), optimizer)
""",
        "a_module --policy none -m": """
# With layers that auto_wrap_policy="auto" makes units.
#: The same numbers
import flatshard
assert __spec__.name == "a_module"
layers = [nn.Linear(16, 512), nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 16)]
model, optimizer = start(lambda _: DDP(nn.Sequential(*layers)))
assert len(flatshard.sharded_modules(model)) <= 1
train(model, optimizer)
""",
        "clips_a_large_gradient --steps 2": """
# Torch's norm of it has a rounding error of 2e-4.
#: The same numbers
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Linear(2048, 2048))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(2):
    model(torch.rand(8, 2048)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()
""",
        "nested_optimizers": """
#: The same numbers
class Outer(torch.optim.Optimizer):
    def __init__(self, params, inner):
        super().__init__(params, {})
        self.inner = inner
    def step(self, closure=None):
        self.inner.step()
model, inner = start()
train(model, Outer(model.parameters(), inner))
""",
        "two_optimizers --steps 14": """
# In processes that the script starts, one with a closure.
#: The same numbers
#: generator = DDP
def work(rank, text):
    assert rank == int(os.environ["RANK"]) and text == "text"
    dist.init_process_group("gloo")
    generator = DDP(make())
    critic = DDP(make(1))
    ours, others = [torch.optim.Adam(one.parameters()) for one in (generator, critic)]
    torch.manual_seed(rank)
    for _ in range(7):
        fake = generator(torch.randn(8, 16))
        def closure():
            others.zero_grad()
            loss = critic(fake.detach()).mean() - critic(torch.rand(8, 16)).mean()
            loss.backward()
            return loss
        others.step(closure)
        ours.zero_grad()
        critic(fake).mean().neg().backward()
        ours.step()
from torch.multiprocessing.spawn import spawn
spawn(work, ("text",), 2, join=False).join()
""",
        "compiled": """
# torch.compile asks the class DistributedDataParallel whether a forward is running.
#: The same numbers
model, optimizer = start()
train(torch.compile(model, backend="eager"), optimizer)
""",
        "mixed_precision": """
#: The same numbers
#: keep mixed precision (compared without it, as DDP has none)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
precision = MixedPrecision(torch.bfloat16)
train(*start(lambda model: FullyShardedDataParallel(model, mixed_precision=precision)))
""",
        "hybrid_mesh": """
#: The same numbers
#: keep mixed precision (compared without it, as DDP has none)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
groups = mesh.get_group("shard"), mesh.get_group("replicate")
first = FullyShardedDataParallel(make(), device_mesh=mesh)
second = FullyShardedDataParallel(make(), groups)
third = fully_shard(make(), mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
model = nn.Sequential(first, second, third)
train(model, torch.optim.SGD(model.parameters(), lr=0.1))
""",
        "other_wrappers --steps 12": """
#: The same numbers
#: (FullyShardedDataParallel)
#: the model (fully_shard)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from flatshard import ShardedWrapper, checkpoint
first, _ = start(FullyShardedDataParallel)
assert isinstance(first, FullyShardedDataParallel)
second = ShardedWrapper(make())
third = make()
fully_shard(third[0])
fully_shard(third)
def after(step):
    with FullyShardedDataParallel.state_dict_type(first, StateDictType.FULL_STATE_DICT):
        first.load_state_dict(first.state_dict())
    first.clip_grad_norm_(1.0)
    checkpoint.full_state_dict(second), checkpoint.full_optim_state_dict(second, optimizers[1])
    with ShardedWrapper.summon_full_params(second):
        second[0].weight.norm()
    second.clip_grad_norm_(1.0)
optimizers = [torch.optim.Adam(one.parameters()) for one in (first, second, third)]
class All:
    step = lambda _: [one.step() for one in optimizers]
    zero_grad = lambda _: [one.zero_grad() for one in optimizers]
train(lambda x: first(x) + second(x) + third(x), All(), after=after)
""",
    },
}


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _judge_many(folder: Path, *words: str) -> dict[str, Any]:
    """Judge many runs in one process, which starts once."""
    command = [PYTHON, "-m", "tests.extras.trial_run.many", str(folder / "records"), *words]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    return {report["name"]: report for report in reports}


@pytest.mark.timeout(300)
def test_verdicts(tmp_path: Path) -> None:
    options: dict[str, list[str]] = {}
    expected: dict[str, tuple[str, list[str]]] = {}
    for verdict, scripts in SCRIPTS.items():
        for command, script in scripts.items():
            name, *options[name] = command.split()
            (tmp_path / f"{name}.py").write_text(HEAD + script)
            texts = re.findall(r"^#: (.*(?:\n#  .*)*)", script, re.MULTILINE)
            expected[name] = verdict, [text.replace("\n# ", "") for text in texts]
    reports = _judge_many(tmp_path, "scripts", json.dumps(options))
    assert reports.keys() == expected.keys()
    for name, (verdict, texts) in expected.items():
        report = reports[name]
        said = "\n".join([f"{report['verdict']}: {report['text']}", *report["lines"]])
        said = said.replace("\n      ", " / ")
        if not (said.startswith(verdict) and all(text in said for text in texts)):
            pytest.fail(f"{name}: expected {verdict}, {texts}, got {said}")
    assert reports["clips_a_large_gradient"]["costs"] == {}, "fewer than five steps after warm-up"
    memory, time_per_step, sent = reports["two_optimizers"]["costs"].values()
    assert min(*memory, *time_per_step) > 0
    assert sent[0] > 4  # KiB of gradients of one model


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, environment, text in (
        (["none.py"], {}, "SCRIPT: expected a file (or -m and a module), got 'none.py'"),
        (["--steps", "0", __file__], {}, "expected at least 1, got 2 and 0"),
        (["--nproc-per-node", "0", __file__], {}, "expected at least 1, got 0 and 10"),
        (["--strategy", "FULL", __file__], {}, "--strategy: invalid choice: 'FULL' (choose from "),
        (["--policy", "all", __file__], {}, "--policy: invalid choice: 'all' (choose from "),
        (["--steps", "many", __file__], {}, "--steps: invalid int value: 'many'"),
        ([], {}, "the following arguments are required: script"),
        ([__file__], {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, "--keep: expected a new folder"),
    ):
        with mock.patch.dict(os.environ, environment):
            with pytest.raises(SystemExit, match="3"):
                sys.exit(main(["try", *words]))
        said = "".join(capsys.readouterr())
        assert text in said
        assert said.count("\n") == 1


def test_costs_are_medians_after_warm_up() -> None:
    seconds = [0, 100, 200, 201, 203, 206, 210, 215, 221]  # two slow steps, then 1 to 6
    costs = [(index, 1e3 * one, 2 * index) for index, one in enumerate(seconds)]
    figures: dict[str, Any] = {}
    table = cost_table([[SimpleNamespace(costs=costs)]] * 2, figures)
    assert figures == {name: (one, one) for name, one in zip(COSTS, (8, 3500, 2), strict=True)}
    assert "3500.0" in table


def test_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    script = "open(f'pid-{os.getpid()}', 'w').close()\ntime.sleep(1000)"
    (tmp_path / "script.py").write_text(HEAD + script)
    command = [PYTHON, "-m", "flatshard", "try", "script.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE)
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("pid-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130, error
    assert b"interrupted" in error
    for file in tmp_path.glob("pid-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.name.removeprefix("pid-")), 0)


@pytest.mark.timeout(300)
def test_planted_faults(tmp_path: Path) -> None:
    reports = _judge_many(tmp_path, "faults")
    assert reports.keys() == {"", *FAULTS}
    assert reports[""]["verdict"] == SAME, reports[""]["text"]
    for fault, (kind, _) in FAULTS.items():
        report = reports[fault]
        assert report["verdict"] == DIFFERS, (fault, report["text"])
        assert report["first"]["kind"] == kind, (fault, report["first"])
        assert f"{kind} {report['first']['name']!r}" in report["text"]


@pytest.mark.timeout(1800)
def test_random_models_raise_no_alarm(tmp_path: Path) -> None:
    reports = _judge_many(tmp_path, "0-200" if THOROUGH else "0-3")
    alarms = [one["text"] for one in reports.values() if one["verdict"] in (DIFFERS, RAISES)]
    assert not alarms, alarms[0]
    # Some models cannot be compared, because they do not run under DistributedDataParallel.
    assert sum(one["verdict"] == SAME for one in reports.values()) >= len(reports) / 2


def test_files_of_another_run_are_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    torch.distributed.FileStore(str(tmp_path / "ddp"), -1).set("port", "12345")
    assert main(["try", "--keep", str(tmp_path), __file__]) == 3
    assert f"found files of another run in {tmp_path}" in capsys.readouterr().out


def test_torchrun_starts_the_ranks_and_the_report_is_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(HEAD + "train(*start())")
    command = ROOT / "flatshard" / "__main__.py"
    words = ["try", "--steps", "4", "--json", "a.json", "script.py"]
    status, out, err = torchrun(2, command, *words, cwd=tmp_path)
    assert status == 0, out + err
    assert out.count("The same numbers") == 1
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["verdict"] == "same"
    assert report["text"] == out.strip()
