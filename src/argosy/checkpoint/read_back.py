"""Reading a checkpoint back once it is committed, all writers together.

Each reads a share of the files, not its own, and leaves a note of what it found in the checkpoint's folder; heads of
groups sum the notes of theirs up (`rank_writer`). Heads, and the first for its own group, wait for notes about as long
as their own shares took; then the first reads the shares without a note itself: a writer that has died, or is slow,
holds the others up for a while only.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from argosy.checkpoint.checksums import DamagedCheckpoint
from argosy.checkpoint.rank_writer import GROUP, SaveOrder
from argosy.checkpoint.store import Checkpoint, step_folder
from argosy.files import atomic_write

PATIENCE_S = 1.0
"""How long the first writer waits for the others at least."""
LOOK_S = 0.02, 2.0
"""The first and the longest pause between two looks at the folder."""


def vouch(order: SaveOrder, is_closing: threading.Event) -> None:
    """As a rank that is not the first, read a share of the checkpoint of `order`, and leave a note of what was found.

    Waits until it is committed; returns if that will not happen, or once `is_closing` is set: it would be by now.
    """
    checkpoint = Checkpoint(step_folder(Path(order.run_dir), order.step))
    pause_s, most_s = LOOK_S
    while not checkpoint.is_there:
        if (is_closing.wait(pause_s) or not order.partial.exists()) and not checkpoint.is_there:
            return
        pause_s = min(2 * pause_s, most_s)
    with suppress(
        OSError, DamagedCheckpoint
    ):  # it was deleted meanwhile, or its manifest is damaged, which the first finds too
        began_s = time.monotonic()
        _leave(checkpoint, _note_of(checkpoint, order.rank), checkpoint.problem(order.rank, order.size))
        if order.is_head:
            try:
                read = _read_by(checkpoint, order.members, 2 * time.monotonic() - began_s + PATIENCE_S)
                _leave(checkpoint, _summary_of(checkpoint, order.rank), None, sorted({order.rank, *read}))
            except DamagedCheckpoint as problem:
                _leave(checkpoint, _summary_of(checkpoint, order.rank), str(problem))


def verify_together(checkpoint: Checkpoint, size: int) -> None:
    """As the first of the `size` ranks that wrote `checkpoint`, have all of it read.

    Raises: Damaged, naming a file that is missing or differs.
    """
    began_s = time.monotonic()
    checkpoint.verify(checkpoint.share(0, size))
    took_s = time.monotonic() - began_s
    read = _read_by(checkpoint, range(1, min(GROUP, size)), time.monotonic() + took_s + PATIENCE_S)
    heads = list(range(GROUP, size, GROUP))
    until_s, pause_s = time.monotonic() + took_s + PATIENCE_S, LOOK_S[0]  # heads begin to wait when the first does
    while heads:
        for head in list(heads):
            if (ranks := _found_in(checkpoint, _summary_of(checkpoint, head))) is not None:
                read |= {*ranks}
                heads.remove(head)
        if not heads or time.monotonic() > until_s:
            break
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LOOK_S[1])
    for rank in sorted({*range(1, size)} - read, reverse=True):
        if _found_in(checkpoint, _note_of(checkpoint, rank)) is None:
            checkpoint.verify(checkpoint.share(rank, size))
    for path in checkpoint.folder.glob("rank-*.read"):
        path.unlink(missing_ok=True)


def _read_by(checkpoint: Checkpoint, ranks: Iterable[int], until_s: float) -> set[int]:
    """Wait for the notes of `ranks`, and return those who left one. Raises: Damaged if one found damage."""
    waiting, read = {*ranks}, set[int]()
    pause_s, most_s = LOOK_S
    while waiting and time.monotonic() < until_s:
        read |= {rank for rank in waiting if _found_in(checkpoint, _note_of(checkpoint, rank)) is not None}
        waiting -= read
        if waiting:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, most_s)
    return read


def _leave(checkpoint: Checkpoint, path: Path, problem: str | None, ranks: Sequence[int] = ()) -> None:
    found = {"manifest_sha256": checkpoint.manifest.sha256, "problem": problem, "ranks": ranks}
    with atomic_write(path) as file:
        file.write(json.dumps(found).encode())


def _found_in(checkpoint: Checkpoint, path: Path) -> list[int] | None:
    """Return what a note says of this very checkpoint: the ranks that have read theirs, as a head; None without one.

    Raises: Damaged if it tells of damage.
    """
    try:
        note = json.loads(path.read_bytes())
        is_this = note["manifest_sha256"] == checkpoint.manifest.sha256
        problem, ranks = note["problem"], [int(rank) for rank in note["ranks"]]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if is_this and problem is not None:
        raise DamagedCheckpoint(problem)
    return ranks if is_this else None


def _note_of(checkpoint: Checkpoint, rank: int) -> Path:
    return checkpoint.folder / f"rank-{rank:05d}.read"


def _summary_of(checkpoint: Checkpoint, head: int) -> Path:
    return checkpoint.folder / f"rank-{head:05d}.group.read"
