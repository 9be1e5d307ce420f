"""Runs a script once, in a process for each rank, and reads the ranks' records.

[Note: stand-ins]
In these processes, other classes take the place of DistributedDataParallel, FSDP1 and
``ShardedWrapper``. They wrap the model by ``ShardedWrapper`` in the sharded run, otherwise by
DistributedDataParallel, and record what the model computes.

[Note: lone calls]
Under DistributedDataParallel, one rank may call the model or ``state_dict()``; under flatshard,
these calls need every rank. The run under DistributedDataParallel counts the calls by line. If
ranks call a line different numbers of times, the run under flatshard keeps an unsharded copy of the
model, with its initial values. At these lines the copy is called, so the run continues.
"""

import contextlib
import copy
import faulthandler
import functools
import gc
import inspect
import os
import random
import runpy
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # optimizers import it: load it once, before ranks are forked
from torch import nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from flatshard.extras import program_line
from flatshard.extras.trial_run.recorder import Record, Recorder, read, write
from flatshard.units.module_proxy import ModuleProxy
from flatshard.wrapper import ShardedWrapper

multiprocessing: Any = torch.multiprocessing
# torch's own class, kept because `_install` replaces the class in all modules outside of flatshard.
DDP: Any = nn.parallel.DistributedDataParallel

_WRAPS = 'wraps the model ({}): write flatshard.ShardedWrapper(model, auto_wrap_policy="auto")'
_NEEDS_ALL = {
    # method of a module: what to write instead of a call on some ranks only
    "state_dict": "write flatshard.checkpoint.full_state_dict(model), which needs every rank",
    "__call__": "forward() needs every rank: evaluate equal numbers of batches on all ranks",
}


def run(options: Any, name: str, lone_calls: Any = ()) -> tuple[list[Record], str]:
    """Run the script, and return the records of all ranks, and why the run failed, or "".

    ``name``: `ddp`; `sharded`; or `noise`, which repeats `ddp` with noise in the weights.
    ``lone_calls``: see [Note: lone calls].
    """
    print(f"flatshard try: run {name!r}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the ranks, too
    torch.set_num_threads(1)  # ranks are forked, and threads of this process would be missing
    # Under torchrun, the first process of each host starts all ranks of its host.
    first = int(os.environ.get("RANK", 0))
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", options.nproc_per_node))
    files = [options.folder / f"{name}-{rank}.pt" for rank in range(options.nproc_per_node)]
    port = options.folder / f"{name}.port"
    if first == 0:
        write(port, get_free_port())
    options.run, options.lone_calls, options.port = name, lone_calls, read(port)
    # Processes that are forked need not import torch.
    arguments = (_run_rank, (first, files, options), num_ranks)
    context = multiprocessing.start_processes(*arguments, join=False, start_method="fork")
    try:
        # The records say why ranks have failed. After one has failed, others may end within five
        # seconds, and record an earlier failure.
        with contextlib.suppress(multiprocessing.ProcessExitedException):
            while not context.join(grace_period=5.0):
                pass
    finally:
        for one in context.processes:
            with contextlib.suppress(OSError):
                os.killpg(one.pid, signal.SIGKILL)  # also DataLoaders' workers
            one.kill()  # if it has no group of processes yet
            one.join()
    for file, one in zip(files[first:], context.processes, strict=False):
        if not file.exists():
            log = file.with_suffix(".log").read_text(errors="replace")[-4000:]
            text = f"{file.stem}: the process ended with status {one.exitcode}. Last output:\n{log}"
            # A rank that this process has ended is the cause only if no other rank has failed.
            was_ended = one.exitcode in (-signal.SIGTERM, -signal.SIGKILL)
            write(file, Record((float(sys.maxsize) if was_ended else 0.0, text)))
    records = [read(file) for file in files]  # other hosts write their ranks' files
    return records, min(one.failure for one in records)[1]


def _run_rank(local_rank: int, first: int, files: list[Path], options: Any) -> NoReturn:
    """Run the script in this process, which was forked for one rank.

    Writes the ``Record`` of the rank's tensors, costs and errors to the rank's file.
    """
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank, size = first + local_rank, f"{options.nproc_per_node}"
    local = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    own = {"MASTER_PORT": f"{options.port}", "RANK": f"{rank}", "LOCAL_RANK": f"{local_rank}"}
    # torchrun's store has the addresses of the last run: use another port, and another store.
    os.environ |= {**local, **os.environ, **own, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    files[rank].unlink(missing_ok=True)
    with files[rank].with_suffix(".log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # Scripts that set no seed can be compared, too.
    for module in (torch, random, getattr(sys.modules.get("numpy"), "random", random)):
        getattr(module, "manual_seed", module.seed)(1234 + rank)
    torch.set_default_dtype(torch.float64 if options.exact else torch.float32)
    torch.use_deterministic_algorithms(options.exact, warn_only=True)
    faulthandler.dump_traceback_later(options.timeout, exit=True, file=2)
    recorder, failure = Recorder(options, files[rank]), ""
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
        innermost, _ = [*traceback.walk_tb(error.__traceback__)][-1]
        failure = f"{type(error).__name__}: {error}\n  at {program_line(innermost)}"
    recorder.end(failure)


def _install(recorder: Recorder) -> None:
    """Replace the wrappers in all loaded modules, see [Note: stand-ins], and watched functions."""
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
            recorder.remark(str(message))
        warn(message, category, stacklevel + 1, **kwargs)

    warnings.warn = note  # type: ignore
    multiprocessing.spawn = multiprocessing.start_processes = _spawn
    if recorder.options.wrap:
        optimizers: Any = torch.optim.Optimizer
        optimizers.__init__ = functools.partialmethod(_make_and_wrap, recorder, optimizers.__init__)


def _stand_in(recorder: Recorder, original: Any, name: str) -> Any:
    """Return the class that takes the place of a wrapper, see [Note: stand-ins]."""
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
            if name != ShardedWrapper.__name__:
                recorder.remark(_WRAPS.format(name))
            recorder.add_model(self)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return recorder.forward(self, super().forward, args, kwargs)

    return functools.update_wrapper(Recorded, original, updated=())


def _wrap_in_place(recorder: Recorder, name: str, module: nn.Module, **given: Any) -> nn.Module:
    """Wrap a module as FSDP2's ``fully_shard`` does: the object itself becomes the wrapper."""
    inner = object.__new__(type(module))
    inner.__dict__, module.__dict__ = module.__dict__, {}
    module.__class__ = _stand_in(recorder, ShardedWrapper, name)
    type(module).__init__(module, inner, **given)
    return module


def _make_and_wrap(optimizer: Any, recorder: Any, make: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the outermost module, below DataParallel, with the parameters of the optimizer."""
    make(optimizer, *args, **kwargs)
    held = {param for group in optimizer.param_groups for param in group["params"]}
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    users = [one for one in modules if held <= {*one.parameters()}]
    users = [one for one in users if not isinstance(one, nn.DataParallel)]
    if users and held.isdisjoint(recorder.names):
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group()
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
        call = program_line(caller), _NEEDS_ALL[method]
        # Count only calls of the program: wrappers call their modules, and `full_state_dict` calls
        # `state_dict` only on rank 0.
        if not caller.f_globals.get("__name__", "").startswith(("torch.", "flatshard.")):
            recorder.record.calls[call] += 1
        if call not in recorder.options.lone_calls:
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
    """Call the function of this rank here, in the place of ``torch.multiprocessing.spawn``."""
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

    __getitem__ = ModuleProxy.__getitem__
    named_modules = ModuleProxy.named_modules
    summon_full_params = staticmethod(lambda *_, **__: contextlib.nullcontext())
    optim_state_dict = ShardedWrapper.optim_state_dict
    optim_state_dict_to_load = ShardedWrapper.optim_state_dict_to_load
    set_state_dict_type = ShardedWrapper.set_state_dict_type
    state_dict_type = ShardedWrapper.state_dict_type
