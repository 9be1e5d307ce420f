"""Extra: finds ranks that wait for one another for ever, and makes them raise; logs long waits.

Used wherever this folder is installed. Without this folder, ranks that exchange values under
different names still raise. Ranks that wait in different collectives wait until the timeout of the
process group, and errors do not name lines of the program.
"""

from flatshard.extras.deadlock.watchdog import WATCH

__all__ = ["WATCH"]
