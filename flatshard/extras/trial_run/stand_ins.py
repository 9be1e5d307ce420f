"""Classes that take the place of DistributedDataParallel, FSDP1 and ``ShardedWrapper``.

[Note: lone calls]
Under DistributedDataParallel, one rank may call the model or ``state_dict()``; under flatshard,
these calls need every rank. The run under DistributedDataParallel counts the calls by line. If
ranks call a line different numbers of times, the run under flatshard keeps an unsharded copy of the
model, with its initial values. At these lines the copy is called, so the run continues.
"""

import copy
import functools
import gc
import inspect
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from flatshard.extras import program_line
from flatshard.extras.trial_run.recorder import Recorder
from flatshard.units.module_proxy import ModuleProxy
from flatshard.wrapper import ShardedWrapper

# torch's own class, kept because `install` replaces the class in all modules outside of flatshard.
DDP: Any = nn.parallel.DistributedDataParallel


def install(recorder: Recorder) -> None:
    """Put classes that wrap and record in the place of all wrappers, in all loaded modules.

    They wrap by ``ShardedWrapper`` in the sharded run, otherwise by DistributedDataParallel.
    """
    options, is_sharded = recorder.options, recorder.options.run == "sharded"
    policy = "auto" if options.policy == "auto" else None
    keywords = {"sharding_strategy": options.strategy, "auto_wrap_policy": policy}

    def stand_in(original: Any, name: str) -> Any:
        base: Any = ShardedWrapper if is_sharded else DDP if original is DDP else _Reference
        order = list(inspect.signature(original.__init__).parameters)[2:]
        chosen = keywords if is_sharded and name in (DDP.__name__, "--wrap") else {}

        class Recorded(base):  # type: ignore[misc]
            def __init__(self, module: nn.Module, *args: Any, **given: Any) -> None:
                given = chosen | dict(zip(order, args, strict=False)) | given
                if options.exact:
                    module.double()
                plain = copy.deepcopy(module) if is_sharded and options.lone_calls else None
                super().__init__(module, **given)
                self.__dict__["_plain"] = module.__dict__["_plain"] = plain
                if name != ShardedWrapper.__name__:
                    recorder.remark(f"wraps the model ({name})")
                recorder.add_model(self)

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return recorder.forward(self, super().forward, args, kwargs)

        return functools.update_wrapper(Recorded, original, updated=())

    def in_place(module: nn.Module, _name: str = "fully_shard", **given: Any) -> nn.Module:
        """Wrap a module as FSDP2's ``fully_shard`` does: the object itself becomes the wrapper."""
        inner = object.__new__(type(module))
        inner.__dict__, module.__dict__ = module.__dict__, {}
        module.__class__ = stand_in(ShardedWrapper, _name)
        type(module).__init__(module, inner, **given)
        return module

    wrappers = (DDP, FullyShardedDataParallel, ShardedWrapper)
    new = {id(one): stand_in(one, one.__name__) for one in wrappers} | {id(fully_shard): in_place}
    for path, module in [*sys.modules.items()]:
        for name, value in [*getattr(module, "__dict__", {}).items()]:
            if id(value) in new and not path.startswith("flatshard."):
                setattr(module, name, new[id(value)])
    _watch(recorder, "state_dict", "state_dict() needs every rank, calls by rank:")
    _watch(recorder, "__call__", "forward() needs every rank, calls by rank:")
    optimizers: Any = torch.optim.Optimizer
    make = optimizers.__init__

    def make_and_wrap(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Wrap the outermost module, below DataParallel, with the parameters of the optimizer."""
        make(optimizer, *args, **kwargs)
        held = {param for group in optimizer.param_groups for param in group["params"]}
        modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
        users = [one for one in modules if held <= {*one.parameters()}]
        users = [one for one in users if not isinstance(one, nn.DataParallel)]
        if users and held.isdisjoint(recorder.names):
            if not dist.is_initialized():
                dist.init_process_group()
            in_place(max(users, key=lambda one: len([*one.modules()])), "--wrap")

    if options.wrap:
        optimizers.__init__ = make_and_wrap


def _watch(recorder: Recorder, method: str, what: str) -> None:
    """Count or replace calls of a method of ``nn.Module``, see [Note: lone calls]."""
    real: Any = getattr(nn.Module, method)

    @functools.wraps(real)
    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_training = method == "__call__" and torch.is_grad_enabled()
        if "_plain" not in vars(module) or is_training or torch.compiler.is_compiling():
            return real(module, *args, **kwargs)
        caller = sys._getframe(1)
        # Count only calls of the program: wrappers call their modules, and `full_state_dict` calls
        # `state_dict` only on rank 0.
        if not caller.f_globals.get("__name__", "").startswith(("torch.", "flatshard.")):
            recorder.remark(what)
        plain = vars(module)["_plain"]
        if plain is None or (program_line(caller), what) not in recorder.options.lone_calls:
            return real(module, *args, **kwargs)
        before = {**vars(plain.train(module.training))}
        result = real(plain, *args, **kwargs)
        # Copy attributes that the forward has set, because the program may read them.
        owner = module.module if isinstance(module, ShardedWrapper) else module
        vars(owner).update({k: v for k, v in vars(plain).items() if v is not before.get(k, real)})
        return result

    setattr(nn.Module, method, watched)


class _Reference(DDP):  # type: ignore[misc]
    """DistributedDataParallel with the attributes that FSDP1 and flatshard programs use."""

    def __init__(self, module: nn.Module, **given: Any) -> None:
        known = inspect.signature(DDP.__init__).parameters
        named = {name: value for name, value in given.items() if name in known}
        super().__init__(module, **{**named, "find_unused_parameters": True})
        self.state_dict, self.load_state_dict = module.state_dict, module.load_state_dict
        self.clip_grad_norm_ = functools.partial(nn.utils.clip_grad_norm_, [*module.parameters()])

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "module" else getattr(self.module, name)

    __getitem__ = ModuleProxy.__getitem__
    named_modules = ModuleProxy.named_modules
    summon_full_params = staticmethod(lambda *_, **__: nullcontext())
    optim_state_dict = ShardedWrapper.optim_state_dict
    optim_state_dict_to_load = ShardedWrapper.optim_state_dict_to_load
    set_state_dict_type = ShardedWrapper.set_state_dict_type
    state_dict_type = ShardedWrapper.state_dict_type
