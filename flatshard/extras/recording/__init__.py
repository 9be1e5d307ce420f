"""Extra: records the steps of a model, the collectives of a rank, and non-finite gradients.

It only watches: ``StepObserver``s hear of the steps, and a listener of ``Communicator`` of the
collectives. Without this folder, ``ShardedWrapper.record_steps()``, ``step_report()``,
``warn_non_finite()`` and ``flatshard.collectives`` raise an error that names it.
"""

from flatshard.extras.recording.non_finite import watch_non_finite
from flatshard.extras.recording.recording import last_report, record_steps

__all__ = ["last_report", "record_steps", "watch_non_finite"]
