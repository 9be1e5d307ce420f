"""Extra: records the steps of a model.

It only watches, as a ``StepObserver``. Without this folder, ``ShardedWrapper.record_steps()`` and
``step_report()`` raise an error that names it.
"""

from flatshard.extras.recording.recording import last_report, record_steps

__all__ = ["last_report", "record_steps"]
