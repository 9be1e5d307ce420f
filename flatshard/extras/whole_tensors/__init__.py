"""Extra: steps optimizers that need whole parameters (Muon, LAMB, Adafactor, LBFGS).

``WholeTensorAdapter`` tries copies of an optimizer to find its ``StepMode``: whether the optimizer
can step sharded parameters, or needs full parameters, and on how many ranks. In each step,
``WholeTensorAdapter`` then gives the optimizer sharded or full parameters accordingly.

Without this folder, an optimizer not known to be element-wise raises at the first step on sharded
parameters. The element-wise optimizers of torch, and optimizers passed to
``flatshard.declare_elementwise``, do not need this extra.
"""

from flatshard.extras.whole_tensors.whole_step import WholeTensorAdapter

__all__ = ["WholeTensorAdapter"]
