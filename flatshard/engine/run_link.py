"""``RunLink``: what the parts of one flat parameter know of the run that it takes part in."""

from __future__ import annotations

from dataclasses import dataclass, field

from flatshard.comm.work import PendingSends


@dataclass(eq=False)
class RunLink:
    """Shared by them, because both change when a module around the unit is wrapped."""

    unit_name: str  # for errors
    # What other ranks may still be reading; one list for all flat parameters of a run.
    pending_sends: PendingSends = field(default_factory=PendingSends)
