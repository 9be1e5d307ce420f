"""For the notebooks: starts ranks, colours plots, and imports programs from ``scripts/``.

Your own program needs none of this: start it with ``torchrun``.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import compare_strategies
import train_mnist
import train_transformer
from lib.mnist_data import load_digits, load_mnist
from lib.output import COLOURS, PEAK
from lib.rank_processes import launch
from lib.recorded_step import record_step

__all__ = [
    "COLOURS",
    "PEAK",
    "compare_strategies",
    "launch",
    "load_digits",
    "load_mnist",
    "record_step",
    "train_mnist",
    "train_transformer",
]
