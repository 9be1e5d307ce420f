"""Extra: predicts the memory, the communication and the time of training before it runs.

``plan`` (in ``report``) traces one step of a model on fake tensors (``trace``). Then ``plan``
replays the step (``replay``) under each sharding strategy on a machine (``hardware``).

Without this folder, ``flatshard.plan`` raises, and the command ``flatshard plan`` does not exist.
"""

from flatshard.extras.plan.hardware import Device
from flatshard.extras.plan.report import TrainingPlan, plan
from flatshard.extras.plan.trace import CannotTraceError, checkpoint_blocks

__all__ = ["CannotTraceError", "Device", "TrainingPlan", "checkpoint_blocks", "plan"]
