"""Extra: predicts the memory, the communication and the time of training before it runs.

``plan`` (in ``report``) traces one step of a model on fake tensors (``trace``). Then ``plan``
replays the step (``replay``) under each sharding strategy on a machine (``hardware``).
``predict`` (in ``planning``) needs only the shapes of the parameters, and returns the memory
without activations.

Without this folder, ``flatshard.plan``, ``flatshard.memory_plan`` and ``ShardedWrapper.plan()``
raise, and the command ``flatshard plan`` does not exist.
"""

from flatshard.extras.plan.hardware import Device
from flatshard.extras.plan.planning import MemoryPlan, RankPlan, UnitMemory, predict
from flatshard.extras.plan.planning import plan_wrapped as plan_wrapped
from flatshard.extras.plan.report import TrainingPlan, plan
from flatshard.extras.plan.report import add_arguments as add_arguments
from flatshard.extras.plan.report import run as run
from flatshard.extras.plan.trace import CannotTraceError, checkpoint_blocks

__all__ = ["CannotTraceError", "Device", "MemoryPlan", "RankPlan", "TrainingPlan", "UnitMemory"]
__all__ += ["checkpoint_blocks", "plan", "predict"]
