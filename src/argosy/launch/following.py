"""metrics.jsonl, followed while a run goes on: each line is passed to a function of the caller's."""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any, BinaryIO

EVERY_S = 0.1
"""How often the file is looked at."""
OnStep = Callable[[dict[str, Any]], object]


class NewLines:
    """The complete lines of a file that are new since the last look. The file may be cut back, and be written anew."""

    def __init__(self, path: Path):
        """What is there already is not new."""
        self._path = path
        self._ends, self._sums = array("Q"), array("Q")
        """Where each known line ends, and its CRC-32, by which it is recognized."""
        self.take()

    def take(self) -> list[dict[str, Any]]:
        """Return the records of the new lines."""
        try:
            with self._path.open("rb") as file:
                self._forget_what_changed(file)
                return list(self._records(file))
        except FileNotFoundError:
            return []

    def _records(self, file: BinaryIO) -> Iterator[dict[str, Any]]:
        end = self._ends[-1] if self._ends else 0
        file.seek(end)
        for line in file:
            if not line.endswith(b"\n"):  # it is being written
                return
            end += len(line)
            self._ends.append(end)
            self._sums.append(zlib.crc32(line))
            try:
                yield json.loads(line)
            except ValueError:  # a kill cut it off
                continue

    def _forget_what_changed(self, file: BinaryIO) -> None:
        """Forget known lines from the end on, until one is there as it was."""
        while self._ends:
            start = self._ends[-2] if len(self._ends) > 1 else 0
            file.seek(start)
            if zlib.crc32(file.read(self._ends[-1] - start)) == self._sums[-1]:
                return
            self._ends.pop()
            self._sums.pop()


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
