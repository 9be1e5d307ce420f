"""The user's options. Each option is validated once: when it is made, or passed to a wrapper."""

import enum
import os
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from flatshard.options.extras import extra

# ---------------------------------------------------------------- strategies


@dataclass(frozen=True)
class Placement:
    """The properties of a sharding strategy. Training steps depend only on these properties."""

    # Whether parameters, gradients and optimizer state are split over the shard group.
    sharded: bool = True
    # Whether units are resharded between forward and backward.
    reshard_after_forward: bool = True
    # False: units stay unsharded until parameters change, or a forward without gradients ends.
    reshard_after_backward: bool = True
    # Whether parameters are split only within each node, so that each node has a full replica.
    hybrid: bool = False
    # With `hybrid`: whether gradients and optimizer state are split over all ranks. False: they are
    # split within each node, as parameters are.
    over_all: bool = False
    # Number of ranks over which backward all-gathers parameters. None: the same ranks as forward.
    regather_size: int | None = None
    # Whether ranks may skip the unit in a step, or run units in different orders.
    may_diverge: bool = False

    def diverging(self) -> Self:
        """Return a copy of this placement for a unit that ranks may skip (``allow_divergence``)."""
        return replace(self, reshard_after_forward=False, regather_size=None, may_diverge=True)


class _SameAsTorchs(enum.Enum):
    """Base class of enums that torch has, too. Members equal torch's members of the same name."""

    def __eq__(self, other: object) -> bool:
        if type(other).__name__ != type(self).__name__ or not isinstance(other, enum.Enum):
            return NotImplemented
        return type(self).__members__.get(other.name) is self

    # Equal members must have equal hashes. torch's enum hashes the member's name.
    __hash__ = enum.Enum.__hash__


class ShardingStrategy(_SameAsTorchs):
    """How parameters, gradients and optimizer state are placed over the ranks.

    Example:
        ```python
        model = ShardedWrapper(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=flatshard.ShardingStrategy.SHARD_GRAD_OP,
        )
        ```
    """

    NO_SHARD = "NO_SHARD"
    """Nothing is sharded. Ranks all-reduce gradients, as in DistributedDataParallel."""
    SHARD_OP = "SHARD_OP"
    """Optimizer state and reduced gradients are sharded: ZeRO stage 1.

    Parameters stay unsharded until the optimizer changes them.
    """
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    """Parameters stay unsharded from forward to the end of their backward: ZeRO stage 2."""
    FULL_SHARD = "FULL_SHARD"
    """Parameters are resharded after forward and unsharded again for backward: ZeRO stage 3."""
    HYBRID_SHARD = "HYBRID_SHARD"
    """``FULL_SHARD`` over the ranks of each node. Each node has a replica of the model."""
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"
    """``SHARD_GRAD_OP`` over the ranks of each node. Each node has a replica of the model."""
    _HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"
    """The name that FSDP1 has for ``HYBRID_SHARD_ZERO2``."""
    HYBRID_SHARD_OP = "HYBRID_SHARD_OP"
    """``HYBRID_SHARD``, but gradients and optimizer state are sharded over all ranks.

    Parameters are sent between nodes once after each optimizer step. All later all-gathers stay
    within a node.
    """

    @property
    def placement(self) -> Placement:
        """The strategy's properties."""
        return _PLACEMENTS[self]


_PLACEMENTS = {
    ShardingStrategy.NO_SHARD: Placement(sharded=False, reshard_after_forward=False),
    ShardingStrategy.SHARD_OP: Placement(reshard_after_forward=False, reshard_after_backward=False),
    ShardingStrategy.SHARD_GRAD_OP: Placement(reshard_after_forward=False),
    ShardingStrategy.FULL_SHARD: Placement(),
    ShardingStrategy.HYBRID_SHARD: Placement(hybrid=True),
    ShardingStrategy.HYBRID_SHARD_ZERO2: Placement(reshard_after_forward=False, hybrid=True),
    ShardingStrategy.HYBRID_SHARD_OP: Placement(hybrid=True, over_all=True),
}


def resharding(
    strategy: ShardingStrategy, after_forward: bool | int | None
) -> tuple[ShardingStrategy, Placement]:
    """Apply the user's ``reshard_after_forward`` to a strategy."""
    placement = strategy.placement
    if after_forward is None:
        return strategy, placement
    if not isinstance(after_forward, int):
        expected = "expected True, False or a number of ranks"
        raise TypeError(f"reshard_after_forward: {expected}, got {after_forward!r}.")
    problem = None
    # Compare by identity: `after_forward != False` would let 0 pass, because 0 == False.
    if after_forward is not False and after_forward < 1:
        problem = "expected a bool or a positive number of ranks."
    elif after_forward and not placement.reshard_after_forward:
        problem = f"{strategy.name} never reshards after forward. Pass False, or sharding_strategy "
        problem += "FULL_SHARD or HYBRID_SHARD."
    elif placement.over_all and after_forward > 1:
        problem = f"{strategy.name} always shards parameters over the ranks of a node, so no other "
        problem += "number of ranks can be chosen. Use True or False."
    if problem is not None:
        raise ValueError(f"reshard_after_forward={after_forward}: {problem}")
    if after_forward > 1:
        placement = replace(placement, regather_size=after_forward)
    elif after_forward is not True:
        placement = replace(placement, reshard_after_forward=False)
    # Name the strategy that does the same without the user's keyword, if there is one.
    same = (one for one in ShardingStrategy if one.placement == placement)
    return next(same, strategy), placement


class BackwardPrefetch(_SameAsTorchs):
    """When backward starts the all-gather of the next unit. ``None`` means no prefetch.

    Example:
        ```python
        model = ShardedWrapper(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            backward_prefetch=flatshard.BackwardPrefetch.BACKWARD_POST,
        )
        ```
    """

    AUTO = "AUTO"
    """``BACKWARD_PRE``, or ``END_OF_FORWARD`` if backward all-gathers over gloo's sockets."""
    BACKWARD_PRE = "BACKWARD_PRE"
    """Start before this unit's gradients are computed. This gives the most overlap."""
    BACKWARD_POST = "BACKWARD_POST"
    """Start after this unit was resharded. Then one unit less is in memory."""
    END_OF_FORWARD = "END_OF_FORWARD"
    """Like ``BACKWARD_PRE``, but backward's first all-gather already starts when forward ends.

    The last unit of forward stays unsharded, which saves one all-gather. When forward ends, the
    all-gather of the next unit in backward starts. Use this on a slow network, which would be idle
    between forward and backward. After a forward without backward, both units stay unsharded.
    """


def as_strategy(value: object, *, has_grid: bool = False) -> ShardingStrategy:
    """Return the ``ShardingStrategy`` for the user's value: an enum's member, a name or None."""
    if value is None:
        return ShardingStrategy.HYBRID_SHARD if has_grid else ShardingStrategy.FULL_SHARD
    return as_member(ShardingStrategy, value, "sharding_strategy")


def as_backward_prefetch(value: object) -> BackwardPrefetch | None:
    """Return the ``BackwardPrefetch`` for the user's value: an enum's member, a name, or None."""
    return None if value is None else as_member(BackwardPrefetch, value, "backward_prefetch")


def as_member(kind: type[enum.Enum], value: object, keyword: str) -> Any:
    """Convert ``value`` (a member of ``kind`` or of torch's enum, or a name) to a ``kind``."""
    name = value.name if isinstance(value, enum.Enum) else value
    known = {**{one.value: one for one in kind}, **kind.__members__}
    if not isinstance(name, str) or name not in known:
        choices = ", ".join(f'"{one.value}"' for one in kind)
        error = ValueError if isinstance(name, str) else TypeError
        raise error(f"{keyword}: {value!r} is unknown or unsupported. Use one of {choices}.")
    return known[name]


# ---------------------------------------------------------------- offload


class OffloadError(RuntimeError):
    """The disk has too little space for the tensors that ``CPUOffload(path=...)`` stores on it."""


def check_flags(policy: object, *names: str) -> None:
    """Raise TypeError unless the attributes ``names`` of ``policy`` are bools."""
    for name in names:
        if not isinstance(value := getattr(policy, name), bool):
            kind = type(policy).__name__
            raise TypeError(f"{kind}: {name} must be True or False, got {value!r}.")


@dataclass(frozen=True)
class CPUOffload:
    """Where shards, gradients and optimizer state are stored between uses.

    Without ``path``, offloaded tensors are in host memory. If the model computes on the CPU, all
    tensors are in host memory anyway, so nothing changes. With ``path``, offloaded tensors are in
    files without names. The files disappear when the process ends. Setting only ``path`` offloads
    everything. The page on precision and offload says how much time and memory each choice costs.

    Example:
        ```python
        in_host_memory = CPUOffload(offload_params=True)
        on_disk = CPUOffload(path="/tmp")
        policy = ModuleWrapPolicy({Block})
        model = ShardedWrapper(model, auto_wrap_policy=policy, cpu_offload=on_disk)
        ```

    Attributes:
        offload_params: offload the shards, their gradients and the optimizer state. Each all-gather
            copies the shard to the device, each reduce-scatter copies the gradient back, and
            optimizers step the offloaded shards.
        offload_optimizer: offload the optimizer state, and on an accelerator also gradients and
            full precision shards. A copy of each shard in the compute dtype stays on the device. No
            effect if ``offload_params`` is set, too.
        path: a directory for the files; ranks may pass different directories.
        pin_memory: whether to pin host memory, so that copies overlap with computation.

    Raises:
        TypeError: a flag is not a bool, or ``path`` is not a directory's path.
        OffloadError: from ``ShardedWrapper``, on all ranks: the disk at ``path`` is too full, or
            the process has too many mapped files.
    """

    offload_params: bool = False
    offload_optimizer: bool = False
    path: str | os.PathLike[str] | None = None
    pin_memory: bool = True

    def __post_init__(self) -> None:
        check_flags(self, "offload_params", "offload_optimizer", "pin_memory")
        if self.path is not None and not isinstance(self.path, str | os.PathLike):
            raise TypeError(f"CPUOffload: path must be a directory's path, got {self.path!r}.")

    @property
    def is_on(self) -> bool:
        """Whether anything is offloaded."""
        return self.offload_params or self.offload_optimizer or self.path is not None

    @property
    def takes_params(self) -> bool:
        """Whether shards are offloaded, without a copy that stays on the device."""
        return self.offload_params or (self.is_on and not self.offload_optimizer)

    def describe(self) -> str:
        """Return a text of the settings, for ranks to compare."""
        to = "host" if self.path is None else "disk"
        return f"offload of {'all' if self.takes_params else 'state'} to {to}" if self.is_on else ""


def as_cpu_offload(value: object) -> CPUOffload:
    """Convert the user's ``cpu_offload`` to a ``CPUOffload``."""
    if isinstance(value, CPUOffload):
        return value
    if value is None or isinstance(value, bool):
        return CPUOffload(offload_params=bool(value))
    torch_names = extra("torch_names", f"cpu_offload={value!r}")
    return torch_names.as_cpu_offload(value)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- communication


class Collectives(enum.Enum):
    """Values of ``ShardedWrapper(collectives=...)``: the way in which ranks exchange bytes."""

    AUTO = "auto"
    """The best way for the backend.

    On gloo, ranks on one host read each other's memory, and ranks on different hosts use sockets.
    Other backends use their own collectives.
    """
    SOCKETS = "sockets"
    """Sockets between all ranks, even on one host. Needs gloo."""
    NATIVE = "native"
    """The backend's own collectives, also on gloo."""


@dataclass(frozen=True)
class TransportOptions:
    """The user's options ``collectives`` and ``wire_dtype``."""

    collectives: Collectives = Collectives.AUTO
    # Dtype to which wider floating point values are rounded before sending. None: no rounding.
    wire_dtype: torch.dtype | None = None

    @property
    def needs_gloo(self) -> str:
        """The user's option that only gloo supports, as a text for errors, or ""."""
        if self.collectives is Collectives.SOCKETS:
            return 'collectives="sockets"'
        return f"wire_dtype={self.wire_dtype}" if self.wire_dtype else ""


# Default of `coalesce_bytes`.
COALESCE_BYTES = 4 << 20


def as_coalesce_bytes(value: object) -> int:
    """Check the user's ``coalesce_bytes``, and return it. None means the default."""
    if value is None:
        return COALESCE_BYTES
    # Refuse True, which is an int, and would mean one byte.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"coalesce_bytes: expected an int (of bytes) or None, got {value!r}.")
    if value < 0:
        raise ValueError(f"coalesce_bytes: expected 0 (coalesce nothing) or more, got {value}.")
    return value


def as_transport(collectives: object, wire_dtype: object) -> TransportOptions:
    """Check the user's ``collectives`` and ``wire_dtype``, and return both as one object."""
    chosen = as_member(Collectives, collectives, "collectives")
    # Accept only bfloat16: no other narrow dtype has the same range as float32.
    if wire_dtype not in (None, torch.bfloat16):
        error = ValueError if isinstance(wire_dtype, torch.dtype) else TypeError
        raise error(f"wire_dtype: expected torch.bfloat16 or None, got {wire_dtype!r}.")
    if wire_dtype is not None and chosen is Collectives.NATIVE:
        raise ValueError(
            'wire_dtype: collectives="native" uses the backend\'s own collectives, which cannot '
            "round values. Use mixed_precision=MixedPrecision(param_dtype=..., reduce_dtype=...)."
        )
    return TransportOptions(chosen, wire_dtype)


def check_launch_without_group() -> None:
    """Raise RuntimeError if a launcher started several ranks, which would train separate models."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1:
        raise RuntimeError(
            f"ShardedWrapper: {world_size} ranks were started (WORLD_SIZE), but there is no "
            "process group. Call torch.distributed.init_process_group() before wrapping."
        )
