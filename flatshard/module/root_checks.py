"""``RootChecks``: checks of the outermost module before its forwards, and the module's buffers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from flatshard.engine.buffer_sync import Buffers
from flatshard.engine.forward import RootModule
from flatshard.memory.buffers import prepare_allocator
from flatshard.module import meta_init
from flatshard.module.sharding import Sharding, handles_in, modules_apart, shardings_in
from flatshard.optimizer import step

# Modules to which assignments are counted, as these may add parameters, and the count.
_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_count = 0


class RootChecks(RootModule):
    def __init__(self, root: Sharding) -> None:
        self._root = root
        self._apart = modules_apart(root.wrapper, root.settings.ranks.world.size)
        self._num_registered = -1  # modules and parameters assigned until the last check
        self._modules = list(root.wrapper.modules())

    def buffers(self) -> Buffers:
        """The buffers that modules have now, each once, without those that are ignored."""
        # This method runs in every step. ``named_buffers()`` would take longer, as it makes the
        # name of every buffer.
        ignored = self._root.ignored
        own = ignored.modules.union(self._apart)
        seen = {id(buffer) for module in own for buffer in module._buffers.values()}
        seen.update(id(module._buffers.get(attribute)) for module, attribute in ignored.places)
        found: Buffers = {}
        for module in self._modules:
            for attribute, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    found[module, attribute] = buffer
        return found

    def recover(self) -> None:
        # An exception may have interrupted an optimizer's step, which has plain tensors.
        step.restore_all()

    def check(self) -> None:
        """Raise if the module was changed since it was wrapped, lacks values or is captured."""
        root = self._root
        if root.context.device is not None:
            _check_not_captured(root.context.device)
        # Looking at all modules takes long, so only when something was assigned to one.
        if self._num_registered != num_registered():
            self._check_all_owned()
            self._num_registered = num_registered()
        if not root.context.has_run:
            handles = handles_in(root.wrapper)
            if any(one.is_left_empty for one in shardings_in(root.wrapper)):
                meta_init.check_loaded(root.wrapper, handles, root.settings.ranks.world)
            if any(handle.shard.device.type == "cpu" for handle in handles):
                prepare_allocator()

    def _check_all_owned(self) -> None:
        """Raise if modules were added since wrapping: nothing would average their gradients."""
        root, handles = self._root, handles_in(self._root.wrapper)
        # Modules that were assigned since the last check are watched from now on, too.
        self._modules = list(root.wrapper.modules())
        _watch(self._modules)
        is_summoned = any(handle.summoned is not None for handle in handles)
        if root.settings.ranks.world.size == 1 or is_summoned:
            return
        for handle in handles:
            handle.check_places()
        known = root.ignored.ids()
        known.update(id(param) for handle in handles for param in handle.sharded)
        for name, param in root.wrapper.named_parameters():
            if id(param) not in known and param.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was added after wrapping: it would be trained on each "
                    "rank's own gradients. Add modules before wrapping, freeze it, or let "
                    "ShardedWrapper ignore it (ignored_states) and average its gradient yourself."
                )


def _watch(modules: Iterable[nn.Module]) -> None:
    """Count assignments to these modules from now on."""
    _watched.update(modules)
    _install()


@functools.cache
def _install() -> None:
    # At the first call, not at import: the hooks slow down every assignment to any module.
    register_module_module_registration_hook(_registered)
    register_module_parameter_registration_hook(_registered)


def num_registered() -> int:
    """Number of modules and parameters assigned to watched modules so far."""
    return _count


def _registered(module: nn.Module, name: str, value: object) -> None:
    """Global hook of torch, which is about to register ``value``."""
    global _count
    # Traced by Dynamo, the look into the set would be an error; what is traced adds no parameters.
    if not torch.compiler.is_compiling() and module in _watched:
        _count += 1


def _check_not_captured(device: torch.device) -> None:
    """Raise RuntimeError while a CUDA graph captures the current stream."""
    # What the host does in a step would run once, at the capture, and never again. Asked of
    # another device than the current one, torch would begin to use that.
    is_current = device.type == "cuda" and torch.cuda.current_device() == device.index
    if is_current and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "ShardedWrapper: the forward of a sharded model cannot be captured in a CUDA graph: "
            "replays would neither unshard parameters nor reduce gradients. Train without the "
            "graph; torch.compile(block) before wrapping makes a block's kernels fewer."
        )
