"""A request to stop: a signal that the loop answers after the step at hand, with its state saved."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopSignal:
    """Remembers the first SIGTERM or SIGINT; a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal that came, if any."""

    def listen(self) -> StopSignal:
        """Catch the signals from now on (main thread only)."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._remember)
            signal.signal(signal.SIGINT, self._remember)
        return self

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
