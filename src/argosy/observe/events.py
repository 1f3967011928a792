"""A run's records: one line of JSON for each step (metrics.jsonl) and each event (events/PROCESS.jsonl), appended and
flushed at once; and files of such lines, read from either end.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, BinaryIO

from argosy.credentials import redacted
from argosy.errors import ArgosyWarning
from argosy.files import append_whole
from argosy.observe.records import MOST_LINE_BYTES, finite, record_of

EVENTS_READ_BYTES = 2**16
"""Bytes that are read at once, from the end of a file backwards."""
NO_RECORD = b"\0"
"""Stands for the end of a line that is too long to be held, and is no record with it."""


class JsonLines:
    """An append-only file of JSON lines, created with the first line."""

    def __init__(self, path: Path):
        self.path = path

    def write(self, record: dict[str, Any]) -> int:
        """Append one complete record: a reader never meets half a line of a living writer. Returns its bytes.

        A number that is not finite becomes null, since JSON has no word for it. A full disk is a warning: a run does
        not end because its records cannot be written.
        """
        line = json.dumps(finite(record), allow_nan=False).encode() + b"\n"
        try:
            self._append(line)
        except OSError as problem:
            warnings.warn(f"{self.path}: a record is lost ({problem}). Free some space.", ArgosyWarning, stacklevel=2)
        return len(line)

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+", buffering=0) as file:
            if _is_cut_off(file):
                line = b"\n" + line  # that line is lost; this one must not be
            append_whole(file, line)


def _is_cut_off(file: FileIO) -> bool:
    """Return True if the last line is incomplete: its writer was killed, or the disk was full."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


class Events:
    """The events of one process of a run: start, save, fault, recovery, ... (events/PROCESS.jsonl)."""

    def __init__(self, run_dir: Path, process: str):
        self._lines = JsonLines(run_dir / "events" / f"{process}.jsonl")

    def write(self, kind: str, **facts: Any) -> None:
        """Record an event with its time (seconds since 1970) and its facts."""
        self._lines.write({"time_s": round(time.time(), 3), "event": kind, **redacted(facts)})


def each_line(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete records of a JSON-lines file, however long it is, one at a time.

    A last line that a kill cut off does not count.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        while line := file.readline(MOST_LINE_BYTES + 1):
            if (record := record_of(line)) is not None:
                yield record


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return all that `each_line` yields: for files that are short."""
    return list(each_line(path))


def backwards(file: BinaryIO) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield where each line begins, and its record, from the last one on; None for a line that was cut off.

    Reading backwards spares a long run from reading its whole file only to continue at the end.
    """
    position = file.seek(0, os.SEEK_END)
    rest: list[bytes] = []  # the parts of a line whose begin is not read yet, from the last one on
    while position:
        if len(rest) > MOST_LINE_BYTES // EVENTS_READ_BYTES:
            rest = [NO_RECORD]
        size = min(EVENTS_READ_BYTES, position)
        position = file.seek(position - size)
        first, *lines = file.read(size).split(b"\n")
        if not lines:
            rest.append(first)
            continue
        lines[-1] += b"".join(reversed(rest))
        begin = position + len(first) + 1 + sum(len(line) + 1 for line in lines)
        for line in reversed(lines):
            begin -= len(line) + 1
            if line:
                yield begin, record_of(line)
        rest = [first]
    if whole := b"".join(reversed(rest)):
        yield 0, record_of(whole)


def forget_from(path: Path, step: int) -> None:
    """Drop the lines of `step` and later of a file whose lines are in the order of their "step".

    Evaluations alone may come late, after lines of later steps: those of earlier steps are kept.
    """
    if not path.exists():
        return
    late: list[tuple[int, dict[str, Any]]] = []
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        for start, record in backwards(file):
            if record is None or record["step"] >= step:
                end = start
            elif "validation_loss" in record and "loss" not in record:
                late.append((start, record))
            else:
                break
        file.truncate(end)
        file.seek(end)
        file.writelines(json.dumps(record).encode() + b"\n" for start, record in reversed(late) if start > end)


def from_the_end(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete records of a JSON-lines file, the last one first."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        yield from (record for _, record in backwards(file) if record is not None)


def plan_since(starts: Iterable[Mapping[str, Any]]) -> int:
    """Return the step from which on all of a rank's `start` events, given in order, have the plan of the last one."""
    since, before = 0, ""
    for start in starts:
        plan = str(start.get("plan", ""))
        since, before = since if plan == before else int(start["step"]), plan
    return since


class Metrics:
    """The numbers of a run, step by step."""

    def __init__(self, run_dir: Path, may_write: Callable[[], bool] = lambda: True):
        """`may_write` is asked before each line: a process that the run continued without must add none."""
        self.path = run_dir / "metrics.jsonl"
        self._lines, self._may_write = JsonLines(self.path), may_write

    def write(self, record: dict[str, Any]) -> None:
        """Append one record, which names its `step`, if this process may write."""
        if self._may_write():
            self._lines.write(record)

    def write_evaluation(
        self, step: int, line: Mapping[str, float], tasks: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        """Append the record of an evaluation after `step`. line: has a validation_loss. tasks: the metrics of each."""
        self.write({"step": step, **line, **({"tasks": tasks} if tasks else {})})

    def forget_from(self, step: int) -> None:
        """Drop the records of `step` and later: those steps were lost and are about to be run again."""
        forget_from(self.path, step)

    def last(self, count: int) -> list[dict[str, Any]]:
        """Return the records of the last `count` steps (fewer if there are no more), in order."""
        steps = (record for record in from_the_end(self.path) if "loss" in record)
        return list(islice(steps, count))[::-1]

    def newest(self, key: str, before: int, among: int) -> dict[str, Any] | None:
        """Return the newest record with `key` of the `among` steps before `before`; None if there is none."""
        last = takewhile(lambda record: record["step"] >= before - among, from_the_end(self.path))
        return next((record for record in last if record["step"] < before and key in record), None)

    def has(self, step: int, key: str) -> bool:
        """Return True if any record of `step`, which is among the last ones, has `key`."""
        last = takewhile(lambda record: record["step"] >= step, from_the_end(self.path))
        return any(record["step"] == step and key in record for record in last)

    def each(self) -> Iterator[dict[str, Any]]:
        """Yield all records so far, one at a time: a long run has more than memory should hold."""
        return each_line(self.path)

    def read(self) -> list[dict[str, Any]]:
        return read_lines(self.path)
