"""Writing one rank's part of a checkpoint: its file, the note beside it, the first rank's commit.

Ranks do not talk: each leaves a note with the size and checksum of its file in the checkpoint's partial folder. Of each
RANKS_OF_A_HEAD ranks, a group, the head, which is the first of them, waits for the notes of the others and sums them up
in one; rank 0 waits for those of its own group and of the other heads. So no process looks at more files again and
again than a group has ranks, or than there are groups. What a dead attempt left there has another ticket.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from argosy.checkpoint import fence, store
from argosy.checkpoint.checksums import FileSum, shard_name
from argosy.checkpoint.manifest import CheckpointManifest
from argosy.credentials import redact
from argosy.errors import ArgosyError
from argosy.faults import fault
from argosy.files import atomic_write, json_of, make_folder

WRITE_BYTES, CHUNKS = 4 * 2**20, 16
"""A file is written in chunks of at most so many bytes, and in at least so many chunks."""
SYNC_BYTES = 64 * 2**20
"""Bytes that are written through to the disk before the kernel gets more: dirty pages do not pile up, and the file's
size shows the first rank that it advances."""
STALL_S = 120.0
"""A checkpoint is given up once the parts that are waited for have not grown for so long."""
MORE_PATIENT = 1.25
"""The first rank waits this many times as long for other groups: their heads know what is missing."""
RANKS_OF_A_HEAD = 128
"""Ranks whose notes their head sums up: about the square root of the largest number of ranks."""
PROGRESS_S = 1.0
"""Shortest interval between calls of `progress`, and between looks at the sizes of files."""


@dataclass(frozen=True)
class SaveOrder:
    """One rank's part of one attempt at a checkpoint."""

    run_dir: str
    ticket: str
    """Name of the attempt, the same on all ranks."""
    generation: int
    step: int
    rank: int
    size: int
    bytes: int
    """Size of the snapshot, which is to become this rank's file."""
    began_s: float
    """Time at which training asked for it, on the machine's monotonic clock."""
    manifest: dict[str, Any]
    """The checkpoint's manifest as a record, still without files."""

    @property
    def partial(self) -> Path:
        """The folder that all ranks write in."""
        return fence.partial_folder(Path(self.run_dir), self.step, self.generation)

    @property
    def file(self) -> Path:
        return self.partial / shard_name(self.rank)

    def note_of(self, rank: int) -> Path:
        """Return where `rank` leaves the note of how its part went."""
        return self.partial / f"rank-{rank:05d}.json"

    def summary_of(self, head: int) -> Path:
        """Return where a head leaves the note of its group; what stands there while it waits grows as its parts do."""
        return self.partial / f"rank-{head:05d}.group.json"

    @property
    def is_head(self) -> bool:
        """True if this rank sums up its group."""
        return self.rank % RANKS_OF_A_HEAD == 0

    @property
    def members(self) -> range:
        """The other ranks of this one's group, if it is the head."""
        return range(self.rank + 1, min(self.rank + RANKS_OF_A_HEAD, self.size)) if self.is_head else range(0)

    def check_generation(self) -> None:
        """Raises: Fenced if a later generation has begun."""
        fence.check_generation(Path(self.run_dir), self.generation)


@dataclass(frozen=True)
class PartNote:
    """Outcome of a rank's part, or of a group's parts."""

    ticket: str
    files: tuple[tuple[int, str], ...] = ()
    """Size and SHA-256 of each file, by rank; none if there is an error."""
    error: str = ""

    @classmethod
    def read(cls, path: Path, ticket: str) -> PartNote | None:
        """Return the note at `path` if there is one, and it is of this attempt."""
        try:
            record = json_of(path.read_bytes())
            files = tuple((int(size), str(sha256)) for size, sha256 in record["files"])
            note = cls(str(record["ticket"]), files, str(record["error"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return note if note.ticket == ticket else None

    def write(self, path: Path) -> None:
        """Leave the note at `path`. Raises: OSError."""
        with atomic_write(path) as file:
            file.write(json.dumps(asdict(self)).encode())


def commit_part(order: SaveOrder, snapshot: int, progress: Callable[[], None] = lambda: None) -> int:
    """Write this rank's part; as a head, sum up those of its group; as the first rank, commit when all are there.

    `snapshot`: descriptor of the file in memory that is to be written. `progress` is called while it goes on.
    Returns the bytes of the part, or, on the first rank, of the checkpoint.
    Raises: OSError, Fenced; on a head if any part of its group fails, on the first rank if any part does, and then
    nothing of the checkpoint is left.
    """
    pulse = _Pulse(progress)
    if order.rank:
        mine = _write_and_tell(order, snapshot, pulse)
        if order.is_head:
            _sum_up(order, mine, pulse)
        return mine.bytes
    try:
        order.check_generation()
        store.sweep(Path(order.run_dir), order.generation, before_step=order.step)
        mine = _write_and_tell(order, snapshot, pulse)
        others = range(RANKS_OF_A_HEAD, order.size, RANKS_OF_A_HEAD)
        files = [mine, *_gather(order, _of_members(order), STALL_S, pulse)]
        files += _gather(order, [_of_group(order, head) for head in others], MORE_PATIENT * STALL_S, pulse)
        by_name = {shard_name(rank): file for rank, file in enumerate(files)}
        manifest = replace(CheckpointManifest.from_record(order.manifest), files=by_name)
        return store.commit(order.partial, manifest).bytes
    except (OSError, ArgosyError):
        store.discard(order.partial)
        raise


def leave_note(order: SaveOrder, note: PartNote) -> None:
    """Leave the note of how this rank's part went; a failure of a head's is one of its group. Raises: OSError."""
    _make_partial(order)
    note.write(order.note_of(order.rank))
    if note.error and order.is_head:
        note.write(order.summary_of(order.rank))


def _make_partial(order: SaveOrder) -> None:
    """Make the folder that is to become the checkpoint; its own name is synced when it does."""
    make_folder(order.partial.parent)
    order.partial.mkdir(exist_ok=True)


def words(problem: BaseException) -> str:
    """Return a problem in a line, in the system's own words if it has some: "[Errno 28] No space left on device"."""
    line = redact((str(problem).splitlines() or [""])[0])
    return line if isinstance(problem, OSError | ArgosyError) and line else f"{type(problem).__name__}: {line}"


class _Pulse:
    """Calls `progress` while something goes on, but not too often."""

    def __init__(self, progress: Callable[[], None]):
        self._progress, self._called_s = progress, time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._called_s >= PROGRESS_S:
            self._called_s = time.monotonic()
            self._progress()


def _write_and_tell(order: SaveOrder, snapshot: int, pulse: _Pulse) -> FileSum:
    try:
        order.check_generation()
        _make_partial(order)
        order.file.unlink(missing_ok=True)  # a new file, so that a dying writer does not write to this one
        part = _write(order, snapshot, pulse)
        leave_note(order, PartNote(order.ticket, ((part.bytes, part.sha256),)))
    except OSError as problem:
        with suppress(OSError):
            order.file.unlink(missing_ok=True)  # on a full disk the note needs its room
        with suppress(OSError):
            leave_note(order, PartNote(order.ticket, error=words(problem)))
        raise
    return part


def _write(order: SaveOrder, snapshot: int, pulse: _Pulse) -> FileSum:
    """Copy the snapshot to the disk, hashing it on the way."""
    digest = hashlib.sha256()
    with (
        mmap.mmap(snapshot, order.bytes, access=mmap.ACCESS_READ) as pages,
        memoryview(pages) as view,
        order.file.open("xb", buffering=0) as file,
    ):
        at_once, synced = min(WRITE_BYTES, order.bytes // CHUNKS + 1), 0
        for start in range(0, order.bytes, at_once):
            fault("save", step=order.step, rank=order.rank, fraction=start / order.bytes)
            if start - synced >= SYNC_BYTES:
                os.fdatasync(file.fileno())
                order.check_generation()
                synced = start
            with view[start : start + at_once] as chunk:
                digest.update(chunk)
                _write_all(file.fileno(), chunk)
            pulse()
        os.fsync(file.fileno())
    return FileSum(order.bytes, digest.hexdigest())


def _write_all(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        with data[done:] as rest:
            done += os.write(descriptor, rest)


def _sum_up(order: SaveOrder, mine: FileSum, pulse: _Pulse) -> None:
    """As a head, leave the note of this group once all its parts are there. Raises: OSError if one fails."""
    summary, grown = order.summary_of(order.rank), 0

    def advancing() -> None:
        nonlocal grown
        pulse()
        grown += 1
        with suppress(OSError):
            summary.write_bytes(b" " * grown)

    try:
        files = [mine, *_gather(order, _of_members(order), STALL_S, advancing)]
        PartNote(order.ticket, tuple((file.bytes, file.sha256) for file in files)).write(summary)
    except OSError as problem:
        with suppress(OSError):
            PartNote(order.ticket, error=words(problem)).write(summary)
        raise


@dataclass(frozen=True)
class _Awaited:
    """A note that is waited for."""

    note: Path
    growing: Path
    """The file that grows until then."""
    whose: str
    files: int


def _of_members(order: SaveOrder) -> list[_Awaited]:
    folder = order.partial
    return [_Awaited(order.note_of(r), folder / shard_name(r), f"rank {r}", 1) for r in order.members]


def _of_group(order: SaveOrder, head: int) -> _Awaited:
    last = min(head + RANKS_OF_A_HEAD, order.size) - 1
    return _Awaited(order.summary_of(head), order.summary_of(head), f"rank {head} to {last}", last - head + 1)


def _gather(
    order: SaveOrder, awaited: Sequence[_Awaited], patience_s: float, advancing: Callable[[], None]
) -> list[FileSum]:
    """Wait for notes, and return their files, in order.

    Raises: OSError if a part failed, nothing comes, or the first rank has given the checkpoint up meanwhile.
    """
    found: dict[_Awaited, PartNote] = {}
    seen, since_s, looked_s, pause_s = -1, time.monotonic(), -math.inf, 0.002
    while missing := [some for some in awaited if some not in found]:
        for some in missing:
            note = PartNote.read(some.note, order.ticket)
            if note is not None and (note.error or len(note.files) != some.files):
                said = note.error or "its note is of other ranks"
                raise OSError(said if some.files > 1 and said.startswith("rank ") else f"{some.whose}: {said}")
            if note is not None:
                found[some] = note
        missing = [some for some in missing if some not in found]
        if missing and time.monotonic() - looked_s >= min(PROGRESS_S, patience_s / 4):
            looked_s = time.monotonic()
            if order.rank and not order.note_of(order.rank).exists():
                raise OSError("the first rank has given this checkpoint up")
            there = len(found) + sum(_size(some.growing) for some in missing)
            if there != seen:
                seen, since_s = there, time.monotonic()
                advancing()
            if time.monotonic() - since_s > patience_s:
                whose = ", ".join(some.whose.removeprefix("rank ") for some in missing)
                raise OSError(f"no progress on the part of rank {whose} for {patience_s:.0f} s")
        if missing:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.2)
    return [FileSum(*file) for some in awaited for file in found[some].files]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
