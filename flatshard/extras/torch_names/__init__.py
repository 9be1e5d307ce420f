"""Extra: names of torch's wrappers (DistributedDataParallel, FSDP1, FSDP2) for migration.

With this folder, ``ShardedWrapper`` accepts the keywords of torch's wrappers, and torch's policies
for precision and offload, and has the attributes of torch's wrappers. If a program calls a torch
method that ``ShardedWrapper`` lacks, the error names the replacement. Without this folder, torch's
keywords and policies raise ``MissingExtraError``, and these attributes raise ``AttributeError``.

A test compares the names with the migration page's tables, and with torch's classes, to notice new
names in torch.
"""

import difflib
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from flatshard.engine.gradients import GradSync
from flatshard.engine.unit import Unit
from flatshard.options import CPUOffload
from flatshard.options.precision import MixedPrecision
from flatshard.state.model_state import StateDictOptions

# Keywords of torch's wrappers that have no effect here, with the reason. If the user passes another
# value than None or False, rank 0 warns.
IGNORED = {
    "use_orig_params": "parameters keep their names and shapes",
    "bucket_cap_mb": "gradients are reduced by unit, not by bucket",
    "bucket_cap_mb_list": "gradients are reduced by unit, not by bucket",
    "find_unused_parameters": "unused parameters are always found",
    "check_reduction": "missing reductions are always detected",
    "gradient_as_bucket_view": "gradients are always views of a flat tensor",
    "static_graph": "flatshard always records the order of units",
    "skip_all_reduce_unused_params": "units that no rank used are never reduced",
    "batched_grad_copy": "gradients are copied on arrival, while backward runs",
    "lazy_bucket_allocation": "gradient buffers are allocated when the first gradient arrives",
    "shard_placement_fn": "flat parameters are split into equal ranges",
}

# Keywords of torch's wrappers that flatshard refuses, with the reason. Values other than None,
# False and 0 raise NotImplementedError.
REFUSED = {
    "dim": "inputs are not scattered, so dim can only be 0",
    "delay_all_reduce_named_params": "make these parameters' module a unit of its own instead",
    "param_to_hook_all_reduce": "a unit is reduced when its gradients are complete",
    "dp_mesh_dims": "pass these dimensions of the mesh, such as device_mesh=mesh['dp']",
}

# Values of keywords in IGNORED or REFUSED that cause no warning or error. For a keyword that is not
# listed here, this value is False. ShardedWrapper acts as FSDP1 with `use_orig_params=True`.
DEFAULTS = {"use_orig_params": True}

# Keywords of torch's wrappers that have another name in ShardedWrapper. Each function converts the
# value of torch's keyword into keywords of ShardedWrapper.
OTHER_NAMES: dict[str, Callable[[Any], dict[str, Any]]] = {
    # DistributedDataParallel treats an empty list like None. Programs pass an empty list or None
    # for a module on the CPU, which needs no `device_id`.
    "device_ids": lambda value: {"device_id": _only(value)} if value else {},
    "output_device": lambda value: {"device_id": value},
    # Unlike ``broadcast_buffers=False``, torch's ``forward_sync_buffers=False`` sends rank 0's
    # buffers to all ranks when the model is wrapped.
    "forward_sync_buffers": lambda value: (
        {"broadcast_buffers": value}
        | ({} if value in (True, None) else {"sync_module_states": True})
    ),
    "init_sync": lambda value: {} if value else {"sync_module_states": False},
    "mesh": lambda value: {"device_mesh": value},
    "mp_policy": lambda value: {"mixed_precision": value},
    "offload_policy": lambda value: {"cpu_offload": value},
    "ignored_params": lambda value: {"ignored_states": value},
}

# Values: public methods of torch's wrappers that ShardedWrapper does not have, separated by spaces.
# Keys: the advice in the error for all of these methods.
_MISSING = {
    "use `with model.join():`": "join_hook join_device join_process_group",
    "each process has one device, so nothing is scattered": "scatter gather",
    "move inputs yourself: x.to(device)": "to_kwargs",
    "backward() always finishes its reductions": (
        "finalize_backward require_manual_backward_finalization should_finalize_after_backward"
    ),
    "use `optim_state_dict`": "full_optim_state_dict sharded_optim_state_dict",
    "use `optim_state_dict_to_load`": (
        "scatter_full_optim_state_dict shard_full_optim_state_dict flatten_sharded_optim_state_dict"
    ),
    "state dicts have the unwrapped model's names": "rekey_optim_state_dict",
    "use `.module`": "_fsdp_wrapped_module",
    "use `ignored_states`": "_set_params_and_buffers_to_ignore_for_model",
    "use `parameters()`": "params",
    "use `record_steps()`": "training_state",
    "use `with model.no_sync():`": "set_requires_gradient_sync",
    "use `with model.no_sync(replicas_only=True):`": "set_requires_all_reduce",
    "the first backward outside of `no_sync` reduces": "set_is_last_backward",
    "choose `sharding_strategy` or `reshard_after_forward` when wrapping": (
        "set_reshard_after_forward set_reshard_after_backward"
    ),
    "units unshard automatically; to read full parameters, use `summon_full_params`": (
        "unshard reshard set_modules_to_forward_prefetch set_modules_to_backward_prefetch"
        " set_unshard_in_backward"
    ),
    "use `register_comm_hook(state, hook)` for reductions": (
        "set_custom_all_gather set_custom_reduce_scatter set_all_reduce_hook"
    ),
    "after an exception, call forward again; no state needs a reset": "reset_iter_state",
    "unused parameters are always found": "set_reduce_scatter_unused_params",
    "streams and buffers cannot be chosen; `collectives` chooses the transport": (
        "set_allocate_memory_from_process_group_for_comm set_symm_mem_for_comm set_post_optim_event"
        " set_reduce_scatter_max_input_buffers set_separate_reduce_scatter_group"
    ),
    "gradients are averages over ranks; to change the factor, scale the loss": (
        "set_gradient_divide_factor set_reduce_scatter_divide_factor"
        " set_force_sum_reduction_for_comms"
    ),
}
MISSING_METHODS = {name: reason for reason, names in _MISSING.items() for name in names.split()}

# Attributes of torch's wrappers that `Settings` has under the same names.
_SETTINGS = """device mixed_precision cpu_offload backward_prefetch forward_prefetch
    broadcast_buffers""".split()

# Attributes of torch's wrappers, which a ShardedWrapper also has, read-only.
ATTRIBUTES: dict[str, Callable[[Unit], Any]] = {
    # Whether the backward after the next forward reduces all gradients over all ranks.
    "require_backward_grad_sync": lambda one: {*one.context.syncs} == {GradSync.FULL},
    **{name: attrgetter(f"settings.{name}") for name in _SETTINGS},
    "device_type": lambda one: one.settings.device.type,
    "device_ids": lambda one: (
        None if one.settings.device.index is None else [one.settings.device.index]
    ),
    "output_device": lambda one: one.settings.device.index,
    "find_unused_parameters": lambda _: True,
    "static_graph": lambda _: False,
    "_set_static_graph": lambda _: lambda: None,
    "forward_sync_buffers": lambda one: one.settings.broadcast_buffers,
    "dim": lambda _: 0,
    "rank": lambda one: one.settings.ranks.world.rank,
    "world_size": lambda one: one.settings.ranks.world.size,
    "compute_device": lambda one: one.settings.device,
    "limit_all_gathers": lambda _: True,
}


def attribute(name: str, unit: Unit | None, error: AttributeError) -> Any:
    """Return attribute ``name`` of torch's wrappers, or raise an error that names the replacement.

    ``unit``: None while the wrapper is being built or copied. ``error``: Python's error about the
    missing attribute.
    """
    if name in ATTRIBUTES and unit is not None:
        return ATTRIBUTES[name](unit)
    reason = why_missing(name)
    raise (error if reason is None else AttributeError(reason)) from None


def why_missing(name: str) -> str | None:
    """Return the error text for a method that only torch's wrappers have, or None."""
    reason = MISSING_METHODS.get(name)
    return reason and f"{name} is not available on a ShardedWrapper: {reason}."


def read_keywords(extra: dict[str, Any], own: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Translate keywords of torch's wrappers (``extra``) into keywords of ``ShardedWrapper``.

    Returns ``own`` with the translated values in place of None, and a line of text for each keyword
    that has no effect.
    """
    meant, notes = dict(own), []
    accepted = [*IGNORED, *REFUSED, *OTHER_NAMES]
    for name, value in extra.items():
        if name not in accepted:
            close = difflib.get_close_matches(name, [*own, *accepted], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"ShardedWrapper: unknown keyword {name!r}.{hint}")
        if value is None or (name not in OTHER_NAMES and value == DEFAULTS.get(name, False)):
            continue
        if name in REFUSED:
            text = f"{name}={value!r} is not supported: {REFUSED[name]}"
            raise NotImplementedError(f"ShardedWrapper: {text}.")
        if name in IGNORED:
            notes.append(f"{name}: {IGNORED[name]}")
            continue
        for our_name, ours in OTHER_NAMES[name](value).items():
            before = meant.get(our_name)
            # 0, "cuda:0" and torch.device("cuda", 0) mean the same device, so for `device_id`
            # compare only the text after the colon.
            texts = {str(device).rpartition(":")[2] for device in (before, ours)}
            if before is None:
                meant[our_name] = ours
            elif before is not ours and (our_name != "device_id" or len(texts) > 1):
                raise ValueError(
                    f"ShardedWrapper: {name}={value!r:.200} contradicts another keyword, which "
                    f"gives {our_name}={before!r:.200}. Pass only one of the two keywords."
                )
    return meant, notes


def _only(device_ids: Sequence[Any]) -> Any:
    if len(device_ids) > 1:
        raise ValueError(
            f"ShardedWrapper: device_ids={list(device_ids)} names several devices, but a process "
            "trains on one device. Pass one index, or device_id."
        )
    return device_ids[0]


def as_mixed_precision(policy: Any) -> MixedPrecision:
    """Convert a precision policy of FSDP1 or FSDP2 into flatshard's ``MixedPrecision``."""
    ours = MixedPrecision.__dataclass_fields__
    fields: dict[str, Any] = {}
    for name, given in vars(policy).items():
        name = name.removeprefix("_")  # FSDP1's field `_module_classes_to_ignore`
        if name in ours:
            fields[name] = given
        elif given is not None and given is not False:
            raise NotImplementedError(
                f"mixed_precision: {name}={given!r} is not supported. Leave {name} out. The "
                f"supported options are {', '.join(ours)}."
            )
    # FSDP1's policy has a separate field for the root, `cast_root_forward_inputs`. FSDP2's policy
    # has only `cast_forward_inputs`, which also applies to the root.
    fields.setdefault("cast_root_forward_inputs", fields.get("cast_forward_inputs", True))
    return MixedPrecision(**fields)


def as_cpu_offload(policy: Any) -> CPUOffload:
    """Convert an offload policy of FSDP1 or FSDP2 into flatshard's ``CPUOffload``."""
    if isinstance(flag := getattr(policy, "offload_params", None), bool):
        return CPUOffload(offload_params=flag)
    # FSDP2's policies: OffloadPolicy offloads nothing, CPUOffloadPolicy offloads everything.
    if type(policy).__name__ == "OffloadPolicy":
        return CPUOffload()
    if isinstance(pin_memory := getattr(policy, "pin_memory", None), bool):
        return CPUOffload(offload_params=True, pin_memory=pin_memory)
    raise TypeError(f"cpu_offload: expected CPUOffload(offload_params=...), got {policy!r}.")


# Prefix of the names of torch's config classes, keyed by the name of the state dict type.
_CONFIGS = {"FULL_STATE_DICT": "Full", "SHARDED_STATE_DICT": "Sharded"}


def read_options(
    state_dict_type: Any, state_dict_config: Any, optim_state_dict_config: Any
) -> StateDictOptions:
    """Convert torch's state dict type and configs into ``StateDictOptions``."""
    name = getattr(state_dict_type, "name", state_dict_type)
    if name not in _CONFIGS:
        raise NotImplementedError(
            f"state_dict_type: expected {' or '.join(_CONFIGS)}, got {name}. State dicts have the "
            "names and shapes of the unwrapped model."
        )
    options = {"is_sharded": name == "SHARDED_STATE_DICT"}
    for prefix, config in (("", state_dict_config), ("optim_", optim_state_dict_config)):
        if config is None:
            continue
        keyword = f"{prefix}state_dict_config"
        kind = f"{_CONFIGS[name]}{'Optim' if prefix else ''}StateDictConfig"
        # Compare class names instead of importing torch's classes, because the import is slow.
        if kind not in (base.__name__ for base in type(config).__mro__):
            raise TypeError(
                f"state_dict_type: {keyword} must be torch's {kind} for {name}, got {config!r}. "
                f"Pass a {kind}, or leave {keyword} out."
            )
        options[f"{prefix}offload_to_cpu"] = config.offload_to_cpu
        options[f"{prefix}rank0_only"] = getattr(config, "rank0_only", False)
    return StateDictOptions(**options)


def as_torch(options: StateDictOptions) -> Any:
    """Convert ``options`` to torch's ``StateDictSettings``."""
    # Import only when the function is called, because the import is slow.
    from torch.distributed.fsdp import api

    if options.is_sharded:
        return api.StateDictSettings(
            api.StateDictType.SHARDED_STATE_DICT,
            api.ShardedStateDictConfig(options.offload_to_cpu),
            api.ShardedOptimStateDictConfig(options.optim_offload_to_cpu),
        )
    return api.StateDictSettings(
        api.StateDictType.FULL_STATE_DICT,
        api.FullStateDictConfig(options.offload_to_cpu, options.rank0_only),
        api.FullOptimStateDictConfig(options.optim_offload_to_cpu, options.optim_rank0_only),
    )
