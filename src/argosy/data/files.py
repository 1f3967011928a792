"""Files that are either whole or not there: written beside their final name, synced, then renamed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"
"""Suffix of a file that is being written; nothing reads such a file, and `prepare` removes what a kill left."""


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for writing; it gets its name, and the disk has it, when the block ends without an error."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        yield file
        sync(file)
    partial.replace(path)
    sync_folder(path.parent)


def sync(file: BinaryIO) -> None:
    """Wait until the disk has what was written to `file`."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in `folder`: a rename is only then sure to outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
