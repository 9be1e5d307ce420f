"""Extra: records the steps of a model, and watches for non-finite gradients.

It only watches, as a ``StepObserver``. Without this folder, ``ShardedWrapper.record_steps()``,
``step_report()`` and ``warn_non_finite()`` raise an error that names it.
"""

from flatshard.extras.recording.non_finite import watch_non_finite
from flatshard.extras.recording.recording import last_report, record_steps

__all__ = ["last_report", "record_steps", "watch_non_finite"]
