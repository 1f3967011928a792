"""The journal of a running `prepare`: which shards are finished, and where in the input to resume.

It has one JSON line for each cut, synced before work goes on. All files that a line names are complete, so a killed
`prepare` loses only the shards that were open.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from argosy.data.documents import Tally
from argosy.data.manifest import Shard, SplitName
from argosy.data.pieces import InputPiece
from argosy.data.sources import InputFile
from argosy.files import PARTIAL, atomic_write, sync

NAME = "prepare.journal"


@dataclass(frozen=True)
class DocumentPosition:
    """The place of a document among what the workers made of the pieces."""

    piece: int = 0
    chunk: int = 0
    """Its number in the piece; see `work`."""
    start: int = 0
    """The number, in the piece, of the chunk's first text."""
    document: int = 0
    """The first document of the chunk that is in no shard yet."""
    before: Tally = field(default_factory=Tally)
    """Counts at the start of the chunk."""
    files: int = 0
    """At the end of all: the input's files that were read."""


class Cut(BaseModel):
    """Finished shards, at most one for each split."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shards: dict[SplitName, Shard]
    next: DocumentPosition
    """The first document that is not in a shard yet."""


def fingerprint(options: dict[str, Any], files: Sequence[InputFile], pieces: Sequence[InputPiece]) -> str:
    """Hash all that the result depends on, and where the pieces begin, which positions count.

    Input files count by name, size and time of change.
    """
    inputs = [(file.name, file.size, file.stamp) for file in files]
    cuts = [(piece.first, piece.from_byte) for piece in pieces]
    return hashlib.sha256(json.dumps([options, inputs, cuts]).encode()).hexdigest()


class Journal:
    """The journal in a folder. `cuts` are those of an earlier `prepare` of the same input, and those added since."""

    def __init__(self, folder: Path, job: str):
        self._path, self.job = folder / NAME, job
        lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        self.is_of_other_job = len(lines) > 1 and lines[0] != job.encode()
        """True if an earlier `prepare` finished shards here with other options or input."""
        self.cuts = [] if self.is_of_other_job else _whole_cuts(lines[1:])
        if not self.cuts:
            remove_shards(folder)
        with atomic_write(self._path) as file:
            file.writelines(line.encode() + b"\n" for line in (job, *(cut.model_dump_json() for cut in self.cuts)))

    @property
    def next(self) -> DocumentPosition:
        """Where to resume."""
        return self.cuts[-1].next if self.cuts else DocumentPosition()

    def add(self, cut: Cut) -> None:
        """Add `cut`, whose shards have their final names."""
        with self._path.open("ab") as file:
            file.write(cut.model_dump_json().encode() + b"\n")
            sync(file)
        self.cuts.append(cut)

    def remove(self) -> None:
        """Remove the journal, once the manifest is written."""
        self._path.unlink()


def _whole_cuts(lines: Sequence[bytes]) -> list[Cut]:
    """Return the cuts up to a line that a kill left half-written."""
    cuts = []
    for line in lines:
        try:
            cuts.append(Cut.model_validate_json(line))
        except ValidationError:
            break
    return cuts


def remove_shards(folder: Path) -> None:
    """Remove what an earlier `prepare` left."""
    for split in ("train", "validation"):
        for suffix in (".bin", ".idx", ".crc32"):
            for path in (*folder.glob(f"{split}-?????{suffix}"), *folder.glob(f"{split}-?????{suffix}{PARTIAL}")):
                path.unlink()
