"""`run_ranks`: run a function on several gloo ranks and bring back what they return.

`@on_ranks` makes a test of such a function.

A rank is a process forked from a server that has torch and the package loaded. It stays for the
calls that follow, up to `CALLS_PER_PROCESS`, since its first forward, backward and step cost far
more than the process group that each call makes anew. A call begins and ends with the state that
`_isolated` lists, and after anything but a clean return all its processes are thrown away, so that
a rank that fails or hangs can't disturb the next test. What a test changes besides (a module's
constant, a thread) needs ``fresh=True``; ``FRESH_RANKS=1`` in the environment makes every call
fresh, to tell whether a failure comes from an earlier test. Ranks meet through a file, never a
port.

How much is coalesced by default is for the ranks what it is for the test that calls.

The first failure is the one shown, with its traceback. A rank that has reported stays alive until
the parent lets it go, so that its closed sockets don't make the others fail too. When time is up,
every rank that is still running shows where it is, and is killed: a hang is a failure.
"""

import atexit
import contextlib
import enum
import faulthandler
import functools
import gc
import importlib
import inspect
import io
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from flatshard import options
from flatshard.comm.ranks import forget_destroyed
from flatshard.engine import saved_tensors

PRELOAD = [
    "flatshard.wrap",
    "pytest",
    "tests.harness",
    "tests.models",
    "tests.oracle",
    "tests.idioms",
    "tests.side",
    "torch._dynamo",  # torch loads it, in more than a second, when it makes the first optimizer
]
ROOT = Path(__file__).resolve().parents[1]
CALLS_PER_PROCESS = 60
"""After so many calls a process is replaced, which bounds what tests may leave behind."""
READY_SECONDS = 200
"""A loaded machine takes long to load what ranks need; a call's time begins after that."""
THREADS_PER_PROCESS = 40
"""The same with so many threads: a model that is never freed keeps its process groups, whose
threads wake up all the time."""

_context = multiprocessing.get_context("forkserver")


class RankError(AssertionError):
    """A rank raised, died or hung; the message says which, and where.

    Attributes:
        verdict: "raises", "crashes" or "hangs", which is said also where other ranks raise.
        why: the first error with its type, or the exit code.
        raised: whether each rank raised, in rank order.
    """

    def __init__(self, text: str, ranks: "Sequence[_Rank]" = ()) -> None:
        super().__init__(text)
        failed = sorted((rank for rank in ranks if rank.failed), key=lambda rank: rank.when)
        self.raised = [rank.state is _State.RAISED for rank in ranks]
        self.why = next((rank.error for rank in failed), "")
        if died := next((rank for rank in failed if rank.state is _State.DIED), None):
            self.verdict, self.why = "crashes", died.error
        elif any(rank.state is _State.RUNNING for rank in ranks):
            self.verdict = "hangs"
            self.why = self.why and f"one rank raises {self.why}; others wait"
        else:
            self.verdict = "raises"


@dataclass(frozen=True)
class _Setup:
    """What a rank needs to know before it runs its function."""

    rank: int
    expendable: bool
    world_size: int
    store: str
    group_timeout: float
    init_group: bool
    patience: float | None
    coalesce_bytes: int


class _State(enum.Enum):
    RUNNING = enum.auto()
    RETURNED = enum.auto()  # and waiting to be let go
    RAISED = enum.auto()
    DIED = enum.auto()
    ENDED = enum.auto()  # as it should


@dataclass
class _Worker:
    """A process that is a rank in one call after another."""

    process: Any
    pipe: Connection
    stack_path: Path
    calls: int = 0
    is_ready: bool = False

    def wait_until_ready(self) -> None:
        """Until it is forked: the server may still be loading what ranks need."""
        if not self.is_ready:
            if not self.pipe.poll(READY_SECONDS):
                raise RankError(f"no process after {READY_SECONDS} seconds: is the server loading?")
            self.pipe.recv_bytes()
            self.is_ready = True

    @property
    def is_spent(self) -> bool:
        """Whether it has served long enough."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        num_threads = len(list(tasks.iterdir())) if tasks.is_dir() else 0
        return self.calls >= CALLS_PER_PROCESS or num_threads > THREADS_PER_PROCESS


@dataclass
class _Rank:
    """The parent's view of one rank."""

    setup: _Setup
    worker: _Worker
    state: _State = _State.RUNNING
    result: Any = None
    report: str = ""
    error: str = ""
    when: float = 0.0

    @property
    def failed(self) -> bool:
        return self.state in (_State.RAISED, _State.DIED)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float = 20.0,
    init_group: bool = True,
    expendable: Sequence[int] = (),
    fresh: bool = False,
    preload: tuple[str, ...] = (),
    patience: float | None = None,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on ``world_size`` ranks.

    Warnings are errors inside a rank, and so is an exception in a destructor; use `pytest.warns`
    or `allow_warnings` there, and `pytest.raises` for an error that every rank is to raise.

    Args:
        fn: a function at module level.
        world_size: the number of ranks.
        args: anything that pickles; tensors arrive as copies.
        timeout: seconds until the whole call fails.
        group_timeout: seconds until a collective in the ranks' process group fails.
        init_group: whether to make the default process group. RANK and WORLD_SIZE are always set.
        expendable: ranks that may raise, die or hang. They end at once when they raise, as a
            crashed process would, and nobody waits for them; their result is None. Implies
            ``fresh``.
        fresh: whether to take new processes, and end them afterwards.
        preload: modules that take seconds to import. A fork server of its own has loaded them, so
            that not every rank imports them.
        patience: seconds that a rank stays alive after it raised, and then ends as its program
            would; after as many seconds more, ranks that still run are hanging. Without it, the
            first error ends the call.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: a rank that is not expendable raised, died or was still running at the end.
    """
    __tracebackhide__ = True
    call = _pack((fn, args))
    fresh = fresh or bool(expendable) or bool(os.environ.get("FRESH_RANKS"))
    kind = world_size, preload
    ranks: list[_Rank] = []
    workers: list[_Worker] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = f"{folder}/store"
        common = world_size, store, group_timeout, init_group, patience, options.COALESCE_BYTES
        setups = [_Setup(rank, rank in expendable, *common) for rank in range(world_size)]
        try:
            workers = _kept(kind, fresh) or [_launch(preload) for _ in range(world_size)]
            for worker in workers:
                worker.wait_until_ready()
            deadline = time.monotonic() + timeout
            ranks.extend(map(_Rank, setups, workers))
            for rank in ranks:
                _start(rank, call)
            awaited = [rank for rank in ranks if not rank.setup.expendable]
            _collect(awaited, deadline, 0.3 if patience is None else 2 * patience)
            if all(rank.state is _State.RETURNED for rank in awaited):
                _release(awaited, deadline)
            if any(rank.state is not _State.ENDED for rank in awaited):
                raise RankError(_describe(awaited, timeout), awaited)
        except BaseException:
            _end(workers)
            raise
    if fresh:
        _end(workers)
    else:
        _idle[kind] = workers
    return [rank.result for rank in ranks]


@dataclass(frozen=True)
class _ByName:
    """A test's function, by names: `on_ranks` replaced it, so it cannot be pickled."""

    module: str
    name: str

    def __call__(self, rank: int, world_size: int, parameters: dict[str, Any]) -> None:
        test = getattr(importlib.import_module(self.module), self.name)
        test.__wrapped__(rank, world_size, **parameters)


def on_ranks(
    world_size: int | Callable[[str], int] | None = None, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that several ranks run.

    The function takes its rank, the number of ranks, and pytest's parameters and fixtures.

    Args:
        world_size: the number of ranks, or a function of the parameter ``way`` that returns it. By
            default it is itself a parameter of the test.
        options: more keywords of `run_ranks`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(**parameters: Any) -> None:
            __tracebackhide__ = True
            call = _ByName(function.__module__, function.__name__)
            number = parameters.pop(second.name) if world_size is None else world_size
            if callable(number):
                number = number(parameters["way"])
            run_ranks(call, number, parameters, **options)

        _, second, *others = inspect.signature(function).parameters.values()
        named = others if world_size is not None else [second, *others]
        test.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
        return test

    return decorate


@contextlib.contextmanager
def allow_warnings(category: type[Warning] = Warning, message: str = "") -> Iterator[None]:
    """Let warnings of this category that match ``message`` (a regular expression) pass."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message, category)
        yield


@contextlib.contextmanager
def rank_0_warns(rank: int, message: str) -> Iterator[None]:
    """Expect one warning that matches ``message`` (a regular expression), only on rank 0."""
    with (
        pytest.warns(UserWarning, match=message)
        if rank == 0
        else contextlib.nullcontext([0]) as caught
    ):
        yield
    assert len(caught) == 1, [str(one.message) for one in caught]


@contextlib.contextmanager
def naming(configuration: object) -> Iterator[None]:
    """Name the configuration in any exception that leaves this block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"configuration: {configuration}")
        raise


def assert_raises(
    error: type[BaseException] | tuple[type[BaseException], ...],
    message: str,
    call: Callable[..., object],
    *args: Any,
    **keywords: Any,
) -> None:
    """Expect that the call raises this error, with text that matches ``message``.

    A failure names the message, so that a test may try a table of calls.
    """
    with naming(message), pytest.raises(error, match=message):
        call(*args, **keywords)


class Watching(TorchDispatchMode):
    """Calls ``see(operation, output)`` after each operation of torch."""

    def __init__(self, see: Callable[[Any, Any], object]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(func, out)
        return out


@contextlib.contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Let this process write no file of more than ``limit`` bytes: EFBIG, as ENOSPC would be."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Python would cut the byte code of modules that are imported meanwhile, and keep the files.
    with mock.patch.object(sys, "dont_write_bytecode", True):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)


# ---------------------------------------------------------------- the parent's side


_idle: dict[tuple[int, tuple[str, ...]], list[_Worker]] = {}
"""By world size and preloaded modules, the processes kept for the next call.

They have all been through the same calls, so that counters which a process keeps for good agree, as
they do on the ranks of one program.
"""


def _kept(kind: tuple[int, tuple[str, ...]], fresh: bool) -> list[_Worker]:
    """The kept processes for so many ranks, unless they have served long enough."""
    if fresh:
        return []
    workers = _idle.pop(kind, [])
    if any(worker.is_spent for worker in workers):
        _end(workers)
        return []
    return workers


def _start(rank: _Rank, call: bytes) -> None:
    rank.worker.calls += 1
    with contextlib.suppress(BrokenPipeError):  # `_receive` sees that it has ended
        rank.worker.pipe.send_bytes(_pack(rank.setup))
        rank.worker.pipe.send_bytes(call)


def _launch(preload: tuple[str, ...]) -> _Worker:
    ours, theirs = _context.Pipe()
    descriptor, stack_path = tempfile.mkstemp(prefix="rank-stack-")
    os.close(descriptor)
    with _server_of(preload):
        process = forked(_worker_main, stack_path, theirs, daemon=True)
    theirs.close()
    return _Worker(process, ours, Path(stack_path))


_servers: dict[tuple[str, ...], Any] = {}
"""Fork servers that have loaded more than `PRELOAD`, by what more they have loaded."""


@contextlib.contextmanager
def _server_of(preload: tuple[str, ...]) -> Iterator[None]:
    """Within this context `forked` asks the fork server that has loaded these modules."""
    if not preload:
        yield
        return
    if preload not in _servers:
        _servers[preload] = forkserver.ForkServer()
        _servers[preload].set_forkserver_preload([*PRELOAD, *preload])
    # multiprocessing knows only one server; it asks for a process by this function.
    connect = _servers[preload].connect_to_new_process
    with mock.patch.object(forkserver, "connect_to_new_process", connect):
        yield


def forked(function: Callable[..., None], *args: Any, daemon: bool = False) -> Any:
    """A started process that need not import what the server has loaded."""
    environment = {
        # Python 3.11's fork server does not take over sys.path before it preloads.
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        # Gloo otherwise looks up the host's name, which may be slow or lead nowhere.
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    _context.set_forkserver_preload(PRELOAD)
    process = _context.Process(target=function, args=args, daemon=daemon)
    with mock.patch.dict(os.environ, environment):
        process.start()
    return process


@atexit.register
def _end_idle() -> None:
    for workers in _idle.values():
        _end(workers)


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        if worker.process.is_alive():
            worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.process.close()
        worker.pipe.close()
        worker.stack_path.unlink()


def _collect(ranks: list[_Rank], deadline: float, seconds: float) -> None:
    """Take reports until every rank has one, or until ``seconds`` after the first failure."""
    while pending := {rank.worker.pipe: rank for rank in ranks if rank.state is _State.RUNNING}:
        if any(rank.failed for rank in ranks):
            # What failed first may be heard last: a dead rank makes others raise, say.
            deadline = min(deadline, time.monotonic() + seconds)
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for pipe in ready:
            _receive(pending[pipe])  # type: ignore[index]


def _receive(rank: _Rank) -> None:
    try:
        rank.state, rank.when, content = _unpack(rank.worker.pipe.recv_bytes())
    except (EOFError, ConnectionError):
        process = rank.worker.process
        process.join(5)
        rank.state, rank.when = _State.DIED, time.monotonic()
        rank.report = f"ended without a report, exit code {process.exitcode}"
        rank.error = f"rank {rank.setup.rank} ends with exit code {process.exitcode}"
        return
    if rank.state is _State.ENDED:
        return
    if rank.state is _State.RETURNED:
        rank.result = content
    else:
        rank.report, rank.error = content


def _release(ranks: list[_Rank], deadline: float) -> None:
    """Let the ranks take down their process groups, and see that this ends well."""
    for rank in ranks:
        rank.worker.pipe.send_bytes(b"go")
        rank.state = _State.RUNNING
    for rank in ranks:
        if rank.worker.pipe.poll(max(0.0, deadline - time.monotonic())):
            _receive(rank)


def _describe(ranks: list[_Rank], timeout: float) -> str:
    """The first failure at length, the later ones in a line, and where the other ranks are."""
    # A dead rank is the cause of what others raise, even where it is noticed later.
    failures = [rank for rank in ranks if rank.failed]
    failures.sort(key=lambda rank: (rank.state is not _State.DIED, rank.when))
    running = [rank for rank in ranks if rank.state is _State.RUNNING]
    if failures:
        first, *others = failures
        lines = [f"rank {first.setup.rank} of {first.setup.world_size} {first.report}"]
        lines += [_stack(first)] if first.state is _State.DIED else []
        lines += [f"rank {rank.setup.rank}, later: {_last_line(rank.report)}" for rank in others]
    else:
        names = ", ".join(str(rank.setup.rank) for rank in running)
        lines = [f"still running after {timeout} seconds: ranks {names}"]
    for rank in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.worker.process.pid, signal.SIGUSR1)
    time.sleep(0.2 if running else 0.0)  # the handler writes the stack from within the rank
    lines += [f"rank {rank.setup.rank} was running:\n{_stack(rank)}" for rank in running]
    return "\n".join(lines)


def _last_line(report: str) -> str:
    return report.strip().splitlines()[-1]


def _stack(rank: _Rank) -> str:
    """What faulthandler wrote, down to where the rank's own code begins."""
    text = rank.worker.stack_path.read_text() or "(it had not started yet)"
    return re.split(r".*in (_run|_serve)\b", text)[0].strip()


# ---------------------------------------------------------------- the rank's side


def _worker_main(stack_path: str, pipe: Connection) -> None:
    stack_file = Path(stack_path).open("w")
    faulthandler.enable(stack_file)
    faulthandler.register(signal.SIGUSR1, stack_file)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
        pipe.send_bytes(b"ready")
        while True:
            # What is here needs no collection in this call, and no test sees it.
            gc.freeze()
            setup = _unpack(pipe.recv_bytes())
            with _isolated(setup):
                _serve(setup, pipe)


@contextlib.contextmanager
def _isolated(setup: _Setup) -> Iterator[None]:
    """What a call finds, whatever was called before: the state that tests are allowed to change."""
    ranks = {
        "RANK": str(setup.rank),
        "WORLD_SIZE": str(setup.world_size),
        "LOCAL_RANK": str(setup.rank),
        "LOCAL_WORLD_SIZE": str(setup.world_size),
    }
    with (
        mock.patch.dict(os.environ, ranks),
        mock.patch.object(options, "COALESCE_BYTES", setup.coalesce_bytes),
        # Tests are short, and shall train without saved-tensor hooks from the second step on.
        mock.patch.object(saved_tensors, "CLEAN_STEPS", 1),
        warnings.catch_warnings(),
    ):
        warnings.resetwarnings()
        warnings.simplefilter("error")
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
            torch.set_grad_enabled(True)
            torch.use_deterministic_algorithms(False)
            torch.set_num_threads(1)


def _serve(setup: _Setup, pipe: Connection) -> None:
    """One call: report, wait for the other ranks to have reported, take down what it made."""
    lost: list[str] = []
    sys.unraisablehook = lambda args: lost.append(
        f"in {args.object!r}\n" + "".join(traceback.format_exception(args.exc_value))
    )
    call = pipe.recv_bytes()
    try:
        message = _pack((_State.RETURNED, time.monotonic(), _run(setup, call)))
    except BaseException as error:
        if setup.expendable:
            os._exit(1)
        texts = "raised\n" + traceback.format_exc(), f"{type(error).__name__}: {error}"
        message = _pack((_State.RAISED, time.monotonic(), texts))
        if setup.patience is not None:
            pipe.send_bytes(message)
            pipe.poll(setup.patience)
            os._exit(1)
    pipe.send_bytes(message)
    del message
    pipe.recv_bytes()

    if dist.is_initialized():
        dist.destroy_process_group()
        forget_destroyed()
    # The first collection runs finalizers, which keep the call's communicators alive until the
    # second one. Left for `gc.freeze`, they and the threads of their groups would stay for good.
    for _ in range(2):
        gc.collect()
    ended = (_State.ENDED, time.monotonic(), None)
    if lost:
        text = "raised where nobody sees it, " + "\n".join(lost)
        ended = (_State.RAISED, time.monotonic(), (text, text))
    pipe.send_bytes(_pack(ended))


def _run(setup: _Setup, call: bytes) -> Any:
    fn, args = _unpack(call)  # the first time, this imports the test's module
    random.seed(0)
    torch.default_generator.manual_seed(0)
    if setup.init_group:
        _init_group(setup)
    return fn(setup.rank, setup.world_size, *args)


def _init_group(setup: _Setup) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(setup.store, setup.world_size),
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=timedelta(seconds=setup.group_timeout),
    )


# ---------------------------------------------------------------- between them


def _pack(content: Any) -> bytes:
    """Pickle with tensors by value; a pipe's own pickler would share their memory."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _unpack(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)
