"""What each strategy sends and holds, on four ranks that make two nodes, against the theory.

Expected figures are in units of Psi (the bytes of all parameters) and of the root unit's part.
"""

import contextlib
import gc
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lib.gpt import Block
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from train_transformer import Transformer

from flatshard import ShardedWrapper
from flatshard.collectives import record
from flatshard.module.wrappers import handles_in
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import run_ranks

WORLD, PER_NODE = 4, 2
WIDTH, DEPTH, MICRO_BATCHES = 96, 4, 2
ROWS, LENGTH, VOCABULARY, HEADS = 2, 16, 512, 4
SIZES = WIDTH, DEPTH, HEADS, LENGTH, VOCABULARY

WAYS: dict[str, dict[str, Any]] = {
    **{name: {"sharding_strategy": name} for name in ("NO_SHARD", "SHARD_OP", "SHARD_GRAD_OP")},
    "FULL_SHARD": {},
    "FULL_SHARD, k=2": {"reshard_after_forward": 2},
    **{
        f"HYBRID_SHARD{end}": {"sharding_strategy": f"HYBRID_SHARD{end}"}
        for end in ("", "_ZERO2", "_OP")
    },
}
MODES: dict[str, dict[str, Any]] = {"last": {}, "replicas": {"replicas_only": True}}
"""Of accumulation: keywords of ``no_sync``. With "each", every micro-batch reduces gradients."""
WEIGHTS = {"gather": 1, "reduce": 1, "all_reduce": 2}
"""Weights of volume, as in the ZeRO paper: an all-reduce counts as a reduce-scatter and an
all-gather."""

# ---------------------------------------------------------------- a training


class Job:
    """Trains a model with one strategy on this rank."""

    def __init__(self, keywords: dict[str, Any]) -> None:
        torch.manual_seed(0)
        # One unit for each block, which are so small that they would be coalesced.
        model, policy = Transformer(*SIZES), ModuleWrapPolicy({Block})
        self.model = ShardedWrapper(model, auto_wrap_policy=policy, coalesce_bytes=0, **keywords)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.seed = 100 * dist.get_rank()

    def loss(self) -> Tensor:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def backward(self) -> None:
        self.loss().backward()

    def accumulate(self, micro_batches: int, mode: str = "each") -> None:
        """Run forward and backward for each micro-batch, then one optimizer step."""
        waits = self.model.no_sync(**MODES[mode]) if mode in MODES else contextlib.nullcontext()
        with waits:
            for _ in range(micro_batches - 1):
                self.backward()
        self.backward()
        self.step()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


# ---------------------------------------------------------------- what it sends and holds


def traffic(job: Job, micro_batches: int, mode: str) -> dict[str, Any]:
    """Number and volume of a step's collectives by group and kind, and its control messages."""
    with record() as events:
        job.accumulate(micro_batches, mode)
    flow: dict[str, tuple[int, float]] = {}
    control = [event.nbytes for event in events if event.kind not in WEIGHTS]
    for event in events:
        if event.kind in WEIGHTS:
            nodes = {rank // PER_NODE for rank in event.ranks}
            group = "all" if len(event.ranks) == WORLD else "node" if len(nodes) == 1 else "across"
            key = f"{group} {event.kind}"
            count, volume = flow.get(key, (0, 0))
            flow[key] = count + 1, volume + WEIGHTS[event.kind] * event.nbytes
    return {"micro_batches": micro_batches, "mode": mode, "flow": flow, "control": control}


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory of tensors, each storage once. Of a sharded tensor, this rank's part."""
    memory = {}
    for tensor in tensors:
        storage = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
        with contextlib.suppress(RuntimeError):  # the tensor of a resharded unit has no memory
            memory[storage.data_ptr()] = storage.nbytes()
    return sum(memory.values())


BUFFERS_IN = ("flatshard.engine.gradients", "flatshard.engine.gather")


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """Tensors among the attributes of an object, and of its attributes from ``BUFFERS_IN``."""
    for value in vars(thing).values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, Tensor):
                yield one
            elif type(one).__module__ in BUFFERS_IN:
                yield from tensors_in(one)


def held(job: Job) -> dict[str, int]:
    """Bytes that this rank holds now, by kind."""
    handles = handles_in(job.model)
    gradients = [tensor for handle in handles for tensor in tensors_in(handle.grads)]
    published = [p.grad for p in job.model.parameters() if p.grad is not None]
    states = (value for state in job.optimizer.state.values() for value in state.values())
    return {
        "parameters": bytes_of(handle.flat_param for handle in handles),
        "gradients": bytes_of([*gradients, *published]),
        "optimizer": bytes_of(value for value in states if isinstance(value, Tensor)),
        **gathered(handles),
    }


def gathered(handles: list[Any]) -> dict[str, int]:
    """Bytes of unsharded parameters and secondary shards."""
    # If the shard itself is the unsharded buffer, `buffer_bytes` is 0, and the buffer does not
    # count.
    buffers = [handle.buffer.untyped_storage() for handle in handles if handle.buffer_bytes]
    secondary = sum(one.gather.secondary.nbytes for one in handles if one.gather.secondary)
    return {"gathered": sum(one.nbytes() for one in buffers), "secondary": secondary}


def all_tensors() -> int:
    """Bytes of all tensors that Python's garbage collector finds."""
    readings: list[int] = []
    # Repeat until four readings in succession agree: a transport's thread may still hold tensors
    # after a collective has ended, and on a busy machine that thread may have to wait for a core.
    while len(readings) < 4 or len(set(readings[-4:])) > 1:
        time.sleep(0.05)
        gc.collect()
        tensors = (one for one in gc.get_objects() if issubclass(type(one), Tensor))
        readings.append(bytes_of(tensors))
    return readings[-1]


class Peaks(TorchDispatchMode):
    """Measures this rank's memory after every operation, and keeps the peaks.

    Gradients count as the flat tensors that are created in backward and still exist, because a
    buffer that is being reduced may be held only by a local variable.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.largest: Counter[str] = Counter()
        self._handles = handles_in(job.model)
        groups = (1, PER_NODE, WORLD)
        self._numels = {h.layout.padded_numel // size for h in self._handles for size in groups}
        self._known: set[int] | None = None
        self._gradients: dict[int, tuple[StorageWeakRef, int]] = {}

    def begin_backward(self) -> None:
        # The storages of parameters exist by now. Later storages with a gradient's size are
        # gradients.
        self._known = {key_of(tensor) for one in self._handles for tensor in tensors_in(one)}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._known is not None and isinstance(result, Tensor) and result.dim() == 1:
            self._notice(result)
        alive = {key: one for key, one in self._gradients.items() if not one[0].expired()}
        self._gradients = alive
        gradients = sum(nbytes for _, nbytes in alive.values())
        self.largest |= Counter(gradients=gradients, **gathered(self._handles))
        return result

    def _notice(self, tensor: Tensor) -> None:
        if tensor.numel() in self._numels and key_of(tensor) not in self._known:
            storage = tensor.untyped_storage()
            self._gradients[key_of(tensor)] = (StorageWeakRef(storage), storage.nbytes())


def key_of(tensor: Tensor) -> int:
    """Key of a tensor's storage, equal for all tensors over the storage, even without memory."""
    return tensor.untyped_storage()._cdata


def peaks_of(job: Job) -> dict[str, int]:
    """Peak memory of each kind in a step; the maximum over ranks. Collective."""
    with Peaks(job) as peaks:
        loss = job.loss()
        peaks.begin_backward()
        loss.backward()
    job.step()
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, dict(peaks.largest))
    kinds = ("gathered", "gradients", "secondary")
    return {kind: max(one.get(kind, 0) for one in of_ranks) for kind in kinds}


def accumulated(job: Job, max_bytes: int) -> dict[str, int]:
    """Bytes of gradients after a backward, for each mode of accumulation."""
    job.backward()
    found = {"each": held(job)["gradients"]}
    job.step()
    for mode, keywords in {**MODES, "max_bytes": {"max_bytes": max_bytes}}.items():
        with job.model.no_sync(**keywords):
            job.backward()
        found[mode] = held(job)["gradients"]
        job.backward()
        job.step()
    return found


def measure(rank: int, world_size: int) -> dict[str, Any]:
    """Figures of all strategies."""
    os.environ["LOCAL_WORLD_SIZE"] = str(PER_NODE)
    model = Transformer(*SIZES)
    psi, block = bytes_of(model.parameters()), bytes_of(model.blocks[0].parameters())
    sizes = {"psi": psi, "root": psi - DEPTH * block, "block": block}
    del model
    return {"sizes": sizes, **{name: _figures(name, psi) for name in WAYS}}


def _figures(name: str, psi: int) -> dict[str, Any]:
    before = all_tensors()
    job = Job(WAYS[name])
    for _ in range(2):  # in the first steps, ranks also agree on an execution order
        job.accumulate(1)
    modes = ["each", "last", *(["replicas"] if name.startswith("HYBRID") else [])]
    steps = [traffic(job, 1, "each"), *(traffic(job, MICRO_BATCHES, mode) for mode in modes)]
    job.backward()
    job.optimizer.step()
    between = held(job), all_tensors() - before
    job.optimizer.zero_grad()
    return {
        "padding": sum(one.layout.padding_numel for one in handles_in(job.model)),
        "steps": steps,
        "between": between,
        "peaks": peaks_of(job),
        "accumulated": accumulated(job, psi // 2),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(measure, WORLD, timeout=200)


@pytest.fixture(scope="module")
def figures(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return ranks[0]


# ---------------------------------------------------------------- what is sent

Coefficients = tuple[int, float, float]

# Five units. Number of collectives, and their volume: so many Psi, so many times the root's part.
# An all-reduce of x bytes moves 2 x.
ONCE, HALF, AGAIN = (5, 1, 0), (5, 0.5, 0), (9, 2, -1)  # backward gathers again, but not the root
ONE_STEP: dict[str, dict[str, Coefficients]] = {
    "NO_SHARD": {"all all_reduce": (5, 2, 0)},
    "SHARD_OP": {"all gather": ONCE, "all reduce": ONCE},
    "SHARD_GRAD_OP": {"all gather": ONCE, "all reduce": ONCE},
    "FULL_SHARD": {"all gather": AGAIN, "all reduce": ONCE},
    "FULL_SHARD, k=2": {"all gather": ONCE, "node gather": (4, 1, -1), "all reduce": ONCE},
    "HYBRID_SHARD": {"node gather": AGAIN, "node reduce": ONCE, "across all_reduce": ONCE},
    "HYBRID_SHARD_ZERO2": {"node gather": ONCE, "node reduce": ONCE, "across all_reduce": ONCE},
    "HYBRID_SHARD_OP": {
        "node gather": AGAIN,
        "node reduce": ONCE,
        "across gather": HALF,
        "across reduce": HALF,
    },
}

# Which collectives of a step with several micro-batches are not several times as many.
NOT_AGAIN = {"SHARD_OP": "all gather", "HYBRID_SHARD_OP": "across gather"}


def _times(name: str, key: str, mode: str) -> int:
    """How often several micro-batches make the collectives of ``ONE_STEP``."""
    if key == NOT_AGAIN.get(name):
        return 1
    group, kind = key.split()
    is_in_each = kind == "gather" or mode == "each" or (mode == "replicas" and group == "node")
    return MICRO_BATCHES if is_in_each else 1


@pytest.mark.parametrize("name", WAYS)
def test_traffic(figures: dict[str, Any], name: str) -> None:
    psi, root = figures["sizes"]["psi"], figures["sizes"]["root"]
    assert figures[name]["padding"] == 0  # so that all numbers are exact
    for step in figures[name]["steps"]:
        expected = {}
        for key, (count, of_psi, of_root) in ONE_STEP[name].items():
            times = _times(name, key, step["mode"]) if step["micro_batches"] > 1 else 1
            expected[key] = (times * count, times * (of_psi * psi + of_root * root))
        assert step["flow"] == expected, (step["micro_batches"], step["mode"])
        # One a backward that reduces: eleven bytes, four per unit, and one per parameter.
        messages = 1 if step["mode"] == "last" else step["micro_batches"]
        assert step["control"] == messages * [11 + 4 * 5 + (5 + 4 * 11)]


# ---------------------------------------------------------------- what is held

# Parameters, gradients, optimizer state (AdamW's two), gathered, secondary.
BETWEEN = {
    "NO_SHARD": (1, 1, 2, 0, 0),
    "SHARD_OP": (1 / 4, 1 / 4, 1 / 2, 1, 0),
    "SHARD_GRAD_OP": (1 / 4, 1 / 4, 1 / 2, 0, 0),
    "FULL_SHARD": (1 / 4, 1 / 4, 1 / 2, 0, 0),
    "FULL_SHARD, k=2": (1 / 4, 1 / 4, 1 / 2, 0, 0),
    "HYBRID_SHARD": (1 / 2, 1 / 2, 1, 0, 0),
    "HYBRID_SHARD_ZERO2": (1 / 2, 1 / 2, 1, 0, 0),
    "HYBRID_SHARD_OP": (1 / 4, 1 / 4, 1 / 2, 0, 1 / 2),
}


@pytest.mark.parametrize("name", WAYS)
def test_between_steps(ranks: list[dict[str, Any]], name: str) -> None:
    psi = ranks[0]["sizes"]["psi"]
    held, _ = ranks[0][name]["between"]
    # AdamW also counts its steps, 4 bytes a parameter.
    assert list(held.values()) == pytest.approx([x * psi for x in BETWEEN[name]], rel=0.01)
    # Whoever holds them: nothing is left of the unwrapped parameters. The median of the ranks: a
    # thread of one rank may hold a tensor for long, but what flatshard fails to free is on all.
    everything = statistics.median_low(figures[name]["between"][1] for figures in ranks)
    assert everything == pytest.approx(sum(BETWEEN[name]) * psi, rel=0.01)


@pytest.mark.parametrize("name", WAYS)
def test_peaks(figures: dict[str, Any], name: str) -> None:
    psi, root, block = figures["sizes"].values()
    peaks = figures[name]["peaks"]
    # Two blocks are unsharded at once: backward of a block runs, and the next block is being
    # all-gathered.
    frees = name.startswith("FULL") or name in ("HYBRID_SHARD", "HYBRID_SHARD_OP")
    assert peaks["gathered"] == (0 if name == "NO_SHARD" else root + 2 * block if frees else psi)
    secondary = {"FULL_SHARD, k=2": (psi - root) / 2, "HYBRID_SHARD_OP": psi / 2}
    assert peaks["secondary"] == secondary.get(name, 0)
    if name == "NO_SHARD":
        assert peaks["gradients"] == psi
        return
    # The reduction of the first block has begun, and the one before it has not finished. Each takes
    # a block's gradients twice, to send and to receive. The results of the other blocks are there.
    first = 1 / 2 if name.startswith("HYBRID") else 1 / 4
    rest = 1 / 2 if name in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2") else 1 / 4
    bound = root + (4 + 2 * first) * block + 2 * rest * block
    # A reduction that a loaded machine holds up for a second lets the next one begin.
    assert root + block < peaks["gradients"] <= bound + 3 * block


# Reduced each time, no_sync(), no_sync(max_bytes), no_sync(replicas_only).
# The root and one block of four fit into half of Psi.
ACCUMULATED: dict[str, tuple[float, float, float, float]] = {
    "NO_SHARD": (1, 1, 1, 1),
    "SHARD_OP": (1 / 4, 1, 1 / 4, 1 / 4),
    "SHARD_GRAD_OP": (1 / 4, 1, 1 / 4, 1 / 4),
    "FULL_SHARD": (1 / 4, 1, 1 / 4, 1 / 4),
    "FULL_SHARD, k=2": (1 / 4, 1, 1 / 4, 1 / 4),
    "HYBRID_SHARD": (1 / 2, 1, 1 / 2, 1),
    "HYBRID_SHARD_ZERO2": (1 / 2, 1, 1 / 2, 1),
    "HYBRID_SHARD_OP": (1 / 4, 1, 1 / 4, 3 / 4),
}


@pytest.mark.parametrize("name", WAYS)
def test_accumulated(figures: dict[str, Any], name: str) -> None:
    psi, root, block = figures["sizes"].values()
    each, whole, of_the_rest, replicas = ACCUMULATED[name]
    expected = {
        "each": each * psi,
        "last": whole * psi,
        "replicas": replicas * psi,
        "max_bytes": root + block + of_the_rest * 3 * block,
    }
    assert root + block <= psi // 2 < root + 2 * block
    assert figures[name]["accumulated"] == pytest.approx(expected, rel=0.01)
