"""``Settings``: the checked values of the keywords of ``ShardedWrapper`` for one unit."""

import warnings
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from flatshard import options
from flatshard.comm.communicator import Topology
from flatshard.comm.process_groups import current_cuda
from flatshard.comm.ranks import Ranks
from flatshard.module.user_groups import read_ranks
from flatshard.options import BackwardPrefetch, CPUOffload, Placement, ShardingStrategy
from flatshard.options.extras import extra
from flatshard.options.precision import MixedPrecision, as_mixed_precision
from flatshard.units.module_tree import Ignored, unit_text
from flatshard.units.policies import ChosenModule, Policy, as_policy

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None


def as_flag(keyword: str, value: object, default: bool | None = None) -> bool | None:
    """Return ``value`` (a bool, 0 or 1) as a bool, or ``default`` if ``value`` is None."""
    # Do not call `bool` on other values: `bool("no")` is True.
    if value is not None and value not in (True, False):
        raise TypeError(f"{keyword}: expected True or False, got {value!r}.")
    return default if value is None else bool(value)


def _as_init_fn(value: object) -> object:
    if value is not None and not callable(value):
        raise TypeError(f"param_init_fn: expected a function that takes a module, got {value!r}.")
    return value


def _as_boundary(value: object) -> Any:
    if isinstance(value, str) and value == "element":
        return value
    return extra("boundary", f"ShardedWrapper(boundary={value!r})").as_boundary(value)


# Functions that check and convert the values of keywords, without the module or the ranks.
READERS: dict[str, Callable[[Any], Any]] = {
    "mixed_precision": as_mixed_precision,
    "cpu_offload": options.as_cpu_offload,
    "backward_prefetch": options.as_backward_prefetch,
    "coalesce_bytes": options.as_coalesce_bytes,
    "boundary": _as_boundary,
    "auto_wrap_policy": as_policy,
    "param_init_fn": _as_init_fn,
    "sync_module_states": partial(as_flag, "sync_module_states"),
    "forward_prefetch": partial(as_flag, "forward_prefetch", default=True),
    "broadcast_buffers": partial(as_flag, "broadcast_buffers", default=True),
}
# The keywords, except `allow_divergence`, that a policy may change for a unit.
_PER_UNIT = {"sharding_strategy", "reshard_after_forward", "mixed_precision", "boundary"}


def read_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the keywords in ``given`` that ``READERS`` contains, and return the values by name."""
    return {name: reader(given[name]) for name, reader in READERS.items() if name in given}


def read_strategy(given: Mapping[str, Any], ranks: Ranks) -> tuple[ShardingStrategy, Placement]:
    """Return the strategy and placement for ``sharding_strategy`` and ``reshard_after_forward``."""
    strategy = options.as_strategy(given["sharding_strategy"], has_grid=ranks.grid is not None)
    return options.resharding(strategy, given.get("reshard_after_forward"))


def find_device(
    module: nn.Module,
    ignored: Ignored,
    device_id: int | str | torch.device | None,
    group: dist.ProcessGroup | None,
) -> torch.device:
    """Return the device on which the model computes."""
    if device_id is not None:
        return _read_device(device_id)
    left_alone = ignored.ids()
    present = [param for param in module.parameters() if id(param) not in left_alone]
    # Skip the meta device: all ranks must find the same device, but perhaps only some ranks have
    # their tensors on the meta device.
    device = next((param.device for param in present if not param.is_meta), None)
    if (device is None or device.type == "cpu") and torch.cuda.is_available():
        types = {"cpu"} if group is None else {str(device) for device in group._device_types}
        if "cpu" not in types or (present and device is None):
            return current_cuda(group)
    return device or torch.device("cpu")


def _read_device(device_id: int | str | torch.device) -> torch.device:
    try:
        # Making a tensor fails if this host lacks the device. Return the tensor's device, which has
        # an index. Without an index, "cuda" means the current device, which may change.
        return torch.empty(0, device=torch.device(device_id)).device
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ValueError(
            f"device_id: there is no {device_id!r} on this host, which has "
            f"{torch.accelerator.device_count()} accelerators. Pass the index of one of these, a "
            f"device or 'cpu'. Reported by torch: {error}"
        ) from error


@dataclass(frozen=True)
class Settings:
    """The keywords of ``ShardedWrapper`` for one unit. A policy may change some of the keywords."""

    ranks: Ranks
    strategy: ShardingStrategy
    placement: Placement
    device: torch.device
    mixed_precision: MixedPrecision
    coalesce_bytes: int
    boundary: str | int
    cpu_offload: CPUOffload = field(default_factory=CPUOffload)
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.AUTO
    forward_prefetch: bool = True
    broadcast_buffers: bool = True
    auto_wrap_policy: Policy | None = None
    allow_divergence: Any = False
    param_init_fn: Callable[[nn.Module], Any] | None = None
    sync_module_states: bool | None = None

    @classmethod
    def read(cls, module: nn.Module, ignored: Ignored, given: Mapping[str, Any]) -> Self:
        """Check the keywords of ``ShardedWrapper``, and return the outermost unit's settings."""
        as_flag("limit_all_gathers", given["limit_all_gathers"])
        values = read_values(given)
        transport = options.as_transport(given["collectives"], given["wire_dtype"])
        process_group = given["process_group"]
        if process_group is None and given["device_mesh"] is None:
            if dist.is_available() and dist.is_initialized():
                process_group = dist.group.WORLD
            else:
                options.check_launch_without_group()
                warnings.warn(
                    "ShardedWrapper: no process group, so this process trains alone and nothing is "
                    "sharded. To train on several ranks, start them with torchrun.",
                    stacklevel=3,
                )
        ranks = read_ranks(process_group, given["device_mesh"], mode=transport)
        device = find_device(module, ignored, given["device_id"], ranks.world.group)
        strategy = read_strategy(given, ranks)
        return cls(ranks, *strategy, device, allow_divergence=given["allow_divergence"], **values)

    @property
    def topology(self) -> Topology:
        return self.ranks.resolve(self.placement)

    def describe(self) -> str:
        """Return a text with the settings that must be the same on every rank, for comparison."""
        # Compare ranks per node only for HYBRID strategies, which need nodes of equal size.
        groups = f"{self.ranks.describe()}, " if self.placement.hybrid else ""
        return (
            f"{self.strategy}, {self.placement}, {groups}{self.mixed_precision}, "
            f"{self.cpu_offload.describe()}, coalesce_bytes={self.coalesce_bytes}, "
            f"broadcast_buffers={self.broadcast_buffers}, boundary={self.boundary!r}"
        )

    def override(self, member: ChosenModule, divergent: Set[nn.Module]) -> Self:
        """Return these settings, changed by the keywords that the policy gives for a module."""
        keywords = dict(member.overrides)
        own = {name: keywords.pop(name) for name in _PER_UNIT & keywords.keys()}
        strategy, placement = self.strategy, self.placement
        if "sharding_strategy" in own or "reshard_after_forward" in own:
            strategy, placement = read_strategy({"sharding_strategy": strategy} | own, self.ranks)
        if keywords.pop("allow_divergence", member.module in divergent):
            placement = placement.diverging()
        if keywords:
            raise ValueError(
                f"auto_wrap_policy: for {unit_text(member.name)} the policy sets "
                f"{', '.join(sorted(keywords))}. Pass these keywords to the outermost wrapper: a "
                f"policy can set only allow_divergence, {', '.join(sorted(_PER_UNIT))}."
            )
        keeps_secondary = placement.regather_size is not None or placement.over_all
        changed = replace(self, strategy=strategy, placement=placement, **read_values(own))
        gather_dtype = changed.mixed_precision.gather_dtype
        if gather_dtype is not None and keeps_secondary:
            raise NotImplementedError(
                f"{unit_text(member.name)}: mixed_precision: gather_dtype={gather_dtype} "
                "is not supported with reshard_after_forward=k or HYBRID_SHARD_OP (secondary "
                "shards are not sent in float8). Leave out gather_dtype, or use FULL_SHARD."
            )
        return changed

    def check(self) -> None:
        """Raise ValueError if the ranks or the device do not fit the user's keywords."""
        if self.ranks.grid is not None and not self.placement.hybrid:
            raise ValueError(
                f"ShardedWrapper: a pair of process groups or a 2-D device_mesh is for HYBRID "
                f"strategies, got {self.strategy.name}. Pass one group of all ranks, or a HYBRID "
                "strategy."
            )
        asked = self.ranks.mode.needs_gloo
        if asked and self.device.type != "cpu":
            raise ValueError(
                f"{asked} is for gloo and parameters in host memory, but the parameters are on "
                f"{self.device}. Leave the keyword out. To send fewer bytes, pass "
                "MixedPrecision(param_dtype, reduce_dtype)."
            )
