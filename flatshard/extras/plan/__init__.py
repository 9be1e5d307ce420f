"""Extra: predicts the memory, the communication and the time of training before it runs.

``plan`` (``report``) traces a step of a model on fake tensors (``trace``), and replays the step
under each sharding strategy (``replay``) on a machine (``hardware``). ``predict`` (``shards``)
gives the memory without activations, from the shapes of the parameters alone.

Without this folder, ``flatshard.plan``, ``flatshard.memory_plan`` and ``ShardedWrapper.plan()``
raise, and the command ``flatshard plan`` does not exist.
"""

from flatshard.extras.plan import command_line  # noqa: F401  (the command asks for it)
from flatshard.extras.plan.measured import RankPlan, plan_wrapped  # noqa: F401
from flatshard.extras.plan.report import TrainingPlan, plan
from flatshard.extras.plan.shards import MemoryPlan, UnitMemory, predict
from flatshard.extras.plan.trace import CannotTraceError, selective_contexts

__all__ = [
    "CannotTraceError",
    "MemoryPlan",
    "RankPlan",
    "TrainingPlan",
    "UnitMemory",
    "plan",
    "predict",
    "selective_contexts",
]
