"""The caller's side of a `prepare`: starts workers, replaces those that end, and takes their results in order."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from argosy.data.executors.executor import CrewExecutor
from argosy.data.work import Chunk, DamagedResult, PrepareTask, WorkFolder, WorkState
from argosy.data.worker import BEAT_S, SILENT_S
from argosy.errors import ArgosyError, RunFailed, UserError
from argosy.processes.supervisor import RestartPolicy, Restarts

LOOK_S = 1.0
"""How often the caller looks whether its workers live."""
TELL_S = 0.1
"""How often workers are told that the caller has got on."""
POLL_S, MOST_POLL_S = 0.005, 0.2
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
        words = [f"{self.running} worker{'' if self.running == 1 else 's'}"]
        if self.waiting:
            words.append(f"{self.waiting} waiting" + (f" ({self.why})" if self.why else ""))
        return ", ".join(words)


class Workers:
    """The workers of one call of `prepare`; a context manager, which ends them. They start when there is work."""

    def __init__(
        self,
        folder: WorkFolder,
        executor: Callable[[], CrewExecutor],
        wanted: int,
        on_look: Callable[[Crew], None] = lambda crew: None,
    ):
        """on_look: told how many live, about once a second while results are waited for."""
        self._folder, self._make_executor, self._wanted, self._on_look = folder, executor, wanted, on_look
        self._executor: CrewExecutor | None = None
        self._state = WorkState(uuid.uuid4().hex, ahead=max(LEAST_AHEAD, 4 * wanted))
        self._told_s = self._looked_s = -1e9
        self._beats: dict[str, tuple[int, float]] = {}
        self._gone: dict[str, str] = {}
        """Workers that were replaced, and how they ended."""
        self._restarts = Restarts(RestartPolicy(most_failures=MOST_ENDS * wanted))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._executor is not None:
            self._executor.stop()

    def results(
        self, stage: str, tasks: int, first: int = 0, chunk: int = 0, start: int = 0, ahead: int = 0
    ) -> Iterator[tuple[PrepareTask, int, Chunk]]:
        """Yield each chunk of each task's results, in order, with its number; wait for those that are not there.

        first, chunk, start: the first one, and where it begins in its piece. ahead: tasks that may be done ahead; 0:
        as many as suits workers.

        Raises: the error of a task that failed; RunFailed if workers end again and again.
        """
        ahead = ahead or self._state.ahead
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
        """Tell the workers that all is done."""
        self._tell(is_over=True)

    def _wait(self, task: PrepareTask, chunk: int) -> Chunk:
        poll_s = POLL_S
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
            self._start_if_none()
            time.sleep(poll_s)
            poll_s = min(1.5 * poll_s, MOST_POLL_S)

    def _start_if_none(self) -> None:
        if self._executor is None:
            self._tell()
            self._executor = self._make_executor()
            self._executor.start(self._wanted)

    def _tick(self) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_S:
            self._told_s = now_s
            self._tell()
        if self._executor is not None and now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._look(self._executor)

    def _tell(self, is_over: bool = False) -> None:
        self._state = replace(self._state, beat=self._state.beat + 1, is_over=is_over)
        self._folder.say(self._state)

    def _look(self, executor: CrewExecutor) -> None:
        """Free what workers held that have ended, and start others in their place."""
        states = {name: state for name, state in executor.states().items() if name not in self._gone}
        beats = self._folder.beats()
        ended = {name: why for name, (state, why) in states.items() if state == "ended"}
        ended |= {name: f"it shows no life for {SILENT_S:.0f} s" for name in states if self._is_silent(name, beats)}
        if ended:
            self._gone |= ended
            self._folder.release_all(set(ended))
            if None in [self._restarts.ended() for _ in ended]:
                raise _ended(next(iter(ended.values())), self._restarts.failures, self._folder)
            executor.start(len(ended))
        waiting = [why for name, (state, why) in states.items() if state == "waiting" and name not in ended]
        running = {name for name, (state, _) in states.items() if state == "running" and name not in ended}
        text_bytes = sum(beats[name][1] for name in running if name in beats)
        self._on_look(Crew(len(running), len(waiting), waiting[0] if waiting else "", text_bytes))

    def _is_silent(self, name: str, beats: dict[str, tuple[int, int]]) -> bool:
        """True if a worker has shown signs of life, and none for long."""
        if name not in beats:
            return False
        count, now_s = beats[name][0], time.monotonic()
        if self._beats.get(name, (-1, 0.0))[0] != count:
            self._beats[name] = (count, now_s)
        return now_s - self._beats[name][1] > SILENT_S + BEAT_S


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
        f"{count} workers have ended before their time ({why}; SIGKILL often means that memory ran out). Repeat the "
        f"command, and it goes on from there; fewer `processes` take less memory. What they print: {folder.path}/logs."
    )
