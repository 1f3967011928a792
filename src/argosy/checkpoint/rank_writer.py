"""Writing one rank's part of a checkpoint: its file, the note beside it, the first rank's commit.

Ranks do not talk: each leaves a note with the size and checksum of its file in the checkpoint's partial folder, and the
first one waits for the notes of all. What a dead attempt left there has another ticket.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from argosy.checkpoint import fence, store
from argosy.checkpoint.checksums import FileSum
from argosy.checkpoint.manifest import CheckpointManifest
from argosy.checkpoint.names import shard_name
from argosy.credentials import redact
from argosy.errors import ArgosyError
from argosy.faults import fault
from argosy.files import atomic_write

CHUNK_BYTES, CHUNKS = 4 * 2**20, 16
"""A file is written in chunks of at most so many bytes, and in at least so many chunks."""
SYNC_BYTES = 64 * 2**20
"""So much is written through to the disk before more is given to the kernel: dirty pages do not pile up, and the file's
size shows the first rank that it advances."""
STALL_S = 120.0
"""The first rank gives a checkpoint up once the others' parts have not grown for so long."""


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
    """When training asked for it, on the machine's monotonic clock."""
    manifest: dict[str, Any]
    """The checkpoint's manifest as a record, still without files."""

    @property
    def partial(self) -> Path:
        """The folder that all ranks write in."""
        return fence.partial_folder(Path(self.run_dir), self.step, self.generation)

    @property
    def file(self) -> Path:
        """The file that this rank writes."""
        return self.partial / shard_name(self.rank)

    def note_of(self, rank: int) -> Path:
        """Return where `rank` leaves the note of how its part went."""
        return self.partial / f"rank-{rank:05d}.json"

    def check_generation(self) -> None:
        """Raises: Fenced if a later generation has begun."""
        fence.check_generation(Path(self.run_dir), self.generation)


@dataclass(frozen=True)
class Note:
    """How a rank's part went."""

    ticket: str
    bytes: int = 0
    sha256: str = ""
    error: str = ""


def commit_part(order: SaveOrder, snapshot: int) -> int:
    """Write this rank's part; as the first rank, commit the checkpoint once the others' parts are there.

    `snapshot`: descriptor of the file in memory that is to be written. Returns the bytes of the part, or, on the first
    rank, of the checkpoint.
    Raises: OSError, Fenced; on the first rank if any part fails, and then nothing of the checkpoint is left.
    """
    if order.rank:
        return _write_and_tell(order, snapshot).bytes
    try:
        order.check_generation()
        store.sweep(Path(order.run_dir), order.generation, before_step=order.step)
        mine = _write_and_tell(order, snapshot)
        manifest = replace(CheckpointManifest.from_record(order.manifest), files=_gather(order, {0: mine}))
        return store.commit(order.partial, manifest).bytes
    except (OSError, ArgosyError):
        store.discard(order.partial)
        raise


def leave_note(order: SaveOrder, note: Note) -> None:
    """Leave the note of how this rank's part went. Raises: OSError."""
    order.partial.mkdir(parents=True, exist_ok=True)
    with atomic_write(order.note_of(order.rank)) as file:
        file.write(json.dumps(asdict(note)).encode())


def words(problem: BaseException) -> str:
    """Return a problem in a line, in the system's own words if it has some: "[Errno 28] No space left on device"."""
    line = redact((str(problem).splitlines() or [""])[0])
    return line if isinstance(problem, OSError | ArgosyError) and line else f"{type(problem).__name__}: {line}"


def _write_and_tell(order: SaveOrder, snapshot: int) -> FileSum:
    try:
        order.check_generation()
        order.partial.mkdir(parents=True, exist_ok=True)
        order.file.unlink(missing_ok=True)  # a new file, so that a dying writer does not write to this one
        part = _write(order, snapshot)
        leave_note(order, Note(order.ticket, bytes=part.bytes, sha256=part.sha256))
    except OSError as problem:
        with suppress(OSError):
            order.file.unlink(missing_ok=True)  # on a full disk the note needs its room
        with suppress(OSError):
            leave_note(order, Note(order.ticket, error=words(problem)))
        raise
    return part


def _write(order: SaveOrder, snapshot: int) -> FileSum:
    """Copy the snapshot to the disk, hashing it on the way."""
    digest = hashlib.sha256()
    with (
        mmap.mmap(snapshot, order.bytes, access=mmap.ACCESS_READ) as pages,
        memoryview(pages) as view,
        order.file.open("xb", buffering=0) as file,
    ):
        at_once, synced = min(CHUNK_BYTES, order.bytes // CHUNKS + 1), 0
        for start in range(0, order.bytes, at_once):
            fault("save", step=order.step, rank=order.rank, fraction=start / order.bytes)
            if start - synced >= SYNC_BYTES:
                os.fdatasync(file.fileno())
                order.check_generation()
                synced = start
            with view[start : start + at_once] as chunk:
                digest.update(chunk)
                _write_all(file.fileno(), chunk)
        os.fsync(file.fileno())
    return FileSum(order.bytes, digest.hexdigest())


def _write_all(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        with data[done:] as rest:
            done += os.write(descriptor, rest)


def _gather(order: SaveOrder, sums: dict[int, FileSum]) -> dict[str, FileSum]:
    """Wait for the notes of all ranks, and return their files. Raises: OSError if a part failed, or nothing comes."""
    seen, since_s, pause_s = -1, time.monotonic(), 0.002
    while len(sums) < order.size:
        for rank in set(range(order.size)) - sums.keys():
            note = _note(order, rank)
            if note is not None and note.error:
                raise OSError(f"rank {rank}: {note.error}")
            if note is not None:
                sums[rank] = FileSum(note.bytes, note.sha256)
        missing = [rank for rank in range(order.size) if rank not in sums]
        there = len(sums) + sum(_size(order.partial / shard_name(rank)) for rank in missing)
        if there != seen:
            seen, since_s = there, time.monotonic()
        if time.monotonic() - since_s > STALL_S:
            ranks = ", ".join(map(str, missing))
            raise OSError(f"nothing has come of the part of rank {ranks} for {STALL_S:.0f} s")
        if missing:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.2)
    return {shard_name(rank): sums[rank] for rank in range(order.size)}


def _note(order: SaveOrder, rank: int) -> Note | None:
    """Return the note that `rank` left for this attempt, if there is one."""
    try:
        note = Note(**json.loads(order.note_of(rank).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    return note if note.ticket == order.ticket else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
