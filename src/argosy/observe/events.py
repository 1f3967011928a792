"""The run's records: one line of JSON for each step and for each event, appended and flushed at once."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from argosy.credentials import redacted
from argosy.errors import ArgosyWarning


class JsonLines:
    """An append-only file of JSON lines, created with the first line."""

    def __init__(self, path: Path):
        self.path = path

    def write(self, record: dict[str, Any]) -> None:
        """Append one complete record: a reader never meets half a line of a living writer.

        A number that is not finite becomes null, since JSON has no word for it. A full disk is a warning: a run does
        not end because its records cannot be written.
        """
        line = json.dumps(_finite(record), allow_nan=False).encode() + b"\n"
        try:
            self._append(line)
        except OSError as problem:
            warnings.warn(f"{self.path}: a record is lost ({problem}). Free some space.", ArgosyWarning, stacklevel=2)

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            if _is_cut_off(file):
                file.write(b"\n")  # that line is lost; this one must not be
            file.write(line)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_cut_off(file: BinaryIO) -> bool:
    """True if the last line is incomplete: its writer was killed, or the disk was full."""
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


class Tail:
    """Follows a JSON-lines file that another process writes."""

    def __init__(self, path: Path):
        self._path, self._at = path, 0

    def read(self) -> list[dict[str, Any]]:
        """Return the complete records that were added since the last call, or since the file became shorter."""
        with suppress(OSError), self._path.open("rb") as file:
            self._at = min(self._at, file.seek(0, os.SEEK_END))
            file.seek(self._at)
            whole, end, _ = file.read().rpartition(b"\n")
            self._at += len(whole) + len(end)
            return _records(whole.decode(errors="replace"))
        return []


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete records of a JSON-lines file; a last line that a kill cut off does not count."""
    if not path.exists():
        return []
    return _records(path.read_text())


def _records(text: str) -> list[dict[str, Any]]:
    records = []
    for line in text.splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records
