"""Extra: steps optimizers that look at whole parameters (Muon, LAMB, Adafactor, LBFGS).

``WholeStepper`` finds out what an optimizer needs to see of sharded parameters, and shows the
optimizer that.

Without this folder, such an optimizer raises at its first step on sharded parameters. torch's own
element-wise optimizers, and those in ``flatshard.declare_elementwise``, need no extra.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch

from flatshard.comm.consistency import agreed
from flatshard.extras.whole_tensors.trial import StepMode, find_step_mode, without_params
from flatshard.extras.whole_tensors.whole_step import OP, REMEDY, WholeStep, sharded_params
from flatshard.optimizer.stepper import Closure, State, Stepper
from flatshard.tensor.shard_spec import first_of_dtensor
from flatshard.tensor.sharded_tensor import FlatShardTensor

__all__ = ["WholeStepper"]

_logger = logging.getLogger("flatshard")


class WholeStepper(Stepper):
    """Steps one optimizer that is not known to be element-wise, in its ``StepMode``."""

    def __init__(self) -> None:
        self.mode = StepMode.ON_SHARDS
        self._tried: set[int] = set()  # ids of the parameters with which the mode was found
        self._step: WholeStep | None = None
        self._compile_again: Callable[[], object] | None = None

    def begin(self, optimizer: torch.optim.Optimizer, closure: Closure | None) -> Any:
        self._find_mode(optimizer)
        if self.mode is StepMode.ON_SHARDS:
            if closure is None:  # a closure may run a compiled model
                stance = torch.compiler.set_stance("force_eager")
                # Also where an optimizer that raised is dropped.
                self._compile_again = weakref.finalize(self, stance.__exit__, None, None, None)
            return optimizer
        step = self._step
        if step is None or not step.is_of(optimizer):
            step = self._step = WholeStep(optimizer, self.mode, step)
        if self.mode is StepMode.ON_EVERY_RANK:
            step.swap_in(optimizer)
            if closure is not None:
                closure.loss = step.average(closure.loss)
            return optimizer
        with torch.no_grad():
            step.step(optimizer, [] if closure is None else [_once(optimizer, closure.loss)])
        return without_params(optimizer)  # the step has been made

    def pause(self, optimizer: torch.optim.Optimizer) -> None:
        if self._step is not None:
            self._step.write_back()

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        self.pause(optimizer)
        self.undo(optimizer)

    def undo(self, optimizer: torch.optim.Optimizer) -> None:
        if self._step is not None:
            self._step.undo()
        if self._compile_again is not None:
            self._compile_again()

    def shared_state(self, optimizer: torch.optim.Optimizer) -> dict[FlatShardTensor, State]:
        if self._step is None or self.mode is StepMode.ON_EVERY_RANK:
            return {}
        return self._step.shared_state(optimizer)

    def report(self, ids: Collection[int]) -> str | None:
        if self._step is None or not any(id(param) in ids for param in self._step.owned):
            return None
        return (
            f"steps {self.mode.value}: at most {self._step.extra_bytes():,} bytes beside this "
            "rank's shards, gradients and state"
        )

    def _find_mode(self, optimizer: torch.optim.Optimizer) -> None:
        """Find how the optimizer steps the parameters that have gradients now.

        Collective: all ranks of its sharded parameters.
        """
        sharded = sharded_params(optimizer)
        some = [param for param in sharded if param.grad is not None]
        with_grads = {id(param) for param in some}
        if self.mode is not StepMode.ON_SHARDS or with_grads <= self._tried:
            return
        # The optimizer may need something else for parameters that it has not stepped yet.
        facts = {f"parameter {param.spec.name!r}": "with a gradient" for param in some}
        comms = dict.fromkeys(param.spec.comm for param in sharded)
        agreed(lambda: (True, facts), comms, OP, REMEDY)
        mode = find_step_mode(optimizer)
        split = first_of_dtensor(param.spec for param in sharded)
        if split is not None and mode is not StepMode.ON_SHARDS:
            raise NotImplementedError(
                f"parameter {split!r} was a DTensor, and {type(optimizer).__name__} "
                "needs full parameters: of those this rank's group holds a part. Use an "
                "element-wise optimizer, such as AdamW, for it."
            )
        # A model that is sharded because it does not fit is then full on each device.
        level = logging.WARNING if mode is StepMode.ON_EVERY_RANK else logging.INFO
        _logger.log(level, "%s steps %s", type(optimizer).__name__, mode.value)
        self.mode = mode
        self._tried |= with_grads


def _once(optimizer: torch.optim.Optimizer, loss: Any) -> Callable[[], Any]:
    """A closure that ran before the step, for an optimizer that calls it once."""
    losses = [loss]

    def closure() -> Any:
        if losses:
            return losses.pop()
        raise NotImplementedError(
            f"{type(optimizer).__name__}.step() calls its closure several times, and needs full "
            "parameters, each of which one rank alone has meanwhile. Step it without a closure."
        )

    return closure
