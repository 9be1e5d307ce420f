"""``Machine``: speeds of devices and links, and the durations of operators and collectives.

The time of an operator follows the roofline model (Williams, Waterman and Patterson, 2009): the
duration is the time for the arithmetic or the time for the memory traffic, whichever is longer.
"""

import math
import re
from dataclasses import dataclass
from functools import partial

from flatshard.extras import show_bytes
from flatshard.extras.plan.trace import Op

# Fractions of a data sheet's peaks that large kernels reach: matrix products of cuBLAS, flash
# attention (0.4 on Hopper, see arXiv 2407.08608; 0.6 on Ampere, see arXiv 2307.08691), and copies.
_MATMUL, _ATTENTION, _COPY = 0.75, 0.42, 0.9
_KERNEL_SECONDS = 4e-6  # time between the starts of two small kernels
# Share of a GPU's multiprocessors that the kernel of one NCCL collective occupies (15 %, see
# NVIDIA/nccl#1432). No other kernel runs on these multiprocessors (NVIDIA/nccl#689).
COLLECTIVE_SHARE = 0.15


def amount(value: float | str) -> float:
    """Return a number, or read a text such as ``80GB``, ``80GiB``, ``50GB/s`` or ``990T``.

    Raises ValueError if the text is no amount.
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"([0-9.]+)\s*([KMGTP]?)(i?)(B|FLOPS)?(/s)?", value.strip())
    if found is None:
        raise ValueError(f"expected an amount such as 80GB or 990T, got {value!r}")
    number, unit, binary = found.group(1, 2, 3)
    return float(number) * (1024 if binary else 1000) ** " KMGTP".index(unit or " ")


# Returns a number of bytes as text in powers of 1000, as in ``80GB``.
show = partial(show_bytes, base=1000)


@dataclass(frozen=True)
class Device:
    """Sustained speeds of one device.

    Attributes:
        flops: floating point operations per second in large matrix products.
        attention_flops: floating point operations per second in attention kernels.
        memory_rate: bytes per second that kernels read and write.
        memory_bytes: memory of the device.
        is_gpu: whether the device is a GPU, so that operators run as GPU kernels, and NCCL runs the
            collectives. On a CPU, gloo runs the collectives, and copies all bytes before sending.
    """

    flops: float
    attention_flops: float
    memory_rate: float
    memory_bytes: float
    is_gpu: bool = True

    @classmethod
    def of_data_sheet(
        cls, flops: float, memory_rate: float, memory_bytes: float, attention: float = _ATTENTION
    ) -> "Device":
        """Estimate a GPU's sustained speeds from the peak speeds in the maker's data sheet.

        ``attention``: the part of the peak ``flops`` that attention kernels reach.
        """
        return cls(_MATMUL * flops, attention * flops, _COPY * memory_rate, memory_bytes)

    def seconds(self, op: Op, busy: float = 0.0) -> float:
        """Return the duration of an operator. ``busy``: seconds until running collectives end."""
        rate = self.attention_flops if op.is_attention else self.flops
        seconds, share = op.flops / rate, COLLECTIVE_SHARE * self.is_gpu
        seconds = min(seconds / (1 - share), seconds + share * max(0.0, busy))
        return max(seconds, op.nbytes / self.memory_rate, _KERNEL_SECONDS * self.is_gpu)


_GIB = 2**30
# Peaks from the makers' data sheets: bfloat16 operations per second (without sparsity), and bytes
# per second. The third number is the memory that torch reports.
DEVICES = {
    "v100": Device.of_data_sheet(125e12, 0.9e12, 31.7 * _GIB),
    "a100-40gb": Device.of_data_sheet(312e12, 1.555e12, 39.4 * _GIB, attention=0.6),
    "a100": Device.of_data_sheet(312e12, 2.039e12, 79.1 * _GIB, attention=0.6),
    "h100-96gb": Device.of_data_sheet(989e12, 2.4e12, 95.0 * _GIB),
    "h100": Device.of_data_sheet(989e12, 3.35e12, 79.1 * _GIB),
    "h200": Device.of_data_sheet(989e12, 4.8e12, 139.8 * _GIB),
    "b200": Device.of_data_sheet(2250e12, 8.0e12, 178.4 * _GIB),
    "gb200": Device.of_data_sheet(2500e12, 8.0e12, 184.0 * _GIB),
    "mi300x": Device.of_data_sheet(1307e12, 5.3e12, 191.5 * _GIB),
    "mi325x": Device.of_data_sheet(1307e12, 6.0e12, 255.5 * _GIB),
    "mi355x": Device.of_data_sheet(2517e12, 8.0e12, 287.5 * _GIB),
    "l40s": Device.of_data_sheet(362e12, 0.864e12, 44.4 * _GIB),
    "rtx4090": Device.of_data_sheet(165e12, 1.008e12, 23.6 * _GIB),
}


@dataclass(frozen=True)
class Machine:
    """Devices and their links. ``plan`` explains ``per_node``, ``node_link`` and ``link``."""

    device: Device
    per_node: int = 8
    node_link: float = 450e9
    link: float = 50e9
    latency: float = 5e-6  # minimum seconds per message

    def collective_seconds(self, nbytes: float, size: int, in_node: int) -> float:
        """Seconds of an all-gather or a reduce-scatter of ``nbytes`` in a ring of ``size`` ranks.

        ``in_node`` ranks of the ring are in one node. An all-reduce takes twice the time.
        """
        if size == 1:
            return 0.0
        # A ring enters each node once. With several rings, the links of all ranks of a node are in
        # use, so the rate is the sum of the rates of these links.
        rate = min(self.node_link, self.link * in_node if size > in_node else math.inf)
        # Several rings or trees run at once, so latency grows with the logarithm of the size.
        return nbytes * (size - 1) / size / rate + self.latency * (size - 1).bit_length()
