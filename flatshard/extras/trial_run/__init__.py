"""Extra: ``flatshard try`` runs a script as it is under DDP and under flatshard, and compares.

The launcher (``command``) starts the ranks of up to three runs (``launch``): the reference under
DistributedDataParallel; the same script with ``ShardedWrapper`` in its place; and, if the two
differ, the reference once more with initial weights changed by one unit in the last place. Each
rank (``rank``) replaces the names of the wrappers (``wrappers``), records tensors at every step
(``recorder``), and runs the script. ``compare`` then measures differences in units of the rounding
noise that the third run shows.

Without this folder the command line has no ``try``.
"""

from flatshard.extras.trial_run import command

__all__ = ["command"]
