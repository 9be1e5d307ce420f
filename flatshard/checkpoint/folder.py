"""The folder of a checkpoint: how a save completes it, and how old folders are deleted.

[Note: a checkpoint is either complete or absent]
Ranks write files into ``NAME.incomplete`` and sync them to the disk. Then rank 0 writes the marker
``flatshard.json``, syncs the folder, and renames the folder to ``NAME``. If a process is killed
earlier, ``NAME.incomplete`` stays until the next save. A deletion first undoes the renaming.
"""

import contextlib
import io
import json
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

MARKER = "flatshard.json"
_FORMAT = "flatshard.checkpoint/1"
INCOMPLETE = ".incomplete"


@dataclass(frozen=True)
class FileRecord:
    """The length of a file in bytes, and the file's CRC-32 checksum, as in zip and gzip."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Marker:
    """Content of ``flatshard.json``. Rank 0 writes this file last, into a complete folder."""

    world_size: int
    step: int | None
    files: dict[str, FileRecord]
    saved_at: float = 0.0  # seconds since 1970
    format: str = _FORMAT

    @property
    def lengths(self) -> dict[str, int]:
        return {name: file.bytes for name, file in self.files.items()}


def read_marker(folder: Path) -> Marker | None:
    """Read the marker of a complete checkpoint. Returns None if the checkpoint is incomplete."""
    if folder.name.endswith(INCOMPLETE) or not (folder / MARKER).is_file():
        return None
    try:
        said: dict[str, Any] = json.loads((folder / MARKER).read_text())
        if said["format"] != _FORMAT:
            raise ValueError(f"expected format {_FORMAT!r}, got {said['format']!r}")
        files = {name: FileRecord(**record) for name, record in said.pop("files").items()}
        return Marker(files=files, **said)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        text = f"{folder / MARKER} cannot be read: {error!r}. Load another checkpoint."
        raise ValueError(text) from error


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the most recent complete checkpoint in ``directory``, or None if there is none.

    No communication. All ranks get the same path, unless a save is running.

    Example:
        ```python
        from flatshard import checkpoint

        checkpoint.save("runs/step-1", model)
        checkpoint.save("runs/step-2", model)
        print(checkpoint.latest("runs"))  # runs/step-2
        ```
    """
    return max(_complete_in(Path(directory)), default=(0.0, None))[1]


def _complete_in(directory: Path) -> list[tuple[float, Path]]:
    """Return the time of completion and the path of each complete checkpoint in ``directory``."""
    found: list[tuple[float, Path]] = []
    for folder in directory.iterdir() if directory.is_dir() else ():
        with contextlib.suppress(ValueError):  # leave out checkpoints whose marker is damaged
            if (marker := read_marker(folder)) is not None:
                found.append((marker.saved_at, folder))
    return found


def record_of(path: Path) -> FileRecord:
    piece, crc32, length = memoryview(bytearray(4 << 20)), 0, 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            crc32, length = zlib.crc32(piece[:count], crc32), length + count
    return FileRecord(length, crc32)


def check_sums(folder: Path, marker: Marker, names: Iterable[str]) -> None:
    """Raise ValueError if the content of a file is not the content that was saved."""
    for name in names:
        got, expected = record_of(folder / name), marker.files[name]
        if got != expected:
            raise ValueError(
                f"{folder / name} is corrupted: expected {expected.bytes} bytes with CRC-32 "
                f"{expected.crc32:08x}, got {got.bytes}, {got.crc32:08x}. Load another checkpoint."
            )


def check_lengths(folder: Path, lengths: Mapping[str, int], remedy: str, wait: float = 0) -> None:
    """Wait up to ``wait`` seconds until each file has its expected length. If not, raise."""
    deadline = time.monotonic() + wait
    for name, expected in lengths.items():
        path = folder / name
        while not path.exists() or path.stat().st_size < expected:
            if time.monotonic() < deadline:
                time.sleep(0.1)
            elif path.exists():
                what = f"expected {expected} bytes, got {path.stat().st_size}"
                raise ValueError(f"{path} is incomplete: {what}. {remedy}")
            else:
                raise FileNotFoundError(f"{path} is missing, expected {expected} bytes. {remedy}")


def own_file(rank: int) -> str:
    """Return the name of a rank's file for values outside DCP's files, such as random states."""
    return f"rank-{rank:05d}.pt"


def incomplete(path: Path) -> Path:
    """Return the temporary folder for the files of a save, which is later renamed to ``path``."""
    return path.with_name(path.name + INCOMPLETE)


# ---------------------------------------------------------------- writing


class ZipStream(io.BufferedWriter):
    """A file that ``torch.save`` writes. ``record``: length and checksum of the bytes so far."""

    record = FileRecord(0, 0)

    def write(self, data: Any) -> int:
        # Checksum before writing: it brings the data into the CPU's cache, so the write is faster.
        crc32 = zlib.crc32(data, self.record.crc32)
        count = super().write(data)
        self.record = FileRecord(self.record.bytes + count, crc32)
        return count

    def flush(self) -> None:
        # After an error, torch flushes this stream again, although the stream is already closed.
        if not self.closed:
            super().flush()


@contextlib.contextmanager
def zip_stream(path: str | os.PathLike[str]) -> Iterator[ZipStream]:
    """Open a file for ``torch.save``. A failed write raises OSError, not torch's RuntimeError."""
    with ZipStream(io.FileIO(path, "w")) as stream:
        try:
            yield stream
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


# ---------------------------------------------------------------- writing, on rank 0


def begin(path: Path, keep: int | None) -> None:
    """Make the folder for a save, and delete incomplete folders of earlier saves that were killed.

    An incomplete folder is deleted only if its name and the name of ``path`` differ in nothing but
    numbers. Folders with other names may belong to another training run.
    """
    if keep is not None and (keep < 1 or not re.search(r"\d", path.name)):
        raise ValueError(
            f"keep={keep} with checkpoint {path.name!r}: expected keep >= 1, and a number in the "
            "name ('step-00001000'): keep deletes older checkpoints that differ only in the number."
        )
    if path.exists():
        raise FileExistsError(f"{path} already exists. Save under another name, or delete {path}.")
    for one in sorted(path.parent.glob(f"*{INCOMPLETE}")):
        if _series(one.with_name(one.name.removesuffix(INCOMPLETE))) == _series(path):
            shutil.rmtree(one)
    incomplete(path).mkdir(parents=True)


def finish(path: Path, marker: Marker, keep: int | None) -> None:
    """Write the marker, rename the temporary folder to ``path``, and delete old checkpoints."""
    folder = incomplete(path)
    # Give this save the latest time: if hosts' clocks differ, an earlier save may have a later
    # time. Then `latest` would return the earlier checkpoint, and `keep` would delete this one.
    last = max(_complete_in(path.parent), default=(0.0, None))[0]
    marker = replace(marker, saved_at=max(time.time(), math.nextafter(last, math.inf)))
    # Wait up to 10 s: a network file system may show the files of another host with a delay.
    check_lengths(folder, marker.lengths, "Save on a file system that all hosts share.", wait=10)
    (folder / MARKER).write_text(json.dumps(asdict(marker), indent=1))
    sync(folder / MARKER)
    sync(folder)
    os.rename(folder, path)
    sync(path.parent)
    found = sorted(one for one in _complete_in(path.parent) if _series(one[1]) == _series(path))
    for _, old in found[: -keep if keep else 0]:
        # Rename first: if the program is killed below, the name says that files are missing.
        os.rename(old, incomplete(old))
        shutil.rmtree(incomplete(old))


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _series(path: Path) -> str:
    """Replace each number in the name by 0. All saves of a training run get the same text."""
    return re.sub(r"\d+", "0", path.name)
