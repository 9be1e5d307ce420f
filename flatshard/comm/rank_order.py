"""Sums over ranks, in rank order and in no less than fp32: they come out alike anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which values that come in ``dtype`` are added up."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def average(rows: Sequence[Tensor], out: Tensor) -> None:
    """Fill ``out`` with the average of every rank's values.

    Args:
        rows: each rank's, ``(numel,)``, in rank order.
        out: ``(numel,)`` in the dtype to add in.
    """
    # One after the other: a kernel's own sum over ranks would choose an order by the sizes.
    out.copy_(rows[0])
    for row in rows[1:]:
        out.add_(row)
    divide(out, len(rows), out)


def divide(total: Tensor, number: int, out: Tensor) -> None:
    """Fill ``out`` with ``total / number``, elements of the same dtype; may be the same tensor."""
    if number & (number - 1) == 0 and not total.is_complex():
        # To the bit the same for a power of two, in half the time.
        torch.mul(total, 1 / number, out=out)
    else:
        torch.div(total, number, out=out)
