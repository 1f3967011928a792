"""The caller's side of a `prepare`: starts workers, replaces those that end, takes their results in order, and counts
how far the work is.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, Self

from argosy.data.cutting import Journal
from argosy.data.tokenizer import EncodedBatch
from argosy.data.work import Chunk, DamagedResult, PrepareTask, WorkFolder, WorkState
from argosy.data.worker import WORKER_BEAT_S, WORKER_SILENT_S
from argosy.engines.engine import Engine, NeverFits, ProgramJob
from argosy.engines.record import JobState, LaunchedJob
from argosy.errors import ArgosyError, RunFailed, UserError, counted
from argosy.processes.supervisor import RestartPolicy, Restarts

WORKERS_LOOK_S = 1.0
"""Seconds between two looks of the caller at its workers."""
PROGRESS_NOTE_S = 0.1
"""Seconds between two notes to workers of how far the caller is."""
RESULT_POLL_S, MOST_RESULT_POLL_S = 0.005, 0.2
LEAST_AHEAD = 64
"""Tasks that may be done ahead of the first one that the caller waits for: this bounds what lies in the folder."""
MOST_ENDS = 3
"""Workers that may end before their time, for each that is wanted, without a result in between."""


@dataclass(frozen=True)
class Crew:
    """The workers, in numbers."""

    running: int = 0
    waiting: int = 0
    why: str = ""
    """Why one waits."""
    text_bytes: int = 0
    """Text of unfinished tasks that they have worked at."""

    def __str__(self) -> str:
        words = [counted(self.running, "worker")]
        if self.waiting:
            words.append(f"{self.waiting} waiting" + (f" ({self.why})" if self.why else ""))
        return ", ".join(words)


class Workers:
    """The workers of one call of `prepare`; a context manager, which ends them. They start when there is work."""

    def __init__(
        self,
        folder: WorkFolder,
        engine: Engine,
        job_of: Callable[[str], ProgramJob],
        wanted: int,
        on_look: Callable[[Crew], None],
    ):
        """job_of: returns the job of a worker, given its name. on_look: told how many live, about once a second while
        results are waited for."""
        self._folder, self._wanted, self._on_look = folder, wanted, on_look
        self._engine, self._job_of = engine, job_of
        self._jobs: dict[str, LaunchedJob] = {}
        self._states: dict[str, tuple[JobState, str]] = {}
        """The state of each worker that was started and not replaced, and a few words on it."""
        self._over = set[str]()
        """Workers whose jobs have ended; one that was replaced because it was silent may go on."""
        self._state = WorkState(uuid.uuid4().hex)
        self._told_s = self._looked_s = -1e9
        self._beats: dict[str, tuple[int, float]] = {}
        self._restarts = Restarts(RestartPolicy(most_failures=MOST_ENDS * wanted))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(UserError):
            self._engine.stop_all([job for name, job in self._jobs.items() if name not in self._over])

    def results(
        self, stage: str, tasks: int, first: int = 0, chunk: int = 0, start: int = 0, ahead: int = 0
    ) -> Iterator[tuple[PrepareTask, int, Chunk]]:
        """Yield each chunk of each task's results, in order, with its number; wait for those that are not there.

        first, chunk, start: the first one, and where it begins in its piece. ahead: tasks that may be done ahead; 0:
        as many as suits workers.

        Raises: the error of a task that failed; RunFailed if workers end again and again.
        """
        ahead = ahead or max(LEAST_AHEAD, 4 * self._wanted)
        for number in range(first, tasks):
            task, is_last = PrepareTask(stage, number), False
            if number > first:
                chunk, start = 0, 0
            while not is_last:
                self._state = replace(
                    self._state, stage=stage, tasks=tasks, task=number, chunk=chunk, start=start, ahead=ahead
                )
                found = self._wait(task, chunk)
                yield task, chunk, found
                self._restarts.progress()
                chunk, start, is_last = chunk + 1, found.end, found.is_last

    def finish(self) -> None:
        self._tell(is_over=True)

    def _wait(self, task: PrepareTask, chunk: int) -> Chunk:
        poll_s = RESULT_POLL_S
        while True:
            self._tick()
            try:
                return self._folder.read(task, chunk)
            except FileNotFoundError:
                pass
            except DamagedResult:
                self._folder.drop(task, chunk)
            if failure := self._folder.failure(task):
                raise _error(*failure)
            if not self._jobs:
                self._tell()
                self._start(self._wanted)
            time.sleep(poll_s)
            poll_s = min(1.5 * poll_s, MOST_RESULT_POLL_S)

    def _start(self, count: int) -> None:
        """Start workers. They may have to wait for machines."""
        first = len(self._jobs)
        names = [f"{self._state.caller[:6]}-{first + number}" for number in range(count)]
        started = self._engine.start_all([self._job_of(name) for name in names])
        self._jobs.update(zip(names, started, strict=True))
        self._states.update(dict.fromkeys(names, ("waiting", "started")))

    def _tick(self) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= PROGRESS_NOTE_S:
            self._told_s = now_s
            self._tell()
        if self._jobs and now_s - self._looked_s >= WORKERS_LOOK_S:
            self._looked_s = now_s
            self._look()

    def _tell(self, is_over: bool = False) -> None:
        self._state = replace(self._state, beat=self._state.beat + 1, is_over=is_over)
        self._folder.say(self._state)

    def _look(self) -> None:
        """Free what workers held that have ended, and start others in their place."""
        states, beats = self._states, self._folder.beats()
        try:
            found = self._engine.states([self._jobs[name] for name in states])
            states.update(zip(list(states), found, strict=True))
        except NeverFits:
            raise
        except UserError:  # a cluster that does not answer now says nothing of any worker
            pass
        ended = {name: why for name, (state, why) in states.items() if state == "ended"}
        self._over |= set(ended)
        ended |= {
            name: f"no sign of life for {WORKER_SILENT_S:.0f} s" for name in states if self._is_silent(name, beats)
        }
        if ended:
            self._folder.release_all(set(ended))
            if None in [self._restarts.ended() for _ in ended]:
                raise _ended(next(iter(ended.values())), self._restarts.failures, self._folder)
            for name in ended:
                del states[name]
            self._start(len(ended))
        waiting = [why for state, why in states.values() if state == "waiting"]
        running = {name for name, (state, _) in states.items() if state == "running"}
        text_bytes = sum(beats[name][1] for name in running if name in beats)
        self._on_look(Crew(len(running), len(waiting), waiting[0] if waiting else "", text_bytes))

    def _is_silent(self, name: str, beats: dict[str, tuple[int, int]]) -> bool:
        """True if a worker has shown signs of life, and none for long."""
        if name not in beats:
            return False
        count, now_s = beats[name][0], time.monotonic()
        if self._beats.get(name, (-1, 0.0))[0] != count:
            self._beats[name] = (count, now_s)
        return now_s - self._beats[name][1] > WORKER_SILENT_S + WORKER_BEAT_S


def _error(kind: str, why: str) -> ArgosyError | OSError:
    """Return the error that a worker met."""
    if kind == "UserError":
        return UserError(why)
    if kind == "OSError":
        return OSError(why)
    if kind == "Exception":
        return RunFailed(f"a worker failed: {why}. Try engine = huggingface, or another tokenizer.")
    return RunFailed(why)


def _ended(why: str, count: int, folder: WorkFolder) -> RunFailed:
    return RunFailed(
        f"{counted(count, 'worker')} ended early ({why}; SIGKILL often means that memory ran out). Repeat the "
        f"command, and it goes on from there; fewer `processes` take less memory. Their output: {folder.path}/logs."
    )


REPORT_EVERY_S = 0.1


@dataclass(frozen=True)
class PrepareProgress:
    """The progress of `prepare`."""

    stage: Literal["tokenizer", "duplicates", "tokens", "done"]
    """The phase: training the tokenizer, looking for duplicates, tokenizing, or finished."""
    text_bytes: int = 0
    """UTF-8 bytes of text tokenized so far."""
    total_text_bytes: int | None = None
    """Bytes in all; None if that is not known before the input is read."""
    tokens: int = 0
    documents: int = 0
    rate_bytes_per_s: float = 0.0
    """Text tokenized per second since `prepare` was called, without the work of an interrupted call before."""
    underway_bytes: int = 0
    """Text that workers have tokenized and not delivered."""
    workers: str = ""
    """The workers, in words."""
    pieces_done: float = 0.0
    """duplicates: share of the input that was looked at."""

    def __str__(self) -> str:
        if self.stage == "tokenizer":
            return "prepare  training the tokenizer"
        if self.stage == "duplicates":
            return f"prepare  looking for duplicates, {self.pieces_done:.0%}" + (
                f"   {self.workers}" if self.workers else ""
            )
        total = f"/{self.total_text_bytes / 1e6:.1f}" if self.total_text_bytes else ""
        done = min(self.text_bytes + self.underway_bytes, self.total_text_bytes or sys.maxsize)
        return (
            f"prepare  {done / 1e6:.1f}{total} MB of text, "
            f"{self.tokens / 1e6:.2f}M tokens   {self.rate_bytes_per_s / 1e6:.1f} MB/s"
            + (f"   {self.workers}" if self.workers else "")
        )


Report = Callable[[PrepareProgress], None]


class Meter:
    """Counts finished work and reports it."""

    def __init__(self, journal: Journal, total_text_bytes: int | None, report: Report):
        done = [shard for cut in journal.cuts for shard in cut.shards.values()]
        self._report, self._began_s, self._reported_s = report, time.monotonic(), -REPORT_EVERY_S
        self._earlier_bytes = sum(shard.text_bytes for shard in done)
        self.progress = PrepareProgress(
            stage="tokens",
            text_bytes=self._earlier_bytes,
            total_text_bytes=total_text_bytes,
            tokens=sum(shard.tokens for shard in done),
            documents=sum(shard.documents for shard in done),
        )

    def count(self, batch: EncodedBatch) -> None:
        """Add documents that are in a shard."""
        old = self.progress
        self._show(
            replace(
                old,
                text_bytes=old.text_bytes + int(batch.text_bytes.sum()),
                tokens=old.tokens + len(batch.tokens),
                documents=old.documents + len(batch.lengths),
            )
        )

    def compared(self, share: float) -> None:
        """Show how much of the input was looked at for duplicates; after all of it, tokenizing begins."""
        if share < 1.0:
            self._show(replace(self.progress, stage="duplicates", pieces_done=share))
        else:
            self.progress = replace(self.progress, stage="tokens")
            self._began_s = time.monotonic()

    def look(self, crew: Crew) -> None:
        """Show how many workers there are, and what they are at."""
        self._show(replace(self.progress, underway_bytes=crew.text_bytes, workers=str(crew)))

    def finish(self) -> None:
        self._report(replace(self.progress, stage="done", underway_bytes=0, workers=""))

    def _show(self, progress: PrepareProgress) -> None:
        now_s = time.monotonic()
        done = progress.text_bytes + progress.underway_bytes - self._earlier_bytes
        self.progress = replace(progress, rate_bytes_per_s=done / max(now_s - self._began_s, 1e-9))
        if now_s - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now_s
            self._report(self.progress)
