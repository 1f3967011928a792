"""The process that writes one rank's part of each checkpoint, so that no disk, however slow, holds up training.

    python -m argosy.checkpoint.writer SNAPSHOT

SNAPSHOT is the descriptor of a file in memory that the training process fills. Messages of the channel to it are the
orders "save" (order, upkeep) and "close", and "are_you_there", which is answered at once; back come news. A writer ends
with its parent, and since memory is shared by descriptor alone, nothing of it is left then.

What rank 0's writer has committed all writers read back, each a share of the files, not its own, and leave a note of
what they found in the checkpoint's folder; heads of groups sum the notes of theirs up (`rank_writer`). Heads, and the
first for its own group, wait for notes about as long as their own shares took; then the first reads the shares without
a note itself: a writer that has died, or is slow, holds the others up for a while only. Then rank 0's deletes older
checkpoints, and copies the new one to the remote place if there is one.

This module imports neither torch nor numpy, so that the process starts in a moment and takes little memory.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from argosy.checkpoint import store
from argosy.checkpoint.checksums import DamagedCheckpoint
from argosy.checkpoint.fence import Fenced
from argosy.checkpoint.rank_writer import RANKS_OF_A_HEAD, SaveOrder, commit_part, words
from argosy.checkpoint.store import Checkpoint, step_folder
from argosy.errors import STOP_SIGNALS, UserError
from argosy.files import atomic_write, json_of
from argosy.processes.child import Channel, ChannelClosed, channel_to_parent, messages

if TYPE_CHECKING:
    from argosy.checkpoint.remote import Remote

FIRST_WRITER_S = 1.0
"""Shortest limit of the first writer's wait for the others."""
LAST_COPY_PAUSES_S = 2.0, 10.0
"""Pauses before the last checkpoint is copied to the remote place once more, if that failed."""
FOLDER_LOOK_S = 0.02, 2.0
"""The first and the longest pause between two looks at the folder."""


def vouch(order: SaveOrder, is_closing: threading.Event) -> None:
    """As a rank that is not the first, read a share of the checkpoint of `order`, and leave a note of what was found.

    Waits until it is committed; returns if that will not happen, or once `is_closing` is set: it would be by now.
    """
    checkpoint = Checkpoint(step_folder(Path(order.run_dir), order.step))
    pause_s, most_s = FOLDER_LOOK_S
    while not checkpoint.is_there:
        if (is_closing.wait(pause_s) or not order.partial.exists()) and not checkpoint.is_there:
            return
        pause_s = min(2 * pause_s, most_s)
    with suppress(OSError, DamagedCheckpoint):  # deleted meanwhile, or a damaged manifest, which the first finds too
        began_s = time.monotonic()
        _leave(checkpoint, _note_of(checkpoint, order.rank), checkpoint.problem(order.rank, order.size))
        if order.is_head:
            try:
                until_s = 2 * time.monotonic() - began_s + FIRST_WRITER_S
                read = _wait_for(checkpoint, _note_of, order.members, until_s)
                _leave(checkpoint, _summary_of(checkpoint, order.rank), None, sorted({order.rank, *read}))
            except DamagedCheckpoint as problem:
                _leave(checkpoint, _summary_of(checkpoint, order.rank), str(problem))


def verify_together(checkpoint: Checkpoint, size: int) -> None:
    """As the first of the `size` ranks that wrote `checkpoint`, have all of it read.

    Raises: DamagedCheckpoint, naming a file that is missing or differs.
    """
    began_s = time.monotonic()
    checkpoint.verify(checkpoint.share(0, size))
    took_s = time.monotonic() - began_s
    near = range(1, min(RANKS_OF_A_HEAD, size))
    read = _wait_for(checkpoint, _note_of, near, time.monotonic() + took_s + FIRST_WRITER_S)
    heads = range(RANKS_OF_A_HEAD, size, RANKS_OF_A_HEAD)  # they begin to wait when the first does
    found = _wait_for(checkpoint, _summary_of, heads, time.monotonic() + took_s + FIRST_WRITER_S)
    for rank in sorted({*range(1, size)}.difference(read, *found.values()), reverse=True):
        if _found_in(checkpoint, _note_of(checkpoint, rank)) is None:
            checkpoint.verify(checkpoint.share(rank, size))
    for path in checkpoint.folder.glob("rank-*.read"):
        path.unlink(missing_ok=True)


def _wait_for(
    checkpoint: Checkpoint, path_of: Callable[[Checkpoint, int], Path], ranks: Iterable[int], until_s: float
) -> dict[int, list[int]]:
    """Wait for the notes that `ranks` leave at `path_of`, and return what those that came say (`_found_in`).

    Raises: DamagedCheckpoint if one found damage.
    """
    waiting, read = {*ranks}, dict[int, list[int]]()
    pause_s, most_s = FOLDER_LOOK_S
    while waiting and time.monotonic() < until_s:
        for rank in waiting:
            if (found := _found_in(checkpoint, path_of(checkpoint, rank))) is not None:
                read[rank] = found
        waiting -= read.keys()
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

    Raises: DamagedCheckpoint if it tells of damage.
    """
    try:
        note = json_of(path.read_bytes())
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


WRITER_NICENESS = 5
"""Niceness of the writer's process: training comes first."""


@dataclass(frozen=True)
class Upkeep:
    """Work on checkpoints once they are committed."""

    keep_last: int = 2
    keep_every: int = 0
    remote: str = ""
    """An fsspec URL; empty: none."""


class NewsSender(Protocol):
    """Passes news on."""

    def __call__(self, news: str, /, **facts: Any) -> None: ...


class Writer:
    """Saves in one thread, verifies and prunes in a second, copies to the remote place in a third; each in order."""

    def __init__(self, snapshot: int, tell: NewsSender):
        self._snapshot, self._tell = snapshot, tell
        self._saves, self._upkeep, self._copies = _Line(self._save), _Line(self._look_after), _Line(self._drain)
        self._draining: int | None = None
        self._remote: Remote | None = None
        """The remote place, which knows what is there already; None before the first copy."""
        self._not_copied: tuple[SaveOrder, Upkeep] | None = None
        self._is_closing = threading.Event()

    def save(self, order: SaveOrder, upkeep: Upkeep) -> None:
        """Take an order. "save" or "save_failed" is told once it is done, then what becomes of the checkpoint."""
        self._saves.put(order, upkeep)

    def close(self) -> None:
        """Tell "closed" once all is done; returns at once."""
        threading.Thread(target=self._finish, daemon=True).start()

    def _finish(self) -> None:
        self._is_closing.set()
        for line in (self._saves, self._upkeep, self._copies):
            line.finish()
        for pause_s in LAST_COPY_PAUSES_S:
            if self._not_copied is not None:  # no later save makes up for it
                time.sleep(pause_s)
                self._drain(*self._not_copied)
        self._tell("closed")

    def _save(self, order: SaveOrder, upkeep: Upkeep) -> None:
        try:
            size = commit_part(order, self._snapshot, lambda: self._tell("progress"))
        except Exception as problem:  # training must hear of it, whatever it was
            self._tell("save_failed", step=order.step, error=words(problem))
            return
        seconds = round(time.monotonic() - order.began_s, 3)
        self._tell("save", step=order.step, seconds=seconds, bytes=size)
        self._upkeep.put(order, upkeep)

    def _look_after(self, order: SaveOrder, upkeep: Upkeep) -> None:
        """Read back what was not read yet; as the first rank, delete what is not kept."""
        run_dir = Path(order.run_dir)
        try:
            if order.rank:
                vouch(order, self._is_closing)
                return
            order.check_generation()
            for checkpoint in store.committed(run_dir):
                if not checkpoint.is_verified:
                    self._verify(checkpoint, order.size if checkpoint.step == order.step else 1)
            spare = [self._draining] if self._draining is not None else []
            for gone in store.prune(run_dir, upkeep.keep_last, upkeep.keep_every, spare=spare, keep_unread=True):
                self._tell("prune", step=gone.step)
        except Exception as problem:  # too much is kept, or too little is known, which is no reason to end
            self._tell("upkeep_failed", error=words(problem))
        if upkeep.remote:
            self._copies.put(order, upkeep)

    def _verify(self, checkpoint: Checkpoint, readers: int) -> None:
        began_s = time.monotonic()
        try:
            verify_together(checkpoint, readers)
        except DamagedCheckpoint as problem:
            self._tell("damaged_checkpoint", problem=str(problem))
            store.withdraw(checkpoint)
            return
        checkpoint.mark_verified()
        self._tell("verified", step=checkpoint.step, seconds=round(time.monotonic() - began_s, 3))

    def _drain(self, order: SaveOrder, upkeep: Upkeep) -> None:
        """Copy the newest verified checkpoint to the remote place, then one of those kept for good, unless they
        are there: its own copy may have failed, or a later save have come before it.
        """
        from argosy.checkpoint.remote import Remote  # it brings fsspec and its file systems, which few runs need

        run_dir, began_s = Path(order.run_dir), time.monotonic()
        self._not_copied = None
        try:
            newest = store.newest_verified(run_dir)
            if newest is None:
                return
            self._draining = newest.step
            remote = self._remote = self._remote or Remote(upkeep.remote, run_dir)
            lasting = {
                c.step: c
                for c in store.committed(run_dir)
                if upkeep.keep_every and c.step % upkeep.keep_every == 0 and c.step < newest.step and c.is_verified
            }
            lacking = sorted(set(lasting) - set(remote.steps())) if lasting else []
            for checkpoint in (newest, *(lasting[step] for step in lacking[-1:])):
                self._draining = checkpoint.step
                if remote.put(checkpoint, order.check_generation):
                    seconds = round(time.monotonic() - began_s, 3)
                    self._tell("drained", step=checkpoint.step, seconds=seconds, bytes=checkpoint.bytes)
            try:
                remote.prune(upkeep.keep_last, upkeep.keep_every)
            except Exception as problem:  # all is there, and too much: a place may let nobody delete
                self._tell("upkeep_failed", error=f"{upkeep.remote}: {words(problem)}")
        except Exception as problem:  # of whichever of fsspec's file systems
            self._not_copied = None if isinstance(problem, UserError | Fenced) else (order, upkeep)
            self._tell("drain_failed", step=self._draining, error=words(problem))
        finally:
            self._draining = None


class _Line:
    """A thread that does one piece of work after the other."""

    def __init__(self, work: Callable[[SaveOrder, Upkeep], None]):
        self._work = work
        self._waiting: queue.SimpleQueue[tuple[SaveOrder, Upkeep] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, order: SaveOrder, upkeep: Upkeep) -> None:
        self._waiting.put((order, upkeep))

    def finish(self) -> None:
        """Wait until all that was put has been done."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._work(*item)


def main() -> None:
    """Take orders until the parent is gone."""
    snapshot = int(sys.argv[1])
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # they are for training, which saves then
    os.nice(WRITER_NICENESS)
    trainer = channel_to_parent(send_timeout_s=math.inf)  # it may stand still for long, and hear the news later
    tell = _teller(trainer)
    writer = Writer(snapshot, tell)
    for message in messages(trainer):
        if message["kind"] == "are_you_there":
            tell("here")
        elif message["kind"] == "close":
            writer.close()
        else:
            writer.save(SaveOrder(**message["order"]), Upkeep(**message["upkeep"]))
    os._exit(0)  # amid whatever the threads do: without its parent a checkpoint is not committed


def _teller(trainer: Channel) -> NewsSender:
    lock = threading.Lock()

    def tell(news: str, /, **facts: Any) -> None:
        with lock:
            try:
                trainer.send(news, **facts)
            except ChannelClosed:
                os._exit(0)

    return tell


if __name__ == "__main__":
    main()
