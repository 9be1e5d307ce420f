"""``load_safely``: reads files of ``torch.save`` without running code from them.

torch's ``weights_only`` refuses numpy's numbers, such as a learning rate from a numpy schedule.
``NumpyDtype`` and ``number_from_numpy`` load them as Python's, without code of numpy.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

# numpy's names of its number types, with the codes of Python's module struct.
_CODES = dict(zip("f2 f4 f8 b1 i1 i2 i4 i8 u1 u2 u4 u8".split(), "efd?bhiqBHIQ", strict=True))


class NumpyDtype:
    """Replaces ``numpy.dtype``: the type of a number, and the order of the number's bytes."""

    def __init__(self, name: str, *_: object) -> None:
        self.name, self.order = name, "="

    def __setstate__(self, state: Sequence[Any]) -> None:
        self.order = state[1].replace("|", "=")


def number_from_numpy(dtype: NumpyDtype, data: bytes) -> bool | int | float:
    """Return the Python number of a numpy scalar with this dtype and these bytes."""
    if dtype.name not in _CODES:
        raise TypeError(f"the file has a number of numpy's type {dtype.name!r}, which is not real")
    number: bool | int | float = struct.unpack(dtype.order + _CODES[dtype.name], data)[0]
    return number


STAND_INS: list[tuple[Any, str]] = [
    (NumpyDtype, "numpy.dtype"),
    (number_from_numpy, "numpy._core.multiarray.scalar"),
    (number_from_numpy, "numpy.core.multiarray.scalar"),  # the name in numpy before version 2
]
"""Classes and functions that replace those that a file names, with the names in the file."""


def load_safely(file: Any, **options: Any) -> Any:
    """Call ``torch.load`` with ``weights_only``, on the CPU."""
    with torch.serialization.safe_globals([*STAND_INS]):
        return torch.load(file, map_location="cpu", weights_only=True, **options)
