"""What other wrappers take and offer, and what becomes of it here.

``DDP_KEYWORDS`` and its kin are the whole story: the constructor reads them, the tables of
docs/migration.md are made from them, and a test compares them with the installed torch, so that a
new keyword there is noticed.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from flatshard.module.sharding import Sharding


class Fate(enum.Enum):
    """What happens to a name of another wrapper."""

    SAME = "same"
    """It means the same here."""
    OTHER_NAME = "other name"
    """It is read, and means what another name says here."""
    IGNORED = "ignored"
    """It has no effect, and a warning says so where it was set."""
    REFUSED = "refused"
    """It raises, with the reason."""


class Entry(NamedTuple):
    """One name: what becomes of it, and why or how."""

    fate: Fate
    note: str
    default: Any = None
    """The other wrapper's default, which is passed without a word."""


DDP_KEYWORDS: dict[str, Entry] = {
    "module": Entry(Fate.SAME, "the module to wrap"),
    "device_ids": Entry(Fate.OTHER_NAME, "one index is `device_id`; several are refused, as there"),
    "output_device": Entry(Fate.OTHER_NAME, "`device_id`; another one than it is refused"),
    "dim": Entry(Fate.REFUSED, "inputs are not scattered, so there is only 0", 0),
    "broadcast_buffers": Entry(Fate.SAME, "rank 0's buffers before each forward; on by default"),
    "forward_sync_buffers": Entry(Fate.OTHER_NAME, "`broadcast_buffers`"),
    "init_sync": Entry(Fate.OTHER_NAME, "`sync_module_states`; True compares, and sends if needed"),
    "process_group": Entry(Fate.SAME, "the ranks that train the model"),
    "device_mesh": Entry(Fate.SAME, "the same as a mesh"),
    "mixed_precision": Entry(
        Fate.SAME, "torch's dataclasses are understood, field by field: docs/precision.md"
    ),
    "bucket_cap_mb": Entry(Fate.IGNORED, "there are no buckets; auto_wrap_policy makes units"),
    "bucket_cap_mb_list": Entry(Fate.IGNORED, "there are no buckets; auto_wrap_policy makes units"),
    "find_unused_parameters": Entry(Fate.IGNORED, "unused parameters are always found", False),
    "check_reduction": Entry(Fate.IGNORED, "reductions are always checked", False),
    "gradient_as_bucket_view": Entry(
        Fate.IGNORED, "gradients are always views of flat storage", False
    ),
    "static_graph": Entry(Fate.IGNORED, "the order of units is always recorded", False),
    "skip_all_reduce_unused_params": Entry(
        Fate.IGNORED, "units that no rank used are never reduced", False
    ),
    "batched_grad_copy": Entry(
        Fate.IGNORED, "gradients are copied as they come, while backward goes on", False
    ),
    "lazy_bucket_allocation": Entry(
        Fate.IGNORED, "gradient buffers exist only from first gradient to reduction", False
    ),
    "delay_all_reduce_named_params": Entry(
        Fate.REFUSED, "make these parameters' module a unit of its own instead"
    ),
    "param_to_hook_all_reduce": Entry(Fate.REFUSED, "reductions start when a unit is complete"),
}
"""DistributedDataParallel's constructor."""

DDP_METHODS: dict[str, Entry] = {
    "no_sync": Entry(Fate.SAME, "with `max_bytes` and `replicas_only` beside it"),
    "register_comm_hook": Entry(
        Fate.SAME, "torch's fp16, bf16 and all-reduce hooks; others that take buckets are refused"
    ),
    "join": Entry(
        Fate.REFUSED,
        "a rank that has finished cannot serve the others' gathers: give every rank equally many "
        "batches (DistributedSampler(drop_last=True))",
    ),
    "join_hook": Entry(Fate.REFUSED, "see `join`"),
    "join_device": Entry(Fate.REFUSED, "see `join`"),
    "join_process_group": Entry(Fate.REFUSED, "see `join`"),
    "scatter": Entry(Fate.REFUSED, "one process trains on one device"),
    "gather": Entry(Fate.REFUSED, "one process trains on one device"),
    "to_kwargs": Entry(Fate.REFUSED, "move inputs yourself: x.to(device)"),
    "finalize_backward": Entry(Fate.REFUSED, "backward() always finishes its reductions"),
    "require_manual_backward_finalization": Entry(
        Fate.REFUSED, "backward() always finishes its reductions"
    ),
    "should_finalize_after_backward": Entry(
        Fate.REFUSED, "backward() always finishes its reductions"
    ),
    "will_sync_module_buffers": Entry(Fate.SAME, "whether the next forward gives out buffers"),
}
"""DistributedDataParallel's public methods beyond ``nn.Module``'s."""

DDP_ATTRIBUTES: dict[str, str] = {
    "require_backward_grad_sync": "False under `no_sync`",
    "device": "where the model computes",
    "device_type": "its type",
    "device_ids": "its index in a list; None on the CPU",
    "output_device": "its index; None on the CPU",
    "find_unused_parameters": "True",
    "static_graph": "False",
    "broadcast_buffers": "as set",
    "dim": "0",
}
"""DistributedDataParallel's attributes, read-only here."""


class Read(NamedTuple):
    """Keywords of another wrapper, as ours."""

    ours: dict[str, Any]
    notes: list[str]
    """One line per keyword that was set and has no effect."""

    def check_against(self, **given: Any) -> None:
        """Compare with what was said under our own names; None is nothing.

        Raises:
            ValueError: something else was said there.
        """
        for name, value in self.ours.items():
            if given[name] is not None and given[name] != value:
                raise ValueError(
                    f"ShardedWrapper: {name}={given[name]!r} contradicts another keyword that "
                    f"means {name}={value!r}. Pass one of them."
                )


def read_ddp_keywords(extra: dict[str, Any], known: Iterable[str]) -> Read:
    """Translate the keywords that the constructor does not know by name.

    Args:
        extra: what was passed beside the constructor's own keywords.
        known: the constructor's own.

    Raises:
        TypeError: a keyword is unknown; names the nearest known one.
        ValueError: a value that means nothing here.
        NotImplementedError: a keyword that is refused.
    """
    ours: dict[str, Any] = {}
    notes = []
    for name, value in extra.items():
        entry = DDP_KEYWORDS.get(name)
        if entry is None:
            close = difflib.get_close_matches(name, [*known, *DDP_KEYWORDS], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"ShardedWrapper: unknown keyword {name!r}.{hint}")
        if value is None or value == entry.default:
            continue
        if entry.fate is Fate.IGNORED:
            notes.append(f"{name}: {entry.note}")
        elif entry.fate is Fate.REFUSED:
            raise NotImplementedError(f"ShardedWrapper: {name}={value!r}: {entry.note}")
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
    """Whether they name the same, as 0, "cuda:0" and ``torch.device("cuda", 0)`` do."""
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


FSDP_KEYWORDS: dict[str, Entry] = {
    "module": Entry(Fate.SAME, "the module to wrap"),
    "process_group": Entry(Fate.SAME, "a group, or a pair (shard, replicate)"),
    "sharding_strategy": Entry(Fate.SAME, "torch's enum and its names are understood"),
    "cpu_offload": Entry(Fate.SAME, "torch's dataclass too; also to a disk, see offload.md"),
    "auto_wrap_policy": Entry(Fate.SAME, "torch's own policies too"),
    "backward_prefetch": Entry(Fate.SAME, "torch's enum is understood; the default is `AUTO`"),
    "mixed_precision": Entry(
        Fate.SAME, "torch's dataclasses are understood, field by field: docs/precision.md"
    ),
    "ignored_modules": Entry(Fate.SAME, "left alone"),
    "ignored_states": Entry(Fate.SAME, "parameters or modules that are left alone"),
    "param_init_fn": Entry(Fate.SAME, "left out: modules' `reset_parameters()`"),
    "device_id": Entry(Fate.SAME, "an index or a device"),
    "sync_module_states": Entry(
        Fate.SAME, "left out: ranks whose weights differ get rank 0's, with a warning"
    ),
    "forward_prefetch": Entry(Fate.SAME, "on unless False"),
    "limit_all_gathers": Entry(Fate.SAME, "buffers in flight are always bounded"),
    "use_orig_params": Entry(Fate.SAME, "True by default here"),
    "device_mesh": Entry(Fate.SAME, "1-D, or 2-D (replicate, shard)"),
}
"""FullyShardedDataParallel's constructor."""

FSDP_METHODS: dict[str, Entry] = {
    "check_is_root": Entry(Fate.SAME, "whether no other wrapper contains this one"),
    "clip_grad_norm_": Entry(Fate.SAME, "`torch.nn.utils.clip_grad_norm_` is right too"),
    "fsdp_modules": Entry(Fate.SAME, "`sharded_modules`"),
    "no_sync": Entry(Fate.SAME, "with `max_bytes` and `replicas_only` beside it"),
    "optim_state_dict": Entry(Fate.SAME, "full tensors by name"),
    "optim_state_dict_to_load": Entry(Fate.SAME, "and back"),
    "summon_full_params": Entry(Fate.SAME, "with `recurse`, `writeback`, `rank0_only`, ..."),
    "register_comm_hook": Entry(
        Fate.SAME, "on an inner wrapper too; with HYBRID strategies only torch's own hooks"
    ),
    "state_dict_type": Entry(Fate.SAME, "FULL_STATE_DICT and its configs; others are refused"),
    "set_state_dict_type": Entry(Fate.SAME, "FULL_STATE_DICT and its configs; others are refused"),
    "get_state_dict_type": Entry(Fate.SAME, "torch's `StateDictSettings`"),
    "full_optim_state_dict": Entry(Fate.REFUSED, "use `optim_state_dict`"),
    "sharded_optim_state_dict": Entry(Fate.REFUSED, "use `optim_state_dict`"),
    "scatter_full_optim_state_dict": Entry(Fate.REFUSED, "use `optim_state_dict_to_load`"),
    "shard_full_optim_state_dict": Entry(Fate.REFUSED, "use `optim_state_dict_to_load`"),
    "flatten_sharded_optim_state_dict": Entry(Fate.REFUSED, "use `optim_state_dict_to_load`"),
    "rekey_optim_state_dict": Entry(Fate.REFUSED, "names are those of the unwrapped model"),
}
"""FullyShardedDataParallel's public methods beyond ``nn.Module``'s."""


def table(entries: dict[str, Entry]) -> str:
    """A Markdown table of names and their fates."""
    rows = [f"| `{name}` | {entry.fate.value} | {entry.note} |" for name, entry in entries.items()]
    return "\n".join(["| name | here | |", "|---|---|---|", *rows])


def why_refused(name: str) -> str | None:
    """Why a method of another wrapper is not here; None for one that is, or is nobody's."""
    for table, owner in (
        (DDP_METHODS, "DistributedDataParallel"),
        (FSDP_METHODS, "FullyShardedDataParallel"),
    ):
        entry = table.get(name)
        if entry is not None and entry.fate is Fate.REFUSED:
            return f"{owner}'s {name} is not available on a ShardedWrapper: {entry.note}"
    return None


def ddp_attribute(name: str, sharding: Sharding) -> Any:
    """An attribute of DistributedDataParallel, where the wrapped module has none so named."""
    device = sharding.settings.device
    ids = [device.index] if device.index is not None else None
    return {
        "require_backward_grad_sync": not sharding.context.is_accumulating,
        "device": device,
        "device_type": device.type,
        "device_ids": ids,
        "output_device": ids[0] if ids else None,
        "find_unused_parameters": True,
        "static_graph": False,
        "broadcast_buffers": sharding.settings.broadcast_buffers,
        "dim": 0,
    }[name]
