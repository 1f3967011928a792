"""Fetching a file, or a part of one, from another site: in pieces, several under way, from where it broke off."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from argosy.files import sync
from argosy.processes.messages import WireRecord
from argosy.sync.sites.messages import PIECE_BYTES, PieceRequest, Source

AHEAD_BYTES = 1 << 23
"""Bytes that are asked for before they come: what a link of 1 Gbit/s and 60 ms holds."""


@dataclass(frozen=True)
class Wanted:
    """Bytes that another site has."""

    what: Source
    round: int
    attempt: int
    start: int
    """First byte within the whole."""
    size: int


class PulledFile:
    """One such transfer. What has come is in a file, which another process of the exchange goes on with."""

    def __init__(self, wanted: Wanted, peer: str, path: Path):
        self.wanted, self.peer, self.path = wanted, peer, path
        self._file = path.open("a+b")
        self.received = min(self._file.seek(0, os.SEEK_END), wanted.size)
        self._file.truncate(self.received)
        self._asked = self.received

    @property
    def is_done(self) -> bool:
        """True once all has come."""
        return self.received >= self.wanted.size

    def again(self) -> None:
        """Ask again for what has not come: the connection broke."""
        self._asked = self.received

    @property
    def under_way(self) -> int:
        """Bytes that were asked for and have not come."""
        return self._asked - self.received

    def ask(self, send: Callable[[WireRecord], None], others: int = 0) -> None:
        """Ask for as much as may be under way. others: bytes of other transfers that are."""
        of = self.wanted
        while self._asked < self.wanted.size and self.under_way + others < AHEAD_BYTES:
            size = min(PIECE_BYTES, self.wanted.size - self._asked)
            send(PieceRequest(
                what=of.what, round=of.round, attempt=of.attempt, start=of.start, at=self._asked, bytes=size
            ))  # fmt: skip
            self._asked += size

    def take(self, at: int, data: bytes) -> None:
        """Keep a piece; one that is not the next is left out."""
        if at == self.received and len(data) <= self.wanted.size - at:
            self._file.write(data)
            self.received += len(data)
            if self.is_done:
                self._file.flush()

    def checksum(self) -> int:
        """Return the CRC-32 of all that came."""
        return zlib.crc32(self.content())

    def content(self) -> bytes:
        """Return all that came."""
        self._file.flush()
        return self.path.read_bytes()

    def move(self, path: Path) -> None:
        """Give the file, all of which is on the disk then, another name."""
        sync(self._file)
        self.path.replace(path)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def forget(self) -> None:
        """Begin anew: what came was not what was sent."""
        self._file.truncate(0)
        self._file.seek(0)
        self.received = self._asked = 0


def read_piece(path: Path, at: int, size: int) -> bytes | None:
    """Return `size` bytes of a file, from byte `at` on; None if it is not there, or ends before them."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            data = file.read(size)
    except OSError:
        return None
    return data if len(data) == size else None
