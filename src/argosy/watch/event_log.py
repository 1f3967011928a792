"""The events of all processes of a run, in the order of time."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from argosy.observe.events import Tail
from argosy.observe.records import event_of

MOST_EVENTS = 20_000
"""Most events that are held. In a longer run the events of single ranks are left out first, then the oldest."""
LEADING_BYTES, OTHER_BYTES = 2**24, 2**18
"""Bytes at the end of a file that are read at first: for processes that tell of the whole run, and for others."""
OF_ONE_RANK = frozenset(("start", "end", "save", "verified", "prune", "drained", "resume", "fetched"))
"""Events that each rank writes, and rank 0 as well."""

Event = dict[str, Any]


class EventLog:
    """The events of a run's folder, followed. Each has its `process`, the name of the file that it is in."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._tails: dict[str, Tail] = {}
        self._sizes: dict[str, int] = {}
        self.events: list[Event] = []
        self.left_out = 0
        """The number of events that were read and are not held."""

    def refresh(self) -> bool:
        """Read what was added; return True if there is anything new. Raises: OSError if the folder cannot be read."""
        new: list[Event] = []
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(".jsonl") and entry.is_file(follow_symlinks=False):
                    new += self._read(entry)
        if new:
            self.events = sorted([*self.events, *new], key=lambda event: event["time_s"])
            self._bound()
        return bool(new)

    def _read(self, entry: os.DirEntry[str]) -> list[Event]:
        try:
            size = entry.stat().st_size
        except OSError:
            return []
        if size == self._sizes.get(entry.name, 0):
            return []
        process = entry.name.removesuffix(".jsonl")
        if size < self._sizes.get(entry.name, 0):  # replaced: what it held is not there any more
            self.events = [event for event in self.events if event["process"] != process]
            del self._tails[entry.name]
        if entry.name not in self._tails:
            most_bytes = LEADING_BYTES if tells_of_the_run(process) else OTHER_BYTES
            self._tails[entry.name] = Tail(Path(entry.path), most_bytes)
        self._sizes[entry.name] = size
        checked = map(event_of, self._tails[entry.name].read())
        return [{**event, "process": process} for event in checked if event is not None]

    def _bound(self) -> None:
        if len(self.events) <= MOST_EVENTS:
            return
        before = len(self.events)
        self.events = [e for e in self.events if tells_of_the_run(e["process"]) or e["event"] not in OF_ONE_RANK]
        self.events = self.events[-MOST_EVENTS:]
        self.left_out += before - len(self.events)


def tells_of_the_run(process: str) -> bool:
    """Return True for the processes whose events are about the whole run or a machine, not about one rank of many."""
    return not process.startswith("rank-") or process == "rank-0"
