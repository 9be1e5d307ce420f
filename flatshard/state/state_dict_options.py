"""``StateDictOptions``: where state dicts lie and who gets them, as FSDP1's configs say it.

torch's own classes are read, and given back; they are imported only when they are used, because
their package is slow to load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StateDictOptions:
    """What becomes of the whole tensors of a unit.

    Attributes:
        offload_to_cpu: the model's lie in CPU memory, copied there unit by unit.
        rank0_only: ranks other than rank 0 have none of the model's.
        optim_offload_to_cpu: the same for the optimizer's.
        optim_rank0_only: likewise.
    """

    offload_to_cpu: bool = False
    rank0_only: bool = False
    optim_offload_to_cpu: bool = True
    optim_rank0_only: bool = False


def read_options(
    state_dict_type: Any, state_dict_config: Any, optim_state_dict_config: Any
) -> StateDictOptions:
    """Read torch's enum and configs.

    Raises:
        NotImplementedError: state dicts that are not whole are asked for.
        TypeError: a config is none of whole state dicts, or of the other kind.
    """
    name = getattr(state_dict_type, "name", state_dict_type)
    if name != "FULL_STATE_DICT":
        raise NotImplementedError(
            f"state_dict_type: expected FULL_STATE_DICT, got {name}: state dicts hold whole "
            "tensors under the unwrapped model's names. To save without a whole model everywhere: "
            "FULL_STATE_DICT with FullStateDictConfig(offload_to_cpu=True, rank0_only=True), which "
            "holds one unit at a time on the device."
        )
    default = StateDictOptions()
    if state_dict_config is not None:
        _check_kind("state_dict_config", state_dict_config, "FullStateDictConfig")
    if optim_state_dict_config is not None:
        _check_kind("optim_state_dict_config", optim_state_dict_config, "FullOptimStateDictConfig")
    model, optim = state_dict_config, optim_state_dict_config
    return StateDictOptions(
        offload_to_cpu=model.offload_to_cpu if model else default.offload_to_cpu,
        rank0_only=model.rank0_only if model else default.rank0_only,
        optim_offload_to_cpu=optim.offload_to_cpu if optim else default.optim_offload_to_cpu,
        optim_rank0_only=optim.rank0_only if optim else default.optim_rank0_only,
    )


def _check_kind(keyword: str, config: Any, kind: str) -> None:
    if kind not in (base.__name__ for base in type(config).__mro__):
        raise TypeError(
            f"state_dict_type: {keyword}: expected torch's {kind}, which goes with "
            f"FULL_STATE_DICT, got {config!r}"
        )


def as_torch(options: StateDictOptions) -> Any:
    """The same as torch's ``StateDictSettings``."""
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        StateDictType,
    )
    from torch.distributed.fsdp.api import StateDictSettings

    return StateDictSettings(
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=options.offload_to_cpu, rank0_only=options.rank0_only),
        FullOptimStateDictConfig(
            offload_to_cpu=options.optim_offload_to_cpu, rank0_only=options.optim_rank0_only
        ),
    )
