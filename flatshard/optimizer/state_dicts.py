"""Hooks on ``state_dict()`` and ``load_state_dict()`` of optimizers with sharded parameters.

``optimizer.state_dict()`` contains only this rank's part of the state, and must not be loaded on
another rank or into another layout. So flatshard puts a stamp (the rank, and a digest of the
layout) into the first parameter group. Loading raises if the stamp does not match.

If torch's ``get_state_dict`` calls ``state_dict()``, state with one value per element becomes
sharded tensors, which checkpoints can save and reshard.
"""

import copy
import hashlib
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flatshard.comm.host_exchange import HostExchange
from flatshard.engine.run_state import temporarily
from flatshard.memory import checksum
from flatshard.optimizer import adapter
from flatshard.optimizer.adapter import Optimizer, apart, is_elementwise, map_state, with_inner
from flatshard.tensor import whole
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import FlatShardTensor, StateShard, state_shard
from flatshard.units.module_proxy import callers
from flatshard.units.module_tree import unit_text

StateDict = dict[str, Any]

# Module of torch that has `get_state_dict`. It treats the state of a parameter as full unless the
# parameter is a DTensor, and has no hook to change this. So flatshard finds the module's functions
# and their options on the call stack.
_MODULE = "torch.distributed.checkpoint.state_dict"


# ------------------------------------------------------------ what torch's get_state_dict asks for


def torch_request() -> Any:
    """Return the ``StateDictOptions`` of torch's running ``get_state_dict`` or ``set_state_dict``.

    Returns None if no such function is running in this thread.
    """
    return next((f.f_locals["info"] for f in _frames() if "info" in f.f_locals), None)


def is_for_rank_0(asked: Any) -> bool:
    """Whether torch needs the state only on rank 0. ``asked``: the options of torch's call."""
    # With ignore_frozen_params, every rank needs the state: torch first removes frozen parameters
    # from the state, on every rank, and then the whole state on all ranks but 0.
    is_dropped: bool = asked.full_state_dict and asked.cpu_offload
    return is_dropped and not asked.ignore_frozen_params


def check_order(asked: Any, spec: ShardSpec) -> None:
    """Raise if torch's broadcast would change the order of the parameter's elements."""
    if asked.broadcast_from_rank0 and list(spec.order) != sorted(spec.order):
        raise ValueError(
            f"parameter {spec.name!r}: broadcast_from_rank0 sends elements in memory order, which "
            "is wrong for tensors that are not contiguous (channels_last). Pass full tensors on "
            "every rank: StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)."
        )


def is_getting_shards() -> bool:
    """Whether a function such as torch's ``get_state_dict`` is running and asks for shards."""
    getters = [frame for frame in _frames() if frame.f_code.co_name.startswith("get_")]
    return any(not getattr(f.f_locals["options"], "full_state_dict", False) for f in getters)


def _frames() -> Iterator[FrameType]:
    """Yield this thread's stack frames of functions in ``_MODULE``, innermost first."""
    return (frame for frame in callers() if frame.f_globals.get("__name__") == _MODULE)


# ------------------------------------------------------------ torch's get_state_dict


def with_shards(
    optimizer: Optimizer,
    state_dict: StateDict,
    *,
    shared: dict[FlatShardTensor, StateDict] | None = None,
    asked: Any = None,
) -> StateDict:
    """Return a copy of a state dict in which state with one value per element is sharded.

    Args:
        optimizer: the optimizer that has made the state dict, or loads it.
        state_dict: the state dict.
        shared: None if the state dict is loaded. For a checkpoint, the result of
            ``adapter.shared_state``. Then sharded tensors share memory with this rank's parts.
        asked: if torch's ``set_state_dict`` loads, its options. None: ``state_dict`` has this
            rank's parts.
    """
    is_saving = shared is not None
    # State without one value per element must be equal on all ranks. For optimizers that are not
    # element-wise, `shared_state` has already compared this state, or sent it to all ranks.
    may_differ = is_saving and is_elementwise(optimizer)
    is_local = not is_saving and asked is None
    params, states = params_by_key(optimizer, state_dict), dict(state_dict["state"])
    states |= {key: shared[param] for key, param in params.items() if shared and param in shared}
    pairs = ((params.get(key), state) for key, state in states.items())
    numbers = () if is_saving else adapter.numbers_in(pairs)

    def sharded(spec: ShardSpec, name: str, value: Any) -> Any:
        if asked:
            check_order(asked, spec)
        is_number = is_saving or name in numbers
        part = adapter.part_per_element(spec, value, is_local=is_local, is_number=is_number)
        if part is not None:
            if is_saving:
                return state_shard(part, spec, f"{name} of")
            # In its next step, an element-wise optimizer replaces this tensor by this rank's range.
            return FlatShardTensor(part, spec, role=f"{name} of")
        if may_differ and isinstance(value, Tensor) and value.numel() > 1:
            raise ValueError(
                f"state {name!r} of parameter {spec.name!r} ({unit_text(spec.unit)}) has shape "
                f"{tuple(value.shape)}, but ranks can combine only single numbers and one value "
                "per element. Use optimizer.state_dict() on each rank instead."
            )
        return value

    for key, param in params.items():
        if isinstance(param, FlatShardTensor) and isinstance(states.get(key), dict):
            states[key] = map_state(partial(sharded, param.spec), apart(states[key]))
    return {**state_dict, "state": states}


def to_full(states: StateDict, device: torch.device | None, only_rank: int | None) -> None:
    """Replace sharded tensors in the parameters' ``states`` by full tensors, in place.

    Collective: all ranks of the shard groups; for tensor-parallel parameters, all ranks of the
    mesh. ``only_rank``: the rank of the default group that gets the full tensors; other ranks get
    empty tensors. None: all ranks get the full tensors.
    """
    # Gather all tensors of a unit and a name (such as "exp_avg") together. Every rank stores about
    # the same part of these tensors, so all ranks send about the same number of bytes.
    found: dict[tuple[str, str], list[StateShard]] = {}
    own = {key: states[key] for key in sorted(states, key=str) if isinstance(states[key], dict)}
    for name, value in chain(*(adapter.named_values(state).items() for state in own.values())):
        if isinstance(value, StateShard):
            found.setdefault((value.spec.unit, name), []).append(value)
    full: dict[int, Tensor] = {}
    for (_, name), shards in sorted(found.items()):  # all ranks gather in the same order
        parts: list[tuple[ShardSpec, Tensor, int | None]] = []
        for spec, local in ((shard.spec, shard.local) for shard in shards):
            owner = spec.comm.ranks.index(only_rank) if only_rank in spec.comm.ranks else 0
            is_split = spec.tensor_parallel is not None
            parts.append((spec, local, None if is_split or only_rank is None else owner))
        gathered = whole.start_gather(parts, f"full optimizer state {name}")()
        for shard, tensor in zip(shards, gathered, strict=False):
            value = shard.local if tensor is None else shard.spec.unsplit(tensor)
            is_kept = only_rank in (None, shard.spec.comm.global_rank)
            full[id(shard)] = value.to(device) if is_kept else value.new_empty(0)
    for key, state in own.items():
        states[key] = map_state(lambda _, value: full.get(id(value), value), state)


def copied(value: Any, device: torch.device | None = None, *, shares_memory: bool = False) -> Any:
    """Return a deep copy of nested containers, with all tensors on ``device`` if it is given.

    numpy's numbers become Python numbers, so that files can be loaded without running code.
    With ``shares_memory``, a tensor that is already on the device is not copied.
    """

    def copied_leaf(leaf: Any) -> Any:
        if isinstance(leaf, StateShard):
            local = leaf.local.to(device or leaf.local.device, copy=not shares_memory)
            return state_shard(local, leaf.spec, leaf.shard_role)
        if isinstance(leaf, Tensor):
            leaf = leaf if shares_memory else leaf.detach()
            return leaf.to(device or leaf.device, copy=not shares_memory)
        return copy.deepcopy(python_number(leaf))

    return pytree.tree_map(copied_leaf, value)


def python_number(value: Any) -> Any:
    """Return numpy's numbers (``np.float64(0.1)``) as Python numbers, and other values as is."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def check_inner(optimizer: Optimizer, state_dict: StateDict) -> None:
    """Raise ValueError if ``state_dict`` lacks state of an optimizer inside of ``optimizer``."""
    keys = {id(param): key for key, param in params_by_key(optimizer, state_dict).items()}
    for inner in with_inner(optimizer)[1:]:
        for param, state in inner.state.items():
            saved = state_dict["state"].get(keys.get(id(param)), {})
            if id(param) in keys and (missing := sorted(state.keys() - saved.keys())):
                kind, inner_kind = type(optimizer).__name__, type(inner).__name__
                raise ValueError(
                    f"{kind} steps {inner_kind}, but {kind}.state_dict() lacks the state {missing} "
                    f"of {inner_kind}, so a resumed training would differ. Let state_dict() and "
                    f"load_state_dict() of {kind} call those of {inner_kind}."
                )


def params_by_key(optimizer: Optimizer, state_dict: StateDict) -> dict[Any, Any]:
    """Return the optimizer's parameters with the keys of a state dict (positions or names)."""
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    return dict(zip(keys, adapter.all_params(optimizer), strict=False))


# Key of the stamp (the rank, and a digest of the layout), which loading checks. The stamp is in the
# first parameter group, because torch's loading removes unknown top-level keys. If a user loads
# before the first step, flatshard's hooks are not registered yet, so the first step checks the
# stamp.
STAMP = "flatshard"

_ONE_RANKS = (
    "optimizer.state_dict() contains only this rank's parts of sharded parameters, and can be "
    "loaded only on this rank. Save flatshard.checkpoint.full_optim_state_dict(model, optimizer) "
    "instead, and call it on every rank. [FS-OPTIM-STATE]"
)


def check_state(optimizer: Optimizer) -> None:
    """Raise, before a step, if the loaded state is of another rank, layout or optimizer."""
    watch(optimizer)
    for group in optimizer.param_groups:
        if STAMP in group:
            _check_stamp(optimizer, group[STAMP])
            # Delete the stamp only after the check: if the check raises, the next step also raises.
            del group[STAMP]
        # Check only torch's optimizers: other libraries' optimizers may work without some options.
        if not optimizer.defaults.keys() <= group.keys() and adapter.is_torchs_own(optimizer):
            missing, kind = min(optimizer.defaults.keys() - group.keys()), type(optimizer).__name__
            raise RuntimeError(
                f"{kind}.step(): a parameter group has no option {missing!r}, only "
                f"{', '.join(sorted(map(repr, group.keys() - {'params'})))}. The loaded state is "
                f"probably of another class than {kind}. Load state that {kind} has saved."
            )


def watch(optimizer: Optimizer) -> None:
    """Register hooks that put the stamp into state dicts, and check the stamp at loading.

    An optimizer that does not call ``super().__init__()`` (Lookahead) cannot have hooks. But its
    ``state_dict()`` calls the ``state_dict()`` of its inner optimizer, which has hooks.
    """
    for one in with_inner(optimizer):
        saving: Any = getattr(one, "_optimizer_state_dict_post_hooks", None)
        loading: Any = getattr(one, "_optimizer_load_state_dict_pre_hooks", None)
        if saving is not None and _add_stamp not in saving.values():
            one.register_state_dict_post_hook(_add_stamp)
        if loading is not None and unstamped not in loading.values():
            one.register_load_state_dict_pre_hook(unstamped)


def _add_stamp(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    if _request.is_ours:
        return
    stamp, asked = _stamp(optimizer), torch_request()
    if is_elementwise(optimizer) and (asked is None or stamp is None):
        state_dict["state"] = {k: adapter.shown(one) for k, one in state_dict["state"].items()}
    # Call `shared_state` even if "state" is empty: the call also compares the ranks' parameter
    # groups, because NorMuon stores its momenta in a group.
    if stamp is not None and (state_dict["state"] or asked is not None):
        if asked is not None:
            shared = adapter.shared_state(optimizer)
            states = with_shards(optimizer, state_dict, shared=shared)["state"]
            device = torch.device("cpu") if asked.cpu_offload else None
            if asked.full_state_dict:
                to_full(states, device, 0 if is_for_rank_0(asked) else None)
            state_dict["state"] = copied(states, device, shares_memory=True)
            return
        state_dict["param_groups"][0][STAMP] = stamp
        if stamp["rank"] == 0:
            # Warn now. Otherwise users would notice only at loading that the file lacks parts.
            warnings.warn(_ONE_RANKS, stacklevel=5)


class _Request(threading.local):  # other threads may call `state_dict()` at the same time
    is_ours = False  # whether `parts` is calling `state_dict()`


_request = _Request()


def parts(optimizer: Optimizer) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with sharded tensors, and without a stamp."""
    with temporarily([_request], is_ours=True):
        return optimizer.state_dict()


def is_stamped(state_dict: dict[str, Any]) -> bool:
    return any(STAMP in group for group in state_dict["param_groups"])


def unstamped(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Check the stamp of a state dict, and return the state dict without the stamp.

    If torch's ``set_state_dict`` loads, there is no stamp, and full tensors become sharded tensors.
    """
    if not is_stamped(state_dict):
        asked = torch_request()
        return with_shards(optimizer, state_dict, asked=asked) if asked else state_dict
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        if STAMP in group:
            _check_stamp(optimizer, group.pop(STAMP))
    state_dict = {**state_dict, "param_groups": groups}
    return with_shards(optimizer, state_dict) if is_elementwise(optimizer) else state_dict


def _check_stamp(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    own = _stamp(optimizer)
    if own is not None and own["layout"] == saved["layout"]:
        return
    where = "parameters that are not sharded"
    if own is not None:
        where = f"rank {own['rank']} of {own['world_size']}, which holds other parts"
    raise RuntimeError(
        f"optimizer.state_dict() of rank {saved['rank']} of {saved['world_size']} contains only "
        f"that rank's parts of the state, and does not fit {where}. Save flatshard.checkpoint."
        "full_optim_state_dict(model, optimizer), which can be loaded on any number of ranks."
    )


def _stamp(optimizer: Optimizer) -> dict[str, Any] | None:
    """Return the stamp: rank, world size, digest of the layout. None without sharded parameters."""
    specs = [one.spec for one in adapter.all_params(optimizer) if isinstance(one, FlatShardTensor)]
    if not specs:
        return None
    comm, places = specs[-1].comm, [(s.shape, s.strides, s.offset, s.numel) for s in specs]
    digest = hashlib.sha256(repr(places).encode()).hexdigest()
    return {"rank": comm.rank, "world_size": comm.size, "layout": digest}


# ------------------------------------------------------------ the same state on all ranks


def check_same_state(
    values: Mapping[str, Any], host: HostExchange, optimizer: str, *, some_may_lack: bool = False
) -> None:
    """Raise ValueError on all ranks if values with the same name differ between ranks.

    Values differ, for example, if the optimizer itself calls collectives, and updates the state of
    each parameter on only one rank.

    Collective: all ranks of ``host``. ``values`` is the result of ``comparable``. With
    ``some_may_lack``, a name may be missing on some ranks.
    """
    mine = {name: _digest(value) for name, value in values.items()}
    everyone = host.gather(mine, "comparing optimizer state")
    if everyone.count(first := everyone[0]) == len(everyone):
        return  # all ranks agree: skip the loop over ranks
    for rank, theirs in zip(host.ranks, everyone, strict=True):
        for name in {**first, **theirs}:
            pair = first.get(name), theirs.get(name)
            if not _are_close(*pair) and not (some_may_lack and None in pair):
                raise ValueError(
                    f"{name} differs between ranks {host.ranks[0]} and {rank}: {optimizer} keeps "
                    "different state on each rank. Expected equal state, which a checkpoint keeps "
                    "once for all ranks. Save optimizer.state_dict() of each rank in a file of its "
                    "own, and load it on the same rank."
                )


def comparable(
    states: Iterable[tuple[str, StateDict]], groups: Iterable[tuple[int, StateDict]]
) -> dict[str, Any]:
    """Return the values in parameters' states, and the tensors in groups' options."""
    found: StateDict = {}
    for fqn, state in states:
        for name, value in adapter.named_values(state).items():
            if not isinstance(value, FlatShardTensor):
                found[f"state {name!r} of parameter {fqn!r}"] = value
    for number, group in groups:  # NorMuon keeps its momenta in a group's options
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for name, value in adapter.named_values(options).items():
            if isinstance(value, Tensor):
                found[f"option {name!r} of group {number}"] = value
    return found


# Digest of a value: a text (a tensor's dtype and shape, or the `repr`), and sums of the elements.
_Digest = tuple[str, tuple[float, ...]]


def _digest(value: Any) -> _Digest:
    """Return a text and numbers by which ranks compare ``value``.

    On ranks with the same value, texts are equal, and the numbers are close. For a tensor of
    floats, the numbers are the norm, the sum of every second element, and the sum of the first
    half. For any other value, there are no numbers.
    """
    if not isinstance(value, Tensor):
        return repr(value), ()
    text = f"{value.dtype} {tuple(value.shape)}"
    if not value.numel() or not value.is_floating_point():
        return f"{text} {checksum(value)}", ()
    flat = value.detach().reshape(-1)
    parts = flat[::2], flat[: (len(flat) + 1) // 2]
    sums = (flat.norm(dtype=torch.float64), *(part.sum(dtype=torch.float64) for part in parts))
    return text, tuple(map(float, sums))


def _are_close(one: _Digest | None, other: _Digest | None) -> bool:
    """Whether the digests are of the same value. Sums may differ by rounding."""
    if one is None or other is None or one[0] != other[0]:
        return one == other
    pairs = zip(one[1], other[1], strict=False)
    limit = 1e-3 * max((*one[1][:1], *other[1][:1]), default=0.0)
    return all(abs(a - b) <= limit or repr(a) == repr(b) for a, b in pairs)
