"""Runs a script once, in a process for each rank, and reads the records that the ranks write.

[Note: stand-ins]
In the ranks' processes, stand-in classes replace DistributedDataParallel, FSDP1 and
``ShardedWrapper``. Stand-ins are subclasses of ``ShardedWrapper`` in the sharded run, otherwise of
DistributedDataParallel. A stand-in records the tensors that its model computes.

[Note: lone calls]
Under DistributedDataParallel, one rank may call the model or ``state_dict()`` without the other
ranks; under flatshard, every rank must call. The run under DistributedDataParallel counts the calls
in each line. If ranks run a line different numbers of times, the run under flatshard calls, in this
line, an unsharded copy of the model with the initial values, so the run does not deadlock.
"""

import contextlib
import copy
import faulthandler
import functools
import gc
import inspect
import os
import pickle
import random
import resource
import runpy
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # import before ranks are forked, because optimizers import it
from torch import Tensor, nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim import optimizer as steps
from torch.utils._pytree import tree_map_only

from flatshard.extras import program_line
from flatshard.extras.trial_run import sketches
from flatshard.precision import tensors_in
from flatshard.units.module_proxy import ModuleProxy
from flatshard.wrapper import ShardedWrapper

dist: Any = torch.distributed
multiprocessing: Any = torch.multiprocessing
# torch's own class, kept because `_install` replaces the class in all modules outside of flatshard.
DDP: Any = nn.parallel.DistributedDataParallel

_WRAPS = 'wraps the model ({}): write flatshard.ShardedWrapper(model, auto_wrap_policy="auto")'
_NEEDS_ALL = {
    # method of a module: what to write instead of a call on some ranks only
    "state_dict": "write flatshard.checkpoint.full_state_dict(model), which needs every rank",
    "__call__": "forward() needs every rank: evaluate equal numbers of batches on all ranks",
}


def run(options: Any, name: str, lone_calls: Any = ()) -> tuple[list[sketches.Record], str]:
    """Run the script. Returns the records of all ranks, and why the run failed (or "").

    ``name``: ``ddp``, ``sharded``, or ``noise``, which repeats ``ddp`` with noise in the weights.
    ``lone_calls``: see [Note: lone calls].
    """
    print(f"flatshard try: run {name!r}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # then `finally` ends the ranks
    torch.set_num_threads(1)  # forked ranks would lack the threads of this process
    # Under torchrun, the first process of each host starts all ranks of its host.
    first = int(os.environ.get("RANK", 0))
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", options.nproc_per_node))
    # The ranks of all hosts write their records into one file.
    store = dist.FileStore(str(options.records / name), -1)
    if first == 0:
        store.set("port", f"{get_free_port()}")
    options.run, options.lone_calls, options.store = name, lone_calls, store
    # Fork the ranks, so that they need not import torch.
    arguments = (_run_rank, (first, options), num_ranks)
    context = multiprocessing.start_processes(*arguments, join=False, start_method="fork")
    try:
        # Ignore the exception, because the records say why ranks have failed. After one rank has
        # failed, the other ranks have five seconds to end, and to record earlier failures.
        with contextlib.suppress(multiprocessing.ProcessExitedException):
            while not context.join(grace_period=5.0):
                pass
    finally:
        for rank, one in enumerate(context.processes, first):
            with contextlib.suppress(OSError):
                os.killpg(one.pid, signal.SIGKILL)  # also DataLoaders' workers
            one.kill()  # if the rank has not called `setsid` yet
            one.join()
            if not store.check([f"{rank}"]):
                log = (options.folder / f"{name}-{rank}.log").read_text(errors="replace")
                text = f"rank {rank} ended with status {one.exitcode}. Last output:\n{log[-4000:]}"
                # If this process has killed the rank, another rank's failure is the cause.
                when = sys.maxsize * (one.exitcode in (-signal.SIGTERM, -signal.SIGKILL))
                store.set(f"{rank}", pickle.dumps(sketches.Record((when, text))))
    try:
        records = [pickle.loads(store.get(f"{rank}")) for rank in range(options.nproc_per_node)]
    except RuntimeError:
        return [], f"the records of another host are missing in --keep {options.keep} (5 minutes)"
    return records, min(one.failure for one in records)[1]


def _run_rank(local_rank: int, first: int, options: Any) -> NoReturn:
    """Run the script in this process, which was forked for one rank.

    Writes the ``Record`` of the rank's tensors, costs and errors into ``options.store``.
    """
    os.setsid()
    rank, size = first + local_rank, options.nproc_per_node
    local = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    # torchrun's store has the addresses of the last run: use another port, and another store.
    own = {"RANK": rank, "LOCAL_RANK": local_rank, "TORCHELASTIC_USE_AGENT_STORE": False}
    own["MASTER_PORT"] = options.store.get("port").decode()
    os.environ |= {k: f"{v}" for k, v in {**local, **os.environ, **own}.items()}
    with (options.folder / f"{options.run}-{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # Set seeds, so that scripts that set no seed can be compared, too.
    for module in (torch, random, getattr(sys.modules.get("numpy"), "random", random)):
        getattr(module, "manual_seed", module.seed)(1234 + rank)
    torch.set_default_dtype(torch.float64 if options.exact else torch.float32)
    torch.use_deterministic_algorithms(options.exact, warn_only=True)
    faulthandler.dump_traceback_later(options.timeout, exit=True, file=2)
    recorder, failure = Recorder(options, rank), ""
    _install(recorder)
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = "" if options.is_module else str(Path(options.script).resolve().parent)
    as_module = functools.partial(runpy.run_module, alter_sys=True)
    try:
        (as_module if options.is_module else runpy.run_path)(options.script, run_name="__main__")
    except SystemExit as error:
        failure = f"exit status {error.code}" if error.code else ""
    except BaseException as error:
        traceback.print_exc()
        innermost = inspect.trace(0)[-1].frame
        failure = f"{type(error).__name__}: {error}\n  at {program_line(innermost)}"
    recorder.end(failure)


class Recorder:
    """Records the steps of one rank."""

    def __init__(self, options: Any, rank: int) -> None:
        """Record ``options.steps`` steps, of all optimizers together, then end the process."""
        self.options, self._rank, self.record = options, rank, sketches.Record()
        self.names: dict[Tensor, str] = {}  # names of wrapped models' parameters
        self._models: dict[Any, str] = {}  # wrapped models, and the prefix of their tensors' names
        # Number of the current step. The step ends when any optimizer has stepped.
        self._step = 1
        # Number of nested optimizer steps: an optimizer may step another optimizer, and flatshard
        # may step a copy of an optimizer.
        self._depth = 0
        self._aside = 0.0  # seconds spent on recording, which do not count
        self._add_costs()

    def end(self, failure: str = "") -> NoReturn:
        """Write the record, and end the process.

        If ``failure`` is empty, checks that the script has wrapped a model and taken all steps.
        """
        if not failure and not self.names:
            failure = "it used no DistributedDataParallel, FSDP or ShardedWrapper (see --wrap)"
        elif not failure and self._step <= self.options.steps:
            failure = f"it took {self._step - 1} optimizer steps, not {self.options.steps}"
            failure += " (did it resume from files of an earlier run?)"
        if failure:
            self.record.failure = time.time(), failure
        self.options.store.set(f"{self._rank}", pickle.dumps(self.record))
        sys.stdout.flush()
        os._exit(bool(failure))  # skip exit handlers, which may wait for other ranks

    def note(self, what: str) -> None:
        """Report the program's current line, with a text."""
        self.record.notes[f"{program_line(sys._getframe())}\n      {what}"] += 1

    def add_model(self, model: Any) -> None:
        """Record the initial values of a wrapped model."""
        prefix = self._models[model] = f"model {len(self._models) + 1}: " * bool(self._models)
        params = {param: prefix + name for name, param in model.module.named_parameters()}
        self.names |= params
        self._add("initial value", params)

    def add_values(self, kind: str, model: Any, values: Any) -> Any:
        """Record inputs or outputs of a model's forward, and return them."""
        if self.options.run == "noise":
            sketches.add_noise(model)
        if self.options.exact:
            values = tree_map_only(Tensor, sketches.as_double, values)
        # The line identifies calls that only some ranks make, see [Note: lone calls].
        where = "" if torch.is_grad_enabled() else f", {program_line(sys._getframe())}"
        name = self._models.get(model, "a copy: ") + kind
        self._add(kind, {one: f"{name} {n}{where}" for n, one in enumerate(tensors_in(values))})
        return values

    def backward(self, backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Run a backward; record the loss, and the averaged gradients before they are clipped."""
        backward(tensors, *args, **kwargs)
        # Leave out the backward of a checkpoint, inside another backward.
        if torch._C._current_graph_task_id() < 0:
            self._add("loss", {one: "loss" for one in tensors_in(tensors) if one.numel() == 1})
            if all(one.require_backward_grad_sync for one in self._models):
                self._add("gradient", dict(reversed(self.names.items())))  # last parameter first

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record the gradients that an optimizer reads."""
        self._depth += 1
        if self._depth == 1:
            self._add("gradient at the step", self._params(optimizer))

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record the values that an optimizer has written, and the rest of the step."""
        self._depth -= 1
        if self._depth:
            return
        self._add("value", self._params(optimizer))
        for model, prefix in self._models.items():
            self._add("buffer", {one: prefix + name for name, one in model.module.named_buffers()})
        self._add("random generator", sketches.generator_states())
        self._add_costs()
        self._step += 1
        if self._step > self.options.steps:
            self.end()

    def _params(self, optimizer: Any) -> dict[Tensor, str]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return {p: self.names.get(p, f"parameter {n}") for n, p in enumerate(params)}

    def _add(self, kind: str, tensors: dict[Tensor, str]) -> None:
        """Record ``tensors``, or if ``kind`` is a kind of gradient, the tensors' gradients."""
        began, line = time.perf_counter(), program_line(sys._getframe())
        for owner, name in tensors.items():
            key, count = (self._step, kind, name), 1
            while key in self.record.events:
                key = (self._step, kind, f"{name} ({(count := count + 1)})")
            tensor = owner.grad if kind.startswith("gradient") else owner
            if tensor is not None:
                self.record.events[key] = sketches.sketch(tensor, owner, line)
        self._aside += time.perf_counter() - began

    def _add_costs(self) -> None:
        """Record the peak memory, the time without recording, and the bytes written until now.

        Memory is the allocator's memory on a GPU, otherwise the memory of the process. Bytes are
        written to files and sockets; only Linux counts them.
        """
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        memory = torch.cuda.max_memory_allocated() or resident
        counts = Path("/proc/self/io")
        written = int(counts.read_text().split()[3]) if counts.exists() else 0
        self.record.costs.append((memory, time.perf_counter() - self._aside, written))


def _install(recorder: Recorder) -> None:
    """Replace the wrappers, see [Note: stand-ins], and all functions whose calls are recorded."""
    wrappers = (DDP, FullyShardedDataParallel, ShardedWrapper)
    new: dict[int, Any] = {id(one): _stand_in(recorder, one, one.__name__) for one in wrappers}
    new[id(fully_shard)] = functools.partial(_wrap_in_place, recorder, "fully_shard")
    for path, module in [*sys.modules.items()]:
        for name, value in [*getattr(module, "__dict__", {}).items()]:
            if id(value) in new and not path.startswith("flatshard."):
                setattr(module, name, new[id(value)])
    for method in _NEEDS_ALL:
        _watch(recorder, method)
    warn: Any = warnings.warn

    def note(message: Any, category: Any = None, stacklevel: int = 1, **kwargs: Any) -> None:
        if sys._getframe(1).f_globals["__name__"].startswith("flatshard."):
            recorder.note(str(message))
        warn(message, category, stacklevel + 1, **kwargs)

    warnings.warn = note  # type: ignore
    multiprocessing.spawn = multiprocessing.start_processes = _spawn
    torch.autograd.backward = functools.partial(recorder.backward, torch.autograd.backward)
    steps.register_optimizer_step_pre_hook(recorder.before_step)
    steps.register_optimizer_step_post_hook(recorder.after_step)
    if recorder.options.run == "noise":
        sketches.compute_norms_in_float64()
    if recorder.options.wrap:
        optimizers: Any = torch.optim.Optimizer
        optimizers.__init__ = functools.partialmethod(_make_and_wrap, recorder, optimizers.__init__)


def _stand_in(recorder: Recorder, original: Any, name: str) -> Any:
    """Return the class that replaces the wrapper ``original``, see [Note: stand-ins]."""
    options, is_sharded = recorder.options, recorder.options.run == "sharded"
    base: Any = ShardedWrapper if is_sharded else DDP if original is DDP else _Reference
    order = list(inspect.signature(original.__init__).parameters)[2:]
    chosen: dict[str, Any] = {}
    if is_sharded and name in (DDP.__name__, "--wrap"):
        policy = {"auto": "auto", "none": None}[options.policy]
        chosen = {"sharding_strategy": options.strategy, "auto_wrap_policy": policy}

    class Recorded(base):  # type: ignore[misc]
        def __init__(self, module: nn.Module, *args: Any, **given: Any) -> None:
            if options.exact:
                module.double()
            plain = copy.deepcopy(module) if options.lone_calls else None
            super().__init__(module, **chosen | dict(zip(order, args, strict=False)) | given)
            self.__dict__["_plain"] = module.__dict__["_plain"] = plain
            if is_sharded and name != ShardedWrapper.__name__:
                recorder.note(_WRAPS.format(name))
            recorder.add_model(self)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = recorder.add_values("input", self, (args, kwargs))
            return recorder.add_values("output", self, super().forward(*args, **kwargs))

    return functools.update_wrapper(Recorded, original, updated=())


def _wrap_in_place(recorder: Recorder, name: str, module: nn.Module, **given: Any) -> nn.Module:
    """Wrap a module as FSDP2's ``fully_shard`` does: the object itself becomes the wrapper."""
    inner = object.__new__(type(module))
    inner.__dict__, module.__dict__ = module.__dict__, {}
    module.__class__ = _stand_in(recorder, ShardedWrapper, name)
    type(module).__init__(module, inner, **given)
    return module


def _make_and_wrap(optimizer: Any, recorder: Any, make: Any, *args: Any, **kwargs: Any) -> None:
    """Make an optimizer, and wrap the largest module with its parameters (not DataParallel)."""
    make(optimizer, *args, **kwargs)
    held = {param for group in optimizer.param_groups for param in group["params"]}
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    users = [m for m in modules if held <= {*m.parameters()} and not isinstance(m, nn.DataParallel)]
    if users and held.isdisjoint(recorder.names):
        if not dist.is_initialized():
            dist.init_process_group()
        _wrap_in_place(recorder, "--wrap", max(users, key=lambda one: len([*one.modules()])))


def _watch(recorder: Recorder, method: str) -> None:
    """Count or replace calls of a method of ``nn.Module``, see [Note: lone calls]."""
    real: Any = getattr(nn.Module, method)

    @functools.wraps(real)
    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_training = method == "__call__" and torch.is_grad_enabled()
        if "_plain" not in vars(module) or is_training or torch.compiler.is_compiling():
            return real(module, *args, **kwargs)
        caller = sys._getframe(1)
        note = f"{program_line(caller)}\n      {_NEEDS_ALL[method]}"
        # Count only calls of the program: wrappers call their modules, and `full_state_dict` calls
        # `state_dict` only on rank 0.
        by_program = not caller.f_globals.get("__name__", "").startswith(("torch.", "flatshard."))
        if by_program and recorder.options.run == "ddp":
            recorder.record.notes[note] += 1
        if note not in recorder.options.lone_calls:
            return real(module, *args, **kwargs)
        plain = vars(module)["_plain"].train(module.training)
        before = {**vars(plain)}
        result = real(plain, *args, **kwargs)
        # The program may read attributes that the copy's forward has set (a loss, for example).
        owner = module.module if isinstance(module, ShardedWrapper) else module
        vars(owner).update({k: v for k, v in vars(plain).items() if v is not before.get(k, real)})
        return result

    setattr(nn.Module, method, watched)


def _spawn(fn: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
    """Call the rank's function in this process, instead of ``torch.multiprocessing.spawn``."""
    if f"{nprocs}" != os.environ["WORLD_SIZE"]:
        raise ValueError(f"the script starts {nprocs} ranks by itself: --nproc-per-node {nprocs}")
    fn(int(os.environ["RANK"]), *args)


class _Reference(DDP):  # type: ignore[misc]
    """DistributedDataParallel with the attributes that FSDP1 and flatshard programs use."""

    def __init__(self, module: nn.Module, **given: Any) -> None:
        named = {n: given[n] for n in given.keys() & inspect.signature(DDP.__init__).parameters}
        super().__init__(module, **{**named, "find_unused_parameters": True})
        self.state_dict, self.load_state_dict = module.state_dict, module.load_state_dict
        self.clip_grad_norm_ = functools.partial(nn.utils.clip_grad_norm_, [*module.parameters()])

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "module" else getattr(self.module, name)

    summon_full_params = staticmethod(lambda *_, **__: contextlib.nullcontext())
    __getitem__ = ModuleProxy.__getitem__

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_modules(*args, **kwargs)

    optim_state_dict = ShardedWrapper.optim_state_dict
    optim_state_dict_to_load = ShardedWrapper.optim_state_dict_to_load
    set_state_dict_type = ShardedWrapper.set_state_dict_type
    state_dict_type = ShardedWrapper.state_dict_type
