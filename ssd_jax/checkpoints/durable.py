"""Files that have reached the disk."""

from __future__ import annotations

import os
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Writes a new file, readable as the umask says, and has it reach the disk.

    Raises:
      OSError: the disk is full, or cannot be written; part of the file may be there.
    """
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Has the names in a directory reach the disk, so that they, too, survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
