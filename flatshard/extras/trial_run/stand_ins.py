"""Classes that take the place of DistributedDataParallel, FSDP1 and ``ShardedWrapper``."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import functools
import gc
import inspect
import os
import sys
import time
import zlib
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flatshard.extras.trial_run.recorder import DDP, Recorder
from flatshard.extras.trial_run.user_line import current_line
from flatshard.tensor.sharded_tensor import FlatShardTensor
from flatshard.wrapper import ShardedWrapper

_FSDP = "torch.distributed.fsdp"


class Replacement:
    """The classes and functions that a run has under the names of all wrappers."""

    def __init__(
        self, recorder: Recorder, options: argparse.Namespace, *, is_sharded: bool
    ) -> None:
        """Wrap by ``ShardedWrapper`` if ``is_sharded``, otherwise by DistributedDataParallel."""
        self.recorder, self.is_sharded, self._options = recorder, is_sharded, options
        given = {"sharding_strategy": options.strategy}
        given["auto_wrap_policy"] = "auto" if options.policy == "auto" else None
        self._keywords = given if is_sharded else {}

    def install(self) -> None:
        """Put the classes in the place of torch's and flatshard's, in all loaded modules."""
        if self.is_sharded:
            _Sharded.recorder, _Sharded.options = self.recorder, self._options
            nn.Module.state_dict = _watched_state_dict(nn.Module.state_dict, _Sharded)  # type: ignore
        self._replace(DDP, self._class(DDP))
        self._replace(ShardedWrapper, self._class(ShardedWrapper))
        real, make = builtins.__import__, torch.optim.Optimizer.__init__

        def watched(*args: Any, **kwargs: Any) -> Any:
            imported = real(*args, **kwargs)
            fsdp: Any = sys.modules.get(_FSDP)
            if fsdp is not None and not getattr(fsdp.__spec__, "_initializing", False):
                builtins.__import__ = real
                wrapper = fsdp.FullyShardedDataParallel
                self._replace(wrapper, self._class(wrapper))
                self._replace(fsdp.fully_shard, self.wrap_in_place)
            return imported

        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            self._wrap_stepped(optimizer)

        builtins.__import__ = watched  # imports FSDP only if the script does: the import is slow
        if self._options.wrap:
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
        """Wrap the outermost module that contains the parameters of the optimizer."""
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if any(id(param) in held for one in self.recorder.models for param in one.parameters()):
            return
        modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
        users = [one for one in modules if held <= {id(param) for param in one.parameters()}]
        if users:
            if not dist.is_initialized():
                dist.init_process_group()
            outermost = max(users, key=lambda one: len([*one.modules()]))
            self.wrap_in_place(outermost, "--wrap", **self._keywords)

    @staticmethod
    def _replace(original: Any, new: Any) -> None:
        for module in list(sys.modules.values()):
            if not getattr(module, "__name__", "").startswith("flatshard."):
                for attribute, value in list(getattr(module, "__dict__", {}).items()):
                    if value is original:
                        setattr(module, attribute, new)

    def _class(self, original: Any, name: str = "") -> Any:
        recorder, keywords, is_ddp = self.recorder, self._keywords, original is DDP
        base: Any = _Sharded if self.is_sharded else DDP if is_ddp else _Reference
        order = list(inspect.signature(original.__init__).parameters)[2:]

        class Recorded(base):  # type: ignore[misc]
            def __init__(self, module: nn.Module, *args: Any, **given: Any) -> None:
                given |= dict(zip(order, args, strict=False))
                if recorder.exact:
                    module.double()
                super().__init__(module, **{**(keywords if is_ddp else {}), **given})
                recorder.add_model(self, name or original.__name__)

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return recorder.forward(self, super().forward, args, kwargs)

        Recorded.__name__ = Recorded.__qualname__ = original.__name__
        Recorded.__module__ = original.__module__
        return Recorded


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


def _watched_state_dict(state_dict: Any, sharded: Any) -> Any:
    """Return a ``Module.state_dict`` that records calls of only some ranks for sharded models."""
    remedy = "state = flatshard.checkpoint.full_state_dict(model) on every rank; rank 0 saves it"

    @functools.wraps(state_dict)
    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors = [*module.named_parameters(), *module.named_buffers()]
        is_inner = args or kwargs.get("destination") is not None  # a call for a child
        if is_inner or not any(isinstance(one, FlatShardTensor) for _, one in tensors):
            return state_dict(module, *args, **kwargs)
        if sharded.all_call("state_dict()", remedy):
            return state_dict(module, *args, **kwargs)
        # Return zeros, so that the run continues and finds other lines to change.
        return {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in tensors}

    return watched


class _Sharded(ShardedWrapper):
    """``ShardedWrapper`` that names the lines at which only some ranks make a collective call."""

    recorder: Recorder
    options: argparse.Namespace

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        remedy = "evaluate on every rank, with the same number of batches"
        if not torch.is_grad_enabled() and not self.all_call("the model's forward", remedy):
            raise RuntimeError(f"only rank {dist.get_rank()} evaluates the model: {remedy}.")
        return super().forward(*args, **kwargs)

    @classmethod
    def all_call(cls, what: str, remedy: str) -> bool:
        """Whether all ranks make this call. Ranks meet in files, which cannot deadlock."""
        line, rank = current_line(), dist.get_rank() if dist.is_initialized() else 0
        ranks = range(dist.get_world_size() if dist.is_initialized() else 1)
        _CALLS[line] += 1
        place = Path(cls.options.folder / f"call-{zlib.crc32(line.encode())}-{_CALLS[line]}")
        files = [place.with_suffix(f".{one}") for one in ranks]
        with cls.recorder.paused():
            files[rank].touch()
            until = time.monotonic() + min(15.0, cls.options.timeout / 10)
            while not (is_met := all(map(Path.exists, files))) and time.monotonic() < until:
                time.sleep(0.002)
        # The first rank that creates the link decides for all ranks.
        with contextlib.suppress(FileExistsError):
            os.symlink("all" if is_met else "some", place)
        if os.readlink(place) == "all":
            return True
        found = f"only rank {rank} calls {what}, which needs every rank"
        cls.recorder.record.findings[line, found] = remedy
        return False


_CALLS: Counter[str] = Counter()
