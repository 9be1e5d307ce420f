"""``StateDictWrites``: notices writes to a state dict's tensors, as if they were the model's.

``for value in model.state_dict().values(): value.mul_(0.9)`` changes a plain model. The tensors of
a sharded one are copies, and an average of weights that is kept in this way would silently stay
what it was at the start.

[Note: witnesses]
The tensors are often gone before anything of ours runs again. What stays of each is an alias that
has its version counter but not its memory, so it tells of writes and keeps nothing alive.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import Tensor

_NAMED = 3


class StateDictWrites:
    """The copies that one model's state dicts gave last, until one of them was written to."""

    def __init__(self) -> None:
        """Nothing was given."""
        self._witnesses: dict[str, tuple[Tensor, int]] = {}
        self._is_said = False

    def give(self, name: str, copy: Tensor) -> None:
        """Watch a copy of the parameter ``name`` instead of the one given before."""
        if not self._is_said:
            witness = copy.detach()
            witness.data = copy.new_empty(0)
            self._witnesses[name] = witness, witness._version

    def forget(self, names: Iterable[str]) -> None:
        """These parameters were loaded: what was written to copies may have got there."""
        for name in names:
            self._witnesses.pop(name, None)

    def check(self) -> None:
        """Warn, once, if a copy was written to and not loaded. No communication."""
        written = [
            name
            for name, (witness, version) in self._witnesses.items()
            if witness._version != version
        ]
        if not written:
            return
        self._is_said = True
        self._witnesses.clear()
        names = ", ".join(repr(name) for name in written[:_NAMED])
        more = f" and {len(written) - _NAMED} more" if len(written) > _NAMED else ""
        warnings.warn(
            f"tensors of a sharded model's state_dict() are copies: writing to those of {names}"
            f"{more} changed no parameter. Call model.load_state_dict(state) with what was "
            "written, or write to model.parameters(), as torch.optim.swa_utils.AveragedModel "
            "does. This is said once.",
            stacklevel=5,
        )
