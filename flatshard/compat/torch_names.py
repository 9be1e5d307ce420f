"""Names of torch's own wrappers (DistributedDataParallel, FullyShardedDataParallel) and their fate.

``KEYWORDS`` and ``METHODS`` are the single source: the constructor reads them, and tests compare
them with the tables of docs/migration.md and with the installed torch, to notice new names.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from flatshard.module.sharding import Sharding


class Fate(enum.Enum):
    """What happens to a name of torch's wrappers."""

    SAME = "same"
    """It means the same here."""
    OTHER_NAME = "other name"
    """It is accepted, and has another name here."""
    IGNORED = "ignored"
    """It has no effect, and setting it warns."""
    RAISES = "raises"
    """It raises, with the reason."""


class Entry(NamedTuple):
    """The fate of a name, and how or why."""

    fate: Fate
    text: str
    default: Any = None
    """torch's default, which may be passed without a warning."""


def _same(text: str) -> Entry:
    return Entry(Fate.SAME, text)


def _other(text: str) -> Entry:
    return Entry(Fate.OTHER_NAME, text)


def _ignored(text: str, default: Any = None) -> Entry:
    return Entry(Fate.IGNORED, text, default)


def _raises(text: str, default: Any = None) -> Entry:
    return Entry(Fate.RAISES, text, default)


KEYWORDS: dict[str, Entry] = {
    "module": _same("the module to wrap"),
    "process_group": _same("a group of all ranks that train, or a pair (shard, replicate)"),
    "device_mesh": _same("1-D, or 2-D (replicate, shard)"),
    "mixed_precision": _same("torch's dataclasses are accepted, field by field: docs/precision.md"),
    # DistributedDataParallel
    "device_ids": _other("one index is `device_id`; several raise, as there"),
    "output_device": _other("`device_id`; another one than it raises"),
    "dim": _raises("inputs are not scattered, so there is only 0", 0),
    "broadcast_buffers": _same("rank 0's buffers before each forward; on by default"),
    "forward_sync_buffers": _other("`broadcast_buffers`"),
    "init_sync": _other("`sync_module_states`; True compares, and sends if needed"),
    "bucket_cap_mb": _ignored("there are no buckets; auto_wrap_policy makes units"),
    "bucket_cap_mb_list": _ignored("there are no buckets; auto_wrap_policy makes units"),
    "find_unused_parameters": _ignored("unused parameters are always found", False),
    "check_reduction": _ignored("reductions are always checked", False),
    "gradient_as_bucket_view": _ignored("gradients are always views of flat storage", False),
    "static_graph": _ignored("the order of units is always recorded", False),
    "skip_all_reduce_unused_params": _ignored("units that no rank used are never reduced", False),
    "batched_grad_copy": _ignored("gradients are copied on arrival, while backward runs", False),
    "lazy_bucket_allocation": _ignored(
        "gradient buffers exist only from first gradient to reduction", False
    ),
    "delay_all_reduce_named_params": _raises(
        "make these parameters' module a unit of its own instead"
    ),
    "param_to_hook_all_reduce": _raises("reductions start when a unit is complete"),
    # FullyShardedDataParallel
    "sharding_strategy": _same("torch's enum and its names are accepted"),
    "cpu_offload": _same("torch's dataclass too; also to a disk, see offload.md"),
    "auto_wrap_policy": _same("torch's own policies too"),
    "backward_prefetch": _same("torch's enum is accepted; the default is `AUTO`"),
    "ignored_modules": _same("left alone"),
    "ignored_states": _same("parameters or modules that are left alone"),
    "param_init_fn": _same("left out: modules' `reset_parameters()`"),
    "device_id": _same("an index or a device"),
    "sync_module_states": _same("left out: where weights differ, rank 0's, with a warning"),
    "forward_prefetch": _same("on unless False"),
    "limit_all_gathers": _same("buffers in flight are always bounded"),
    "use_orig_params": _same("True by default here"),
}
"""Keywords of their constructors."""

_GIVE_ALL_RANKS_BATCHES = (
    "a rank that has finished cannot serve the others' all-gathers: give every rank equally many "
    "batches (DistributedSampler(drop_last=True))"
)
_FINISHES = "backward() always finishes its reductions"

METHODS: dict[str, Entry] = {
    "no_sync": _same("with `max_bytes` and `replicas_only` beside it"),
    "register_comm_hook": _same(
        "torch's fp16, bf16 and all-reduce hooks, with HYBRID strategies no others; a hook that "
        "takes buckets raises"
    ),
    # DistributedDataParallel
    "join": _raises(_GIVE_ALL_RANKS_BATCHES),
    "join_hook": _raises("see `join`"),
    "join_device": _raises("see `join`"),
    "join_process_group": _raises("see `join`"),
    "scatter": _raises("one process trains on one device"),
    "gather": _raises("one process trains on one device"),
    "to_kwargs": _raises("move inputs yourself: x.to(device)"),
    "finalize_backward": _raises(_FINISHES),
    "require_manual_backward_finalization": _raises(_FINISHES),
    "should_finalize_after_backward": _raises(_FINISHES),
    "will_sync_module_buffers": _same("whether the next forward broadcasts buffers"),
    # FullyShardedDataParallel
    "check_is_root": _same("whether no other wrapper contains this one"),
    "clip_grad_norm_": _same("`torch.nn.utils.clip_grad_norm_` is right too"),
    "fsdp_modules": _same("`sharded_modules`"),
    "optim_state_dict": _same("full tensors by name"),
    "optim_state_dict_to_load": _same("and back"),
    "summon_full_params": _same("with `recurse`, `writeback`, `rank0_only`, ..."),
    "state_dict_type": _same("FULL_STATE_DICT and its configs; others raise"),
    "set_state_dict_type": _same("FULL_STATE_DICT and its configs; others raise"),
    "get_state_dict_type": _same("torch's `StateDictSettings`"),
    "full_optim_state_dict": _raises("use `optim_state_dict`"),
    "sharded_optim_state_dict": _raises("use `optim_state_dict`"),
    "scatter_full_optim_state_dict": _raises("use `optim_state_dict_to_load`"),
    "shard_full_optim_state_dict": _raises("use `optim_state_dict_to_load`"),
    "flatten_sharded_optim_state_dict": _raises("use `optim_state_dict_to_load`"),
    "rekey_optim_state_dict": _raises("names are those of the unwrapped model"),
}
"""Their public methods beyond ``nn.Module``'s."""

DDP_ATTRIBUTES: dict[str, tuple[str, Callable[[Sharding], Any]]] = {
    "require_backward_grad_sync": (
        "False under `no_sync`",
        lambda sharding: not sharding.context.state.is_accumulating,
    ),
    "device": ("where the model computes", lambda sharding: sharding.settings.device),
    "device_type": ("its type", lambda sharding: sharding.settings.device.type),
    "device_ids": (
        "its index in a list; None on the CPU",
        lambda sharding: None if (index := sharding.settings.device.index) is None else [index],
    ),
    "output_device": ("its index; None on the CPU", lambda one: one.settings.device.index),
    "find_unused_parameters": ("True", lambda _: True),
    "static_graph": ("False", lambda _: False),
    "broadcast_buffers": ("as set", lambda sharding: sharding.settings.broadcast_buffers),
    "dim": ("0", lambda _: 0),
}
"""DistributedDataParallel's attributes, read-only here: in words, and as values."""


def why_missing(name: str) -> str | None:
    """Why a method of torch's wrappers is missing here; None if it is not, or is unknown."""
    entry = METHODS.get(name)
    if entry is None or entry.fate is not Fate.RAISES:
        return None
    return f"{name} is not available on a ShardedWrapper: {entry.text}"


class Read(NamedTuple):
    """Keywords of torch's wrappers, translated to ours."""

    ours: dict[str, Any]
    notes: list[str]
    """One line per keyword that was set and has no effect."""

    def merged(self, **given: Any) -> list[Any]:
        """The values of our keywords, with those given under our own names; None: not given.

        Raises:
            ValueError: they differ.
        """
        for name, value in self.ours.items():
            if given[name] is not None and given[name] != value:
                raise ValueError(
                    f"ShardedWrapper: {name}={given[name]!r} contradicts another keyword that "
                    f"means {name}={value!r}. Pass one of them."
                )
        return [self.ours.get(name, value) for name, value in given.items()]


def read_keywords(extra: dict[str, Any], known: Iterable[str]) -> Read:
    """Translate the keywords that the constructor does not know by name.

    Args:
        extra: the keywords beside the constructor's own, with their values.
        known: the constructor's own keywords.

    Raises:
        TypeError: a keyword is unknown; names the nearest known one.
        ValueError: a value that has no meaning here.
        NotImplementedError: a keyword that raises.
    """
    ours: dict[str, Any] = {}
    notes = []
    for name, value in extra.items():
        entry = KEYWORDS.get(name)
        if entry is None:
            close = difflib.get_close_matches(name, [*known, *KEYWORDS], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"ShardedWrapper: unknown keyword {name!r}.{hint}")
        if value is None or value == entry.default:
            continue
        if entry.fate is Fate.IGNORED:
            notes.append(f"{name}: {entry.text}")
        elif entry.fate is Fate.RAISES:
            raise NotImplementedError(f"ShardedWrapper: {name}={value!r}: {entry.text}")
        else:
            for our_name, meant in _RENAMED[name](value).items():
                if not _is_same_device(ours.setdefault(our_name, meant), meant):
                    raise ValueError(
                        f"ShardedWrapper: {name}={value!r}, but the model is on "
                        f"{ours[our_name]!r}: outputs stay where the module makes them. Pass one "
                        "device."
                    )
    return Read(ours, notes)


def _is_same_device(one: Any, other: Any) -> bool:
    """Whether both mean the same device, as 0, "cuda:0" and ``torch.device("cuda", 0)`` do."""
    return str(one).rpartition(":")[2] == str(other).rpartition(":")[2]


def _read_device_ids(value: Sequence[Any]) -> dict[str, Any]:
    ids = list(value)
    if not ids:
        return {}  # as None, for a module on the CPU
    if len(ids) != 1:
        raise ValueError(
            f"ShardedWrapper: device_ids={ids}: a process trains on one device; pass one index, "
            "or device_id"
        )
    return {"device_id": ids[0]}


_RENAMED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "device_ids": _read_device_ids,
    "output_device": lambda value: {"device_id": value},
    "forward_sync_buffers": lambda value: {"broadcast_buffers": value},
    "init_sync": lambda value: {} if value else {"sync_module_states": False},
}
