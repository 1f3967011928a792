"""The sidecar `NAME.crc32`: one CRC-32 for each block of `NAME.bin`, little-endian uint32 after uint32.

Checking a checksum of the whole file would take a full read before the first step. With one for each block, a block is
read when it is first used, and a flipped byte is still found before its tokens reach the model.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from argosy.files import atomic_write

BLOCK_BYTES = 256 * 1024
"""Bytes of .bin under one checksum: large enough for one efficient read, small enough to check in no time."""


class BlockChecksums:
    """Computes the checksums of a stream of bytes that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._finished: list[int] = []
        self._crc, self._room = 0, BLOCK_BYTES

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the stream."""
        view = memoryview(data)
        while view:
            head, view = view[: self._room], view[self._room :]
            self._crc = zlib.crc32(head, self._crc)
            self._room -= len(head)
            if not self._room:
                self._close_block()

    def to_bytes(self) -> bytes:
        """End the stream and return the checksums of all blocks, including the last, shorter one."""
        if self._room < BLOCK_BYTES:
            self._close_block()
        return np.array(self._finished, "<u4").tobytes()

    def write(self, path: Path) -> None:
        """End the stream and write its checksums to `path`."""
        with atomic_write(path) as file:
            file.write(self.to_bytes())

    def _close_block(self) -> None:
        self._finished.append(self._crc)
        self._crc, self._room = 0, BLOCK_BYTES


def write_checksums(bin_path: Path) -> None:
    """Write the sidecar for a .bin that has none."""
    checksums = BlockChecksums()
    with bin_path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            checksums.update(block)
    checksums.write(bin_path.with_suffix(".crc32"))


def read_checksums(path: Path) -> npt.NDArray[np.uint32] | None:
    """Return the checksums in `path`, or None if there is no such file (shards of other programs)."""
    return np.fromfile(path, "<u4") if path.is_file() else None
