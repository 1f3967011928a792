"""Cut documents into shards, and keep the journal of a running `prepare`: which shards are finished, where to resume.

The journal has one JSON line for each cut, synced before work goes on. All files that a line names are complete, so a
killed `prepare` loses only the shards that were open.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from argosy.data.documents import InputPiece, Tally
from argosy.data.manifest import CUTTING_JOURNAL, SHARD_FILES, Shard, SplitName
from argosy.data.packing import Packer
from argosy.data.shards import ShardWriter
from argosy.data.sources import InputFile
from argosy.data.tokenizer import EncodedBatch
from argosy.errors import UserError, counted
from argosy.files import PARTIAL, atomic_write, sync


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


class FinishedShards(BaseModel):
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
        """Raises: UserError if an earlier `prepare` finished shards here with other options or input."""
        self._path, self.job = folder / CUTTING_JOURNAL, job
        lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        self.cuts = _whole_cuts(lines[1:])
        if self.cuts and lines[0] != job.encode():
            raise UserError(
                f"out = {folder}: an interrupted `prepare` of other options or other input has finished "
                f"{counted(sum(len(cut.shards) for cut in self.cuts), 'shard')} here. Repeat it as it was, and it goes "
                f"on; or choose another `out`, or delete {folder} to begin anew."
            )
        if not self.cuts:
            remove_shards(folder)
        with atomic_write(self._path) as file:
            file.writelines(line.encode() + b"\n" for line in (job, *(cut.model_dump_json() for cut in self.cuts)))

    @property
    def next(self) -> DocumentPosition:
        """The position at which to resume."""
        return self.cuts[-1].next if self.cuts else DocumentPosition()

    def add(self, cut: FinishedShards) -> None:
        """Add `cut`, whose shards have their final names."""
        with self._path.open("ab") as file:
            file.write(cut.model_dump_json().encode() + b"\n")
            sync(file)
        self.cuts.append(cut)

    def remove(self) -> None:
        """Remove the journal, once the manifest is written."""
        self._path.unlink()


def _whole_cuts(lines: Sequence[bytes]) -> list[FinishedShards]:
    """Return the cuts up to a line that a kill left half-written."""
    cuts = []
    for line in lines:
        try:
            cuts.append(FinishedShards.model_validate_json(line))
        except ValidationError:
            break
    return cuts


def remove_shards(folder: Path) -> None:
    """Remove what an earlier `prepare` left."""
    for split in ("train", "validation"):
        for suffix in SHARD_FILES:
            for path in (*folder.glob(f"{split}-?????{suffix}"), *folder.glob(f"{split}-?????{suffix}{PARTIAL}")):
                path.unlink()


DATA_SPLITS: tuple[SplitName, SplitName] = ("train", "validation")


class _Documents(NamedTuple):
    """The documents of one split, end to end."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    text_bytes: npt.NDArray[np.int64]

    def split_last(self) -> tuple[_Documents, _Documents]:
        at = len(self.tokens) - int(self.lengths[-1])
        return (
            _Documents(self.tokens[:at], self.lengths[:-1], self.text_bytes[:-1]),
            _Documents(self.tokens[at:].copy(), self.lengths[-1:], self.text_bytes[-1:]),
        )


class _OpenShard:
    """A shard being written. Its last document is held back, since it may change splits; see `Cutter.finish`."""

    def __init__(self, prefix: Path, dtype: np.dtype[Any], packer: Packer | None):
        """packer: packs documents, which are conversations, into rows; None: they are laid end to end."""
        self._prefix, self._dtype, self._packer = prefix, dtype, packer
        self._writer: ShardWriter | None = None
        self._waiting: _Documents | None = None
        self.tokens, self.documents, self._text_bytes = 0, 0, 0

    def add(self, documents: _Documents) -> None:
        if not len(documents.lengths):
            return
        self._write_waiting()
        rest, self._waiting = documents.split_last()
        self._write(rest)
        self._count(documents, 1)

    def take_last(self) -> _Documents:
        assert self._waiting is not None
        last, self._waiting = self._waiting, None
        self._count(last, -1)
        return last

    def close(self) -> Shard | None:
        """Finish the shard and return it; None if it has no documents."""
        self._write_waiting()
        if self._packer is not None:
            self._write_rows(self._packer.flush())
        return self._writer.close(self._text_bytes) if self._writer else None

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.abandon()

    def _write_waiting(self) -> None:
        if self._waiting:
            self._write(self._waiting)
            self._waiting = None

    def _write(self, documents: _Documents) -> None:
        if not len(documents.lengths):
            return
        if self._packer is not None:
            units = np.split(documents.tokens, np.cumsum(documents.lengths)[:-1])
            self._write_rows([row for unit in units for row in self._packer.add(unit)])
        else:
            self._append(documents.tokens, documents.lengths)

    def _write_rows(self, rows: Sequence[Sequence[npt.NDArray[Any]]]) -> None:
        """Write rows, each given as the conversations in it."""
        if units := [unit for row in rows for unit in row]:
            self._append(np.concatenate(units), np.array([len(unit) for unit in units], np.int64))

    def _append(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
        self._writer = self._writer or ShardWriter(self._prefix, self._dtype)
        self._writer.write(tokens, lengths)

    def _count(self, documents: _Documents, sign: int) -> None:
        self.tokens += sign * len(documents.tokens)
        self.documents += sign * len(documents.lengths)
        self._text_bytes += sign * int(documents.text_bytes.sum())


class Cutter:
    """Writes batches to the open shards of both splits; a context manager, which drops unfinished shards.

    When a document does not fit into its split's shard, the shards of both splits end before it. So the finished
    shards always hold the input up to one document, and the journal needs only that document's position. A document
    longer than `shard_tokens` gets a shard for itself. Where conversations are packed, a shard consists of whole rows.

    packer: returns the packer of a new shard, or None if documents are laid end to end.
    """

    def __init__(
        self,
        out: Path,
        dtype: np.dtype[Any],
        shard_tokens: int,
        journal: Journal,
        packer: Callable[[], Packer | None] = lambda: None,
    ):
        self._out, self._dtype, self._shard_tokens, self._journal = out, dtype, shard_tokens, journal
        self._packer = packer
        self._shards = Counter(split for cut in journal.cuts for split in cut.shards)
        self._documents = Counter[SplitName]()
        for cut in journal.cuts:
            self._documents.update({split: shard.documents for split, shard in cut.shards.items()})
        self._open = self._next_shards()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for shard in self._open.values():
            shard.abandon()

    def add(self, position: Callable[[int], DocumentPosition], batch: EncodedBatch) -> None:
        """Write documents, and cut where a shard is full. position: returns that of each document of the batch."""
        ends = np.concatenate(([0], np.cumsum(batch.lengths)))
        start = 0
        while start < len(batch.lengths):
            stop = start + self._room_for(batch.lengths[start:], batch.held_out[start:])
            if stop == start:
                self._cut(position(start))
                continue
            tokens = batch.tokens[ends[start] : ends[stop]]
            lengths, text_bytes = batch.lengths[start:stop], batch.text_bytes[start:stop]
            for split in DATA_SPLITS:
                mine = batch.held_out[start:stop] == (split == "validation")
                self._open[split].add(_Documents(tokens[np.repeat(mine, lengths)], lengths[mine], text_bytes[mine]))
            start = stop

    def finish(self, end: DocumentPosition, wants_validation: bool) -> dict[SplitName, tuple[Shard, ...]]:
        """Finish the last shards and return all shards of each split.

        The hash of a few documents may put all of them into one split. If `wants_validation`, the last document then
        moves to the other split, so that two documents are enough to train on one and evaluate on the other.
        """
        totals = {split: self._documents[split] + self._open[split].documents for split in DATA_SPLITS}
        if wants_validation and sum(totals.values()) > 1 and 0 in totals.values():
            empty, full = sorted(DATA_SPLITS, key=totals.__getitem__)
            self._open[empty].add(self._open[full].take_last())
        self._cut(end)
        return {split: tuple(c.shards[split] for c in self._journal.cuts if split in c.shards) for split in DATA_SPLITS}

    def _room_for(self, lengths: npt.NDArray[np.int64], held_out: npt.NDArray[np.bool_]) -> int:
        """Count the next documents that go into the open shards."""
        room = len(lengths)
        for split in DATA_SPLITS:
            mine = held_out == (split == "validation")
            ends = self._open[split].tokens + np.cumsum(lengths * mine)
            # The first document goes in, whatever its length.
            too_many = mine & (ends > self._shard_tokens) & (ends > lengths)
            if too_many.any():
                room = min(room, int(too_many.argmax()))
        return room

    def _cut(self, next_position: DocumentPosition) -> None:
        closed = {split: shard.close() for split, shard in self._open.items()}
        finished = {split: shard for split, shard in closed.items() if shard is not None}
        self._journal.add(FinishedShards(shards=finished, next=next_position))
        self._shards.update(finished.keys())
        self._documents.update({split: shard.documents for split, shard in finished.items()})
        self._open = self._next_shards()

    def _next_shards(self) -> dict[SplitName, _OpenShard]:
        return {
            split: _OpenShard(self._out / f"{split}-{self._shards[split]:05d}", self._dtype, self._packer())
            for split in DATA_SPLITS
        }
