"""Programs for ranks on a simulated GPU: each takes its rank, and returns its error, if any."""

import contextlib
import copy
import dataclasses
import os
import random
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gpu_checks import divergence, equality
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional, distributed_c10d

from flatshard import MixedPrecision, ShardedWrapper, checkpoint, full_tensors
from flatshard.engine import forward_edits
from flatshard.extras.deadlock import gpu
from flatshard.weights import WeightChanges, apply_changes
from flatshard.wrap import CustomPolicy, ModuleWrapPolicy
from tests.simulated_gpu.kernels import driver_calls

GPU = torch.device("cuda", 0)


def train(rank: int, *cases: str) -> dict[str, Any]:
    """Train as `scripts/gpu_check.py` does; returns how far rank 0 is off in each of the cases.

    A case is a strategy, a precision and a variant, with commas between.
    """
    # It waits for the device in the first forwards, which would hide waits that lack.
    vars(forward_edits)["checksum"] = lambda buffer: 0
    equality.STEPS = 3
    cpu, off = torch.device("cpu"), []
    start = dict(equality.make_model(cpu).state_dict())
    for text in cases:
        case = equality.Case(*text.split(","))
        trained = equality.train_sharded(case, rank, GPU)
        if rank == 0:
            expected = equality.train_plain(case, dist.get_world_size(), cpu)
            off.append(dataclasses.asdict(equality.compare(trained, expected, start)))
        # When a tensor of a state dict is freed, flatshard compares it with the shard, on the GPU.
        del trained
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    return {"error": "", "off": off}


DRIVER_CALLS = (
    *("launches", "copies", "collectives", "events recorded", "stream waits", "queries"),
    *("host waits", "allocations"),
)


def call_driver(rank: int, kind: str, number: str) -> dict[str, Any]:
    """Count the calls of the driver in forward and backward with a ``number`` of blocks.

    ``kind``: "plain", or "flatshard", which trains in bfloat16.
    """
    layers = (nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    blocks = [nn.Sequential(*copy.deepcopy(layers)) for _ in range(int(number))]
    model: nn.Module = nn.Sequential(*blocks).to(GPU)
    if kind == "flatshard":
        policy = CustomPolicy(lambda module: module in blocks)
        options = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)}
        model = ShardedWrapper(model, auto_wrap_policy=policy, coalesce_bytes=0, **options)
    batch = torch.randn(4, 8).to(GPU)
    for _ in range(4):
        before = driver_calls(*DRIVER_CALLS)
        model(batch).sum().backward()
        after = driver_calls(*DRIVER_CALLS)
        for param in model.parameters():
            param.grad = None
        torch.cuda.synchronize()
    return {"error": "", "calls": after - before}


def diverge(rank: int, case: str, barrier: str = "") -> dict[str, Any]:
    """``barrier``: if not empty, the last rank waits in a barrier of the program."""
    return divergence.run_program(case, rank, GPU, bool(barrier))


def diverge_unseen(rank: int, case: str, timeout: str = "") -> dict[str, Any]:
    """The same where nobody looks at waits for the GPU, and with a ``timeout`` in seconds."""
    if timeout:
        for group in tuple(distributed_c10d._world.pg_names):
            distributed_c10d._set_pg_timeout(timedelta(seconds=float(timeout)), group)
    vars(gpu)["_place_of"] = lambda thread: None
    vars(gpu)["end_waits"] = vars(gpu)["abort"] = lambda *_: None
    return divergence.run_program(case, rank, GPU)


def wait_in_own(rank: int, kind: str = "") -> dict[str, Any]:
    """Rank 0 waits on the GPU in a collective of the program, the others in one of the model.

    ``kind``: "functional" for a functional collective, "destroyed" for a program that has destroyed
    a process group before.
    """
    if kind == "destroyed":
        group = dist.new_group(backend="nccl")
        dist.all_reduce(torch.ones(1).cuda(), group=group)
        torch.cuda.synchronize()
        dist.destroy_process_group(group)
    program, begin, error = divergence.Program(rank, GPU), time.monotonic(), ""
    program.step()
    try:
        with torch.no_grad():
            if rank == 0:
                value = torch.ones(1).cuda()
                if kind == "functional":
                    value = functional.all_reduce(value, "sum", dist.group.WORLD)
                else:
                    dist.all_reduce(value)
            else:
                value = program.model(program.batch).sum()
            value.item()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "seconds": time.monotonic() - begin}


def save_slowly(rank: int, folder: str, seconds: str) -> dict[str, Any]:
    """Rank 0 writes a checkpoint for so long; the others wait, and go on with the next step."""
    program = divergence.Program(rank, GPU)
    program.step()
    really_replace = os.replace

    def replace_slowly(*args: Any) -> None:
        time.sleep(float(seconds))
        really_replace(*args)

    os.replace = replace_slowly if rank == 0 else really_replace
    checkpoint.save(folder, program.model, program.optimizer)
    if rank == 0:
        time.sleep(float(seconds))  # writes a file of its own
    program.step()
    torch.cuda.synchronize()
    return {"error": "", "seconds": 0.0}


def pause(rank: int, seed: str, steps: str, longest: str) -> dict[str, Any]:
    """Steps in which some rank sleeps anywhere, up to ``longest`` seconds in one step of twenty.

    In some steps a rank reads a value that the others do not read, and the program has collectives
    of its own: all-reduces on the GPU and barriers. Some steps only evaluate.
    """
    program, ranks = divergence.Program(rank, GPU), dist.get_world_size()
    common, value = random.Random(seed), torch.ones(1).cuda()
    for _ in range(int(steps)):
        late, reader, place = common.randrange(ranks), common.randrange(2 * ranks), common.random()
        kind = common.choice(("train", "train", "train", "evaluate", "clip", "reduce", "barrier"))
        seconds = common.random() * (float(longest) if common.random() < 0.05 else 0.02)

        def sleep(here: float, late: int = late, place: float = place, s: float = seconds) -> None:
            if rank == late and here <= place < here + 0.25:
                time.sleep(s)

        sleep(0.0)
        with torch.set_grad_enabled(kind != "evaluate"):
            loss = program.model(program.batch).square().mean()
        sleep(0.25)
        if rank == reader:
            loss.item()
        if kind == "evaluate":
            continue
        if kind == "reduce":
            dist.all_reduce(value)
        loss.backward()
        sleep(0.5)
        if kind == "clip":
            program.model.clip_grad_norm_(1.0)
        program.optimizer.step()
        program.optimizer.zero_grad()
        sleep(0.75)
        if kind == "barrier":
            dist.barrier()
    torch.cuda.synchronize()
    return {"error": "", "seconds": 0.0}


def write_state_dict(rank: int, write: str) -> dict[str, Any]:
    """The program writes to tensors of a state dict, so that no version counter changes.

    Returns ``factors``: for each tensor of the next state dict, the factor by which it has changed.
    """
    program, error = divergence.Program(rank, GPU), ""
    program.step()
    model = program.model
    before = {name: value.cpu() for name, value in model.state_dict().items()}
    state = model.state_dict()
    if "late" in write:
        program.step()
    for value in state.values():
        if "all_reduce" in write:
            dist.all_reduce(value)
        elif "broadcast" in write:
            dist.broadcast(value.data.mul_(2) if rank == 0 else value, 0)
        elif "data" in write:
            value.data.mul_(2)
    held = state if "held" in write else None
    del state, value
    try:
        for _ in range(2):
            with torch.no_grad():
                model(program.batch)
        now = model.state_dict().items()
        factors = [(value.cpu() / before[name]).median().item() for name, value in now]
    except RuntimeError as raised:
        error, factors = str(raised), []
    torch.cuda.synchronize()
    del held
    return {"error": error, "seconds": 0.0, "factors": factors}


class Encoder(nn.Module):
    """A frozen copy of a layer, which follows the layer inside of the forward from a step on."""

    def __init__(self, first: int, way: str) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.key.requires_grad_(way == "trainable")
        self.calls, self.first, self.way = 0, first, way

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        query = self.query(x)
        key = self.key(x)
        if self.calls >= self.first:
            with torch.no_grad():
                part = self.key.weight.data[:1] if self.way == "written" else self.key.weight.data
                part.mul_(0.9)
        return query + key


def edit_in_forward(rank: int, first: str, way: str) -> dict[str, Any]:
    """The forward edits a parameter from call ``first`` on; returns the step of the error."""
    torch.manual_seed(0)
    model = ShardedWrapper(Encoder(int(first), way).to(GPU))
    x, step, error = torch.ones(2, 8).to(GPU), 0, ""
    try:
        while step < 8:
            step += 1
            if way == "written":
                with torch.no_grad():
                    model.key.weight.mul_(0.99)
            with torch.set_grad_enabled(way != "evaluation"):
                loss = model(x).square().sum()
            if way != "evaluation":
                loss.backward()
    except RuntimeError as raised:
        error = str(raised)
    torch.cuda.synchronize()
    return {"error": error, "seconds": 0.0, "step": step}


class Ordered(nn.Module):
    """Equally large layers, which run in a given order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(divergence.Layer() for _ in range(3))

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> dict[str, Tensor]:
        given = x
        for number in order:
            x = self.layers[number](x)
        outputs = {"logits": x, "classes": x.argmax(-1), "first": x[:, :1].expand(-1, 2)}
        return {**outputs, "input": given}


def evaluate_apart(rank: int, what: str) -> dict[str, Any]:
    """Evaluate, perhaps differently on rank 0, and then train for a step.

    Returns ``error``: the error of the backward, or of the evaluation if it takes more than three
    seconds. ``spoiled``: for each output of the evaluation, whether all values are NaN or -1.
    """
    torch.manual_seed(0)
    batch, spoiled, error = torch.randn(4, divergence.WIDTH).to(GPU), dict[str, bool](), ""
    try:
        if what == "buffers":
            model = _evaluate_buffers(rank, batch, spoiled)
        elif what == "alone":
            model = ShardedWrapper(divergence.Layer().to(GPU), sharding_strategy="NO_SHARD")
            with torch.no_grad():
                spoiled["output"] = rank == 0 and bool(model(batch).isnan().any())
        else:
            policy = ModuleWrapPolicy({divergence.Layer})
            model = ShardedWrapper(Ordered().to(GPU), auto_wrap_policy=policy, coalesce_bytes=0)
            order = (1, 0, 2) if what == "order" and rank == 0 else (0, 1, 2)
            saved = batch.clone().requires_grad_().tanh()  # autograd saves the result
            with torch.inference_mode() if what == "inference" else torch.no_grad():
                for name, value in model(saved, order).items():
                    wrong = value.isnan() if value.is_floating_point() else value == -1
                    spoiled[name] = bool(wrong.all())
            saved.sum().backward()
        output = model(batch)
        loss = output["logits"] if isinstance(output, dict) else output
        loss.sum().backward()
        torch.cuda.synchronize()
    except RuntimeError as raised:
        error = str(raised)
    return {"error": error, "seconds": 0.0, "spoiled": spoiled}


def _evaluate_buffers(rank: int, batch: Tensor, spoiled: dict[str, bool]) -> ShardedWrapper:
    """Evaluate one of two models, whose buffers have the same size."""
    layers = [divergence.Layer() for _ in range(2)]
    for layer in layers:
        layer.register_buffer("number", torch.ones(5))
    models = [ShardedWrapper(one.to(GPU), sharding_strategy="NO_SHARD") for one in layers]
    model = models[rank == 0]
    with torch.no_grad():
        model(batch)
    spoiled["number"] = bool(model.number.isnan().all())
    return model


def count_tokens(rank: int) -> dict[str, Any]:
    """Train with counts on the device, and send the weights that change to a copy of the model."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    policy = ModuleWrapPolicy({nn.Linear})
    options = {"auto_wrap_policy": policy, "coalesce_bytes": 0, "sharding_strategy": "SHARD_OP"}
    model = ShardedWrapper(copy.deepcopy(plain).to(GPU), **options)
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-2) for one in (plain, model)]
    changes, wrong = WeightChanges(model), 0
    received = {name: torch.zeros(one.shape).bfloat16() for name, one in plain.state_dict().items()}
    for step in range(4):
        inputs = torch.randn(2, 3, 16, 8)  # rank, micro-batch
        valid = torch.rand(2, 3, 16) < 0.5 + 0.1 * step
        counted = [(r, number) for r in range(2) for number in range(3 - 2 * r)]
        losses = [plain(inputs[place]).square().sum(1)[valid[place]].sum() for place in counted]
        (sum(losses) / sum(valid[place].sum() for place in counted)).backward()
        own = [place for place in counted if place[0] == rank]
        for place in own:
            with contextlib.nullcontext() if place is own[-1] else model.no_sync():
                mask = valid[place].to(GPU)
                model.average_over(mask.sum())
                (model(inputs[place].to(GPU)).square().sum(1) * mask).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        apply_changes(received, changes.changes(digests=True))
        for name, full in full_tensors(model, dtype=torch.bfloat16, device="cpu"):
            wrong += not torch.equal(received[name], full)
    torch.cuda.synchronize()
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    off = max((state[name] - one).abs().max().item() for name, one in plain.state_dict().items())
    return {"error": "", "seconds": 0.0, "off": off, "wrong": wrong}
