"""Idioms of DistributedDataParallel scripts, by what they are about."""

import importlib

from tests.idioms.side import IDIOMS

__all__ = ["IDIOMS"]

for _section in (
    *("loops", "optimizers", "parameters", "models", "layers", "graphs", "states"),
    *("together", "passes", "failures", "walks"),
):
    importlib.import_module(f"tests.idioms.{_section}")
