"""``pack``: turns nested values into dicts with texts as keys, in which DCP keeps every value.

DCP stores tensors of lists and dicts by themselves. But it pickles a tuple or a deque as a whole,
turns keys into texts, and leaves out empty dicts. ``unpack`` restores these from ``pack``'s
``Form``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

Form = list[Any] | None
"""None: DCP restores the value. Otherwise: name of the type, keys (of a deque: its ``maxlen``), and
a form for each value inside. A file keeps these lists without objects of other types.
"""
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "deque": deque}


def pack(value: Any) -> tuple[Any, Form]:
    """Return ``value`` with dicts in place of containers of tensors, and a form for ``unpack``."""
    if isinstance(value, Mapping):
        keys, values = list(value), list(value.values())
        if any(isinstance(key, Tensor) for key in keys):
            raise TypeError(
                "the optimizer keeps a dict with tensors as keys, which a checkpoint cannot restore"
            )
        is_plain = bool(keys) and all(type(key) is str and "." not in key for key in keys)
        names = keys if is_plain else [str(number) for number in range(len(keys))]
        packed, forms = zip(*map(pack, values), strict=True) if values else ((), ())
        is_kept = is_plain and not any(forms)
        form = None if is_kept else ["dict", keys, list(forms)]
        return dict(zip(names, packed, strict=True)), form
    kind = type(value).__name__
    if type(value) is not _SEQUENCES.get(kind) or (kind != "deque" and not _has_tensors(value)):
        return value, None
    packed, forms = zip(*map(pack, value), strict=True) if value else ((), ())
    length = value.maxlen if kind == "deque" else None
    return {str(number): one for number, one in enumerate(packed)}, [kind, length, list(forms)]


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping | deque):
        # also if the value has no tensors: a file must not contain deques and keys as objects
        return True
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    return isinstance(value, Tensor)


def unpack(packed: Any, form: Form) -> Any:
    """Undo ``pack``. ``packed`` is None for empty dicts, which DCP leaves out."""
    if form is None:
        return packed
    kind, keys, forms = form
    packed = packed or {}
    if kind == "dict":
        is_plain = bool(keys) and all(type(key) is str and "." not in key for key in keys)
        names = keys if is_plain else map(str, range(len(keys)))
    else:
        names = map(str, range(len(forms)))
    values = [unpack(packed.get(name), one) for name, one in zip(names, forms, strict=True)]
    if kind == "dict":
        return dict(zip(keys, values, strict=True))
    return deque(values, keys) if kind == "deque" else _SEQUENCES[kind](values)


def pack_optimizer(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide a sharded state dict of an optimizer into a part for DCP, and the rest.

    The rest are forms, state of the whole optimizer (keys that are no parameters), and entries that
    the optimizer's own ``state_dict()`` adds.
    """
    names = {name for group in state["param_groups"] for name in group["params"]}
    states = {name: pack(one) for name, one in state["state"].items() if name in names}
    groups = [pack(group) for group in state["param_groups"]]
    rest = {
        "forms": {name: form for name, (_, form) in states.items() if form},
        "groups": [form for _, form in groups],
        "state": {key: one for key, one in state["state"].items() if key not in names},
        "entries": {k: one for k, one in state.items() if k not in ("state", "param_groups")},
    }
    packed = {name: one for name, (one, _) in states.items()}
    return {"state": packed, "param_groups": [one for one, _ in groups]}, rest


def unpack_optimizer(packed: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Undo ``pack_optimizer``. ``rest`` is empty if an earlier release saved the checkpoint."""
    states, groups = dict(packed.get("state", {})), packed.get("param_groups", [])
    for name, form in rest.get("forms", {}).items():
        states[name] = unpack(states.get(name), form)
    forms = rest.get("groups") or [None] * len(groups)
    groups = [unpack(group, form) for group, form in zip(groups, forms, strict=True)]
    states.update(rest.get("state", {}))
    return {**rest.get("entries", {}), "state": states, "param_groups": groups}
