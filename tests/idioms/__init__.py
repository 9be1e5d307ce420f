"""Idioms of DistributedDataParallel scripts, by what they are about.

Sections in `TABLED` are in the table of `docs/evidence.md`; the others are only tested.
"""

from tests.idioms import (
    failures,
    graphs,
    layers,
    loops,
    models,
    optimizers,
    parameters,
    passes,
    states,
    together,
)
from tests.idioms.side import IDIOMS

TABLED = (loops, optimizers, parameters, models, layers, graphs, states)
TESTED = (failures, passes, together)

__all__ = ["IDIOMS", "TABLED", "TESTED"]
