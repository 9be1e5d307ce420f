"""Extra: steps optimizers that look at whole parameters (Muon, LAMB, Adafactor, LBFGS).

Without this folder, such an optimizer raises at its first step on sharded parameters. torch's own
element-wise optimizers, and those in ``flatshard.declare_elementwise``, need no extra.
"""

from flatshard.extras.whole_tensors.whole_stepper import WholeStepper

__all__ = ["WholeStepper"]
