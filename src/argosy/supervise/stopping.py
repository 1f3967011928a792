"""The end of a run by a signal: its workers save their state and end, and what has not within its time is killed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from argosy.checkpoint.store import how_to_go_on, saved_step
from argosy.errors import STOP_SIGNALS, ArgosyError, Interrupted, Retryable, counted, signals_to
from argosy.observe.heartbeat import HeartbeatReading
from argosy.training.stop import SAME_S

PHASE_UNITS = {"evaluate": "evaluation batch", "check": "replay check", "checkpoint": "save", "recovering": "recovery"}
"""Phase of a worker -> what it ends before it stops, where that is no step."""
BEFORE_UPDATE = ("data", "forward", "backward", "pipeline", "communication")
"""Phases of a step in which the state is still that of the step before."""


class Stopping:
    """The signals that came to an agent, and what follows from them."""

    def __init__(self, run_dir: Path, grace_s: float, is_served: bool = False):
        """`grace_s`: the time that workers have to save their state. is_served: parameter servers have it."""
        self._run_dir, self._grace_s, self._is_served = run_dir, grace_s, is_served
        self._came: list[tuple[int, float]] = []
        """Signals that were not taken in yet, and when each came."""
        self.number: int | None = None
        """The signal for which the run stops; None: none came."""
        self._since_s, self._kill_at_s = 0.0, float("inf")
        self.kill_why = ""
        """Why what still runs at its time is killed."""
        self.not_saved = ""
        """Why the state was not saved, where it was not."""
        self.is_at_once = False
        """The run ends without a wait for its workers: there is nothing that they could save."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take `STOP_SIGNALS` in this block (main thread only)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with signals_to(self._note, *STOP_SIGNALS):
            yield

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.ask(number)  # and no more: it may have interrupted the sending of a message

    def ask(self, number: int) -> None:
        """Act as if the signal had come. Any thread may call this."""
        self._came.append((number, time.monotonic()))

    def begins(self) -> bool:
        """Take in the signals that came since the last call; return True if the run is to stop from now on.

        One more signal, later than `SAME_S`, kills what still runs.
        """
        number = self.number
        while self._came:
            self._take(*self._came.pop(0))
        return number is None and self.number is not None

    def begin(self, number: int) -> None:
        """Stop the run for a signal that a worker was sent directly."""
        self.number, self._since_s = number, time.monotonic()

    def is_urgent(self) -> bool:
        """Return True once a signal has come that `begins` has not taken in and that is not a part of the first one."""
        return any(came_s - self._since_s > SAME_S for _, came_s in self._came)

    def is_late(self, now_s: float) -> bool:
        """Return True if what still runs is to be killed, for `kill_why`."""
        return now_s > self._kill_at_s

    def in_words(self, readings: Collection[HeartbeatReading]) -> str:
        """Say what is done before the run stops, and what a second signal would lose.

        readings: of the workers that are in a world.
        """
        name = "the run" if self.number is None else signal.Signals(self.number).name
        if self.is_at_once or not readings:
            return f"{name}: stopping; there is nothing to save"
        unit = PHASE_UNITS.get(next(iter(readings)).phase, "step")
        if self._is_served:
            return f"{name}: stopping after this {unit}; the parameter servers have the state"
        steps = max(reading.step for reading in readings) - saved_step(self._run_dir)
        loses = f"gives up {counted(steps, 'step')}" if steps > 0 else "stops at once"
        return f"{name}: stopping after this {unit}, with the state saved; once more {loses}"

    def end_at_once_if_nothing_is_lost(self, readings: Collection[HeartbeatReading]) -> None:
        """Set `is_at_once` if all workers are in the first step after the newest checkpoint, or after the start.

        The first step in a world compiles, which may take longer than `grace_s`. readings: of all of the run's workers
        that are in a world.
        """
        saved = saved_step(self._run_dir)
        is_new = [r.step == saved and not r.busy_s and r.phase in BEFORE_UPDATE for r in readings]
        self.is_at_once = bool(is_new) and all(is_new) and not self._is_served

    def killed(self, why: str, reading: HeartbeatReading | None) -> None:
        """Note that a worker was killed that had a part in the state; reading: what it showed last.

        Its state may be saved already: it has waited for a copy in the remote place then.
        """
        if reading is None or reading.step > saved_step(self._run_dir):
            self.not_saved = why

    def error(self) -> ArgosyError | None:
        """Return the error that the command ends with; None if no signal came."""
        if self.number is None:
            return None
        name = signal.Signals(self.number).name
        if self._is_served:
            again = f"The parameter servers have the state; the same command takes part again ({self._run_dir})."
            return Interrupted(f"stopped by {name}. {again}", self.number)
        if self.not_saved:
            why = f"stopped by {name} before the state was saved: {self.not_saved.rstrip('.')}"
            return Retryable(f"{why}. {how_to_go_on(self._run_dir)}")
        return Interrupted(f"stopped by {name}. {how_to_go_on(self._run_dir)}", self.number)

    def _take(self, number: int, now_s: float) -> None:
        if self.number is None:
            self.number, self._since_s, self._kill_at_s = number, now_s, now_s + self._grace_s
            self.kill_why = f"it did not end within resilience.grace_s = {self._grace_s:g}"
        elif now_s - self._since_s > SAME_S:
            self._kill_at_s, self.kill_why = 0.0, "a second signal came"
