"""Trains the MNIST network with its parameters sharded over the ranks.

    torchrun --standalone --nproc-per-node 2 scripts/train_mnist.py
    python scripts/train_mnist.py --world-size 2

The second form starts the ranks itself, on this machine. A rank takes a GPU and NCCL where every
local rank has its own, else the CPU and gloo. `--ddp` trains the same job under
DistributedDataParallel, for comparison. The data are MNIST's files where they are found under
`--data-root`, else the handwritten digits that come with scikit-learn, enlarged to 28x28.
"""

import argparse
import atexit
import contextlib
import functools
import gzip
import importlib.util
import itertools
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
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


def at_least(low: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {value}")
        return value

    return integer


def positive_number(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {value}")
    return value


def output_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"not a file in an existing directory: {text}")
    return path


def directory(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"not a directory: {text}")
    return path


def stop(message: str) -> NoReturn:
    """Ends this rank with exit status 2; one rank per machine says why."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(__file__).name}: error: {message}", file=sys.stderr)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        stop(message)


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    # The job.
    add("--epochs", type=at_least(1), default=10)
    add(
        "--batch-size", type=at_least(1), default=128, help="samples per step, over all ranks (128)"
    )
    add(
        "--test-batch-size", type=at_least(1), default=1000, help="the same for the test set (1000)"
    )
    add("--lr", type=positive_number, default=1.0, help="Adadelta's learning rate (1.0)")
    add("--gamma", type=positive_number, default=0.7, help="its factor after each epoch (0.7)")
    add("--seed", type=int, default=1)
    add("--max-steps", type=at_least(1), help="stop training after so many steps")
    # How it is spread.
    add("--world-size", type=at_least(1), help="ranks to start on this machine (one per GPU, or 1)")
    add("--strategy", choices=[one.name for one in ShardingStrategy], default="FULL_SHARD")
    add(
        "--min-num-params",
        type=at_least(0),
        default=20_000,
        metavar="N",
        help="modules of so many are units of their own (20000); 0: one single unit",
    )
    add("--cpu-offload", action="store_true", help="keep the shards in CPU memory")
    add(
        "--offload-path",
        type=directory,
        metavar="DIR",
        help="keep shards, gradients and optimizer state in files there, which go with the job",
    )
    add("--ddp", action="store_true", help="replicate with DistributedDataParallel instead")
    add(
        "--collectives",
        choices=["auto", "sockets", "native"],
        default="auto",
        help="how ranks move tensors (auto: ranks on one host share memory where they can)",
    )
    # What goes in and comes out.
    add("--data", choices=["auto", "mnist", "digits"], default="auto")
    add("--data-root", type=Path, default=Path("data"), help="MNIST is in ROOT/MNIST/raw (data)")
    add("--download", action="store_true", help="download MNIST to the data root")
    add("--save", type=output_file, metavar="PATH", help="write the trained weights there")
    add("--json", type=output_file, metavar="PATH", help="write the results there")
    add(
        "--record",
        type=output_file,
        metavar="PATH",
        help="after training, write there what one more step of rank 0 held and did over its time",
    )
    add("--progress", action="store_true", help="show the progress bar also outside a terminal")
    args = parser.parse_args()

    if "LOCAL_RANK" in os.environ:  # torchrun has started the ranks
        world_size = int(os.environ["WORLD_SIZE"])
        if args.world_size not in (None, world_size):
            stop(f"--world-size {args.world_size}, but torchrun has started {world_size} ranks")
        args.world_size = world_size
    elif args.world_size is None:
        args.world_size = max(1, torch.cuda.device_count())
    for name in ("batch_size", "test_batch_size"):
        if getattr(args, name) % args.world_size:
            option = "--" + name.replace("_", "-")
            stop(f"{option} {getattr(args, name)} cannot be split over {args.world_size} ranks")
    for option, given in {
        "--cpu-offload": args.cpu_offload,
        "--offload-path": args.offload_path,
    }.items():
        if args.ddp and given:
            stop(f"{option} is for sharded parameters: leave out --ddp")
    if args.download and args.data == "digits":
        stop("--download is for MNIST: leave out --data digits")
    return args


# -------------------------------------------------------------------------------------------- data

MNIST_FILES = [
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
]


class DataError(Exception):
    """What keeps the data from being used."""

    def __str__(self) -> str:
        return " ".join(super().__str__().split())  # one line


class Data(NamedTuple):
    name: str
    source: str
    train: TensorDataset
    test: TensorDataset


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path to write to, which takes the place of `path` when all went well."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def import_mnist() -> Any:
    try:
        from torchvision.datasets import MNIST
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise DataError(f"torchvision cannot be imported ({error})") from error
    return MNIST


def prepare_mnist(root: Path, download: bool) -> None:
    """Puts MNIST's files where torchvision reads them."""
    raw = root / "MNIST" / "raw"
    try:
        if download:
            import_mnist()(root, download=True)
        for path in (raw / name for name in MNIST_FILES):
            packed = path.with_name(f"{path.name}.gz")
            if not path.exists() and packed.exists():
                with replacing(path) as part, gzip.open(packed) as source, part.open("wb") as out:
                    shutil.copyfileobj(source, out)
            elif not path.exists():
                raise DataError(f"MNIST files not found in {root}")
    except (OSError, EOFError, RuntimeError, zlib.error) as error:
        raise DataError(f"MNIST in {root}: {error}") from error
    import_mnist()


def looked_for(root: Path) -> str:
    return (
        f"Looked for {MNIST_FILES[0]} and three others, packed (.gz) or not, in "
        f"{root / 'MNIST' / 'raw'}: --data-root says where they are, --download fetches them, "
        "--data digits does without"
    )


def choose_data(args: argparse.Namespace) -> tuple[str, str]:
    """Returns which data to load, and where they come from or why they were taken."""
    source = ""
    if args.data != "digits":
        try:
            prepare_mnist(args.data_root, args.download)
            return "mnist", f" from {args.data_root}"
        except DataError as error:
            if args.data == "mnist" or args.download:
                raise DataError(f"{error}. {looked_for(args.data_root)}") from error
            source = f": {error}"
    if importlib.util.find_spec("sklearn") is None:
        raise DataError(
            "scikit-learn, whose digits are the data without MNIST, is not installed: "
            'pip install ".[examples]"'
        )
    return "digits", source


def load_mnist(root: Path, train: bool) -> TensorDataset:
    # As tensors, once: decoding and normalising sample by sample costs more than the training.
    mnist = import_mnist()(root, train=train)
    images = (mnist.data.float() / 255 - 0.1307) / 0.3081
    return TensorDataset(images.unsqueeze(1), mnist.targets)


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1)
    images = F.interpolate(images, size=(28, 28), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(digits.target).long()
    # The same 80 / 20 split in every run, whatever --seed is.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order.split([len(images) * 4 // 5, len(images) - len(images) * 4 // 5])
    images = (images - images[train].mean()) / images[train].std()
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def load_data(args: argparse.Namespace) -> Data:
    # Rank 0 looks, unpacks and downloads, and the others take its answer: each looking for itself,
    # they might train on different data, or read what is half written.
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [choose_data(args)]
        except DataError as error:
            answer = [error]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], DataError):
        dist.destroy_process_group()
        stop(str(answer[0]))
    kind, source = answer[0]
    if kind == "mnist":
        train, test = (load_mnist(args.data_root, train=train) for train in (True, False))
        return Data("MNIST", source, train, test)
    return Data("scikit-learn digits, enlarged to 28x28", source, *load_digits())


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


def train_epoch(
    model: nn.Module,
    batches: Iterable[list[Tensor]],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    bar: tqdm,
) -> tuple[list[float], float]:
    """Returns the loss of each step, and of the epoch, over all ranks."""
    model.train()
    losses, counts = [], []
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        # The sum, not the mean: beside the mean's far smaller gradients Adadelta's epsilon is no
        # longer negligible and damps its steps.
        loss = F.nll_loss(model(images), labels, reduction="sum")
        loss.backward()
        optimizer.step()
        loss = loss.detach() / len(labels)
        losses.append(loss)
        counts.append(len(labels))
        bar.update()
        if not bar.disable:  # this rank's loss; reading it waits for the device
            bar.set_postfix(loss=f"{loss.item():.4f}")
    # A step's batches are equally long on all ranks, so the mean of their means is the step's loss.
    # The ranks' losses meet here, in one call, and do not hold up the steps.
    step_losses = torch.stack(losses).double()
    dist.all_reduce(step_losses)
    step_losses /= dist.get_world_size()
    sizes = torch.tensor(counts, dtype=torch.double, device=device)
    return step_losses.tolist(), float(step_losses @ sizes / sizes.sum())


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: TensorDataset, batch_size: int, device: torch.device
) -> tuple[float, int]:
    """Returns the average loss and the number of right answers, each sample counted once."""
    model.eval()
    images, labels = dataset.tensors
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # A sharded forward is collective: every rank must call it equally often, also where the samples
    # do not divide. All ranks take the longest share; places past the end are masked out.
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


def held_bytes(tensors: Iterable[Any]) -> int:
    """Returns the bytes that this rank holds of them: of a sharded one, its own part."""
    parts = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(part.numel() * part.element_size() for part in parts)


def memory_report(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, int]:
    states = (value for state in optimizer.state.values() for value in state.values())
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        # The whole process, with Python, torch and the data in it. Linux counts KiB, macOS bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {
        "parameter_bytes": held_bytes(model.parameters()),
        "gradient_bytes": held_bytes(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer_bytes": held_bytes(value for value in states if isinstance(value, Tensor)),
        "peak_bytes": peak,
    }


def ddp_report(model: nn.Module) -> dict[str, int]:
    """Returns what every rank holds of the unwrapped model when nothing is sharded."""
    full = held_bytes(model.parameters())
    steps = 4 * len(list(model.parameters()))  # Adadelta: two averages and a step count for each
    return {"parameter_bytes": full, "gradient_bytes": full, "optimizer_bytes": 2 * full + steps}


def memory_table(ranks: list[dict[str, int]], ddp: dict[str, int]) -> Table:
    table = Table(title="Held between steps, MiB")
    for name in ("Rank", "Parameters", "Gradients", "Optimizer", "Peak memory"):
        table.add_column(name, justify="right")
    for name, report in [*((str(i), report) for i, report in enumerate(ranks)), ("DDP", ddp)]:
        table.add_row(name, *(f"{value / 2**20:,.2f}" for value in report.values()))
    return table


# ------------------------------------------------------------------------------------- one step

Sample = tuple[float, int, int]
"""Seconds since the step began; bytes of gathered parameters and of gradients from then on."""


class GradientSamples:
    """What a replicated model's gradients take, seen whenever one of them is ready.

    DistributedDataParallel's gradients are views of buckets that it keeps, also while no `.grad`
    shows them.
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
        self.samples.clear()
        self._began = time.perf_counter()

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
    """Does a few more steps; returns what this rank held and did during the last of them.

    Bytes over time are in `samples`, what was gathered or reduced when in `ranges`.
    """
    images, labels = (part[:batch_size].to(device) for part in dataset.tensors)
    sharded = isinstance(model, ShardedWrapper)
    gradients = None if sharded else GradientSamples(model)
    model.train()
    with model.record_steps() if sharded else contextlib.nullcontext():
        for _ in range(4):  # the first ones also fill caches
            optimizer.zero_grad()
            start = time.perf_counter()
            if gradients is not None:
                gradients.begin()
                gradients.look()
            output = model(images)
            forward_end = time.perf_counter() - start
            F.nll_loss(output, labels, reduction="sum").backward()
            backward_end = time.perf_counter() - start
            optimizer.step()
            step_end = time.perf_counter() - start
    samples, ranges, moved = [], [], 2 * held_bytes(model.parameters())
    if gradients is not None:
        samples = [*gradients.samples]
    else:
        report = model.step_report()
        samples = [one for one in report.memory.totals() if one[0] <= backward_end]
        # From here on they are in `.grad`.
        grads = held_bytes(p.grad for p in model.parameters() if p.grad is not None)
        samples.append((backward_end, 0, grads))
        ranges = [
            (one.kind.value, "" if one.unit is None else report.units[one.unit].name, *one[2:])
            for one in report.ranges
        ]
        moved = report.moved_bytes
    return {
        **memory_report(model, optimizer, device),
        "samples": samples,
        "ranges": ranges,
        "moved_bytes": moved,
        "forward_end": forward_end,
        "backward_end": backward_end,
        "step_end": step_end,
    }


# --------------------------------------------------------------------------------------------- job


def say(thing: object) -> None:
    """Prints on rank 0 alone, at once also into a pipe."""
    if dist.get_rank() == 0:
        show = rich_print if isinstance(thing, Table) else print
        show(thing, flush=True)


def connect(init_method: str) -> tuple[torch.device, str]:
    """Joins the process group; returns this rank's device, and a line about all ranks'."""
    rank, world_size, local_rank, local_size = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    gpus = torch.cuda.device_count()
    group = {"init_method": init_method, "rank": rank, "world_size": world_size}
    if gpus >= local_size:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **group)
        return device, f"{world_size} on GPUs, NCCL"
    dist.init_process_group("gloo", **group)
    too_few = f" (for one GPU each, {local_size} are needed, got {gpus})" if gpus else ""
    return torch.device("cpu"), f"{world_size} on the CPU, gloo{too_few}"


def fit(
    model: nn.Module,
    data: Data,
    optimizer: torch.optim.Optimizer,
    args: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """Trains and tests; returns the results of each epoch, the first steps' losses and the time."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # The global batches do not depend on the number of ranks, and no sample is repeated to fill a
    # share: instead, fewer than world_size samples of each epoch's order are left out.
    sampler = DistributedSampler(data.train, world_size, rank, seed=args.seed, drop_last=True)
    batches = BatchSampler(sampler, args.batch_size // world_size, drop_last=False)
    loader = DataLoader(data.train, sampler=batches, batch_size=None)  # indexes a batch at once
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    hide_bar = rank != 0 or (False if args.progress else None)  # None: shown in a terminal only

    epochs: list[dict[str, Any]] = []
    first_losses: list[float] = []
    steps_left = args.max_steps or sys.maxsize
    start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        epoch_start = time.perf_counter()
        sampler.set_epoch(epoch)
        num_steps = min(len(loader), steps_left)
        steps_left -= num_steps
        with tqdm(total=num_steps, desc=f"Epoch {epoch}", leave=False, disable=hide_bar) as bar:
            step_losses, train_loss = train_epoch(
                model, itertools.islice(loader, num_steps), optimizer, device, bar
            )
        test_loss, correct = evaluate(model, data.test, args.test_batch_size // world_size, device)
        scheduler.step()

        accuracy = 100 * correct / len(data.test)
        seconds = time.perf_counter() - epoch_start
        say(f"Train Epoch: {epoch} \tLoss: {train_loss:.6f}")
        say(
            f"Test set: Average loss: {test_loss:.4f}, "
            f"Accuracy: {correct}/{len(data.test)} ({accuracy:.2f}%)"
        )
        epochs.append(
            {
                "epoch": epoch,
                "steps": num_steps,
                "train_loss": train_loss,
                "test_loss": test_loss,
                "correct": correct,
                "accuracy": accuracy,
                "seconds": seconds,
            }
        )
        first_losses += step_losses[: 50 - len(first_losses)]
        if not steps_left:
            break
    elapsed = time.perf_counter() - start
    return {"epochs": epochs, "step_losses": first_losses, "elapsed_seconds": elapsed}


def run_job(args: argparse.Namespace, init_method: str) -> None:
    """Does the whole job as one of the ranks."""
    device, where = connect(init_method)
    data = load_data(args)
    say(f"Data: {data.name} ({len(data.train):,} / {len(data.test):,}){data.source}")
    say(f"Ranks: {where}")

    torch.manual_seed(args.seed)  # the same weights on every rank
    model = Net()
    ddp_memory = ddp_report(model)
    model = wrap_model(model, args, device)
    say(model)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    torch.manual_seed(args.seed + 1 + dist.get_rank())  # each its own dropout
    results = fit(model, data, optimizer, args, device)
    say(f"Elapsed: {results['elapsed_seconds']:.2f} seconds")

    memory: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(memory, memory_report(model, optimizer, device))
    say(memory_table(memory, ddp_memory))
    if args.json and dist.get_rank() == 0:
        about = {
            "settings": vars(args),
            "torch": torch.__version__,
            "device": device.type,
            "parallel": "DDP" if args.ddp else args.strategy,
            "data": data.name,
            "train_samples": len(data.train),
            "test_samples": len(data.test),
        }
        results = {**about, **results, "memory": memory, "ddp_memory": ddp_memory}
        with replacing(args.json) as part:
            part.write_text(json.dumps(results, indent=2, default=str) + "\n")
    if args.record:
        step = record_step(model, data.train, optimizer, args.batch_size // args.world_size, device)
        if dist.get_rank() == 0:
            with replacing(args.record) as part:
                part.write_text(json.dumps(step) + "\n")
    if args.save:
        # Collective: every rank takes part in gathering the full tensors; rank 0 writes them.
        state = (model.module if args.ddp else model).state_dict()
        if dist.get_rank() == 0:
            with replacing(args.save) as part:
                torch.save({name: tensor.cpu() for name, tensor in state.items()}, part)
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------ launch


def run_rank(rank: int, args: argparse.Namespace, init_method: str) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank}
    sizes = {"WORLD_SIZE": args.world_size, "LOCAL_WORLD_SIZE": args.world_size}
    os.environ.update({name: str(value) for name, value in (ranks | sizes).items()})
    run_job(args, init_method)
    leave()


def leave() -> NoReturn:
    """Ends this rank, whose work is done and written.

    Without the interpreter's own end, in which a backend's thread that still wants the interpreter
    is killed, and with it, now and then, the whole process ("terminate called without an active
    exception").
    """
    atexit._run_exitfuncs()  # what Python's own modules put there, such as giving semaphores back
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def launch(args: argparse.Namespace) -> None:
    """Starts the ranks on this machine; when one dies, ends the others and says which it was."""
    threads = max(1, (os.cpu_count() or 1) // args.world_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(run_rank, (args, f"file://{folder}/store"), nprocs=args.world_size)
        except mp.ProcessRaisedException as error:
            sys.exit(f"{error}\nerror: rank {error.error_index} failed, the job was stopped")
        except mp.ProcessExitedException as error:
            if error.exit_code == 2:  # the rank has said why
                sys.exit(2)
            how = error.signal_name or f"exit status {error.exit_code}"
            sys.exit(f"error: rank {error.error_index} ended by {how}, the job was stopped")
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    args = parse_args()
    if "LOCAL_RANK" in os.environ:
        run_job(args, "env://")
        leave()
    else:
        launch(args)
