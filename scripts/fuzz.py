"""Trains random models under random settings, and compares with the unwrapped model.

    python scripts/fuzz.py                          # 100 cases
    python scripts/fuzz.py --cases 5000 --seed 7
    python scripts/fuzz.py --case '{"world": 2, ...}'   # one that was printed

Each case is a tree of modules (nested, shared, tied, frozen, 0-d, empty and uneven parameters, two
dtypes, unused outputs, both kinds of checkpointing, batch norm, recurrent layers), a policy, a
strategy and a way to train, on 1 to 4 gloo ranks. A run is *right* if every loss and the state dict
at the end are those of the unwrapped model on all ranks' rows; it *raises* if all ranks raise
flatshard's own error; otherwise it is *wrong*, or *hangs*. Hypothesis shrinks the first case that
is wrong, hangs or, with ``--no-raises``, raises, and the script prints it and ends with 1.

Needs the extra "dev".
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import functools
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import prerequisites  # noqa: F401  (first: it may end this)

# isort: split
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 6, 3
HANG_SECONDS = 60.0
CASES_PER_PROCESS = 200

Json = dict[str, Any]


# ---------------------------------------------------------------- the models


class Leaf(nn.Module):
    """A layer of parameters; what is inside depends on ``kind``."""

    def __init__(self, kind: str, generator: torch.Generator) -> None:
        super().__init__()

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / 2)

        self.kind = kind
        if kind in ("linear", "biasless"):
            self.weight = new(WIDTH, WIDTH)
            self.bias = new(WIDTH) if kind == "linear" else None
        elif kind == "low_rank":
            self.down, self.up = new(1, WIDTH), new(WIDTH, 1)
        elif kind == "scalar":
            self.scale, self.offset = new(), new(1)
        elif kind == "empty":
            self.nothing, self.shift = new(0, WIDTH), new(WIDTH)
        elif kind == "odd":
            self.values = new(7)
        elif kind == "norm":
            self.inner = nn.LayerNorm(WIDTH, dtype=torch.float64)
        elif kind == "batch_norm":
            self.inner = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        elif kind == "lookup":
            self.inner = nn.Embedding(4, WIDTH, dtype=torch.float64)
            self.inner.weight.data = new(4, WIDTH).data
        elif kind == "recurrent":
            self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True, dtype=torch.float64)
            for param in self.inner.parameters():
                param.data = new(*param.shape).data
        elif kind == "attention":
            self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dtype=torch.float64)
            for param in self.inner.parameters():
                param.data = new(*param.shape).data
        elif kind == "running":
            self.weight = new(WIDTH)
            self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        else:
            raise ValueError(f"no such layer: {kind!r}")

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("linear", "biasless"):
            return nn.functional.linear(x, self.weight, self.bias).tanh()
        if self.kind == "low_rank":
            return x + x @ self.down.T @ self.up.T
        if self.kind == "scalar":
            return (x * self.scale + self.offset).tanh()
        if self.kind == "empty":
            return x + (x @ self.nothing.T).sum(-1, keepdim=True) + self.shift
        if self.kind == "odd":
            return x + self.values[1:] * self.values[0]
        if self.kind == "lookup":
            return x + self.inner((x.detach().sum(-1) * 3).long() % 4)
        if self.kind == "recurrent":
            return self.inner(x.unsqueeze(0))[0].squeeze(0)
        if self.kind == "attention":
            one = x.unsqueeze(1)
            return x + self.inner(one, one, one, need_weights=False)[0].squeeze(1)
        if self.kind == "running":
            if self.training:
                self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return (x - self.mean) * self.weight
        return self.inner(x)


LEAVES = ("linear", "biasless", "low_rank", "scalar", "empty", "odd", "norm", "batch_norm")
LEAVES += ("lookup", "recurrent", "attention", "running")
STATEFUL = {"batch_norm", "running"}
SKIPPING = {"no_grad", "sometimes", "unused", "reentrant"}
"""Kinds of boxes in which a parameter may have no gradient."""


class Box(nn.Module):
    """Modules that run one after the other, in the way that ``kind`` says."""

    def __init__(self, kind: str, body: list[nn.Module], every: int) -> None:
        super().__init__()
        self.kind, self.body, self.every, self.step = kind, nn.ModuleList(body), every, 0

    def run(self, x: Tensor) -> Tensor:
        for module in self.body:
            x = module(x)
        return x

    def forward(self, x: Tensor) -> Any:
        if self.kind == "residual":
            return x + self.run(x)
        if self.kind == "twice":
            return self.run(self.run(x))
        if self.kind == "reentrant":
            return checkpoint(self.run, x, use_reentrant=True)
        if self.kind == "checkpoint":
            return checkpoint(self.run, x, use_reentrant=False)
        if self.kind == "unused":  # a dictionary, of which the caller uses one value
            return {"used": self.body[0](x), "unused": self.run(x)}["used"]
        if self.kind == "sometimes":
            return self.run(x) if self.step % self.every == 0 else x
        if self.kind == "narrow":
            return self.run(x.float()).to(x.dtype)
        if self.kind == "no_grad":
            with torch.no_grad():
                return x + self.run(x)
        if self.kind == "needs_grad":  # what PEFT's enable_input_require_grads does
            return self.run(x if x.requires_grad else x.requires_grad_(torch.is_grad_enabled()))
        return self.run(x)


BOXES = ("sequence", "residual", "twice", "reentrant", "checkpoint", "unused", "sometimes")
BOXES += ("narrow", "frozen", "no_grad", "needs_grad")


def build(case: Json) -> nn.Module:
    """The model of a case, with the same values on every rank."""
    generator = torch.Generator().manual_seed(case["seed"])
    made: list[Leaf] = []
    root = Box("sequence", [_build(node, generator, made) for node in case["tree"]], 1)
    return nn.Sequential(Leaf("linear", generator), root, Leaf("linear", generator))


def _build(node: Json, generator: torch.Generator, made: list[Leaf]) -> nn.Module:
    kind = node["kind"]
    if kind == "shared" and made:
        return made[node["of"] % len(made)]
    if kind == "tied":
        others = [one for one in made if one.kind in ("linear", "biasless")]
        leaf = Leaf("linear", generator)
        if others:
            leaf.weight = others[node["of"] % len(others)].weight
    elif kind in BOXES:
        # Dtypes differ: what is inside is shared with nothing outside.
        inside: list[Leaf] = [] if kind == "narrow" else made
        body = [_build(one, generator, inside) for one in node["body"]]
        box = Box(kind, body, node.get("every", 2))
        if kind == "narrow":
            box.float()
        if kind == "frozen":
            box.requires_grad_(False)
        box.is_unit = node["unit"]
        return box
    else:
        leaf = Leaf("linear" if kind == "shared" else kind, generator)
    leaf.is_unit = node["unit"]
    made.append(leaf)
    return leaf


def kinds_in(nodes: list[Json]) -> set[str]:
    """The kinds of all modules in a tree."""
    found: set[str] = set()
    for node in nodes:
        found |= {node["kind"], *kinds_in(node.get("body", []))}
    return found


# ---------------------------------------------------------------- random cases


def trees() -> st.SearchStrategy[list[Json]]:
    leaves = st.builds(
        lambda kind, of, unit: {"kind": kind, "of": of, "unit": unit},
        st.sampled_from((*LEAVES, "shared", "tied")),
        st.integers(0, 5),
        st.booleans(),
    )

    def boxed(children: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
        return st.builds(
            lambda kind, body, every, unit: {
                "kind": kind,
                "body": body,
                "every": every,
                "unit": unit,
            },
            st.sampled_from(BOXES),
            st.lists(children, min_size=1, max_size=3),
            st.integers(2, 3),
            st.booleans(),
        )

    return st.lists(st.recursive(leaves, boxed, max_leaves=8), min_size=1, max_size=5)


def cases(worlds: list[int]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries(
        {
            "seed": st.integers(0, 1000),
            "world": st.sampled_from(worlds),
            "tree": trees(),
            "policy": st.sampled_from(["none", "auto", "marked", "leaves", "boxes", "size", "all"]),
            "strategy": st.sampled_from(
                [
                    *("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "SHARD_OP"),
                    *("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "HYBRID_SHARD_OP"),
                ]
            ),
            "per_node": st.integers(1, 4),
            "regather": st.sampled_from([None, None, True, False, 2]),
            "orig": st.sampled_from([True, True, False]),
            "coalesce": st.sampled_from([0, None, 300]),
            "backward_prefetch": st.sampled_from(["AUTO", "BACKWARD_PRE", "BACKWARD_POST", None]),
            "forward_prefetch": st.sampled_from([None, False]),
            "collectives": st.sampled_from(["auto", "sockets", "native"]),
            "accumulate": st.integers(1, 3),
            "optimizer": st.sampled_from(["sgd", "adamw"]),
            "in_backward": st.sampled_from([False, False, True]),
            "clip": st.booleans(),
            "eval": st.booleans(),
            "input_grad": st.booleans(),
            "offload": st.sampled_from([False, False, True]),
        }
    ).map(_sound)


def _sound(case: Json) -> Json:
    """Without combinations that are documented to raise, or that differ from DDP as documented."""
    case = dict(case)
    case["per_node"] = min(case["per_node"], case["world"])
    while case["world"] % case["per_node"]:
        case["per_node"] -= 1
    if STATEFUL & kinds_in(case["tree"]):
        case["accumulate"] = 1  # under no_sync every rank's buffers go their own way
    if case["regather"] == 2 and case["world"] not in (2, 4):
        case["regather"] = None
    if case["strategy"] != "FULL_SHARD":
        case["regather"] = None
    if SKIPPING & kinds_in(case["tree"]):
        case["orig"] = True  # a flat parameter is stepped in one piece, without gradients too
    if not case["orig"]:
        case["in_backward"] = False
    if case["in_backward"]:
        case["clip"], case["accumulate"] = False, 1
    return case


# ---------------------------------------------------------------- training


def batches(case: Json, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """A rank's inputs and targets, ``(ROWS, WIDTH)`` each."""
    generator = torch.Generator().manual_seed(case["seed"] * 1000 + step * 10 + rank)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x.requires_grad_(case["input_grad"]), y


def optimizer_of(case: Json, params: Any) -> torch.optim.Optimizer:
    params = [param for param in params if param.requires_grad]
    if case["optimizer"] == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)
    # A large eps: gradients that should be zero, and are 1e-17, are not made steps.
    return torch.optim.AdamW(params, lr=0.01, eps=1e-2)


STEPS = 3


def set_step(model: nn.Module, step: int) -> None:
    for module in model.modules():
        if isinstance(module, Box):
            module.step = step


def expected(case: Json) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state dict of the unwrapped model, rank by rank in one process."""
    model = build(case)
    optimizer = optimizer_of(case, model.parameters())
    losses = []
    for step in range(STEPS):
        set_step(model, step)
        optimizer.zero_grad()
        total = 0.0
        for part in range(case["accumulate"]):
            before = [buffer.clone() for buffer in model.buffers()]
            after = before
            for rank in range(case["world"]):
                for buffer, value in zip(model.buffers(), before, strict=True):
                    buffer.copy_(value)
                x, y = batches(case, rank, step * 3 + part)
                loss = (model(x) - y).square().mean() / case["world"]
                loss.backward()
                total += loss.item()
                if rank == 0:
                    after = [buffer.clone() for buffer in model.buffers()]
            for buffer, value in zip(model.buffers(), after, strict=True):
                buffer.copy_(value)
        if case["clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(total)
        if case["eval"]:
            losses.append(_evaluate(model, case))
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def _evaluate(model: nn.Module, case: Json) -> float:
    model.eval()
    with torch.no_grad():
        x, y = batches(case, 0, 999)
        loss = (model(x) - y).square().mean().item()
    model.train()
    return loss


def wrap(case: Json, model: nn.Module) -> nn.Module:
    from flatshard import CPUOffload, ShardedWrapper
    from flatshard import wrap as policies

    classes = {"leaves": {Leaf}, "boxes": {Box}, "all": {Leaf, Box}}
    policy: Any = {"none": None, "auto": "auto"}.get(case["policy"])
    if case["policy"] in classes:
        policy = policies.ModuleWrapPolicy(classes[case["policy"]])
    elif case["policy"] == "size":
        policy = functools.partial(policies.size_based_auto_wrap_policy, min_num_params=60)
    elif case["policy"] == "marked":
        policy = policies.CustomPolicy(lambda module: getattr(module, "is_unit", False))
    os.environ["LOCAL_WORLD_SIZE"] = str(case["per_node"])
    return ShardedWrapper(
        model,
        auto_wrap_policy=policy,
        sharding_strategy=case["strategy"],
        reshard_after_forward=case["regather"],
        use_orig_params=case["orig"],
        coalesce_bytes=case["coalesce"],
        backward_prefetch=case["backward_prefetch"],
        forward_prefetch=case["forward_prefetch"],
        collectives=case["collectives"],
        cpu_offload=CPUOffload(offload_params=True) if case["offload"] else None,
    )


def train(case: Json) -> tuple[list[float], dict[str, Tensor]]:
    """The same on this rank of the default group, sharded."""
    rank = dist.get_rank()
    model = wrap(case, build(case))
    optimizer = optimizer_of(case, model.parameters())
    if case["in_backward"]:
        model.step_in_backward(optimizer)
    losses = []
    for step in range(STEPS):
        set_step(model, step)
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for part in range(case["accumulate"]):
            is_last = part + 1 == case["accumulate"]
            x, y = batches(case, rank, step * 3 + part)
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = (model(x) - y).square().mean()
                loss.backward()
            total += loss.detach()
        if case["clip"]:
            model.clip_grad_norm_(0.5)
        optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item() / case["world"])
        if case["eval"]:
            losses.append(_evaluate(model, case))
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


# ---------------------------------------------------------------- ranks


def _serve(pipe: Any, stacks: str) -> None:
    """A rank: runs the cases that come through the pipe."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of checkpoints without gradients, and of slow settings
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        faulthandler.enable(file)
        while True:
            case, rank, store = pipe.recv()
            pipe.send(_run(case, rank, store))


def _run(case: Json, rank: int, store: str) -> tuple[str, Any]:
    world = case["world"]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=HANG_SECONDS / 2),
    )
    try:
        return "returned", train(case)
    except Exception as error:
        lines = traceback.format_exception(error)
        return "raised", (type(error).__name__, str(error), "".join(lines[-12:]))
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


class Ranks:
    """Processes that are ranks of one case after another; started again after a failure."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["fuzz", "flatshard.wrap", "torch._dynamo"])
        self._folder = tempfile.TemporaryDirectory(prefix="flatshard-fuzz-")
        self._ranks: list[tuple[Any, Any]] = []
        self._num_cases = 0

    def run(self, case: Json) -> list[tuple[str, Any]]:
        """What each rank says of a case; a rank that hangs or dies says that."""
        if self._num_cases % CASES_PER_PROCESS == 0:
            self.stop()
        self._num_cases += 1
        while len(self._ranks) < self._number:
            self._start()
        store = f"{self._folder.name}/store-{self._num_cases}"
        ranks = self._ranks[: case["world"]]
        for rank, (_, pipe) in enumerate(ranks):
            pipe.send((case, rank, store))
        said: dict[int, tuple[str, Any]] = {}
        end = time.monotonic() + HANG_SECONDS
        while len(said) < len(ranks) and time.monotonic() < end:
            pipes = {pipe: rank for rank, (_, pipe) in enumerate(ranks) if rank not in said}
            for pipe in wait(list(pipes), timeout=1.0):
                try:
                    said[pipes[pipe]] = pipe.recv()
                except (EOFError, ConnectionError):
                    process = ranks[pipes[pipe]][0]
                    process.join(5)
                    said[pipes[pipe]] = ("died", process.exitcode)
        if len(said) < len(ranks):
            for rank in set(range(len(ranks))) - set(said):
                said[rank] = ("hangs", self._stack_of(rank))
        with contextlib.suppress(OSError):
            os.remove(store)
        # What is left of a failure must not meet the next case.
        if any(verdict != "returned" for verdict, _ in said.values()):
            self.stop()
        return [said[rank] for rank in range(len(ranks))]

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        stacks = f"{self._folder.name}/stack-{len(self._ranks)}"
        process = self._context.Process(target=_serve, args=(theirs, stacks), daemon=True)
        process.start()
        theirs.close()
        self._ranks.append((process, ours))

    def _stack_of(self, rank: int) -> str:
        process = self._ranks[rank][0]
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return Path(f"{self._folder.name}/stack-{rank}").read_text()[-2000:]

    def stop(self) -> None:
        """End all ranks."""
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks.clear()


# ---------------------------------------------------------------- verdicts


def judge(case: Json, said: list[tuple[str, Any]]) -> tuple[str, str]:
    """One of "right", "raises", "wrong" and "hangs", and why."""
    verdicts = {verdict for verdict, _ in said}
    if verdicts & {"hangs", "died"}:
        return "hangs", "; ".join(f"rank {r}: {v} {w}" for r, (v, w) in enumerate(said))
    if "raised" in verdicts:
        kind, message, trace = next(what for verdict, what in said if verdict == "raised")
        if verdicts != {"raised"}:
            return "wrong", f"not all ranks raise: {kind}: {message}\n{trace}"
        return "raises", f"{kind}: {message}\n{trace}"
    losses, state = expected(case)
    tolerance = 2e-4 if "narrow" in kinds_in(case["tree"]) else 1e-9
    for rank, (_, (found, _)) in enumerate(said):
        for index, (ours, oracle) in enumerate(zip(found, losses, strict=True)):
            if not abs(ours - oracle) <= tolerance * max(1.0, abs(oracle)):
                return "wrong", f"rank {rank}: loss {index} is {ours!r}, expected {oracle!r}"
    return _compare_states(said[0][1][1], state, tolerance)


def _compare_states(
    ours: dict[str, Tensor], oracle: dict[str, Tensor], tolerance: float
) -> tuple[str, str]:
    if list(ours) != list(oracle):
        return "wrong", f"state dict has {list(ours)}, expected {list(oracle)}"
    for name, value in oracle.items():
        if ours[name].shape != value.shape or ours[name].dtype != value.dtype:
            return "wrong", f"{name}: {tuple(ours[name].shape)} {ours[name].dtype}"
        if not torch.allclose(ours[name], value, rtol=tolerance, atol=tolerance):
            return "wrong", f"{name} differs by {(ours[name] - value).abs().max().item():g}"
    return "right", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--no-raises", action="store_true", help="errors of flatshard's fail, too")
    parser.add_argument("--database", help="folder that keeps failing cases")
    parser.add_argument("--case", help="run this one case")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    ranks = Ranks(max(options.worlds) if options.case is None else 4)
    if options.case is not None:
        verdict, why = judge(json.loads(options.case), ranks.run(json.loads(options.case)))
        print(verdict, why)
        return 0 if verdict == "right" else 1
    counts: collections.Counter[str] = collections.Counter()
    raised: collections.Counter[str] = collections.Counter()
    first: dict[str, str] = {}
    bad = {"wrong", "hangs", *(["raises"] if options.no_raises else [])}

    @seed(options.seed)
    @settings(
        max_examples=options.cases,
        deadline=None,
        database=options.database and DirectoryBasedExampleDatabase(options.database),
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(cases(options.worlds))
    def check(case: Json) -> None:
        verdict, why = judge(case, ranks.run(case))
        counts[verdict] += 1
        if verdict == "raises":
            kind = re.sub(r"'[^']*'|\d+", "_", why.split("\n")[0])[:150]
            raised[kind] += 1
            first.setdefault(kind, json.dumps(case))
        assert verdict not in bad, f"{verdict}: {why}\ncase: {json.dumps(case)}"

    failed = False
    try:
        check()
    except AssertionError as error:
        failed = True
        print(error)
    finally:
        ranks.stop()
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    for kind, count in raised.most_common():
        print(f"  {count} x {kind}\n      {first[kind]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
