"""Extra: optimizers that step each unit in backward, as soon as its gradients are reduced.

Without this folder, ``ShardedWrapper.step_in_backward()`` raises an error that names it.
"""

from flatshard.extras.step_in_backward.in_backward import register

__all__ = ["register"]
