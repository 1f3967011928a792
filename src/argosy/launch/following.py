"""metrics.jsonl, followed while a run goes on: each line is passed to a function of the caller's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

from argosy.observe.new_lines import NewLines

EVERY_S = 0.1
"""How often the file is looked at."""
OnStep = Callable[[dict[str, Any]], object]


class Following:
    """A block in which a function is called with each new record of a run's metrics.jsonl, in a thread.

    Training does not wait for it. If it raises, `stop` is called once, and the block ends with what it raised. (No
    generator: what it raises may be StopIteration.)
    """

    def __init__(self, run_dir: Path, on_step: OnStep | None, stop: Callable[[], None]):
        """`on_step`: the function; None: nothing is followed."""
        self._stop = stop
        self._is_over = Event()
        self._raised: BaseException | None = None
        self._thread: Thread | None = None
        if on_step is not None:
            self._lines = NewLines(run_dir / "metrics.jsonl")
            self._thread = Thread(target=self._follow, args=(on_step,), name="argosy-on-step", daemon=True)

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *ended: object) -> None:
        if self._thread is None:
            return
        self._is_over.set()
        self._thread.join()
        if self._raised is not None:
            raise self._raised

    def _follow(self, on_step: OnStep) -> None:
        is_last = False
        try:
            while not is_last:
                is_last = self._is_over.wait(EVERY_S)
                for record in self._lines.take():
                    on_step(record)
        except BaseException as error:
            self._raised = error
            self._stop()
