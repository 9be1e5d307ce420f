"""``PeerNames``: what DistributedDataParallel and FSDP1 call things, on a wrapper.

``peers`` says which names there are, and what becomes of the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from flatshard.compat import torch_names
from flatshard.module.unit_module import UnitModule, state_dicts_in
from flatshard.state import model_state
from flatshard.state.model_state import as_torch, read_options


class PeerNames(UnitModule):
    """Names that mean nothing new here; those that do are ``ShardedWrapper``'s own methods."""

    def __getattr__(self, name: str) -> Any:
        """What neither wrapper nor module has, another wrapper may have had."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in torch_names.DDP_ATTRIBUTES and "_context" in self.__dict__:
                return self._as_ddp(name)
            reason = torch_names.refuse_method(name)
            if reason is None:
                raise
            raise AttributeError(reason) from None

    def _as_ddp(self, name: str) -> Any:
        """An attribute of DistributedDataParallel, where the wrapped module has none so named."""
        device = self._settings.device
        ids = [device.index] if device.index is not None else None
        return {
            "require_backward_grad_sync": not self._context.is_accumulating,
            "device": device,
            "device_type": device.type,
            "device_ids": ids,
            "output_device": ids[0] if ids else None,
            "find_unused_parameters": True,
            "static_graph": False,
            "broadcast_buffers": self._settings.broadcast_buffers,
            "dim": 0,
        }[name]

    def _fqn_modifiers(self) -> dict[str, str]:
        """Of which child ``torch.distributed.checkpoint.state_dict`` leaves out the name.

        Its functions ask for this first, on all ranks.

        Raises:
            RuntimeError: there is a flat parameter, which they would take for one of the model's,
                so that some ranks fail while others wait for them.
        """
        if self._parameters:
            unit = f"unit {self._unit.name!r}" if self._unit.name else "the model"
            raise RuntimeError(
                f"{unit} was wrapped with use_orig_params=False, which the functions of "
                "torch.distributed.checkpoint.state_dict do not know. Call model.state_dict(), "
                "model.load_state_dict(), ShardedWrapper.optim_state_dict() and "
                "optim_state_dict_to_load(), or wrap with use_orig_params=True."
            )
        return {"": "module"}

    def check_is_root(self) -> bool:
        """Whether no other wrapper contains this one."""
        return self._context.root is self._unit

    def will_sync_module_buffers(self) -> bool:
        """Whether a forward that begins now gives all ranks rank 0's buffers."""
        return (
            self._settings.broadcast_buffers
            and not self._context.is_accumulating
            and any(True for _ in self.module.buffers())
        )

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Any:
        """Say what ``state_dict()`` and ``optim_state_dict()`` give, from now on.

        No communication; on all ranks alike.

        Args:
            module: a wrapper, or any module that contains some; all of them are set.
            state_dict_type: ``FULL_STATE_DICT``; torch's enum or its name.
            state_dict_config: torch's ``FullStateDictConfig``. ``rank0_only``: ``state_dict()``,
                which all ranks call, is empty on other ranks. ``offload_to_cpu``: tensors lie in
                CPU memory, copied there unit by unit. None: on every rank and device.
            optim_state_dict_config: torch's ``FullOptimStateDictConfig``, the default of
                ``optim_state_dict``'s keywords of the same names. None: on every rank, in CPU
                memory.

        Returns:
            What it was: torch's ``StateDictSettings``.

        Raises:
            NotImplementedError: another type.
            TypeError: a config that does not belong to it.
            RuntimeError: units inside differ in what they were.
        """
        options = read_options(state_dict_type, state_dict_config, optim_state_dict_config)
        before = PeerNames.get_state_dict_type(module)
        for part in state_dicts_in(module):
            part.options = options
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> Any:
        """What ``set_state_dict_type`` said: torch's ``StateDictSettings``.

        Raises:
            RuntimeError: units inside differ.
        """
        return as_torch(model_state.options_of(state_dicts_in(module)))

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Iterator[None]:
        """``set_state_dict_type`` for a while; then every unit is as it was."""
        options = read_options(state_dict_type, state_dict_config, optim_state_dict_config)
        with model_state.options_set(state_dicts_in(module), options):
            yield
