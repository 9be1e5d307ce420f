"""Extra: ``flatshard try`` runs a script as it is under DDP and under flatshard, and compares.

``verdict`` starts two runs: the script under DistributedDataParallel, and the script with
``ShardedWrapper`` in its place. If their numbers differ, a third run repeats the first one with
weights changed by one unit in the last place, and ``verdict`` measures the differences in units of
the rounding noise that the third run shows. ``forked_ranks`` starts a process for each rank of a
run. There it replaces the wrappers, runs the script, and records tensors at each step, in the form
that ``sketches`` explains.

Without this folder the command line has no ``try``.
"""

from flatshard.extras.trial_run import verdict

__all__ = ["verdict"]
