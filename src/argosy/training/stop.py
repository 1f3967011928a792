"""Requests to stop: a signal, which the loop answers after the step at hand with its state saved, or a world's end."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

from argosy.errors import STOP_SIGNALS, heeded

SAME_S = 2.0
"""Signals that come within so long are one: `timeout` and SLURM send theirs to the process and to its group."""
HOLD_S = 20.0
"""Longest wait of a rank for its world to end; then it goes on, as nothing has ended it."""
WORLD_LOOK_S = 0.01
"""Interval at which a rank that holds looks whether its world is over."""


class WorldIsOver(Exception):
    """The world is over. It is raised between steps, where there is no collective that would fail."""


class StoppedEarly(Exception):
    """A signal came to one of the processes amid something that need not be finished. All raise it alike."""


class StopSignal:
    """Remembers the first of `STOP_SIGNALS`; a SIGINT that comes later than `SAME_S` after it ends the process."""

    def __init__(self) -> None:
        self.number: int | None = None
        """Number of the signal that came, if any."""
        self._came_s = 0.0
        self.world_is_over = False
        """Set to make the process leave its world at once and without saving: another is formed."""
        self.is_to_hold = False
        """Set if the world is to end in order: its ranks stand still after a step, with their state safe."""
        self.is_to_save = False
        """Set beside that if the state is safe on disk only: more nodes leave than in-memory checkpoints can lose."""

    def listen(self) -> StopSignal:
        """Catch the signals from now on (main thread only)."""
        if threading.current_thread() is threading.main_thread():
            for number in heeded(STOP_SIGNALS):
                signal.signal(number, self._remember)
        return self

    def is_requested(self) -> bool:
        """Return True once a signal came; the loop asks once a step."""
        return self.number is not None

    def between_steps(self) -> None:
        """Let a world that is over end here: the loop calls this before its first step, and after each.

        Raises: WorldIsOver.
        """
        self.check()

    def check(self) -> None:
        """Raises: WorldIsOver."""
        if self.world_is_over:
            raise WorldIsOver

    def hold(self, seconds: float) -> None:
        """Wait until this world is over or a signal comes, for at most `seconds`. Raises: WorldIsOver."""
        until = time.monotonic() + seconds
        self.is_to_hold = False
        while self.number is None and time.monotonic() < until:
            self.check()
            time.sleep(WORLD_LOOK_S)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._came_s = number, now
        elif number == signal.SIGINT and now - self._came_s > SAME_S:
            signal.default_int_handler(number, frame)
