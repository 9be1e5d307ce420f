"""Extras: each folder here adds one thing to the core, and can be deleted.

The core finds extras through the table ``EXTRAS`` in ``flatshard.options.extras``. Several extras
share the functions below, which format tables, and ``mapped_files``.
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


def show_bytes(count: float, base: int = 1024) -> str:
    """Return a number of bytes as text in KiB, MiB or GiB; in kB, MB or GB if ``base`` is 1000."""
    unit, *larger = ("B", "KiB", "MiB", "GiB") if base == 1024 else ("B", "kB", "MB", "GB")
    while count >= base and larger:
        count, unit, *larger = count / base, *larger
    return f"{count:.{int(unit != 'B')}f} {unit}"
