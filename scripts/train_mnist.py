"""Trains the MNIST network with its parameters sharded over the ranks.

    torchrun --standalone --nproc-per-node 2 scripts/train_mnist.py
    python scripts/train_mnist.py --world-size 2

The second form starts the ranks itself, on this machine. If there is a GPU for every local rank,
the ranks use GPUs and NCCL. Otherwise they use the CPU and gloo. `--ddp` trains the same job under
DistributedDataParallel, for comparison. The data are MNIST if `--data-root` has MNIST's files, and
otherwise scikit-learn's handwritten digits, enlarged to 28x28.

`--save PATH` writes a file from which `--resume PATH` continues with any world size, sharded or
with `--ddp`. With `--checkpoint-dir D`, the job saves every `--checkpoint-every` steps and on
SIGTERM, and `--resume` without a path continues from the last checkpoint in D, if there is one. So

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 \\
        scripts/train_mnist.py --checkpoint-dir D --resume

continues after a rank has died.
"""

import argparse
import contextlib
import functools
import itertools
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lib.prerequisites  # noqa: F401  (first, because this import may end the script)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lib import training_job
from lib.command_line import Parser, at_least, directory, positive_number, stop
from lib.mnist_data import Data, load_data
from lib.output import output_file, write_json
from lib.training_job import held_bytes, say
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

try:
    from rich import print as rich_print
    from rich.table import Table
    from tqdm import tqdm
except ModuleNotFoundError as missing:
    print(f'error: {missing.name} is not installed: pip install ".[examples]"', file=sys.stderr)
    sys.exit(2)

from flatshard import CPUOffload, ShardedWrapper, ShardingStrategy
from flatshard.wrap import size_based_auto_wrap_policy

# ---------------------------------------------------------------------------------------- settings


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    job = parser.add_argument_group("the job").add_argument
    job("--epochs", type=at_least(1), default=10, help="total number of epochs (default: 10)")
    job(
        "--batch-size",
        type=at_least(1),
        default=128,
        help="samples per step, over all ranks (default: 128)",
    )
    job(
        "--test-batch-size",
        type=at_least(1),
        default=1000,
        help="samples per evaluation step, over all ranks (default: 1000)",
    )
    job("--lr", type=positive_number, default=1.0, help="Adadelta's learning rate (default: 1.0)")
    job(
        "--gamma",
        type=positive_number,
        default=0.7,
        help="factor of the learning rate after each epoch (default: 0.7)",
    )
    job("--seed", type=at_least(0), default=1, help="seed of weights, data and dropout")
    job("--max-steps", type=at_least(1), help="stop training after this total number of steps")
    spread = parser.add_argument_group("parallelism").add_argument
    training_job.add_ways(spread)
    spread(
        "--min-num-params",
        type=at_least(0),
        default=20_000,
        metavar="N",
        help="shard modules of at least N parameters as units (default: 20000); 0: a single unit",
    )
    spread("--cpu-offload", action="store_true", help="keep the shards in CPU memory")
    spread(
        "--offload-path",
        type=directory,
        metavar="DIR",
        help="keep shards, gradients and optimizer state in temporary files in DIR",
    )
    files = parser.add_argument_group("files").add_argument
    files(
        "--data",
        choices=["auto", "mnist", "digits"],
        default="auto",
        help="data to train on (default: auto, MNIST if its files are present)",
    )
    files(
        "--data-root",
        type=Path,
        default=Path("data"),
        metavar="ROOT",
        help="read MNIST from ROOT/MNIST/raw (default: data)",
    )
    files("--download", action="store_true", help="download MNIST to the data root")
    training_job.add_files(files)
    files("--json", type=output_file, metavar="PATH", help="write the results to PATH as JSON")
    files(
        "--record",
        type=output_file,
        metavar="PATH",
        help="after training, write memory and times of one more step of rank 0 to PATH",
    )
    args = parser.parse_args(arguments)
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Ends the script if the options do not fit together, before any rank starts."""
    training_job.set_world_size(args)
    for name in ("batch_size", "test_batch_size"):
        if getattr(args, name) % args.world_size:
            option = "--" + name.replace("_", "-")
            stop(f"{option} {getattr(args, name)} cannot be split over {args.world_size} ranks")
    for option, given in {
        "--cpu-offload": args.cpu_offload,
        "--offload-path": args.offload_path,
    }.items():
        if args.ddp and given:
            stop(f"{option} is for sharded parameters: remove --ddp")
    if args.download and args.data == "digits":
        stop("--download is for MNIST: remove --data digits")


# ------------------------------------------------------------------------------------------- model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def wrap_model(model: nn.Module, args: argparse.Namespace, device: torch.device) -> nn.Module:
    if args.ddp:
        return DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=args.min_num_params)
    offload = CPUOffload(offload_params=args.cpu_offload, path=args.offload_path)
    return ShardedWrapper(
        model,
        sharding_strategy=ShardingStrategy[args.strategy],
        auto_wrap_policy=policy if args.min_num_params else None,
        cpu_offload=offload,
        collectives=args.collectives,
        device_id=device if device.type == "cuda" else None,
    )


# ---------------------------------------------------------------------------------------- training


def train_steps(
    model: nn.Module,
    batches: Iterable[list[Tensor]],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    bar: tqdm,
) -> tuple[list[float], list[int]]:
    """Returns each step's loss over all ranks, and each step's number of samples per rank."""
    model.train()
    losses, counts = [], []
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels, reduction="sum")
        # The ranks average gradients. The factor turns the average into the gradients of the sum
        # over all ranks' samples. The loss is a sum, not a mean: with the far smaller gradients of
        # a mean, Adadelta's epsilon is no longer negligible and makes the steps smaller.
        (loss * dist.get_world_size()).backward()
        optimizer.step()
        loss = loss.detach() / len(labels)
        losses.append(loss)
        counts.append(len(labels))
        bar.update()
        if not bar.disable:  # the bar shows this rank's loss; `item` waits for the device
            bar.set_postfix(loss=f"{loss.item():.4f}")
    # In a step, all ranks' batches have the same length, so the mean of the ranks' losses is the
    # step's loss. All-reduce once after all steps, so that the steps do not wait.
    step_losses = torch.stack(losses).double() if losses else torch.zeros(0)
    dist.all_reduce(step_losses)
    step_losses /= dist.get_world_size()
    return step_losses.tolist(), counts


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: TensorDataset, batch_size: int, device: torch.device
) -> tuple[float, int]:
    """Returns the average loss and the number of correct answers, each sample counted once."""
    model.eval()
    images, labels = dataset.tensors
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # A sharded forward is collective, so every rank must call forward equally often, even if the
    # samples do not divide evenly. All ranks take a share of the largest size. Indices past the end
    # are masked out.
    share = -(-len(labels) // world_size)
    places = torch.arange(share) * world_size + rank
    totals = torch.zeros(2, dtype=torch.double, device=device)
    for batch in places.split(batch_size):
        real = (batch < len(labels)).to(device)
        batch = batch.clamp(max=len(labels) - 1)
        output, target = model(images[batch].to(device)), labels[batch].to(device)
        losses = F.nll_loss(output, target, reduction="none")
        correct = output.argmax(dim=1) == target
        totals += torch.stack([losses[real].sum(), correct[real].sum()])
    dist.all_reduce(totals)
    loss_sum, correct_sum = totals.tolist()
    return loss_sum / len(labels), int(correct_sum)


# ------------------------------------------------------------------------------------------ memory


def memory_report(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, int]:
    states = (value for state in optimizer.state.values() for value in state.values())
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        # Peak RSS of the whole process, with Python, torch and the data. Linux reports KiB, macOS
        # reports bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {
        "parameter_bytes": held_bytes(model.parameters()),
        "gradient_bytes": held_bytes(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer_bytes": held_bytes(value for value in states if isinstance(value, Tensor)),
        "peak_bytes": peak,
    }


def ddp_report(model: nn.Module) -> dict[str, int]:
    """Returns the bytes of parameters, gradients and optimizer state on each rank under DDP."""
    full = held_bytes(model.parameters())
    steps = 4 * len(list(model.parameters()))  # Adadelta: two averages and a step count for each
    return {"parameter_bytes": full, "gradient_bytes": full, "optimizer_bytes": 2 * full + steps}


def memory_table(ranks: list[dict[str, int]], ddp: dict[str, int]) -> Table:
    table = Table(title="Persistent memory, MiB")
    for name in ("Rank", "Parameters", "Gradients", "Optimizer", "Peak memory"):
        table.add_column(name, justify="right")
    for name, report in [*((str(i), report) for i, report in enumerate(ranks)), ("DDP", ddp)]:
        table.add_row(name, *(f"{value / 2**20:,.2f}" for value in report.values()))
    return table


# ------------------------------------------------------------------------------------- one step

Sample = tuple[float, int, int]
"""Seconds since the step began; from then on, bytes of unsharded parameters and of gradients."""


class GradientSamples:
    """Samples the memory of a DDP model's gradients whenever a gradient is ready.

    DistributedDataParallel keeps the memory of gradients in buckets, also while `.grad` is None.
    So the samples count memory, not `.grad`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.samples: list[Sample] = []
        self._params = list(model.parameters())
        self._memory: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, int] = {}
        self._began = 0.0
        for param in self._params:
            param.register_post_accumulate_grad_hook(self.look)

    def begin(self) -> None:
        self.samples = []
        self._began = time.perf_counter()
        self.look()

    def look(self, *_: Any) -> None:
        for storage in (p.grad.untyped_storage() for p in self._params if p.grad is not None):
            self._memory[storage.data_ptr()] = StorageWeakRef(storage)
            self._sizes[storage.data_ptr()] = storage.nbytes()
        alive = (at for at, memory in self._memory.items() if not memory.expired())
        held = sum(self._sizes[at] for at in alive)
        self.samples.append((time.perf_counter() - self._began, 0, held))


def record_step(
    model: nn.Module,
    dataset: TensorDataset,
    optimizer: torch.optim.Optimizer,
    batch_size: int,
    device: torch.device,
) -> dict[str, Any]:
    """Trains a few more steps, and returns memory and times of this rank's fastest step.

    `samples` has bytes over time. `ranges` has the times of computing and of collectives.
    """
    images, labels = (part[:batch_size].to(device) for part in dataset.tensors)
    sharded = isinstance(model, ShardedWrapper)
    gradients = None if sharded else GradientSamples(model)
    steps: list[dict[str, Any]] = []
    model.train()
    with model.record_steps() if sharded else contextlib.nullcontext() as reports:
        for _ in range(8):
            optimizer.zero_grad()
            start = time.perf_counter()
            if gradients is not None:
                gradients.begin()
            output = model(images)
            forward_end = time.perf_counter() - start
            F.nll_loss(output, labels, reduction="sum").backward()
            backward_end = time.perf_counter() - start
            optimizer.step()
            step_end = time.perf_counter() - start
            ends = {"forward_end": forward_end, "backward_end": backward_end, "step_end": step_end}
            steps.append({**ends, "samples": [] if gradients is None else gradients.samples})
    # Choose the fastest step, in which other programs used the machine least. Skip the first step,
    # which also fills caches.
    number = min(range(1, len(steps)), key=lambda number: steps[number]["step_end"])
    step, memory = steps[number], memory_report(model, optimizer, device)
    if not sharded:
        return {**memory, **step, "ranges": [], "moved_bytes": 2 * held_bytes(model.parameters())}
    report = reports[number]
    samples = [one for one in report.memory.totals() if one[0] <= step["backward_end"]]
    # After their reduction, the gradients are in `.grad`, and no longer in the recorded samples.
    reduced = samples.pop()[0] if samples[-1][1:] == (0, 0) else step["backward_end"]
    samples.append((reduced, 0, memory["gradient_bytes"]))
    ranges = [
        (one.kind.value, "" if one.unit is None else report.units[one.unit].name, *one[2:])
        for one in report.ranges
    ]
    moved = {"samples": samples, "ranges": ranges, "moved_bytes": report.moved_bytes}
    return {**memory, **step, **moved}


# --------------------------------------------------------------------------------------------- job


class Progress(NamedTuple):
    """Progress of a training: number of finished epochs, and of steps in the next epoch."""

    epoch: int = 0
    step: int = 0

    def __str__(self) -> str:
        return f"epoch {self.epoch}" + (f" and {self.step} steps" if self.step else "")


class Training:
    """A model and its optimizer on their way through the epochs, on this rank."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Data,
        args: argparse.Namespace,
        device: torch.device,
    ) -> None:
        self.model, self.optimizer, self.data = model, optimizer, data
        self.args, self.device = args, device
        self.done = Progress()
        # With `drop_last`, no sample is repeated to fill a rank's share. Instead, fewer than
        # world_size samples of each epoch are left out. So a global batch has the same samples on
        # any number of ranks.
        ranks = args.world_size, dist.get_rank()
        self.sampler = DistributedSampler(data.train, *ranks, seed=args.seed, drop_last=True)
        share = args.batch_size // args.world_size
        batches = BatchSampler(self.sampler, share, drop_last=False)
        self.loader = DataLoader(data.train, sampler=batches, batch_size=None)  # a batch at once
        self.scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
        self.checkpoints = training_job.Checkpoints(args, model, optimizer, self.scheduler)

    def steps(self) -> range:
        """Returns the remaining steps of the current epoch; an empty range after the last epoch."""
        args, first = self.args, self.done.epoch * len(self.loader)
        if self.done.epoch == args.epochs:
            return range(0)
        last = min(first + len(self.loader), args.max_steps or sys.maxsize)
        return range(first + self.done.step, last)

    def batches(self, steps: range) -> Iterator[Any]:
        """Yields the batches of `steps`, until SIGTERM arrives.

        Dropout depends only on seed, step and rank. So a training that resumes on the same number
        of ranks draws the same numbers as without the interruption.
        """
        self.sampler.set_epoch(self.done.epoch + 1)
        epoch = itertools.islice(self.loader, self.done.step, None)
        for step, batch in zip(steps, epoch, strict=False):
            if self.checkpoints.must_stop():
                return
            torch.manual_seed(self.args.seed + 1 + step * self.args.world_size + dist.get_rank())
            yield batch

    def epoch(self, log: Callable[[dict[str, Any]], None]) -> tuple[list[float], dict[str, Any]]:
        """Trains the rest of an epoch and evaluates; returns losses and results. Collective."""
        start = time.perf_counter()
        epoch, args, steps = self.done.epoch + 1, self.args, self.steps()
        losses: list[float] = []
        counts: list[int] = []
        hide = dist.get_rank() != 0 or (False if args.progress else None)  # None: in a terminal
        with tqdm(total=len(steps), desc=f"Epoch {epoch}", leave=False, disable=hide) as bar:
            while left := steps[len(losses) :]:
                batches = self.batches(self.checkpoints.until_next(left))
                found = train_steps(self.model, batches, self.optimizer, self.device, bar)
                for step, loss in zip(left, found[0], strict=False):
                    log({"step": step + 1, "loss": loss})
                losses, counts = losses + found[0], counts + found[1]
                self.done = Progress(epoch - 1, self.done.step + len(found[0]))
                if self.done.step < len(self.loader):
                    self.save()
        share = args.test_batch_size // args.world_size
        test_loss, correct = evaluate(self.model, self.data.test, share, self.device)
        if self.done.step == len(self.loader):
            self.scheduler.step()
            self.done = Progress(epoch)
            self.save()
        samples = torch.tensor(counts, dtype=torch.double)
        return losses, {
            "epoch": epoch,
            "steps": len(steps),
            "train_loss": float(torch.tensor(losses).double() @ samples / samples.sum()),
            "test_loss": test_loss,
            "correct": correct,
            "accuracy": 100 * correct / len(self.data.test),
            "seconds": time.perf_counter() - start,
        }

    def save(self) -> None:
        """Saves if a checkpoint is due; ends the job after a SIGTERM. Collective."""
        step = self.done.epoch * len(self.loader) + self.done.step
        position = {**self.done._asdict(), "batch_size": self.args.batch_size}
        self.checkpoints.after_step(step, position=position)

    def resume(self) -> None:
        """Continues from the last checkpoint, if there is one. Collective."""
        position = self.checkpoints.resume().get("position")
        if position is not None:
            check_batch_size(self.args, position)
            self.done = Progress(position["epoch"], position["step"])


def fit(training: Training, log: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Trains to the end. Returns each epoch's results, the first 50 losses and the time."""
    epochs: list[dict[str, Any]] = []
    first_losses: list[float] = []
    start = time.perf_counter()
    while training.steps():
        losses, result = training.epoch(log)
        log(result)
        say(f"Train Epoch: {result['epoch']} \tLoss: {result['train_loss']:.6f}")
        say(
            f"Test set: Average loss: {result['test_loss']:.4f}, Accuracy: "
            f"{result['correct']}/{len(training.data.test)} ({result['accuracy']:.2f}%)"
        )
        epochs.append(result)
        first_losses += losses[: 50 - len(first_losses)]
    elapsed = time.perf_counter() - start
    return {"epochs": epochs, "step_losses": first_losses, "elapsed_seconds": elapsed}


def read_state(args: argparse.Namespace, plain: nn.Module) -> dict[str, Any]:
    """Reads the checkpoint to resume from, and checks that it fits the unwrapped model."""
    state = training_job.read_checkpoint(args.resume, *Progress._fields, "batch_size")
    training_job.check_fits(args.resume, state, plain)
    check_batch_size(args, state)
    return state


def check_batch_size(args: argparse.Namespace, state: dict[str, Any]) -> None:
    if state["step"] and state["batch_size"] != args.batch_size:
        raise training_job.Refused(
            f"--resume: {args.resume or args.checkpoint_dir} was saved in the middle of an epoch "
            f"with --batch-size {state['batch_size']}, got {args.batch_size}"
        )


def run_job(args: argparse.Namespace, device: torch.device) -> None:
    """Runs the whole job on this rank."""
    torch.manual_seed(args.seed)  # the same weights on every rank
    model = Net()
    state = None
    if args.resume not in (None, training_job.LATEST):
        state = training_job.on_all_ranks(lambda: read_state(args, model))
    data = load_data(args)
    say(f"Data: {data.name} ({len(data.train):,} / {len(data.test):,}){data.source}")
    say(f"Ranks: {training_job.about_ranks(device)}")

    ddp_memory = ddp_report(model)
    model = wrap_model(model, args, device)
    say(model)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    training = Training(model, optimizer, data, args, device)
    if state:
        training_job.resume(args.resume, model, optimizer, state)
        training.done = Progress(state["epoch"], state["step"])
    else:
        training.resume()
    if any(training.done):
        say(f"Resumed after {training.done}")
    about = {
        "settings": vars(args),
        "torch": torch.__version__,
        "device": device.type,
        "parallel": "DDP" if args.ddp else args.strategy,
        "data": data.name,
        "train_samples": len(data.train),
        "test_samples": len(data.test),
    }
    with training_job.log_to(args) as log:
        log(about)
        results = fit(training, log)
    say(f"Elapsed: {results['elapsed_seconds']:.2f} seconds")

    memory: list[Any] = [None] * args.world_size
    dist.all_gather_object(memory, memory_report(model, optimizer, device))
    say(memory_table(memory, ddp_memory), rich_print)
    if args.json:
        write(args.json, {**about, **results, "memory": memory, "ddp_memory": ddp_memory}, indent=2)
    if args.save:
        progress = {**training.done._asdict(), "batch_size": args.batch_size}
        training_job.save(args.save, model, optimizer, **progress)
        say(f"Saved {args.save.name} after {training.done}")
    if args.record:
        share = args.batch_size // args.world_size
        write(args.record, record_step(model, data.train, optimizer, share, device))


def write(path: Path, figures: dict[str, Any], indent: int | None = None) -> None:
    """Writes JSON on rank 0."""
    if dist.get_rank() == 0:
        write_json(path, figures, indent)


if __name__ == "__main__":
    training_job.start(run_job, parse_args())
