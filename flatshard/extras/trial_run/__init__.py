"""Extra: ``flatshard try`` runs an unchanged script under DDP and under flatshard, and compares.

``verdict`` starts two runs of the script: one run under DistributedDataParallel, and one run with
``ShardedWrapper`` instead. If their numbers differ, a third run repeats the first run with weights
changed by one unit in the last place. The third run shows the rounding noise, and ``verdict``
measures the differences in units of this noise. In each process of a run, ``forked_ranks`` replaces
the wrappers, runs the script, and records the tensors of each step as ``sketches``.

Without this folder, the command ``flatshard try`` does not exist.
"""

from flatshard.extras.trial_run import verdict

__all__ = ["verdict"]
