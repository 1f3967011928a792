"""Saving: copy this rank's part of the state, hand the copy to a writer process, take note of how it went.

There is no collective in a save: one that hangs on a disk cannot hold up those of a step.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from argosy.checkpoint import fence, store
from argosy.checkpoint.boxes import Box
from argosy.checkpoint.directory import deal
from argosy.checkpoint.manifest import CheckpointManifest
from argosy.checkpoint.rank_writer import PartNote, SaveOrder, leave_note, words
from argosy.checkpoint.shards import TensorsToSave, write_shard
from argosy.checkpoint.writer import NewsSender, Upkeep
from argosy.faults import fault
from argosy.parallel.peers import over, peers_of
from argosy.parallel.world import World
from argosy.processes.child import ChannelClosed, Child, Patience

HUNG_S = 300.0
"""A writer is given up once it has told of no progress, its own or of parts it waits for, for so long while it is
waited for."""
WRITER_SILENT_S = 10.0
"""A writer that does not answer for so long, stopped or holding Python's lock, is given up too; one that starts may
take HUNG_S."""
WRITER_ASK_S = 1.0
"""Interval at which a busy writer is asked whether it is there: a thread that waits for no disk answers."""
LISTEN_S, WRITER_CHECK_S = 1.0, 0.1
"""While a save is waited for: how often it is asked whether it advances, and how often `check` is called."""
WRITER = "argosy.checkpoint.writer"


class Saver:
    """Writes the checkpoints of a run. All ranks call it alike; one save is in flight at a time."""

    def __init__(
        self,
        run_dir: Path,
        world: World,
        heard: NewsSender,
        upkeep: Upkeep | None = None,
        check: Callable[[], None] = lambda: None,
    ):
        """`heard(news, **facts)` is called, by `save`, `poll`, `wait` and `close`, with what becomes of checkpoints.
        `check()` is called again and again while these wait: what it raises ends the waiting.

        On the first rank: "save" (step, seconds, bytes), "save_failed" (step, error), "verified" (step, seconds),
        "damaged_checkpoint" (problem), "prune" (step), "drained" (step, seconds, bytes), "drain_failed" (step, error).
        On every rank: "writer_died" (pid, why), "upkeep_failed" (error).
        """
        self._run_dir, self._world, self._heard = run_dir, world, heard
        self._upkeep, self._check = upkeep or Upkeep(), check
        self._generation = fence.own_generation()
        # Memory without a name: the kernel frees it when the last process that has it dies. It is kept from save to
        # save, since having the kernel clear new pages takes as long as copying.
        self._memory = os.fdopen(os.memfd_create("argosy-snapshot"), "r+b", buffering=0)
        self._process: Child | None = None
        self._in_flight: SaveOrder | None = None
        self._mine: list[Box] | None = None
        self._ticket, self._attempts = "", 0
        self._advanced_s = self._asked_s = 0.0
        self._patience: Patience | None = None
        """With the answer of the writer; None if none is owed."""
        self._has_answered = self._is_closing = False
        self.committed: set[int] = set()
        """Steps that need no saving: those of its own checkpoints, and any that are added here, alike on all ranks."""
        self.last_error: str | None = None
        """Why the newest save of this rank's part failed (on the first rank: of the whole); None if it did not."""
        self.written_bytes = 0
        """Bytes that this rank has written to checkpoints, all of them together."""

    @property
    def writer_pid(self) -> int | None:
        """Process that writes this rank's part; None before the first save, and from its death to the next save."""
        return None if self._process is None else self._process.pid

    @property
    def is_in_flight(self) -> bool:
        return self._in_flight is not None

    def save(
        self, parts: Mapping[Box, Tensor], manifest: CheckpointManifest, passing: Mapping[Box, Tensor] | None = None
    ) -> None:
        """Save the checkpoint of `manifest.step`; `parts`, this rank's, have the same boxes each time.

        passing: what only this checkpoint has; None on all ranks, or on none, which then agree on it anew.

        Returns once the state is copied; before that it waits for the save in flight. One of the ranks that hold a box
        writes it: they agree on that at the first call, a collective. A failure is reported, not raised.
        """
        self.wait()
        if manifest.step in self.committed:
            return
        began_s = time.monotonic()
        if self._mine is None:
            self._share_out(list(parts))
        assert self._mine is not None
        mine = self._mine
        if passing is not None:
            parts = TensorsToSave(parts, passing)
            mine = [*mine, *self._dealt(list(passing))]
        self._attempts += 1
        order = SaveOrder(
            run_dir=str(self._run_dir),
            ticket=f"{self._ticket}-{self._attempts}",
            generation=self._generation,
            step=manifest.step,
            rank=self._world.rank,
            size=self._world.size,
            bytes=0,
            began_s=began_s,
            manifest=replace(manifest, generation=self._generation).to_record(),
        )
        about = {"step": str(order.step), "rank": str(order.rank)}
        try:
            fault("snapshot", step=order.step)
            size = write_shard(self._memory.fileno(), parts, about, mine)
            self._hand_over(replace(order, bytes=size))
        except OSError as problem:  # too little memory, no more processes: no reason to end training
            self._failed(order, words(problem))

    def poll(self) -> None:
        """Report what has happened, without waiting."""
        self._listen(0.0)

    def wait(self) -> None:
        """Wait for the save in flight, if any."""
        self._advanced_s = time.monotonic()
        while self._in_flight is not None:
            self._attend()
            if self._process is not None and time.monotonic() - self._advanced_s > HUNG_S:
                self._give_up(self._process, f"it has made no progress for {HUNG_S:.0f} s")
        self._listen(0.0)

    def close(self) -> None:
        """Wait until all that was saved is read back and copied to the remote place as well, and end the writer."""
        self.wait()
        if self._process is not None:
            self._is_closing = True
            with suppress(ChannelClosed):
                self._process.channel.send("close")
            while self._process is not None:
                self._attend()
        self._memory.close()

    def abandon(self) -> None:
        """End the writer at once, whatever it does: its checkpoint will not be committed."""
        if self._process is not None:
            self._process.kill()
        self._process, self._in_flight = None, None
        self._memory.close()

    def _share_out(self, boxes: list[Box]) -> None:
        """Agree with the other ranks on which boxes each writes, and on the name of this run's attempts."""
        if self._world.is_first:
            store.sweep(self._run_dir, self._generation)  # before any rank begins to write
        self._ticket = self._world.share_first(lambda: uuid.uuid4().hex, str)
        self._mine = self._dealt(boxes)

    def _dealt(self, boxes: list[Box]) -> list[Box]:
        """Return the boxes that this rank writes: each is one rank's, of those that hold it."""
        group = self._world.host_group
        return list(over(group, deal(peers_of(group), boxes)))

    def _hand_over(self, order: SaveOrder) -> None:
        if self._process is None:
            memory = self._memory.fileno()
            self._process = Child(WRITER, str(memory), pass_fds=[memory])
            self._patience, self._has_answered = None, False
        self._in_flight = order
        with suppress(ChannelClosed):  # it has died: `_listen` finds out, and says why
            self._process.channel.send("save", order=asdict(order), upkeep=asdict(self._upkeep))

    def _attend(self) -> None:
        """Listen until there is news, for at most `LISTEN_S`, and only while `check` raises nothing: in a world that is
        over the other ranks' parts may never come.
        """
        until_s = time.monotonic() + LISTEN_S
        while not self._listen(WRITER_CHECK_S) and time.monotonic() < until_s:
            self._check()

    def _listen(self, timeout_s: float) -> bool:
        """Take the writer's news, or its death, waiting up to `timeout_s`. Returns True if something may be new."""
        process = self._process
        if process is None:
            return True
        try:
            news = process.hear(timeout_s)
        except ChannelClosed:
            self._take_end(process, process.reap(), "died")
            return True
        for facts in news:
            self._take(facts.pop("kind"), facts)
        return self._ask(process) or bool(news)

    def _ask(self, process: Child) -> bool:
        """Ask the writer whether it is there, and kill it if it has not answered for too long. Return True if so."""
        if process is not self._process or (self._in_flight is None and not self._is_closing):
            return False
        if self._patience is not None:
            if why := self._patience.end():
                self._give_up(process, why)
            return bool(why)
        if time.monotonic() - self._asked_s > WRITER_ASK_S:
            self._asked_s = time.monotonic()
            self._patience = Patience(process.pid, WRITER_SILENT_S if self._has_answered else HUNG_S, WRITER_SILENT_S)
            with suppress(ChannelClosed):  # the next `hear` raises it
                process.channel.send("are_you_there")
        return False

    def _take(self, news: str, facts: dict[str, Any]) -> None:
        if news == "here":
            self._patience, self._has_answered = None, True
            return
        if news == "progress":
            self._advanced_s = time.monotonic()
            return
        if news in ("save", "save_failed"):
            if self._in_flight is not None and news == "save":
                self.written_bytes += self._in_flight.bytes
            self._in_flight = None
            self.last_error = facts.get("error")
            if news == "save":
                self.committed.add(facts["step"])
            if not self._world.is_first:
                return  # the first rank knows more
        if news == "closed":
            assert self._process is not None
            self._process.kill()
            self._process = None
            return
        self._heard(news, **facts)

    def _give_up(self, process: Child, why: str) -> None:
        """Kill a writer that hangs. If it hangs on a disk it may not even die, so its end is not waited for."""
        process.kill()
        self._take_end(process, why, "hung")

    def _take_end(self, process: Child, why: str, how: str) -> None:
        """Report the end of a writer, and what it means for the save in flight."""
        self._process, self._patience = None, None
        self._heard("writer_died", pid=process.pid, why=why)
        order, self._in_flight = self._in_flight, None
        if order is None:
            return
        if self._world.is_first and store.Checkpoint(store.step_folder(self._run_dir, order.step)).is_there:
            self._take("save", {"step": order.step, "seconds": round(time.monotonic() - order.began_s, 3)})
        else:
            self._failed(order, f"the writer process {how} ({why})")

    def _failed(self, order: SaveOrder, error: str) -> None:
        """Note a failure that the writer could not report."""
        self._in_flight, self.last_error = None, error
        if self._world.is_first:
            self._heard("save_failed", step=order.step, error=error)
            return
        with suppress(OSError):
            leave_note(order, PartNote(order.ticket, error=error))
