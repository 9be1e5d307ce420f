"""Extra: steps optimizers that need whole parameters (Muon, LAMB, Adafactor, LBFGS).

``WholeTensorAdapter`` tries copies of an optimizer to find its ``StepMode``: whether the optimizer
can step sharded parameters, or needs full parameters, and on how many ranks. In each step,
``WholeTensorAdapter`` then gives the optimizer sharded or full parameters accordingly.

Without this folder, an optimizer not known to be element-wise raises at the first step on sharded
parameters. The element-wise optimizers of torch, and optimizers passed to
``flatshard.declare_elementwise``, do not need this extra.
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
from flatshard.optimizer.adapter import Closure, OptimizerAdapter, State, stepping
from flatshard.tensor import reduction_ops
from flatshard.tensor.shard_spec import first_of_dtensor
from flatshard.tensor.sharded_tensor import UNREDUCED, FlatShardTensor

__all__ = ["WholeTensorAdapter"]

_logger = logging.getLogger("flatshard")


class WholeTensorAdapter(OptimizerAdapter):
    """Steps an optimizer not known to be element-wise, in the ``StepMode`` found by trials."""

    def __init__(self) -> None:
        self.mode = StepMode.ON_SHARDS
        # Ids of the parameters with whose gradients, not of zero, the mode was found.
        self._tried: set[int] = set()
        self._has_tried = False
        self._step: WholeStep | None = None
        self._compile_again: Callable[[], object] | None = None

    def begin(self, optimizer: torch.optim.Optimizer, closure: Closure | None) -> Any:
        self._find_mode(optimizer)
        # A trial may have all-gathered parameters, which ends all steps that have begun.
        stepping[optimizer] = self
        if self.mode is StepMode.ON_SHARDS:
            # Run the step eagerly, without compilation. Do not do so if there is a closure, which
            # may run a compiled model: the model must stay compiled.
            if closure is None:
                stance = torch.compiler.set_stance("force_eager")
                # `undo` restores the stance. If a step raises and nobody uses the optimizer again,
                # the finalizer restores the stance when this object is freed.
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
        return without_params(optimizer)  # torch calls ``step()`` of the result: without effect

    def needs_loss(self, optimizer: torch.optim.Optimizer) -> bool:
        # All optimizers of torch call the closure first (LBFGS). So does an optimizer that has no
        # gradients to begin with, or only gradients that the closure's backward will reduce.
        is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        grads = [param.grad for param in sharded_params(optimizer) if param.grad is not None]
        if is_torchs or all(grad in UNREDUCED for grad in grads):
            return True
        self._find_mode(optimizer)
        return self.mode in (StepMode.IN_PARTS, StepMode.ON_OWNERS)

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
        if self._step is None:
            return {}
        if self.mode is StepMode.ON_EVERY_RANK:
            self._step.check_same_state(optimizer)
            return {}
        return self._step.shared_state(optimizer)

    def report(self, ids: Collection[int]) -> str | None:
        if self._step is None or not any(id(param) in ids for param in self._step.owned):
            return None
        return (
            f"steps {self.mode.value}: at most {self._step.extra_bytes():,} bytes in addition to "
            "this rank's shards, gradients and state"
        )

    def _find_mode(self, optimizer: torch.optim.Optimizer) -> None:
        """Set ``mode`` to the ``StepMode`` that the optimizer needs for parameters with gradients.

        Collective: all ranks of the optimizer's sharded parameters.
        """
        sharded = sharded_params(optimizer)
        some = [p for p in sharded if p.grad is not None and id(p) not in self._tried]
        if self.mode is not StepMode.ON_SHARDS or not some:
            return
        # Parameters with a first gradient may need another mode.
        facts = {f"parameter {param.spec.name!r}": "with a gradient" for param in some}
        comms = dict.fromkeys(param.spec.comm for param in sharded)
        agreed(lambda: (True, facts), comms, OP, REMEDY)
        # With gradients of zero, with which torch's get_state_dict steps, an optimizer may skip its
        # computation: DAdaptSGD returns early. So repeat the trial once a gradient is not zero.
        grads: Any = [param.grad for param in some]
        norms = zip(some, reduction_ops.norms(grads, 1.0), strict=True)
        moving = {id(param) for param, norm in norms if norm.item() != 0}
        if self._has_tried and not moving:
            return
        self._has_tried = True
        mode = find_step_mode(optimizer)
        split = first_of_dtensor(param.spec for param in sharded)
        if split is not None and mode is not StepMode.ON_SHARDS:
            raise NotImplementedError(
                f"parameter {split!r} was a DTensor. {type(optimizer).__name__} needs full "
                "parameters, but the ranks of this model together hold only a part of the DTensor. "
                "Step the parameter with an element-wise optimizer, such as AdamW."
            )
        # Warn if every rank gets the full model, which may not fit into the memory of a rank.
        level = logging.WARNING if mode is StepMode.ON_EVERY_RANK else logging.INFO
        _logger.log(level, "%s steps %s", type(optimizer).__name__, mode.value)
        self.mode = mode
        self._tried |= moving


def _once(optimizer: torch.optim.Optimizer, loss: Any) -> Callable[[], Any]:
    """A closure for a single call: returns ``loss``, which the user's closure returned before."""
    losses = [loss]

    def closure() -> Any:
        if losses:
            return losses.pop()
        raise NotImplementedError(
            f"{type(optimizer).__name__}.step() calls its closure several times, but only one rank "
            "has each full parameter during the step. Call step() without a closure."
        )

    return closure
