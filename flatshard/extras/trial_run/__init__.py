"""Extra: ``flatshard try`` runs a script as it is under DDP and under flatshard, and compares.

``verdict`` starts up to three runs: the script under DistributedDataParallel; the script with
``ShardedWrapper`` in its place; and, if the numbers differ, the first run once more with weights
changed by one unit in the last place. ``forked_ranks`` starts a process for each rank of a run,
puts the classes of ``stand_ins`` in the place of the wrappers, and runs the script. ``recorder``
records tensors at each step. ``compare`` measures differences in units of the rounding noise that
the third run shows.

Without this folder the command line has no ``try``.
"""

from flatshard.extras.trial_run import verdict

__all__ = ["verdict"]
