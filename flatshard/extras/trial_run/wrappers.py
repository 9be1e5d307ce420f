"""Classes that take the place of DistributedDataParallel, FSDP1 and ``ShardedWrapper``."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import os
import sys
import time
import zlib
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flatshard.extras.trial_run.program import current_line
from flatshard.extras.trial_run.recorder import Recorder
from flatshard.wrapper import ShardedWrapper

_WAIT = 5.0  # seconds after which a rank takes a call for one that the other ranks do not make
_DDP: Any = nn.parallel.DistributedDataParallel
_FSDP = "torch.distributed.fsdp"


@dataclass
class Replacement:
    """The classes and functions that a run has under the names of all wrappers."""

    recorder: Recorder
    is_sharded: bool  # whether to wrap by ShardedWrapper, otherwise by DistributedDataParallel
    keywords: dict[str, Any]  # of ShardedWrapper in the place of DistributedDataParallel
    folder: Path  # in which ranks meet

    def install(self) -> None:
        """Put the classes in the place of torch's and flatshard's, in all loaded modules."""
        self._replace(_DDP, self._class(_DDP))
        self._replace(ShardedWrapper, self._class(ShardedWrapper))
        real = builtins.__import__

        def watched(*args: Any, **kwargs: Any) -> Any:
            imported = real(*args, **kwargs)
            fsdp: Any = sys.modules.get(_FSDP)
            if fsdp is not None and not getattr(fsdp.__spec__, "_initializing", False):
                builtins.__import__ = real
                wrapper = fsdp.FullyShardedDataParallel
                self._replace(wrapper, self._class(wrapper))
                self._replace(fsdp.fully_shard, self.wrap_in_place)
            return imported

        builtins.__import__ = watched  # FSDP is imported late, because its import is slow

    def wrap_in_place(self, module: nn.Module, **given: Any) -> nn.Module:
        """Wrap a module as FSDP2's ``fully_shard`` does: the object itself becomes the wrapper."""
        inner = object.__new__(type(module))
        inner.__dict__ = module.__dict__
        wrapper = self._class(ShardedWrapper, name="fully_shard")(inner, **given)
        module.__dict__, module.__class__ = wrapper.__dict__, type(wrapper)
        module.__dict__["_kept_wrapper"] = [wrapper]  # flatshard has weak references to it
        return module

    @staticmethod
    def _replace(original: Any, new: Any) -> None:
        for module in list(sys.modules.values()):
            if not getattr(module, "__name__", "").startswith("flatshard."):
                for attribute, value in list(getattr(module, "__dict__", {}).items()):
                    if value is original:
                        setattr(module, attribute, new)

    def _class(self, original: Any, name: str = "") -> Any:
        recorder, keywords, is_ddp = self.recorder, self.keywords, original is _DDP
        base: Any = _Sharded if self.is_sharded else _DDP if is_ddp else _Reference
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

        Recorded.recorder, Recorded.folder = recorder, self.folder
        Recorded.__name__ = Recorded.__qualname__ = original.__name__
        Recorded.__module__ = original.__module__
        return Recorded


class _Reference(_DDP):  # type: ignore[misc]
    """DistributedDataParallel, with what programs for FSDP1 and flatshard use of a wrapper."""

    def __init__(self, module: nn.Module, **given: Any) -> None:
        known = inspect.signature(_DDP.__init__).parameters
        named = {name: value for name, value in given.items() if name in known}
        super().__init__(module, **named, find_unused_parameters=True)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        return getattr(self.module, name)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, **_: Any) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    @staticmethod
    def summon_full_params(*_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()

    optim_state_dict = ShardedWrapper.optim_state_dict
    optim_state_dict_to_load = ShardedWrapper.optim_state_dict_to_load
    set_state_dict_type = ShardedWrapper.set_state_dict_type
    state_dict_type = ShardedWrapper.state_dict_type


class _Sharded(ShardedWrapper):
    """``ShardedWrapper`` that stays usable if only some ranks take a state dict."""

    recorder: Recorder
    folder: Path

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        line = current_line()
        if self._all_arrive(line):
            return super().state_dict(*args, **kwargs)
        what = f"only rank {dist.get_rank()} calls state_dict(), which needs every rank"
        remedy = (
            "state = flatshard.checkpoint.full_state_dict(model) on every rank; rank 0 saves it"
        )
        self.recorder.findings.append((line, what, remedy))
        tensors = [*self.named_parameters(), *self.named_buffers()]
        return {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in tensors}

    def _all_arrive(self, line: str) -> bool:
        """Whether all ranks make this call. Ranks meet in files, which cannot deadlock."""
        if not dist.is_initialized():
            return True
        _CALLS[line] += 1
        place = self.folder / f"call-{zlib.crc32(line.encode())}-{_CALLS[line]}"
        (place.with_suffix(f".{dist.get_rank()}")).touch()
        files = [place.with_suffix(f".{rank}") for rank in range(dist.get_world_size())]
        until = time.monotonic() + _WAIT
        while not (is_met := all(file.exists() for file in files)) and time.monotonic() < until:
            time.sleep(0.005)
        # The first rank that creates the link decides for all ranks.
        with contextlib.suppress(FileExistsError):
            os.symlink("all" if is_met else "some", place)
        return os.readlink(place) == "all"


_CALLS: Counter[str] = Counter()
