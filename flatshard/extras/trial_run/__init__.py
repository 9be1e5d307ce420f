"""Extra: ``flatshard try`` runs a script as it is under DDP and under flatshard, and compares.

``command`` starts up to three runs: the script under DistributedDataParallel; the script with
``ShardedWrapper`` in its place; and, if the numbers differ, the first run once more with weights
changed by one unit in the last place. ``launch`` starts the ranks of a run. In each rank, ``rank``
replaces the names of the wrappers by the classes of ``wrappers``, and runs the script; ``recorder``
records tensors at each step. ``compare`` measures differences in units of the rounding noise that
the third run shows.

Without this folder the command line has no ``try``.
"""

from flatshard.extras.trial_run import command

__all__ = ["command"]
