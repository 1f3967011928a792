"""What a rank waits for, in the live line; and in a line that stays, if it lasts: most runs have no terminal."""

from __future__ import annotations

import time

from argosy.observe.progress import Progress

SHOWN_S, SAID_S = 1.0, 15.0


class Waiting:
    """One wait."""

    def __init__(self, progress: Progress):
        self._progress, self._began_s, self._shown, self._is_said = progress, time.monotonic(), "", False

    def is_for(self, words: str) -> None:
        """Show what is waited for, once it takes longer than SHOWN_S, and say it once, after SAID_S."""
        waited_s = time.monotonic() - self._began_s
        if waited_s > SHOWN_S and words != self._shown:
            self._shown = words
            self._progress.doing(words)
        if waited_s > SAID_S and words and not self._is_said:
            self._is_said = True
            self._progress.say(f" waiting: {words}", "yellow")

    def ends(self) -> None:
        """Show it no more."""
        if self._shown:
            self._progress.doing("")
