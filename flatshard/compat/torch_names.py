"""Names of torch's wrappers (DistributedDataParallel, FullyShardedDataParallel) that differ here.

A test compares them with the tables of docs/migration.md and, to notice new names, with torch.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from flatshard.module.sharding import Sharding


class Fate(enum.Enum):
    OTHER_NAME = "other name"  # it is accepted, and has another name here
    IGNORED = "ignored"  # it has no effect, and setting it warns
    RAISES = "raises"  # it raises, with the reason


class Entry(NamedTuple):
    """The fate of a keyword, and how or why."""

    fate: Fate
    text: str
    default: Any = None  # torch's, which may be passed without a warning


_other = partial(Entry, Fate.OTHER_NAME)
_ignored = partial(Entry, Fate.IGNORED)
_raises = partial(Entry, Fate.RAISES)

# Of DistributedDataParallel's; the others, and FullyShardedDataParallel's, mean the same here.
KEYWORDS: dict[str, Entry] = {
    "device_ids": _other("one index is `device_id`; several raise, as there"),
    "output_device": _other("`device_id`; another one than it raises"),
    "dim": _raises("inputs are not scattered, so there is only 0", 0),
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
}

_FINISHES = "backward() always finishes its reductions"
# Public methods of both that are missing here, and why.
MISSING_METHODS = {
    "join": (
        "a rank that has finished cannot serve the others' all-gathers: give every rank equally "
        "many batches (DistributedSampler(drop_last=True))"
    ),
    **dict.fromkeys(("join_hook", "join_device", "join_process_group"), "see `join`"),
    **dict.fromkeys(("scatter", "gather"), "one process trains on one device"),
    "to_kwargs": "move inputs yourself: x.to(device)",
    "finalize_backward": _FINISHES,
    "require_manual_backward_finalization": _FINISHES,
    "should_finalize_after_backward": _FINISHES,
    "full_optim_state_dict": "use `optim_state_dict`",
    "sharded_optim_state_dict": "use `optim_state_dict`",
    "scatter_full_optim_state_dict": "use `optim_state_dict_to_load`",
    "shard_full_optim_state_dict": "use `optim_state_dict_to_load`",
    "flatten_sharded_optim_state_dict": "use `optim_state_dict_to_load`",
    "rekey_optim_state_dict": "names are those of the unwrapped model",
}

# DistributedDataParallel's attributes, read-only here: in words, and as values.
DDP_ATTRIBUTES: dict[str, tuple[str, Callable[[Sharding], Any]]] = {
    "require_backward_grad_sync": (
        "False under `no_sync`",
        lambda one: not one.context.is_accumulating,
    ),
    "device": ("where the model computes", lambda one: one.settings.device),
    "device_type": ("its type", lambda one: one.settings.device.type),
    "device_ids": (
        "its index in a list; None on the CPU",
        lambda one: None if (index := one.settings.device.index) is None else [index],
    ),
    "output_device": ("its index; None on the CPU", lambda one: one.settings.device.index),
    "find_unused_parameters": ("True", lambda _: True),
    "static_graph": ("False", lambda _: False),
    "broadcast_buffers": ("as set", lambda one: one.settings.broadcast_buffers),
    "dim": ("0", lambda _: 0),
}


def why_missing(name: str) -> str | None:
    """Why a method of torch's wrappers is missing here; None if it is not, or is unknown."""
    reason = MISSING_METHODS.get(name)
    return reason and f"{name} is not available on a ShardedWrapper: {reason}"


def read_keywords(
    extra: dict[str, Any], own: dict[str, Any], known: Iterable[str]
) -> tuple[dict[str, Any], list[str]]:
    """Translate the keywords ``extra``, which the constructor (that has ``known``) does not name.

    Returns:
        ``own``, with the values that ``extra`` gives to what is None in it; and one line for each
        keyword that was set and has no effect.

    Raises:
        TypeError: a keyword is unknown; names the nearest known one.
        ValueError: a value that has no meaning here, or contradicts another keyword.
        NotImplementedError: a keyword that raises.
    """
    meant, notes = dict(own), []
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
            for our_name, ours in _in_our_words(name, value).items():
                if meant.get(our_name) is None:
                    meant[our_name] = ours
                elif not _is_same(meant[our_name], ours):
                    raise ValueError(
                        f"ShardedWrapper: {name}={value!r} contradicts another keyword, which "
                        f"means {our_name}={meant[our_name]!r}. Pass one of them."
                    )
    return meant, notes


def _is_same(one: Any, other: Any) -> bool:
    # 0, "cuda:0" and torch.device("cuda", 0) are one device.
    return one == other or str(one).rpartition(":")[2] == str(other).rpartition(":")[2]


def _in_our_words(name: str, value: Any) -> dict[str, Any]:
    """What a keyword of another name means under our own names."""
    if name == "init_sync":
        return {} if value else {"sync_module_states": False}
    if name != "device_ids":
        return {"device_id" if name == "output_device" else "broadcast_buffers": value}
    if len(value) > 1:
        raise ValueError(
            f"ShardedWrapper: device_ids={list(value)}: a process trains on one device; pass one "
            "index, or device_id"
        )
    # Empty is as None: a module on the CPU.
    return {"device_id": value[0]} if value else {}
