"""A request to stop: a signal that the loop answers after the step at hand, with its state saved."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

LOOK_S = 0.01


class WorldIsOver(Exception):
    """Raised between steps, where no collective is there to raise."""


class StopSignal:
    """Remembers the first SIGTERM or SIGINT; a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal that came, if any."""
        self.world_is_over = False
        """The process is to leave the world it is in, at once and without saving: another is formed."""
        self.is_to_hold = False
        """The world is to end, in order: its ranks are to stand still after a step, with their state safe."""

    def listen(self) -> StopSignal:
        """Catch the signals from now on (main thread only)."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._remember)
            signal.signal(signal.SIGINT, self._remember)
        return self

    def check(self) -> None:
        """Raises: WorldIsOver."""
        if self.world_is_over:
            raise WorldIsOver

    def hold(self, seconds: float) -> None:
        """Wait until this world is over, or a signal comes, but no longer than that. Raises: WorldIsOver."""
        until = time.monotonic() + seconds
        self.is_to_hold = False
        while self.number is None and time.monotonic() < until:
            self.check()
            time.sleep(LOOK_S)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
