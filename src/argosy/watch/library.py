"""The runs under a folder, each opened when it is asked for, and closed when memory is short."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argosy.errors import UserError
from argosy.watch import overview
from argosy.watch.energy import EnergyMeter
from argosy.watch.preview import Preview, preview
from argosy.watch.reader import RunReader
from argosy.watch.run_files import RunTail
from argosy.watch.runs import find_runs, run_folder

REFRESH_S = 0.5
"""What was read so recently is not looked at again."""
FIND_S = 5.0
"""New runs are looked for so often, or less often where that takes long."""
MOST_OPEN = 24
MOST_BYTES = 2**30
"""Numbers of open runs take at most about so much memory; those that were asked for longest ago are closed."""
SHARE = 0.2
"""Most of a processor that goes into looking for changes."""


@dataclass
class Open:
    """An open run."""

    reader: RunReader
    meter: EnergyMeter
    lock: threading.Lock = field(default_factory=threading.Lock)
    read_at: float = -1e9
    """When it was last refreshed, on the monotonic clock."""


@dataclass
class _Tail:
    tail: RunTail | None
    problem: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    read_at: float = -1e9


class Library:
    """The runs under `root`. Any thread may call any method; two that ask for one run wait for each other."""

    def __init__(self, root: Path):
        self.root = root
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, Open] = OrderedDict()
        self._tails: dict[str, _Tail] = {}
        self._found: dict[str, Path] = {}
        self._found_at, self._finding_s = -1e9, 0.0
        self._finding = threading.Lock()

    def ids(self) -> list[str]:
        """Return the ids of all runs."""
        with self._finding:
            now = time.monotonic()
            if now - self._found_at > max(FIND_S, self._finding_s / SHARE):
                self._found = find_runs(self.root)
                self._found_at = time.monotonic()
                self._finding_s = self._found_at - now
                with self._lock:
                    self._tails = {run_id: tail for run_id, tail in self._tails.items() if run_id in self._found}
            return list(self._found)

    @contextmanager
    def open(self, run_id: str) -> Iterator[Open]:
        """Yield the run with this id, refreshed. Raises: UserError if there is none."""
        folder = run_folder(self.root, run_id)
        with self._lock:
            entry = self._open.get(folder)
            if entry is None:
                reader = RunReader(folder)
                entry = self._open[folder] = Open(reader, EnergyMeter(reader))
            self._open.move_to_end(folder)
        with entry.lock:
            if time.monotonic() - entry.read_at > REFRESH_S:
                entry.reader.refresh()
                entry.read_at = time.monotonic()
            yield entry
        self._make_room(entry)

    def preview(self, run_id: str) -> Preview | None:
        """Return a preview of a long run that was not read yet, else None. Raises: UserError if there is no run."""
        folder = run_folder(self.root, run_id)
        with self._lock:
            entry = self._open.get(folder)
        return preview(folder) if entry is None or entry.read_at < 0 else None

    def tails(self) -> Iterator[tuple[str, RunTail | None, str]]:
        """Yield id, run and problem of each run, refreshed; a run that cannot be read has a problem instead."""
        for run_id in self.ids():
            with self._tail(run_id) as entry:
                yield run_id, entry.tail, entry.problem

    def lines(self) -> list[dict[str, Any]]:
        """Return what a list of runs shows."""
        return [
            overview.unreadable(run_id, problem) if tail is None else overview.line(run_id, tail)
            for run_id, tail, problem in self.tails()
        ]

    def news(self, known: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
        """Return id, step and state of the runs that changed since what is `known`, which is brought up to date."""
        found = []
        for run_id, tail, _ in self.tails():
            if tail is not None:
                events = tail.events[-1]["time_s"] if tail.events else None
                now = (tail.last_line.get("step"), tail.state, tail.alive_s, len(tail.events), events)
                if known.get(run_id) != now:
                    known[run_id] = now
                    found.append({"id": run_id, "step": now[0], "state": now[1]})
        return found

    @contextmanager
    def _tail(self, run_id: str) -> Iterator[_Tail]:
        with self._lock:
            entry = self._tails.setdefault(run_id, _Tail(None))
        with entry.lock:
            if time.monotonic() - entry.read_at > REFRESH_S:
                try:
                    entry.tail = entry.tail or RunTail(run_folder(self.root, run_id))
                    entry.tail.refresh()
                    entry.problem = ""
                except UserError as error:  # it was removed, or is being made
                    entry.tail, entry.problem = None, str(error)
                entry.read_at = time.monotonic()
            yield entry

    def _make_room(self, keep: Open) -> None:
        with self._lock:
            sizes = {folder: entry.reader.nbytes for folder, entry in self._open.items()}
            for folder, entry in list(self._open.items()):
                if len(self._open) <= MOST_OPEN and sum(sizes[f] for f in self._open) <= MOST_BYTES:
                    return
                if entry is not keep:
                    del self._open[folder]
