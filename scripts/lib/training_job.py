"""Code of the training scripts: options, ranks, checkpoints and logs.

A script reads its options with a `Parser`, and passes the options and a function to `start`.
`start` runs `function(args, device)` on every rank. Either torchrun has started the ranks, or
`start` starts them on this machine.
"""

import argparse
import atexit
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatshard import ShardedWrapper, ShardingStrategy, checkpoint
from lib.command_line import at_least, directory, input_file, stop
from lib.output import output_file, replacing

Result = TypeVar("Result")
Job = Callable[[argparse.Namespace, torch.device], None]

# ----------------------------------------------------------------------------------------- options


def add_ways(add: Callable[..., Any]) -> None:
    """Adds the options of ranks, strategy and transport."""
    add(
        "--world-size",
        type=at_least(1),
        help="number of ranks to start on this machine (default: one per GPU, or 1)",
    )
    add(
        "--strategy",
        choices=[one.name for one in ShardingStrategy],
        default="FULL_SHARD",
        help="sharding strategy (default: FULL_SHARD)",
    )
    add("--ddp", action="store_true", help="train with DistributedDataParallel instead")
    add(
        "--collectives",
        choices=["auto", "sockets", "native"],
        default="auto",
        help="transport on gloo (default: auto, shared memory for ranks on one host if possible)",
    )


def add_files(add: Callable[..., Any]) -> None:
    """Adds the options of checkpoints and logs."""
    path = {"type": output_file, "metavar": "PATH"}
    add("--save", **path, help="after training, write model, optimizer and progress to PATH")
    add(
        "--resume",
        type=input_file,
        nargs="?",
        const=LATEST,
        metavar="PATH",
        help="resume, with any world size, from a file of --save; without PATH, from the last "
        "checkpoint in --checkpoint-dir",
    )
    add("--checkpoint-dir", type=directory, metavar="DIR", help="save checkpoints in DIR")
    add(
        "--checkpoint-every",
        type=at_least(1),
        default=100,
        metavar="N",
        help="save a checkpoint every N steps (default: 100)",
    )
    add("--log-file", **path, help="write lines of JSON to PATH; with --resume, append")
    add("--progress", action="store_true", help="show the progress bar even outside a terminal")


LATEST = True
"""Value of `--resume` without a path: resume from the last checkpoint."""


def set_world_size(args: argparse.Namespace) -> None:
    """Sets `args.world_size` to the number of ranks."""
    if args.resume == LATEST and not args.checkpoint_dir:
        stop("--resume: needs a file, or --checkpoint-dir")
    if "LOCAL_RANK" in os.environ:  # torchrun has started the ranks
        world_size = int(os.environ["WORLD_SIZE"])
        if args.world_size not in (None, world_size):
            stop(
                f"--world-size {args.world_size}, but torchrun has started {world_size} ranks: "
                "remove --world-size"
            )
        args.world_size = world_size
    elif args.world_size is None:
        args.world_size = max(1, torch.cuda.device_count())


# ------------------------------------------------------------------------------------------- ranks


class Refused(Exception):
    """The job cannot run with these options or files."""

    def __str__(self) -> str:
        return " ".join(super().__str__().split())  # one line


def on_all_ranks(work: Callable[[], Result]) -> Result:
    """Runs `work` on every rank, and returns each rank's own result. Collective.

    If `work` raises `Refused` on one rank, ends all ranks.
    """
    result, refusal = None, None
    try:
        result = work()
    except Refused as error:
        refusal = str(error)
    refusals: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(refusals, refusal)
    for refusal in filter(None, refusals):
        stop(refusal)
    return result


def say(thing: object, show: Callable[..., None] = print) -> None:
    """Prints on rank 0 only, and flushes, so that a pipe gets the line at once."""
    if dist.get_rank() == 0:
        show(thing, flush=True)


def connect(init_method: str) -> torch.device:
    """Joins the process group; returns this rank's device."""
    rank, world_size, local_rank, local_size = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    group: dict[str, Any] = {"rank": rank, "world_size": world_size}
    if os.environ.get("GROUP_WORLD_SIZE") == "1" and init_method == "env://":
        # torchrun's store outlives a restart, and still has the addresses of ranks that have ended.
        # A rank that reads such an address before it is overwritten would hang. So use a separate
        # prefix for each restart. (On several hosts each torchrun counts restarts separately; see
        # docs/checkpoints.md.)
        store, *_ = next(dist.rendezvous(init_method))
        restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
        group["store"] = dist.PrefixStore(f"restart-{restarts}", store)
    else:
        group["init_method"] = init_method
    if torch.cuda.device_count() >= local_size:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **group)
        return device
    dist.init_process_group("gloo", **group)
    return torch.device("cpu")


def about_ranks(device: torch.device) -> str:
    """Returns a line of text: the number of ranks, their device and backend."""
    if device.type == "cuda":
        return f"{dist.get_world_size()} on GPUs, NCCL"
    gpus, needed = torch.cuda.device_count(), os.environ["LOCAL_WORLD_SIZE"]
    too_few = f" (for one GPU each, {needed} are needed, got {gpus})" if gpus else ""
    return f"{dist.get_world_size()} on the CPU, gloo{too_few}"


def held_bytes(tensors: Iterable[Any]) -> int:
    """Returns the bytes of `tensors` on this rank; a sharded tensor counts with its local part."""
    parts = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(part.numel() * part.element_size() for part in parts)


# -------------------------------------------------------------------------------- files of a job


@contextlib.contextmanager
def log_to(args: argparse.Namespace) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that writes a line of JSON on rank 0, and does nothing on other ranks."""
    if args.log_file is None or dist.get_rank() != 0:
        yield lambda line: None
        return
    with args.log_file.open("a" if args.resume else "w") as file:

        def log(line: dict[str, Any]) -> None:
            try:
                print(json.dumps(line, default=str), file=file, flush=True)
            except OSError as error:  # for example, the disk is full
                refuse_alone(f"--log-file: cannot write {args.log_file}: {error.strerror}")

        yield log


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model whose parameters have the names of the unwrapped model."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def save(path: Path, model: nn.Module, optimizer: Any, **progress: Any) -> None:
    """Writes full tensors by name, so that any world size can resume. Collective.

    Only rank 0 holds the full tensors, in host memory. If the file cannot be written, ends all
    ranks.
    """
    plain = unwrapped(model)
    state = {
        "model": checkpoint.full_state_dict(plain),
        "optimizer": checkpoint.full_optim_state_dict(plain, optimizer),
        **progress,
    }

    def write() -> None:
        if dist.get_rank() == 0:
            try:
                with replacing(path) as part:
                    torch.save(state, part)
            # If the disk is full, torch raises RuntimeError.
            except (OSError, RuntimeError) as error:
                raise Refused(f"--save: cannot write {path}: {error}") from error

    on_all_ranks(write)


def read_checkpoint(path: Path, *progress: str) -> dict[str, Any]:
    """Reads a file of `save`.

    Raises:
        Refused: the file cannot be read, or is not a checkpoint with the entries of `progress`.
    """
    try:
        state = torch.load(path, map_location="cpu")
    except Exception as error:  # with a damaged file, `torch.load` may raise any exception
        raise Refused(f"--resume: {path} cannot be read ({type(error).__name__})") from error
    needed = ("model", "optimizer", *progress)
    missing = [key for key in needed if not isinstance(state, dict) or key not in state]
    if missing:
        raise Refused(f"--resume: {path} is not a checkpoint of this script: no {missing[0]!r}")
    for key, kind in {"model": dict, "optimizer": dict, "sizes": dict}.items():
        if not isinstance(state.get(key, {}), kind):
            raise Refused(
                f"--resume: {path} is not a checkpoint of this script: {key!r} is not a dict"
            )
    for key in progress:
        if key != "sizes" and not (type(state[key]) is int and state[key] >= 0):
            raise Refused(f"--resume: {path}: {key!r} is not a number of steps: {state[key]!r}")
    return state


def check_fits(path: Path, state: dict[str, Any], plain: nn.Module) -> None:
    """Compares a checkpoint with the unwrapped model.

    Raises:
        Refused: the checkpoint is from another model.
    """
    there, here = (
        {
            name: list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            for name, value in tensors.items()
        }
        for tensors in (state["model"], plain.state_dict())
    )
    for name in (*here, *there):
        if there.get(name) != here.get(name):
            shapes = (
                f"{name} is {there.get(name, 'missing')} in the file and "
                f"{here.get(name, 'missing')} in the model"
            )
            raise Refused(f"--resume: {path} is from another model: {shapes}")


def resume(path: Path, model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
    """Gives every rank its part of a checkpoint. Collective.

    If the checkpoint is from another optimizer, ends all ranks.
    """
    plain = unwrapped(model)
    plain.load_state_dict(state["model"])

    def load() -> None:
        try:
            ShardedWrapper.optim_state_dict_to_load(
                plain, optimizer, state["optimizer"], load_directly=True
            )
        # All ranks have read the same file, so all ranks raise here.
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Refused(f"--resume: {path} is from another optimizer: {error!r}") from error

    on_all_ranks(load)


class Checkpoints:
    """Saves the job every `--checkpoint-every` steps, and once more when SIGTERM arrives."""

    def __init__(
        self, args: argparse.Namespace, model: nn.Module, optimizer: Any, scheduler: Any = None
    ) -> None:
        self.folder: Path | None = args.checkpoint_dir
        self.every, self.resumes = args.checkpoint_every, args.resume == LATEST
        self.training = model, optimizer
        self.scheduler, self.is_stopping, self.is_asked = scheduler, False, False
        # A machine that is preempted, or torchrun on the machine, sends SIGTERM.
        if self.folder:
            signal.signal(signal.SIGTERM, self.ask)

    def ask(self, *_: Any) -> None:
        self.is_asked = True

    def resume(self) -> dict[str, Any]:
        """Resumes from the last checkpoint, and returns the checkpoint's `extra`. Collective."""
        path = checkpoint.latest(self.folder) if self.folder and self.resumes else None
        if path is None:
            return {}
        try:
            return checkpoint.load(path, *self.training, scheduler=self.scheduler)
        except (OSError, ValueError) as error:  # on all ranks
            stop(" ".join(str(error).split()))

    def until_next(self, steps: range) -> range:
        """Returns the first of `steps`, up to the next checkpoint."""
        return steps[: self.every - steps.start % self.every] if self.folder else steps

    def must_stop(self) -> bool:
        """Whether any rank has received SIGTERM; equal on all ranks. Collective."""
        if self.folder and not self.is_stopping:
            # NCCL can reduce only tensors on a GPU.
            asked = torch.tensor(self.is_asked, dtype=torch.int32)
            asked = asked.to("cuda") if dist.get_backend() == "nccl" else asked
            dist.all_reduce(asked, dist.ReduceOp.MAX)
            self.is_stopping = bool(asked)
        return self.is_stopping

    def after_step(self, step: int, **extra: Any) -> None:
        """Saves if a checkpoint is due; ends the job if a rank has received SIGTERM. Collective."""
        must_stop = self.must_stop()
        if self.folder and (must_stop or step % self.every == 0):
            path = self.folder / f"step-{step:08d}"
            if not path.exists():
                try:
                    checkpoint.save(
                        path,
                        *self.training,
                        scheduler=self.scheduler,
                        extra={"step": step, **extra},
                        keep=3,
                    )
                except OSError as error:  # on all ranks
                    stop(" ".join(str(error).split()))
            if must_stop:
                say(f"SIGTERM: saved {path.name}")
                sys.exit(0)


# ------------------------------------------------------------------------------------------ launch


def start(job: Job, args: argparse.Namespace) -> None:
    """Runs the job, on the ranks that torchrun has started or on new ranks of this machine."""
    if "LOCAL_RANK" in os.environ:
        take_part(job, args, "env://")
    launch(job, args)


def take_part(job: Job, args: argparse.Namespace, init_method: str) -> NoReturn:
    """Runs the job on this rank, and ends the process."""
    status = 0
    device = connect(init_method)
    try:
        job(args, device)
    except SystemExit as stopped:  # from `stop`, on all ranks
        status = stopped.code
    # After the first rank has ended, the launcher may kill the other ranks. Wait until all ranks
    # have printed everything.
    dist.barrier()
    dist.destroy_process_group()
    leave(status)


def refuse_alone(message: str) -> NoReturn:
    """Stops this rank without waiting for the other ranks, which wait in another collective."""
    try:
        stop(message)
    finally:
        leave(2)


def leave(status: Any) -> NoReturn:
    """Ends this rank after its work is done and its files are written.

    Skips the shutdown of the Python interpreter. In the shutdown, Python kills a backend's thread
    that still needs the interpreter, which sometimes ends the process with SIGABRT ("terminate
    called without an active exception").
    """
    atexit._run_exitfuncs()  # Python's own modules need these, for example to free semaphores
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_rank(rank: int, job: Job, args: argparse.Namespace, init_method: str) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank}
    sizes = {"WORLD_SIZE": args.world_size, "LOCAL_WORLD_SIZE": args.world_size}
    os.environ.update({name: str(value) for name, value in (ranks | sizes).items()})
    take_part(job, args, init_method)


def launch(job: Job, args: argparse.Namespace) -> None:
    """Starts the ranks on this machine, and waits until they have ended."""
    threads = max(1, (os.cpu_count() or 1) // args.world_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (job, args, f"file://{folder}/store"), args.world_size)


def spawn(work: Callable[..., None], arguments: tuple[Any, ...], world_size: int) -> None:
    """Runs `work(rank, *arguments)` in `world_size` processes.

    If a rank dies, ends the other ranks and this process, and prints the number of the rank.
    """
    # Hide torch's log of the ranks that it ends, because this function prints the reason.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    # Ctrl-C reaches all processes of the terminal. Let the ranks ignore it, because this process
    # ends the ranks.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ranks = mp.spawn(work, arguments, nprocs=world_size, join=False)
    signal.signal(signal.SIGINT, handler)
    try:
        while not ranks.join():
            pass
    except mp.ProcessRaisedException as error:
        sys.exit(f"{error}\nerror: rank {error.error_index} failed, the job was stopped")
    except mp.ProcessExitedException as error:
        if error.exit_code == 2:  # the rank has printed the reason
            sys.exit(2)
        how = error.signal_name or f"exit status {error.exit_code}"
        sys.exit(f"error: rank {error.error_index} ended by {how}, the job was stopped")
    except KeyboardInterrupt:
        for process in ranks.processes:
            process.kill()
        raise
    finally:
        for file in ranks.error_files:  # ranks that failed after the first rank leave tracebacks
            Path(file).unlink(missing_ok=True)
