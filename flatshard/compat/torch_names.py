"""Names of torch's wrappers (DistributedDataParallel, FullyShardedDataParallel) that differ here.

A test compares them with the tables of docs/migration.md and, to notice new names, with torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from flatshard.module.sharding import Sharding


class Keyword(NamedTuple):
    """Why a keyword has no effect here, or raises."""

    reason: str
    default: Any = None  # this value, mostly torch's default, gives no warning


# Keywords of DistributedDataParallel and FSDP1 that warn when they are set.
IGNORED = {
    "use_orig_params": Keyword("parameters keep their names and shapes", True),  # FSDP1's: False
    "bucket_cap_mb": Keyword("there are no buckets; auto_wrap_policy makes units"),
    "bucket_cap_mb_list": Keyword("there are no buckets; auto_wrap_policy makes units"),
    "find_unused_parameters": Keyword("unused parameters are always found", False),
    "check_reduction": Keyword("reductions are always checked", False),
    "gradient_as_bucket_view": Keyword("gradients are always views of flat storage", False),
    "static_graph": Keyword("the order of units is always recorded", False),
    "skip_all_reduce_unused_params": Keyword("units that no rank used are never reduced", False),
    "batched_grad_copy": Keyword("gradients are copied on arrival, while backward runs", False),
    "lazy_bucket_allocation": Keyword(
        "gradient buffers exist only from first gradient to reduction", False
    ),
}

# Those that raise.
REFUSED = {
    "dim": Keyword("inputs are not scattered, so there is only 0", 0),
    "delay_all_reduce_named_params": Keyword(
        "make these parameters' module a unit of its own instead"
    ),
    "param_to_hook_all_reduce": Keyword("reductions start when a unit is complete"),
}

# Those with another name here, and what a value of theirs means; all others mean the same.
OTHER_NAMES: dict[str, Callable[[Any], dict[str, Any]]] = {
    # Empty is as None: a module on the CPU.
    "device_ids": lambda value: {"device_id": _only(value)} if value else {},
    "output_device": lambda value: {"device_id": value},
    "forward_sync_buffers": lambda value: {"broadcast_buffers": value},
    "init_sync": lambda value: {} if value else {"sync_module_states": False},
}

_FINISHES = "backward() always finishes its reductions"
# Public methods of both that are missing here, and why.
MISSING_METHODS = {
    **dict.fromkeys(("join_hook", "join_device", "join_process_group"), "use `with model.join():`"),
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
    "_fsdp_wrapped_module": "use `.module`",
    "params": "use `parameters()`",
    "training_state": "use `step_report()`",
}

# Attributes of both, read-only here.
ATTRIBUTES: dict[str, Callable[[Sharding], Any]] = {
    "require_backward_grad_sync": lambda one: not one.context.state.is_accumulating,
    "device": lambda one: one.settings.device,
    "device_type": lambda one: one.settings.device.type,
    "device_ids": lambda one: (
        None if one.settings.device.index is None else [one.settings.device.index]
    ),
    "output_device": lambda one: one.settings.device.index,
    "find_unused_parameters": lambda _: True,
    "static_graph": lambda _: False,
    "broadcast_buffers": lambda one: one.settings.broadcast_buffers,
    "dim": lambda _: 0,
    "rank": lambda one: one.settings.ranks.world.rank,
    "world_size": lambda one: one.settings.ranks.world.size,
    "compute_device": lambda one: one.settings.device,
    "mixed_precision": lambda one: one.settings.precision,
    "cpu_offload": lambda one: one.settings.offload,
    "backward_prefetch": lambda one: one.settings.backward_prefetch,
    "forward_prefetch": lambda one: one.settings.forward_prefetch,
    "limit_all_gathers": lambda _: True,
}


class NamesMissing(type):
    """Of a class that lacks names of torch's: says why, also where they are called on it."""

    def __getattr__(cls, name: str) -> NoReturn:
        reason = why_missing(name)
        raise AttributeError(reason or f"type object {cls.__name__!r} has no attribute {name!r}")


def why_missing(name: str) -> str | None:
    """Why a method of torch's wrappers is missing here; None if it is not, or is unknown."""
    reason = MISSING_METHODS.get(name)
    return reason and f"{name} is not available on a ShardedWrapper: {reason}"


def read_keywords(
    extra: dict[str, Any], own: dict[str, Any], known: Iterable[str]
) -> tuple[dict[str, Any], list[str]]:
    """Translate the keywords ``extra``, which the constructor (that has ``known``) does not name.

    Returns ``own``, with the values that ``extra`` gives to what is None in it; and one line for
    each keyword that was set and has no effect.
    """
    meant, notes = dict(own), []
    accepted = [*IGNORED, *REFUSED, *OTHER_NAMES]
    for name, value in extra.items():
        if name not in accepted:
            close = difflib.get_close_matches(name, [*known, *accepted], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"ShardedWrapper: unknown keyword {name!r}.{hint}")
        keyword = IGNORED.get(name) or REFUSED.get(name)
        if value is None or (keyword is not None and value == keyword.default):
            continue
        if name in REFUSED:
            raise NotImplementedError(f"ShardedWrapper: {name}={value!r}: {REFUSED[name].reason}")
        if name in IGNORED:
            notes.append(f"{name}: {IGNORED[name].reason}")
            continue
        for our_name, ours in OTHER_NAMES[name](value).items():
            # The text after a colon: 0, "cuda:0" and torch.device("cuda", 0) are one device.
            is_same = str(meant.get(our_name)).rpartition(":")[2] == str(ours).rpartition(":")[2]
            if meant.get(our_name) is None:
                meant[our_name] = ours
            elif not is_same:
                raise ValueError(
                    f"ShardedWrapper: {name}={value!r} contradicts another keyword, which means "
                    f"{our_name}={meant[our_name]!r}. Pass one of them."
                )
    return meant, notes


def _only(device_ids: Sequence[Any]) -> Any:
    if len(device_ids) > 1:
        raise ValueError(
            f"ShardedWrapper: device_ids={list(device_ids)}: a process trains on one device; pass "
            "one index, or device_id"
        )
    return device_ids[0]
