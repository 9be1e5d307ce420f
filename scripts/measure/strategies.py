"""Measures communication volume and memory of each sharding strategy, beside the formulas.

    python scripts/measure/strategies.py --world-size 4 --ranks-per-node 2 --json figures.json

Starts ranks on this machine's CPU (gloo), and treats every `--ranks-per-node` ranks as a node. For
each strategy, prints the collectives of a step and their volume, persistent memory, peak memory,
and memory while gradients accumulate. Measures no times.
"""

import argparse
import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import measuring  # first, because this import may end the script
import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import table
from rich import print as rich_print
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from train_transformer import Block, Transformer

from flatshard import ShardedWrapper
from flatshard.collectives import Event, record
from flatshard.module.wrappers import handles_in
from flatshard.wrap import ModuleWrapPolicy

MICRO_BATCHES = 4
ROWS, LENGTH = 2, 16  # shape of a rank's batch
VOCABULARY, HEADS = 512, 4

# ------------------------------------------------------------------------------------------- model


def build(args: argparse.Namespace) -> Transformer:
    torch.manual_seed(0)  # the same weights on every rank
    return Transformer(args.width, args.depth, HEADS, LENGTH, VOCABULARY)


def wrap(model: nn.Module, keywords: dict[str, Any]) -> ShardedWrapper:
    return ShardedWrapper(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **keywords)


def text(seed: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


# -------------------------------------------------------------------------------------- strategies


@dataclass(frozen=True)
class Way:
    """A strategy, described by the variables of the formulas.

    Attributes:
        name: name in the tables.
        keywords: keywords of ``ShardedWrapper``.
        shards: group over which parameters, gradients and optimizer state are split.
        forward: group of the all-gathers in forward; None if forward has no all-gathers.
        backward: group of the all-gathers in backward; None if backward has no all-gathers.
        across: kind of collective that reduces gradients across nodes.
        once: whether parameters are all-gathered only once after each optimizer step. If there is
            an ``across``, this holds for the all-gathers between nodes.
    """

    name: str
    keywords: dict[str, Any]
    shards: str
    forward: str | None
    backward: str | None
    across: str | None = None
    once: bool = False


def ways(args: argparse.Namespace) -> list[Way]:
    k = args.ranks_per_node
    regather = {"reshard_after_forward": k}
    return [
        _way("NO_SHARD", "none", None, None),
        _way("SHARD_OP", "all", "all", None, once=True),
        _way("SHARD_GRAD_OP", "all", "all", None),
        _way("FULL_SHARD", "all", "all", "all"),
        Way(f"FULL_SHARD, k={k}", regather, "all", "all", "node"),
        _way("HYBRID_SHARD", "node", "node", "node", across="all_reduce"),
        _way("HYBRID_SHARD_ZERO2", "node", "node", None, across="all_reduce"),
        _way("HYBRID_SHARD_OP", "all", "node", "node", across="reduce", once=True),
    ]


def _way(name: str, shards: str, forward: str | None, backward: str | None, **more: Any) -> Way:
    return Way(name, {"sharding_strategy": name}, shards, forward, backward, **more)


# ---------------------------------------------------------------------------------------- formulas


@dataclass(frozen=True)
class Sizes:
    """Variables of the formulas.

    Attributes:
        psi: bytes of all parameters.
        root: bytes of the root unit, which stays unsharded between forward and backward.
        block: bytes of every other unit.
        num_units: number of units, with the root.
        num_ranks: number of ranks, N.
        per_node: ranks per node, S.
    """

    psi: int
    root: int
    block: int
    num_units: int
    num_ranks: int
    per_node: int

    @classmethod
    def of(cls, model: Transformer, args: argparse.Namespace) -> "Sizes":
        psi, block = bytes_of(model.parameters()), bytes_of(model.blocks[0].parameters())
        units = args.depth + 1
        return cls(
            psi, psi - args.depth * block, block, units, args.world_size, args.ranks_per_node
        )

    def of_group(self, group: str) -> int:
        """Number of ranks in a group."""
        sizes = {"none": 1, "all": self.num_ranks, "node": self.per_node}
        return sizes[group] if group in sizes else self.num_ranks // self.per_node


WEIGHTS = {"gather": 1, "reduce": 1, "all_reduce": 2}
"""Weights of volume, as in the ZeRO paper: an all-reduce counts as a reduce-scatter and an
all-gather."""


@dataclass(frozen=True)
class Traffic:
    """Number and volume in bytes of the collectives of one kind in one group."""

    count: int
    volume: float


Flow = dict[tuple[str, str], Traffic]
"""Traffic, keyed by (group, kind)."""


def expected_traffic(way: Way, sizes: Sizes, micro_batches: int, mode: str) -> Flow:
    """Expected collectives of ``micro_batches`` iterations and one optimizer step.

    With ``mode`` "each", every micro-batch reduces gradients. With "last", only the last
    micro-batch reduces. With "replicas", every micro-batch reduces within a node, and the last
    micro-batch also across nodes.
    """
    units, psi = sizes.num_units, sizes.psi
    part = psi / sizes.per_node
    steps = {"each": micro_batches, "last": 1, "replicas": micro_batches}[mode]
    flow: Flow = {}

    def add(group: str, kind: str, count: int, nbytes: float, times: int) -> None:
        before = flow.get((group, kind), Traffic(0, 0))
        flow[group, kind] = Traffic(
            before.count + times * count, before.volume + times * WEIGHTS[kind] * nbytes
        )

    if way.across and way.once:
        add("across", "gather", units, part, 1)
    if way.forward:
        only_once = way.once and not way.across
        add(way.forward, "gather", units, psi, 1 if only_once else micro_batches)
    if way.backward:
        add(way.backward, "gather", units - 1, psi - sizes.root, micro_batches)
    if way.shards == "none":
        add("all", "all_reduce", units, psi, micro_batches if mode == "each" else 1)
    elif way.across:
        add("node", "reduce", units, psi, steps)
        add("across", way.across, units, part, steps if mode == "each" else 1)
    else:
        add("all", "reduce", units, psi, steps)
    return flow


def expected_between_steps(way: Way, sizes: Sizes) -> dict[str, float]:
    """Persistent memory of a rank in bytes, with AdamW's two state tensors."""
    shard = sizes.psi / sizes.of_group(way.shards)
    stays = sizes.psi if way.once and not way.across else 0
    node_part = sizes.psi / sizes.per_node if way.across and way.once else 0
    return {
        "parameters": shard,
        "gradients": shard,
        "optimizer": 2 * shard,
        "gathered": stays,
        "secondary": node_part,
    }


def expected_peaks(way: Way, sizes: Sizes) -> dict[str, float]:
    """Peak memory of each kind in a step. For gradients, an upper bound."""
    if way.shards == "none":
        return {"gathered": 0, "gradients": sizes.psi, "secondary": 0}
    # Three blocks are unsharded at once: backward of a block ends, backward of the next block
    # begins, and the block after it is being all-gathered.
    gathered = sizes.root + 3 * sizes.block if way.backward else sizes.psi
    # At the peak, the reduction of the first block has begun, and the reduction before it has not
    # finished. A reduction takes a block's gradients twice, to send and to receive. The results of
    # the other blocks are present. (More memory is used only if a rank delays a reduction for a
    # second.)
    within = sizes.per_node if way.across else sizes.num_ranks
    under_way = 4 * sizes.block + 2 * sizes.block / within
    others = sizes.psi - sizes.root - 2 * sizes.block
    gradients = sizes.root + under_way + others / sizes.of_group(way.shards)
    secondary = 0.0
    if way.backward != way.forward and way.backward:
        secondary = (sizes.psi - sizes.root) / sizes.of_group(way.backward)
    elif way.across and way.once:
        secondary = sizes.psi / sizes.per_node
    return {"gathered": gathered, "gradients": gradients, "secondary": secondary}


def whole_units(sizes: Sizes, max_bytes: int) -> int:
    """Total bytes of the smallest units, as many as fit into ``max_bytes``."""
    kept = 0
    for unit in sorted([sizes.root] + [sizes.block] * (sizes.num_units - 1)):
        kept += unit if kept + unit <= max_bytes else 0
    return kept


def expected_accumulated(way: Way, sizes: Sizes, max_bytes: int) -> dict[str, float]:
    """Expected bytes of gradients on a rank after a backward, for each mode of accumulation."""
    shard = sizes.psi / sizes.of_group(way.shards)
    kept = whole_units(sizes, max_bytes)
    held = {
        "each": shard,
        "last": sizes.psi,
        "max_bytes": kept + (sizes.psi - kept) / sizes.of_group(way.shards),
        "replicas": sizes.psi if way.shards == "none" else shard,
    }
    if way.across:
        # The gradients reduced within the node, and a copy of this rank's shard in `.grad`.
        held["replicas"] = sizes.psi / sizes.per_node + shard
    return held


# --------------------------------------------------------------------------------------- measuring


def no_sync_keywords(max_bytes: int) -> dict[str, dict[str, Any]]:
    return {"last": {}, "replicas": {"replicas_only": True}, "max_bytes": {"max_bytes": max_bytes}}


class Job:
    """Trains a model with one strategy on this rank."""

    def __init__(self, way: Way, args: argparse.Namespace) -> None:
        self.args = args
        self.model = wrap(build(args), way.keywords)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.seed = 100 * dist.get_rank()

    def loss(self) -> Tensor:
        self.seed += 1
        return loss_of(self.model, text(self.seed, ROWS))

    def backward(self) -> None:
        self.loss().backward()

    def accumulate(self, micro_batches: int, mode: str) -> None:
        """Run forward and backward for each micro-batch, then one optimizer step."""
        if mode == "each":
            for _ in range(micro_batches - 1):
                self.backward()
        else:
            with self.model.no_sync(**no_sync_keywords(0)[mode]):
                for _ in range(micro_batches - 1):
                    self.backward()
        self.backward()
        self.step()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def measured_traffic(job: Job, micro_batches: int, mode: str) -> tuple[Flow, list[Event]]:
    """Run one step; returns its collectives of tensors, and its other collectives."""
    with record() as events:
        job.accumulate(micro_batches, mode)
    flow: Flow = {}
    for event in events:
        if event.kind in WEIGHTS:
            key = (group_name(event.ranks, job.args), event.kind)
            before = flow.get(key, Traffic(0, 0))
            volume = before.volume + WEIGHTS[event.kind] * event.nbytes
            flow[key] = Traffic(before.count + 1, volume)
    return flow, [event for event in events if event.kind not in WEIGHTS]


def group_name(ranks: tuple[int, ...], args: argparse.Namespace) -> str:
    if len(ranks) == args.world_size:
        return "all"
    nodes = {rank // args.ranks_per_node for rank in ranks}
    return "node" if len(nodes) == 1 else "across"


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
    return {
        "gathered": sum(storage.nbytes() for storage in buffers),
        "secondary": sum(
            handle.gather.secondary.nbytes for handle in handles if handle.gather.secondary
        ),
    }


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
        groups = {1, job.args.ranks_per_node, job.args.world_size}
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


def measured_peaks(job: Job) -> dict[str, int]:
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


def measured_accumulated(job: Job, max_bytes: int) -> dict[str, int]:
    """Measured bytes of gradients after a backward, for each mode of accumulation."""
    job.backward()
    found = {"each": held(job)["gradients"]}
    job.step()
    for mode, keywords in no_sync_keywords(max_bytes).items():
        with job.model.no_sync(**keywords):
            job.backward()
        found[mode] = held(job)["gradients"]
        job.backward()
        job.step()
    return found


def measure_way(way: Way, sizes: Sizes, args: argparse.Namespace) -> dict[str, Any]:
    """Measured and expected figures of one strategy. Collective."""
    before = all_tensors()
    job = Job(way, args)
    for _ in range(2):  # in the first steps, ranks also agree on an execution order
        job.accumulate(1, "each")
    steps = []
    for micro_batches, mode in ((1, "each"), *((MICRO_BATCHES, m) for m in ("each", "last"))):
        steps.append(measure_step(job, way, sizes, micro_batches, mode))
    if way.across:
        steps.append(measure_step(job, way, sizes, MICRO_BATCHES, "replicas"))
    job.backward()
    job.optimizer.step()
    between = {**held(job), "all_tensors": all_tensors() - before}
    job.optimizer.zero_grad()
    max_bytes = sizes.psi // 2
    return {
        "name": way.name,
        "padding_bytes": padding(job.model),
        "steps": steps,
        "between": between,
        "between_expected": expected_between_steps(way, sizes),
        "peaks": measured_peaks(job),
        "peaks_expected": expected_peaks(way, sizes),
        "max_bytes": max_bytes,
        "accumulated": measured_accumulated(job, max_bytes),
        "accumulated_expected": expected_accumulated(way, sizes, max_bytes),
    }


def measure_step(job: Job, way: Way, sizes: Sizes, micro_batches: int, mode: str) -> dict[str, Any]:
    flow, rest = measured_traffic(job, micro_batches, mode)
    expected = expected_traffic(way, sizes, micro_batches, mode)
    none = Traffic(0, 0)
    rows = [
        {
            "group": key[0],
            "kind": key[1],
            **asdict(flow.get(key, none)),
            "count_expected": expected.get(key, none).count,
            "volume_expected": expected.get(key, none).volume,
        }
        for key in sorted({*flow, *expected})
    ]
    return {
        "micro_batches": micro_batches,
        "mode": mode,
        "traffic": rows,
        "control_messages": len(rest),
        "control_bytes": sum(event.nbytes for event in rest),
    }


def padding(model: ShardedWrapper) -> int:
    """Bytes of padding in the flat parameters."""
    return 4 * sum(handle.layout.padding_numel for handle in handles_in(model))


# ------------------------------------------------------------------------------------------ tables

KINDS = {"gather": "All-gathers", "reduce": "Reduce-scatters", "all_reduce": "All-reduces"}
MODES = {
    "each": "reduced each time",
    "last": "no_sync()",
    "max_bytes": "no_sync(max_bytes)",
    "replicas": "no_sync(replicas_only)",
}


def deviation(measured: float, expected: float) -> str:
    if expected == 0:
        return "" if measured == 0 else "not 0"
    return f"{100 * (measured / expected - 1):+.2f}"


def traffic_table(figures: dict[str, Any]) -> Table:
    psi = figures["sizes"]["psi"]
    made = table(
        "Collectives of a step, and their volume per rank, in Psi: measured / formula",
        *("Strategy", "Micro-batches", *KINDS.values()),
        *("Volume: all", "Node", "Across nodes", "Deviation %"),
    )
    for one in figures["strategies"]:
        for step in one["steps"]:
            rows = step["traffic"]
            counts = [count_cell([r for r in rows if r["kind"] == kind]) for kind in KINDS]
            volumes = [[r for r in rows if r["group"] == g] for g in ("all", "node", "across")]
            made.add_row(
                one["name"],
                f"{step['micro_batches']}, {MODES[step['mode']]}",
                *counts,
                *(volume_cell(of_group, psi) for of_group in volumes),
                deviation(total(rows, "volume"), total(rows, "volume_expected")),
            )
    return made


def total(rows: list[dict[str, Any]], column: str) -> float:
    return sum(row[column] for row in rows)


def count_cell(rows: list[dict[str, Any]]) -> str:
    """Number of collectives of a kind, by group. Adds the formula's number only if it differs."""
    parts = []
    for row in rows:
        wrong = row["count"] != row["count_expected"]
        formula = f" / {row['count_expected']}" if wrong else ""
        parts.append(f"{row['count']}{formula} {row['group']}")
    return ", ".join(parts)


def volume_cell(rows: list[dict[str, Any]], psi: int) -> str:
    if not rows:
        return ""
    return f"{total(rows, 'volume') / psi:.3f} / {total(rows, 'volume_expected') / psi:.3f}"


def between_table(figures: dict[str, Any]) -> Table:
    psi = figures["sizes"]["psi"]
    kinds = ("parameters", "gradients", "optimizer", "gathered", "secondary")
    made = table(
        "Persistent memory per rank, in Psi",
        *("Strategy", *(kind.capitalize() for kind in kinds)),
        *("Sum", "Formula", "Deviation %", "All tensors", "Padding %"),
    )
    for one in figures["strategies"]:
        measured = sum(one["between"][kind] for kind in kinds)
        expected = sum(one["between_expected"].values())
        made.add_row(
            one["name"],
            *(f"{one['between'][kind] / psi:.3f}" for kind in kinds),
            f"{measured / psi:.3f}",
            f"{expected / psi:.3f}",
            deviation(measured, expected),
            f"{one['between']['all_tensors'] / psi:.3f}",
            f"{100 * one['padding_bytes'] / psi:.3f}",
        )
    return made


def peaks_table(figures: dict[str, Any]) -> Table:
    psi = figures["sizes"]["psi"]
    made = table(
        "Peak memory in a step, in Psi (gradients: the formula is an upper bound)",
        *("Strategy", "Unsharded", "Formula", "Deviation %"),
        *("Secondary", "Formula", "Deviation %", "Gradients", "Bound"),
    )
    for one in figures["strategies"]:
        cells = []
        for kind in ("gathered", "secondary", "gradients"):
            measured, expected = one["peaks"][kind], one["peaks_expected"][kind]
            cells += [f"{measured / psi:.3f}", f"{expected / psi:.3f}"]
            cells += [deviation(measured, expected)] if kind != "gradients" else []
        made.add_row(one["name"], *cells)
    return made


def accumulated_table(figures: dict[str, Any]) -> Table:
    psi = figures["sizes"]["psi"]
    made = table(
        "Memory of gradients while they accumulate, in Psi: measured / formula (deviation %)",
        *("Strategy", *MODES.values()),
    )
    for one in figures["strategies"]:
        cells = []
        for mode in MODES:
            measured, expected = one["accumulated"][mode], one["accumulated_expected"][mode]
            off = deviation(measured, expected)
            cells.append(f"{measured / psi:.3f} / {expected / psi:.3f} ({off})")
        made.add_row(one["name"], *cells)
    return made


TABLES = (traffic_table, between_table, peaks_table, accumulated_table)

# --------------------------------------------------------------------------------------------- job


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all strategies; returns all figures. Collective."""
    # HYBRID strategies take this number of ranks for a node.
    os.environ["LOCAL_WORLD_SIZE"] = str(args.ranks_per_node)
    sizes = Sizes.of(build(args), args)
    return {
        "torch": torch.__version__,
        "settings": {name: value for name, value in vars(args).items() if name != "json"},
        "sizes": asdict(sizes),
        "strategies": [measure_way(way, sizes, args) for way in ways(args)],
    }


def show(figures: dict[str, Any]) -> None:
    sizes = figures["sizes"]
    print(
        f"Psi: {sizes['psi'] // 4:,} elements, {sizes['psi']:,} bytes; {sizes['num_units']} "
        f"units: the root has {sizes['root'] / sizes['psi']:.3f} Psi, each other unit "
        f"{sizes['block'] / sizes['psi']:.3f} Psi"
    )
    for make in TABLES:
        rich_print(make(figures))


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = measuring.Parser(__doc__)
    add = parser.add_argument
    add("--world-size", type=int, default=4, help="ranks to start on this machine (default: 4)")
    add("--ranks-per-node", type=int, default=2, help="ranks that count as a node (default: 2)")
    add(
        "--width",
        type=int,
        default=128,
        help="width of the model, a multiple of 8 and at least 96 (default: 128)",
    )
    add("--depth", type=int, default=5, help="number of blocks, at least 4 (default: 5)")
    parser.add_json("all figures, in bytes,")
    args = parser.parse_args(arguments)
    nodes, rest = divmod(args.world_size, max(args.ranks_per_node, 1))
    if rest or nodes < 2 or args.ranks_per_node < 2:
        parser.error("--ranks-per-node must divide --world-size into at least 2 nodes of 2 ranks")
    # In a narrower model, the root would be the largest unit, and the formulas of peak memory would
    # be wrong.
    if args.width < 96 or args.width % 8 or args.depth < 4:
        parser.error("--width must be a multiple of 8 and at least 96, --depth at least 4")
    return args


if __name__ == "__main__":
    args = parse_args()
    figures = measuring.figures_of_ranks(measure, args.world_size, args)[0]
    show(figures)
    measuring.write_json(args.json, figures)
