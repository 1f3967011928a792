"""The energy that the agents measured: a sum over all of their lines, kept up as they are written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.observe.line_follower import LineFollower
from argosy.observe.records import record_of
from argosy.watch.reader import RunReader

JOULES_PER_KWH = 3.6e6
SERIES_POINTS = 500
MOST_MINUTES = 1_000_000
LONGEST_LINE_S = 120.0
"""A line that comes so much later than the one before tells of another time too: the run was stopped."""

try:
    import msgspec
except ImportError:
    msgspec = None  # type: ignore[assignment]


@dataclass(slots=True)
class _Minute:
    """The lines of a minute: their energy, and the seconds that they cover, added up over nodes."""

    joules: float = 0.0
    seconds: float = 0.0
    nodes: int = 0


class EnergySoFar:
    """The energy of a run so far. Each line of nodes/NODE.jsonl says what was used since the one before."""

    def __init__(self, reader: RunReader):
        self._reader = reader
        self._files: dict[str, LineFollower] = {}
        self._clear()

    def _clear(self) -> None:
        self.joules = 0.0
        self._sources: set[str] = set()
        self._minutes: dict[int, _Minute] = {}
        self._last: dict[str, float] = {}
        self._counted: dict[str, int] = {}
        """Node -> the last minute that it was counted in."""

    @property
    def source(self) -> str:
        """nvml, rapl or estimate; several are joined by +."""
        return "+".join(sorted(self._sources))

    def refresh(self) -> None:
        """Read the lines that were added."""
        for node in self._reader.nodes:
            self._files.setdefault(node, LineFollower(Path(self._reader.folder, "nodes", f"{node}.jsonl")))
        try:
            if sum(file.forget_what_is_gone() for file in self._files.values()):
                self._clear()  # a file was replaced: the sum is made anew
                self._files = {node: LineFollower(file.path) for node, file in self._files.items()}
            for node, file in self._files.items():
                for chunk in file.blocks():
                    for line in _records(chunk):
                        self._add(node, line)
        except OSError:
            return

    def _add(self, node: str, line: dict[str, Any]) -> None:
        used, time_s = line.get("energy"), line.get("time_s")
        joules = used.get("joules") if isinstance(used, dict) else None
        if isinstance(joules, int | float) and isinstance(time_s, int | float) and joules >= 0:
            self.joules += joules
            self._sources.add(str(used.get("source")))  # type: ignore[union-attr]
            before_s = self._last.get(node, -math.inf)
            self._last[node] = max(time_s, before_s)
            # The first line of an agent does not say since when; and a minute may be covered in part.
            minute = int(time_s // 60)
            if 0 < time_s - before_s <= LONGEST_LINE_S and (
                minute in self._minutes or len(self._minutes) < MOST_MINUTES
            ):
                told = self._minutes.setdefault(minute, _Minute())
                told.joules, told.seconds = told.joules + joules, told.seconds + time_s - before_s
                told.nodes += self._counted.get(node) != minute
                self._counted[node] = minute

    def series(self) -> dict[str, list[float]]:
        """Return the mean power over time: W, by stretches of minutes; of each, of the part that lines tell of."""
        minutes = sorted(self._minutes)
        if not minutes:
            return {"time_s": [], "power_w": []}
        size = -(-(minutes[-1] - minutes[0] + 1) // SERIES_POINTS)
        sums: dict[int, tuple[float, float]] = {}
        for minute in minutes:
            begin = minute - (minute - minutes[0]) % size
            joules, seconds = sums.get(begin, (0.0, 0.0))
            told = self._minutes[minute]
            sums[begin] = joules + told.joules, seconds + told.seconds / told.nodes
        return {"time_s": [60.0 * m for m in sums], "power_w": [joules / seconds for joules, seconds in sums.values()]}


def _records(chunk: bytes) -> list[dict[str, Any]]:
    """Return `time_s` and `energy` of the chunk's lines."""
    if msgspec is not None:
        kind = msgspec.defstruct("Line", [("time_s", Any, None), ("energy", Any, None)], gc=False)
        try:
            found: list[Any] = msgspec.json.Decoder(kind).decode_lines(chunk)
            return [{"time_s": line.time_s, "energy": line.energy} for line in found]
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass  # a damaged line: one by one
    return [line for line in map(record_of, chunk.split(b"\n")) if line is not None]
