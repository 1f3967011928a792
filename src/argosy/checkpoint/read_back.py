"""Reading a checkpoint back once it is committed, all writers together.

Each reads a share of the files, not its own, and leaves a note of what it found in the checkpoint's folder. The first
waits for the notes about as long as its own share took; then it reads the shares without a note itself: a writer that
has died, or is slow, holds the others up for a while only.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from pathlib import Path

from argosy.checkpoint.checksums import Damaged
from argosy.checkpoint.rank_writer import SaveOrder
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
    with suppress(OSError, Damaged):  # it was deleted meanwhile, or its manifest is damaged, which the first finds too
        found = {"manifest_sha256": checkpoint.manifest.sha256, "problem": checkpoint.problem(order.rank, order.size)}
        with atomic_write(_note_of(checkpoint, order.rank)) as file:
            file.write(json.dumps(found).encode())


def verify_together(checkpoint: Checkpoint, size: int) -> None:
    """As the first of the `size` ranks that wrote `checkpoint`, have all of it read.

    Raises: Damaged, naming a file that is missing or differs.
    """
    began_s = time.monotonic()
    checkpoint.verify(checkpoint.share(0, size))
    until_s, waiting = 2 * time.monotonic() - began_s + PATIENCE_S, set(range(1, size))
    pause_s, most_s = LOOK_S
    while waiting and time.monotonic() < until_s:
        waiting -= {rank for rank in waiting if _has_vouched(checkpoint, rank)}
        if waiting:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, most_s)
    for rank in sorted(waiting, reverse=True):
        if not _has_vouched(checkpoint, rank):
            checkpoint.verify(checkpoint.share(rank, size))
    for rank in range(1, size):
        _note_of(checkpoint, rank).unlink(missing_ok=True)


def _has_vouched(checkpoint: Checkpoint, rank: int) -> bool:
    """True if `rank` has read its share of this very checkpoint. Raises: Damaged if it found damage."""
    try:
        note = json.loads(_note_of(checkpoint, rank).read_bytes())
        is_this = note["manifest_sha256"] == checkpoint.manifest.sha256
        problem = note["problem"]
    except (OSError, ValueError, TypeError, KeyError):
        return False
    if is_this and problem is not None:
        raise Damaged(problem)
    return is_this


def _note_of(checkpoint: Checkpoint, rank: int) -> Path:
    return checkpoint.folder / f"rank-{rank:05d}.read"
