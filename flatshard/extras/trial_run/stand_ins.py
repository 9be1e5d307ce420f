"""Classes that take the place of DistributedDataParallel, FSDP1 and ``ShardedWrapper``.

[Note: lone calls]
Under DistributedDataParallel, one rank may call the model or ``state_dict()``; under flatshard,
these calls need every rank. The run under DistributedDataParallel counts the calls by line. If
ranks call a line different numbers of times, the run under flatshard keeps an unsharded copy of the
model, with its initial values. At these lines the copy is called, so the run continues.
"""

from __future__ import annotations

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

from flatshard.extras.trial_run.recorder import Recorder
from flatshard.extras.trial_run.user_line import OURS, current_line
from flatshard.wrapper import ShardedWrapper

# torch's own class: `install` later replaces the class in all modules outside of flatshard.
DDP: Any = nn.parallel.DistributedDataParallel
_WRAPPERS: tuple[Any, ...] = (DDP, FullyShardedDataParallel, ShardedWrapper)
_PLACES: list[tuple[Any, str, Any]] = [
    (module, name, value)
    for path, module in sys.modules.items()
    if not path.startswith("flatshard.")
    for name, value in getattr(module, "__dict__", {}).items()
    if any(value is one for one in (*_WRAPPERS, fully_shard))
]
"""Where loaded modules have these names: found once, before ranks are forked."""


class StandIns:
    """The classes and functions that a run has under the names of all wrappers."""

    def __init__(self, recorder: Recorder, *, is_sharded: bool) -> None:
        """Wrap by ``ShardedWrapper`` if ``is_sharded``, otherwise by DistributedDataParallel."""
        self._recorder, self._options, self._is_sharded = recorder, recorder.options, is_sharded
        policy = "auto" if self._options.policy == "auto" else None
        given = {"sharding_strategy": self._options.strategy, "auto_wrap_policy": policy}
        self._keywords = given if is_sharded else {}

    def install(self) -> None:
        """Put the classes in the place of torch's and flatshard's, in all loaded modules."""
        new = {one: self._class(one) for one in _WRAPPERS} | {fully_shard: self.wrap_in_place}
        for module, name, original in _PLACES:
            setattr(module, name, new[original])
        for method in ("state_dict", "__call__"):
            if self._options.lone_calls if self._is_sharded else method == "state_dict":
                self._watch(method)
        if self._options.wrap:
            make = torch.optim.Optimizer.__init__

            def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
                make(optimizer, *args, **kwargs)
                self._wrap_stepped(optimizer)

            torch.optim.Optimizer.__init__ = made  # type: ignore[assignment,method-assign]

    def wrap_in_place(
        self, module: nn.Module, _name: str = "fully_shard", **given: Any
    ) -> nn.Module:
        """Wrap a module as FSDP2's ``fully_shard`` does: the object itself becomes the wrapper."""
        inner = object.__new__(type(module))
        inner.__dict__, module.__dict__ = module.__dict__, {}
        module.__class__ = self._class(ShardedWrapper, _name)
        type(module).__init__(module, inner, **given)
        return module

    def _wrap_stepped(self, optimizer: Any) -> None:
        """Wrap the outermost module, below DataParallel, with the parameters of the optimizer."""
        held = {param for group in optimizer.param_groups for param in group["params"]}
        if not held.isdisjoint(self._recorder.names):
            return
        modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
        modules = [one for one in modules if not isinstance(one, nn.DataParallel)]
        if users := [one for one in modules if held <= {*one.parameters()}]:
            if not dist.is_initialized():
                dist.init_process_group()
            outermost = max(users, key=lambda one: len([*one.modules()]))
            self.wrap_in_place(outermost, "--wrap", **self._keywords)

    def _class(self, original: Any, name: str = "") -> Any:
        recorder, keywords, is_ddp = self._recorder, self._keywords, original is DDP
        base: Any = ShardedWrapper if self._is_sharded else DDP if is_ddp else _Reference
        keeps_copy = self._is_sharded and self._options.lone_calls

        def count(module: nn.Module, _: Any) -> None:
            self._callee(module, "__call__")

        order = list(inspect.signature(original.__init__).parameters)[2:]

        class Recorded(base):  # type: ignore[misc]
            def __init__(self, module: nn.Module, *args: Any, **given: Any) -> None:
                given |= dict(zip(order, args, strict=False))
                if recorder.options.exact:
                    module.double()
                plain = copy.deepcopy(module) if keeps_copy else None
                if base is not ShardedWrapper:
                    module.register_forward_pre_hook(count)
                super().__init__(module, **{**(keywords if is_ddp else {}), **given})
                self.__dict__["_plain"] = module.__dict__["_plain"] = plain
                recorder.add_model(self, name or original.__name__)

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return recorder.forward(self, super().forward, args, kwargs)

        Recorded.__name__ = Recorded.__qualname__ = original.__name__
        Recorded.__module__ = original.__module__
        return Recorded

    def _watch(self, method: str) -> None:
        """Count or replace calls of a method of ``nn.Module``, see [Note: lone calls]."""
        real: Any = getattr(nn.Module, method)

        @functools.wraps(real)
        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_inner = "destination" in kwargs  # called by `state_dict` of another module
            if not self._is_sharded:  # `full_state_dict` calls it only on rank 0
                is_inner |= sys._getframe(1).f_code.co_filename.startswith(OURS)
            is_watched = "_plain" in module.__dict__ and not is_inner
            callee = self._callee(module, method) if is_watched else module
            before = {**vars(callee)} if callee is not module else {}
            result = real(callee, *args, **kwargs)
            if callee is not module:  # the program may read attributes that the forward has set
                owner = module.module if isinstance(module, ShardedWrapper) else module
                found = {k: v for k, v in vars(callee).items() if v is not before.get(k, real)}
                vars(owner).update(found)
            return result

        setattr(nn.Module, method, watched)

    def _callee(self, module: nn.Module, method: str) -> nn.Module:
        """Count a call of a wrapped model. Returns its copy at a line of lone calls."""
        if method == "state_dict" or not torch.is_grad_enabled():
            call = current_line(), method
            if not self._is_sharded:
                self._recorder.record.calls[call] += 1
            elif call in self._options.lone_calls:
                return module.__dict__["_plain"].train(module.training)  # type: ignore[no-any-return]
        return module


class _Reference(DDP):  # type: ignore[misc]
    """DistributedDataParallel with the attributes that FSDP1 and flatshard programs use."""

    def __init__(self, module: nn.Module, **given: Any) -> None:
        known = inspect.signature(DDP.__init__).parameters
        named = {name: value for name, value in given.items() if name in known}
        super().__init__(module, **{**named, "find_unused_parameters": True})
        self.state_dict, self.load_state_dict = module.state_dict, module.load_state_dict
        params = list(module.parameters())
        self.clip_grad_norm_ = functools.partial(nn.utils.clip_grad_norm_, params)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    summon_full_params = staticmethod(lambda *_, **__: nullcontext())
    optim_state_dict = ShardedWrapper.optim_state_dict
    optim_state_dict_to_load = ShardedWrapper.optim_state_dict_to_load
    set_state_dict_type = ShardedWrapper.set_state_dict_type
    state_dict_type = ShardedWrapper.state_dict_type
