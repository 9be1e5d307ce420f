"""Steps only some parameters of an optimizer, for three extras.

The extra ``whole_tensors`` steps full parameters, ``disk`` steps a part of the shards at a time,
and ``step_in_backward`` steps the parameters of a unit.
"""

from typing import Any

import torch

from flatshard.engine.run_state import temporarily
from flatshard.optimizer import adapter as adapters
from flatshard.optimizer.adapter import Optimizer, adapter_of, unhooked
from flatshard.precision import check_dtype


def step_unhooked(optimizer: Optimizer, *arguments: Any) -> None:
    """Call ``optimizer.step()`` without the hooks of the optimizer."""
    step: Any = type(optimizer).step
    # Bypass torch's wrapper around `step`, which would call the hooks. If `step` calls
    # `super().step()`, flatshard's hooks do nothing there, because `unhooked` is not empty.
    unhooked.append(optimizer)
    try:
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer, *arguments)
    finally:
        unhooked.pop()


def step_groups(optimizer: Optimizer, groups: list[dict[str, Any]], *arguments: Any) -> str | None:
    """Step the parameters in ``groups`` instead of the optimizer's own groups, without hooks.

    Returns the name of an option that the step has changed in a group, or None if there is none.
    """
    before = [_options(group) for group in groups]
    with temporarily([optimizer], param_groups=groups):
        step_unhooked(optimizer, *arguments)
    both = zip(before, map(_options, groups), strict=True)
    return next((key for old, new in both for key in new if new[key] != old.get(key)), None)


def _options(group: dict[str, Any]) -> dict[str, str]:
    return {key: repr(value) for key, value in group.items() if key != "params"}


def step_parts(optimizer: Optimizer, parts: list[dict[str, Any]]) -> None:
    """Step only the parameters in ``parts``. Results are bitwise the same as those of ``step()``.

    The optimizer must be element-wise. Its hooks are not called. ``parts``: copies of parameter
    groups, each with consecutive parameters of the group. So the same neighbours as in ``step()``
    are stepped together, as one range (bucket) of a flat shard. Raises NotImplementedError if the
    optimizer changes an option of a group in each step.
    """
    adapter = adapter_of(optimizer)
    assert isinstance(adapter, adapters.BucketAdapter), "element-wise"
    try:
        with torch.no_grad():
            for part in parts:
                for param in part["params"]:
                    check_dtype(optimizer, part, param)
            adapter.swap_in(optimizer, parts)
            changed = step_groups(optimizer, parts)
    finally:
        adapter.undo(optimizer)
        for extension in adapters.extensions:
            for part in parts:
                extension.after_part(optimizer, part["params"])
    if changed is not None:
        raise NotImplementedError(
            f"{type(optimizer).__name__}.step() changes {changed!r} of a parameter group, which "
            "step_in_backward() would repeat for each unit. Step this optimizer after backward."
        )
