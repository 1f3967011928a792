"""The runs under a folder, each opened when it is asked for, and closed when memory is short."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from argosy.errors import ArgosyError, UserError
from argosy.observe.records import encodable
from argosy.watch.metrics_table import Preview, preview
from argosy.watch.nodes import EnergySoFar
from argosy.watch.reader import RunReader, RunTail, is_run

AnswerT = TypeVar("AnswerT")

REREAD_S = 0.5
"""A run that was read so recently is not read again."""
FIND_S = 5.0
"""New runs are looked for so often, or less often where that takes long."""
MOST_OPEN = 24
MOST_BYTES = 2**30
"""Numbers of open runs take at most about so much memory; those that were asked for longest ago are closed."""
SHARE = 0.2
"""Most of a processor that goes into looking for changes."""


@dataclass
class OpenRun:
    """An open run."""

    reader: RunReader
    meter: EnergySoFar
    lock: threading.Lock = field(default_factory=threading.Lock)
    read_at: float = -1e9
    """Time of the last refresh, on the monotonic clock."""


class Unreadable(ArgosyError):
    """A run's files hold what a run does not write, and a question about it cannot be answered."""


@dataclass
class _Tail:
    tail: RunTail | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    read_at: float = -1e9


class Library:
    """The runs under `root`. Any thread may call any method; two that ask for one run wait for each other."""

    def __init__(self, root: Path):
        self.root = root
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, OpenRun] = OrderedDict()
        self._tails: dict[str, _Tail] = {}
        self._found: dict[str, Path] = {}
        self._found_at, self._finding_s = -1e9, 0.0
        self._finding = threading.Lock()

    def ids(self) -> list[str]:
        with self._finding:
            now = time.monotonic()
            if now - self._found_at > max(FIND_S, self._finding_s / SHARE):
                self._found = find_runs(self.root)
                self._found_at = time.monotonic()
                self._finding_s = self._found_at - now
                with self._lock:
                    self._tails = {run_id: tail for run_id, tail in self._tails.items() if run_id in self._found}
            return list(self._found)

    def ask(self, run_id: str, question: Callable[[OpenRun], AnswerT]) -> AnswerT:
        """Return the answer of the run with this id, refreshed. Nobody else reads it until the question returns.

        Raises: UserError if there is none; Unreadable if it cannot be answered.
        """
        folder = run_folder(self.root, run_id)
        with self._lock:
            entry = self._open.get(folder)
            if entry is None:
                reader = RunReader(folder)
                entry = self._open[folder] = OpenRun(reader, EnergySoFar(folder))
            self._open.move_to_end(folder)
        try:
            with entry.lock:
                if time.monotonic() - entry.read_at > REREAD_S:
                    entry.reader.refresh()
                    entry.read_at = time.monotonic()
                return question(entry)
        except ArgosyError:
            raise
        except Exception as problem:  # whatever its files hold: other runs must not suffer
            with self._lock:
                self._open.pop(folder, None)
            raise Unreadable(f"{run_id}: {_sentence(problem)}") from problem
        finally:
            self._make_room(entry)

    def preview(self, run_id: str) -> Preview | None:
        """Return a preview of a long run that was not read yet, else None. Raises: UserError if there is no run."""
        folder = run_folder(self.root, run_id)
        with self._lock:
            entry = self._open.get(folder)
        return preview(folder) if entry is None or entry.read_at < 0 else None

    def ask_all(
        self, question: Callable[[str, RunTail], AnswerT], otherwise: Callable[[str, str], AnswerT]
    ) -> list[AnswerT]:
        """Return the answers of all runs, refreshed, given the id of each; for a run that cannot be read, `otherwise`
        is asked with its id and the reason."""
        return [self._ask_tail(run_id, question, otherwise) for run_id in self.ids()]

    def news(self, known: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
        """Return id, step and state of the runs that changed since what is `known`, which is brought up to date."""

        def now(run_id: str, tail: RunTail) -> tuple[Any, ...]:
            events = tail.events[-1]["time_s"] if tail.events else None
            return run_id, tail.last_line.get("step"), tail.state, tail.alive_s, len(tail.events), events

        changed = [
            each
            for each in self.ask_all(now, lambda run_id, _: (run_id, None, "unreadable"))
            if known.get(each[0]) != each
        ]
        known.update({each[0]: each for each in changed})
        return [{"id": each[0], "step": each[1], "state": each[2]} for each in changed]

    def _ask_tail(
        self, run_id: str, question: Callable[[str, RunTail], AnswerT], otherwise: Callable[[str, str], AnswerT]
    ) -> AnswerT:
        with self._lock:
            entry = self._tails.setdefault(run_id, _Tail())
        with entry.lock:
            try:
                if entry.tail is None or time.monotonic() - entry.read_at > REREAD_S:
                    entry.tail = entry.tail or RunTail(run_folder(self.root, run_id))
                    entry.tail.refresh()
                    entry.read_at = time.monotonic()
                return question(run_id, entry.tail)
            except UserError as problem:  # it was removed, or is being made
                entry.tail, why = None, str(problem)
            except Exception as problem:  # whatever its files hold: other runs must not suffer
                entry.tail, why = None, _sentence(problem)
        return otherwise(run_id, why)

    def _make_room(self, keep: OpenRun) -> None:
        with self._lock:
            sizes = {folder: entry.reader.nbytes for folder, entry in self._open.items()}
            for folder, entry in list(self._open.items()):
                if len(self._open) <= MOST_OPEN and sum(sizes[f] for f in self._open) <= MOST_BYTES:
                    return
                if entry is not keep:
                    del self._open[folder]


def _sentence(problem: Exception) -> str:
    return f"it cannot be read ({type(problem).__name__}: {encodable(str(problem))[:200]})"


MOST_RUNS = 5000
DEEPEST = 4
"""A run is looked for in so many levels of folders."""
MOST_FOLDERS = 50_000
"""Most folders that are looked into."""


def find_runs(root: Path) -> dict[str, Path]:
    """Return the runs in and under `root`: path relative to it -> folder, in alphabetical order.

    A link is not followed, so nothing outside of `root` is found. A run within a run's folder is none of its own.
    """
    if is_run(root):
        return {own_id(root): root}
    found = dict(_runs_under(root))
    return dict(sorted(found.items()))


def own_id(run: Path) -> str:
    """Return the id of a run that was named itself, and is no run under a folder: its folder's name."""
    return run.resolve().name.lstrip(".") or "run"


def run_folder(root: Path, run_id: str) -> Path:
    """Return the folder of the run with this id. Raises: UserError if `root` has no such run, or it lies outside."""
    unknown = UserError(f"no run {run_id!r} in {root}")
    if "\0" in run_id or run_id.startswith(("/", "\\")):
        raise unknown
    parts = run_id.split("/")
    if is_run(root) and run_id == own_id(root):
        return root.resolve()
    if any(not part or part.startswith(".") for part in parts):
        raise unknown
    try:
        home = root.resolve(strict=True)
        folder = (home / run_id).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # a circle of links, a name that is too long
        raise unknown from None
    if not folder.is_relative_to(home) or not is_run(folder):
        raise unknown
    return folder


def _runs_under(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield runs, level by level, so that in a huge tree the nearest ones are found."""
    level, seen, count = [root], 0, 0
    for _ in range(DEEPEST):
        below: list[Path] = []
        for folder in level:
            for child in _folders_in(folder):
                seen += 1
                if seen > MOST_FOLDERS or count >= MOST_RUNS:
                    return
                if is_run(child):
                    count += 1
                    yield child.relative_to(root).as_posix(), child
                else:
                    below.append(child)
        level = below


def _folders_in(folder: Path) -> list[Path]:
    found: list[Path] = []
    with suppress(OSError), os.scandir(folder) as entries:  # one that may not be read is passed over
        found = [Path(e.path) for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
    return sorted(found)
