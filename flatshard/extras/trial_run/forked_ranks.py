"""Runs a script once, in a process for each rank, and reads the records that the ranks write.

[Note: stand-ins]
In the ranks' processes, stand-in classes replace DistributedDataParallel, FSDP1 and
``ShardedWrapper``. Stand-ins are subclasses of ``ShardedWrapper`` in the sharded run, otherwise of
DistributedDataParallel. A stand-in records the tensors that its model computes.

[Note: lone calls]
Under DistributedDataParallel, one rank may call the model or ``state_dict()`` without the other
ranks; under flatshard, every rank must call. The run under DistributedDataParallel counts the calls
in each line of the script. If the counts of a line differ between ranks, the run under flatshard
does not deadlock there: the line calls an unsharded copy of the model with the initial values.

[Note: sketch]
A rank records a *sketch* of each tensor, 256 sums: the element with index i is multiplied by a
pseudo-random sign, and added to sum number i modulo 256. So a tensor of up to 256 elements is
recorded whole. The sketch of a difference is the difference of the sketches, and the norm of this
difference is close to the norm of the tensors' difference. Because of the signs, swapped elements
change the sketch. If each rank records its own range of a sharded tensor, the sum of these sketches
is the sketch of the full tensor. So recording needs no communication: if only one rank steps an
optimizer, the rank does not wait for the other ranks.
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
import runpy
import signal
import socket
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
import torch._dynamo  # import before ranks are forked, because optimizers import it
from torch import Tensor, distributed as dist, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim import Optimizer, optimizer as steps

from flatshard.extras import peak_resident_bytes, program_line
from flatshard.precision import cast_floats, tensors_in
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_grad
from flatshard.units.layout import memory_order
from flatshard.wrapper import ShardedWrapper

mp: Any = torch.multiprocessing
# torch's own class, kept because `_install` replaces the class in all modules outside of flatshard.
DDP: Any = nn.parallel.DistributedDataParallel

_WRAPS = 'wraps the model ({}): write flatshard.ShardedWrapper(model, auto_wrap_policy="auto")'
_NO_WRAPPER = "it used no DistributedDataParallel, FSDP or ShardedWrapper (see --wrap)"
_NO_OPTIMIZER = "it made no optimizer of a module's parameters, so --wrap did not wrap a model"
FEWER_STEPS = " (did it resume from files of an earlier run?)"  # ends the text about too few steps
_SIZE, _CHUNK = 256, 1 << 16  # number of sums recorded of a tensor; elements added at once
# Replacements for calls that only some ranks make.
_FULL_STATE = "write flatshard.checkpoint.full_state_dict(model), which needs every rank"
_EQUAL_CALLS = "forward() needs every rank: evaluate equal numbers of batches on all ranks"


class Sketch(NamedTuple):
    """This rank's elements of a tensor, reduced to 256 sums ([Note: sketch])."""

    line: str  # line of the program during which the tensor was recorded
    eps: float  # precision of the dtype; 0 for integers
    share: float  # the fraction of the elements that this rank holds; 1 for an unsharded tensor
    sums: Any  # a numpy array, because many arrays are pickled faster than many tensors


def run(options: Any, name: str, lone_calls: Any = ()) -> tuple[list[Any], str]:
    """Run the script. Returns the ``Recorder.record`` of all ranks, and why the run failed (or "").

    ``name``: ``ddp``, ``sharded``, or ``noise``, which repeats ``ddp`` with noise in the weights.
    ``lone_calls``: see [Note: lone calls].
    """
    print(f"flatshard try: run {name!r}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # then `finally` ends the ranks
    # Under torchrun, the first process of each host starts all ranks of its host.
    first, count = int(os.environ.get("RANK", 0)), options.num_here
    # The ranks of all hosts write their records and the first failure into one file.
    store: Any = dist.FileStore(str(options.records / name), -1)  # type: ignore[attr-defined]
    if first == 0 and store.check(["port"]):
        return [], f"--keep: expected a new folder, found files of another run in {options.keep}"
    options.run, options.lone_calls, options.store = name, lone_calls, store
    # Fork the ranks, so that they need not import torch.
    ranks = mp.start_processes(_run_rank, (first, options), count, join=False, start_method="fork")
    keys = [f"{rank}" for rank in range(options.nproc_per_node)]
    # Each rank ends itself after `timeout` seconds. Hosts may start five minutes apart.
    until = time.monotonic() + options.timeout + 300.0
    try:
        while not store.check(keys) and time.monotonic() < until:
            time.sleep(0.02)
            # Read exit codes. `join` would also wait for the processes that a rank has forked.
            for rank, one in enumerate(ranks.processes, first):
                if one.exitcode is not None and not store.check([f"{rank}"]):
                    log = (options.folder / f"{name}-{rank}.log").read_text(errors="replace")
                    text = f"rank {rank} ended with status {one.exitcode}. Last output:\n"
                    store.compare_set("failure", "", text + log[-4000:])
                    store.set(f"{rank}", pickle.dumps(SimpleNamespace(notes={})))
            if store.check(["failure"]):  # the other ranks have five seconds to end
                until = min(until, time.monotonic() + 5.0)
    finally:
        for one in ranks.processes:
            with contextlib.suppress(OSError):
                os.killpg(one.pid, signal.SIGKILL)  # also DataLoaders' workers
            one.kill()  # if the rank has not called `setsid` yet
            one.join()
    records = [pickle.loads(store.get(key)) for key in keys if store.check([key])]
    missing = f"the records of another host are missing in --keep {options.keep}"
    # If a rank has failed, `compare_set` returns its failure.
    return records, store.compare_set("failure", "", missing * (len(records) < len(keys))).decode()


def _run_rank(local_rank: int, first: int, options: Any) -> NoReturn:
    """Run the script in this process, which was forked for one rank.

    Writes the rank's record and its failure, if any, into ``options.store``.
    """
    os.setsid()
    # This process lacks the threads of the process that forked it. Make a new pool of threads here:
    # if several threads of autograd made the pool at once, torch would abort.
    torch.set_num_threads(1)
    rank, size = first + local_rank, f"{options.nproc_per_node}"
    with (options.folder / f"{options.run}-{rank}.log").open("w") as log:
        os.dup2(os.dup2(log.fileno(), 1), 2)  # stdout and stderr
    # Reserve a port for rank 0. Until this process ends, Linux gives the port to no other program.
    # But rank 0's TCPStore can listen on the port, because the store also sets SO_REUSEADDR.
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    if rank == 0:
        options.store.set("port", f"{reserved.getsockname()[1]}")
    env = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size} | os.environ
    # torchrun's store has the addresses of the last run: use another port, and another store.
    env |= {"RANK": f"{rank}", "LOCAL_RANK": f"{local_rank}", "TORCHELASTIC_USE_AGENT_STORE": "0"}
    os.environ |= env | {"MASTER_PORT": options.store.get("port").decode()}
    # Set seeds, so that scripts that set no seed can be compared, too.
    for module in (torch, random, getattr(sys.modules.get("numpy"), "random", random)):
        getattr(module, "manual_seed", module.seed)(1234 + rank)
    torch.set_default_dtype(torch.float64 if options.exact else torch.float32)
    torch.use_deterministic_algorithms(options.exact, warn_only=True)
    faulthandler.dump_traceback_later(options.timeout, exit=True, file=2)
    recorder, failure = Recorder(options, rank), ""
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = "" if options.is_module else str(Path(options.script).resolve().parent)
    as_module = functools.partial(runpy.run_module, alter_sys=True)
    try:
        _install(recorder)
        (as_module if options.is_module else runpy.run_path)(options.script, run_name="__main__")
    except SystemExit as error:
        failure = f"exit status {error.code}" if error.code else ""
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        line = program_line(inspect.trace(0)[-1].frame) or options.script
        failure = f"{type(error).__name__}: {error}\n  at {line}"
    recorder.end(failure)


class Recorder:
    """Records the steps of one rank.

    Attributes:
        record: the record, which ``run`` returns. ``record.events``: sketches of tensors, by step,
            kind of tensor, and name; missing gradients have no sketch. ``record.notes``: how often
            the script ran each line that needs a change, by the text of the line and the change.
            ``record.costs``: peak memory in MiB, milliseconds, and KiB written, before the first
            step and after each step. So the length of ``costs`` is the number of the current step,
            counted from 1.
        names: names of wrapped models' parameters.
    """

    def __init__(self, options: Any, rank: int) -> None:
        """Record ``options.steps`` steps, of all optimizers together, then end the process."""
        self.options, self._rank = options, rank
        self.record = SimpleNamespace(events={}, notes=Counter(), costs=[])
        self.names: dict[Tensor, str] = {}
        self._models: dict[Any, str] = {}  # wrapped models, and the prefix of their tensors' names
        # `_depth`: number of nested optimizer steps, because a step may step another optimizer, and
        # flatshard may step a copy of an optimizer. `_aside`: seconds spent on recording, which are
        # subtracted from the costs.
        self._depth, self._aside = 0, 0.0
        self._add_costs()

    def end(self, failure: str = "") -> NoReturn:
        """Write the record, and end the process.

        If ``failure`` is empty, checks that the script has wrapped a model and taken all steps.
        """
        if not failure and not self.names:
            failure = _NO_OPTIMIZER if self.options.wrap else _NO_WRAPPER
        elif not failure and (taken := len(self.record.costs) - 1) < self.options.steps:
            failure = f"it took {taken} optimizer steps, not {self.options.steps}{FEWER_STEPS}"
        sys.stdout.flush()
        if failure:
            # A rank's death may have caused this failure. Let `run` notice the death first.
            time.sleep(0.2)
            self.options.store.compare_set("failure", "", failure)
        self.options.store.set(f"{self._rank}", pickle.dumps(self.record))
        os._exit(bool(failure))  # skip exit handlers, which may wait for other ranks

    def note(self, what: str, *, counts: bool = True) -> str:
        """Return the program's current line and ``what``. ``counts``: whether to count the call."""
        note = f"{program_line(sys._getframe())}\n      {what}"
        self.record.notes.update([note] * counts)
        return note

    def add_model(self, model: Any) -> None:
        """Record the initial values of a wrapped model."""
        prefix = self._models[model] = f"model {len(self._models) + 1}: " * bool(self._models)
        params = {param: prefix + name for name, param in model.module.named_parameters()}
        self.names |= params
        self._add("initial value", params)

    def add_values(self, kind: str, model: Any, values: Any) -> Any:
        """Record inputs or outputs of a model's forward, and return them."""
        if self.options.run == "noise":
            _add_noise(model)
        values = cast_floats(values, torch.float64) if self.options.exact else values
        # The line identifies calls that only some ranks make, see [Note: lone calls].
        where = "" if torch.is_grad_enabled() else f", {program_line(sys._getframe())}"
        name = self._models.get(model, "a copy: ") + kind
        self._add(kind, {one: f"{name} {n}{where}" for n, one in enumerate(tensors_in(values))})
        return values

    def backward(self, backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Run a backward; record the loss, and the averaged gradients before they are clipped."""
        backward(tensors, *args, **kwargs)
        # Record only the outer backward: activation checkpoints run a backward inside of it.
        if torch._C._current_graph_task_id() < 0:
            self._add("loss", {one: "loss" for one in tensors_in(tensors) if one.numel() == 1})
            if all(one.require_backward_grad_sync for one in self._models):
                self._add("gradient", dict(reversed(self.names.items())))  # last parameter first

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record the gradients that an optimizer reads."""
        self._depth += 1
        if self._depth == 1:
            self._add("gradient at the step", self.params(optimizer))

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record what a step has changed: values, buffers, random generators and costs."""
        self._depth -= 1
        if self._depth:
            return
        self._add("value", self.params(optimizer))
        for model, prefix in self._models.items():
            self._add("buffer", {one: prefix + name for name, one in model.module.named_buffers()})
        states = {torch.get_rng_state(): "torch", torch.tensor(random.getstate()[1]): "random"}
        # numpy has been imported, because `_sketch` needs it.
        states[torch.tensor([*pickle.dumps(sys.modules["numpy"].random.get_state())])] = "numpy"
        if torch.cuda.is_initialized():
            states[torch.cuda.get_rng_state()] = "torch.cuda"
        self._add("random generator", states)
        self._add_costs()
        if len(self.record.costs) > self.options.steps:
            self.end()

    def params(self, optimizer: Any) -> dict[Tensor, str]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return {p: self.names.get(p, f"parameter {n}") for n, p in enumerate(params)}

    def _add(self, kind: str, tensors: dict[Tensor, str]) -> None:
        """Record ``tensors``, or if ``kind`` is a kind of gradient, the tensors' gradients."""
        began, line = time.perf_counter(), program_line(sys._getframe())
        for owner, name in tensors.items():
            key, count = (len(self.record.costs), kind, name), 1
            while key in self.record.events:
                key = (*key[:2], f"{name} ({(count := count + 1)})")
            tensor = owner.grad if kind.startswith("gradient") else owner
            if tensor is not None:
                self.record.events[key] = _sketch(tensor, owner, line)
        self._aside += time.perf_counter() - began

    def _add_costs(self) -> None:
        """Record the peak memory, the time without recording, and the bytes written until now.

        Memory is the allocator's memory on a GPU, otherwise the memory of the process. Only Linux
        counts the bytes that a process writes to files and sockets.
        """
        memory = torch.cuda.max_memory_allocated() or peak_resident_bytes()
        counts = Path("/proc/self/io")
        written = int(counts.read_text().split()[3]) if counts.exists() else 0
        seconds = time.perf_counter() - self._aside
        self.record.costs.append((memory / 2**20, seconds * 1e3, written / 2**10))


def _sketch(tensor: Tensor, owner: Tensor, line: str) -> Sketch:
    """Return the sketch of a tensor. ``owner``: the gradient's parameter, or ``tensor`` itself."""
    if owner.is_sparse:  # a sparse input, which may be too large as a dense tensor
        owner = tensor = owner.coalesce().values()
    if isinstance(owner, FlatShardTensor):
        index, flat = owner.spec.offset, local_grad(tensor, owner.spec)
    else:
        index, flat = 0, tensor.detach().to_dense().permute(memory_order(owner)).reshape(-1)
    share = flat.numel() / owner.numel() if owner.numel() else 1.0
    if flat.is_complex():
        index, flat = 2 * index, torch.view_as_real(flat).reshape(-1)
    sums = torch.zeros(_SIZE, dtype=torch.float64, device=flat.device)
    for part in flat.split(_CHUNK):
        at = torch.arange(index, index := index + part.numel(), device=part.device)
        signs = 1 - 2 * ((at * 0x9E3779B97F4A7C1 >> 40) & 1)
        sums.index_add_(0, at % _SIZE, part.double().nan_to_num(1e4, 3e4, -3e4) * signs)
    eps = torch.finfo(flat.dtype).eps if flat.is_floating_point() else 0.0
    return Sketch(line, eps, share, sums.cpu().numpy())


@functools.cache  # changes each model once
def _add_noise(model: nn.Module) -> None:
    """Change each weight of a model by one unit in the last place."""
    generator = torch.Generator().manual_seed(0)
    for param in filter(torch.is_floating_point, model.parameters()):
        signs = 2 * torch.randint(0, 2, param.shape, generator=generator) - 1
        param.data.mul_(1 + signs.to(param) * torch.finfo(param.dtype).eps)


def _exact_norm(norm: Any, x: Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Return a norm that is computed in float64.

    On CPUs, torch's float32 norm of four million elements has a rounding error of 2e-4, which is
    almost the same for slightly different weights. The noise run computes norms in float64, so that
    its difference from the first run contains this error. The run under flatshard may differ as
    much, because flatshard adds up other ranges of the elements.
    """
    return norm(cast_floats(x, torch.float64), *args, **kwargs).to(dtype or x.real.dtype)


def _install(recorder: Recorder) -> None:
    """Replace the wrappers, see [Note: stand-ins], and all functions whose calls are recorded."""
    wrappers = (DDP, FullyShardedDataParallel, ShardedWrapper)
    new: dict[int, Any] = {id(one): _stand_in(recorder, one, one.__name__) for one in wrappers}
    new[id(fully_shard)] = functools.partial(_wrap_in_place, recorder, "fully_shard")
    new |= {id(mp.spawn): _spawn, id(mp.start_processes): _spawn}
    for path, module in [*sys.modules.items()]:
        for name, value in [*getattr(module, "__dict__", {}).items()]:
            if id(value) in new and not path.startswith("flatshard."):
                setattr(module, name, new[id(value)])
    # torch.compile calls this method of the class that has replaced DistributedDataParallel.
    ShardedWrapper._get_active_ddp_module = DDP._get_active_ddp_module  # type: ignore
    _watch(recorder, "state_dict", _FULL_STATE)
    _watch(recorder, "__call__", _EQUAL_CALLS)
    warn: Any = warnings.warn

    def note(message: Any, category: Any = None, stacklevel: int = 1, **kwargs: Any) -> None:
        if sys._getframe(1).f_globals["__name__"].startswith("flatshard."):
            recorder.note(str(message))
        warn(message, category, stacklevel + 1, **kwargs)

    warnings.warn = note  # type: ignore
    torch.autograd.backward = functools.partial(recorder.backward, torch.autograd.backward)
    steps.register_optimizer_step_pre_hook(recorder.before_step)
    steps.register_optimizer_step_post_hook(recorder.after_step)
    if recorder.options.run == "noise":
        exact = torch.linalg.vector_norm = functools.partial(_exact_norm, torch.linalg.vector_norm)  # type: ignore
        torch._foreach_norm = lambda tensors, ord=2, **_: [exact(one, ord) for one in tensors]  # type: ignore
    if recorder.options.wrap:
        Optimizer.__init__ = functools.partialmethod(_make_and_wrap, recorder, Optimizer.__init__)  # type: ignore


def _stand_in(recorder: Recorder, original: Any, name: str) -> Any:
    """Return the class that replaces the wrapper ``original``, see [Note: stand-ins]."""
    options, is_sharded = recorder.options, recorder.options.run == "sharded"
    base: Any = ShardedWrapper if is_sharded else DDP if original is DDP else _Reference
    order = list(inspect.signature(original.__init__).parameters)[2:]
    policy = None if options.policy == "none" else options.policy
    applies = is_sharded and name in (DDP.__name__, "--wrap")  # --strategy and --policy
    chosen = {"sharding_strategy": options.strategy, "auto_wrap_policy": policy} if applies else {}

    class Recorded(base):  # type: ignore[misc]
        def __init__(self, module: nn.Module, *args: Any, **given: Any) -> None:
            module = module.double() if options.exact else module
            plain = _copy_of(module) if options.lone_calls else None
            given = chosen | dict(zip(order, args, strict=False)) | given
            if (given.pop("mixed_precision", None) or given.pop("mp_policy", None)) and is_sharded:
                recorder.note("keep mixed precision (compared without it, as DDP has none)")
            super().__init__(module, **given)
            self.__dict__["_plain"] = module.__dict__["_plain"] = plain
            if is_sharded and name != ShardedWrapper.__name__:
                recorder.note(_WRAPS.format(name))
            recorder.add_model(self)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = recorder.add_values("input", self, (args, kwargs))
            return recorder.add_values("output", self, super().forward(*args, **kwargs))

    return functools.update_wrapper(Recorded, original, updated=())


def _copy_of(module: nn.Module) -> nn.Module:
    # deepcopy refuses results of autograd, such as weights that `weight_norm` computes in forward.
    kept = tensors_in([vars(one) for one in module.modules()])
    return copy.deepcopy(module, {id(one): one.detach() for one in kept if not one.is_leaf})


def _wrap_in_place(recorder: Recorder, name: str, module: nn.Module, **given: Any) -> nn.Module:
    """Wrap a module as FSDP2's ``fully_shard`` does: the object itself becomes the wrapper."""
    inner = object.__new__(type(module))
    inner.__dict__, module.__dict__ = module.__dict__, {}
    module.__class__ = _stand_in(recorder, ShardedWrapper, name)
    type(module).__init__(module, inner, **given)
    return module


def _make_and_wrap(optimizer: Any, recorder: Any, make: Any, *args: Any, **kwargs: Any) -> None:
    """Make an optimizer, and wrap the largest modules that have the optimizer's parameters."""
    make(optimizer, *args, **kwargs)
    held = recorder.params(optimizer).keys()
    found = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    # For each parameter, the last module in this order is wrapped: the module with most of the
    # optimizer's parameters. If several modules have as many, it is the largest module.
    found.sort(key=lambda one: (len(held & {*one.parameters()}), len([*one.modules()])))
    models = {p: m for m in found if not isinstance(m, nn.DataParallel) for p in m.parameters()}
    if held.isdisjoint(recorder.names):
        for model in dict.fromkeys(models[p] for p in held if p in models):
            if not dist.is_initialized():
                dist.init_process_group()
            _wrap_in_place(recorder, "--wrap", model)


def _watch(recorder: Recorder, method: str, remedy: str) -> None:
    """Count or replace calls of a method of ``nn.Module``, see [Note: lone calls].

    ``remedy``: what the script must do instead, if only some ranks make the call.
    """
    real: Any = getattr(nn.Module, method)

    @functools.wraps(real)
    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_training = method == "__call__" and torch.is_grad_enabled()
        if "_plain" in vars(module) and not is_training and not torch.compiler.is_compiling():
            # Count only calls of the program: wrappers call their modules, and `full_state_dict`
            # calls `state_dict` only on rank 0.
            caller = sys._getframe(1).f_globals.get("__name__", "")
            counts = not caller.startswith(("torch.", "flatshard."))
            if recorder.note(remedy, counts=counts) in recorder.options.lone_calls:
                plain = vars(module)["_plain"].train(module.training)
                before = {**vars(plain)}
                result = real(plain, *args, **kwargs)
                # The program may read attributes that the copy's forward has set, such as a loss.
                owner = module.module if isinstance(module, ShardedWrapper) else module
                changed = {k: v for k, v in vars(plain).items() if v is not before.get(k, real)}
                vars(owner).update(changed)
                return result
        return real(module, *args, **kwargs)

    setattr(nn.Module, method, watched)


def _spawn(fn: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> Any:
    """Call ``fn`` in this process, for this rank. In the script, this function is ``spawn``."""
    if f"{nprocs}" != os.environ["WORLD_SIZE"]:
        raise ValueError(f"the script starts {nprocs} ranks by itself: --nproc-per-node {nprocs}")
    fn(int(os.environ["RANK"]), *args)
    return mp.ProcessContext([], [])  # for `join=False`: nothing is left to join


class _Reference(DDP):  # type: ignore[misc]
    """DistributedDataParallel with the attributes that FSDP1 and flatshard programs use."""

    def __init__(self, module: nn.Module, **given: Any) -> None:
        # Hybrid strategies have two groups, or a mesh with two dimensions. Then use DDP's default
        # group of all ranks: usually, the two groups or the mesh contain all ranks, too.
        group, mesh = given.get("process_group"), given.get("device_mesh") or given.get("mesh")
        if isinstance(group, tuple) or (mesh and mesh.ndim > 1):
            group = mesh = None
        named = {"process_group": group, "device_mesh": mesh, "find_unused_parameters": True}
        super().__init__(module, broadcast_buffers=given.get("broadcast_buffers", True), **named)
        for name in ("state_dict", "load_state_dict", "named_modules"):
            self.__dict__[name] = getattr(module, name)
        self.clip_grad_norm_ = functools.partial(nn.utils.clip_grad_norm_, [*module.parameters()])

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "module" else getattr(self.module, name)


# For a model that contains no `ShardedWrapper`, these methods act as for an unwrapped model.
for _name in """summon_full_params optim_state_dict optim_state_dict_to_load set_state_dict_type
    get_state_dict_type state_dict_type __getitem__""".split():
    setattr(_Reference, _name, inspect.getattr_static(ShardedWrapper, _name))
