"""Extras: each folder here adds one thing to the core, and can be deleted.

The core finds extras through the table ``EXTRAS`` in ``flatshard.options.extras``. The functions
below format tables for several extras.
"""

from collections.abc import Collection, Sequence


def tabulate(table: Sequence[Sequence[str]], *, numbers: Collection[int]) -> str:
    """Align cells in columns, flush right in the columns whose indices are in ``numbers``."""
    columns = []
    for index, column in enumerate(zip(*table, strict=True)):
        width = max(map(len, column))
        align = str.rjust if index in numbers else str.ljust
        columns.append([align(cell, width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def show_bytes(count: int) -> str:
    """Return a number of bytes as text in B, KiB, MiB or GiB."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{count} B"
