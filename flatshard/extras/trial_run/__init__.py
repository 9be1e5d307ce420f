"""Extra: ``flatshard try`` runs a script as it is under DDP and under flatshard, and compares.

``verdict`` starts two runs: the script under DistributedDataParallel, and the script with
``ShardedWrapper`` in its place. If their numbers differ, a third run repeats the first one with
weights changed by one unit in the last place. If the inputs of that run differ, a fourth run, which
repeats the first one as it was, tells why. ``forked_ranks`` starts a process for each rank of a
run. There it puts the classes of ``stand_ins`` in the place of the wrappers, and runs the script;
``recorder`` records tensors at each step. ``compare`` measures differences in units of the rounding
noise that the third run shows.

Without this folder the command line has no ``try``.
"""

from flatshard.extras.trial_run import verdict

__all__ = ["verdict"]
