"""The idioms of `conformance.py`, by what they are about."""

from . import graphs, layers, loops, models, optimizers, parameters, states
from .side import IDIOMS, Idiom, Side

__all__ = [
    "IDIOMS",
    "Idiom",
    "Side",
    "graphs",
    "layers",
    "loops",
    "models",
    "optimizers",
    "parameters",
    "states",
]
