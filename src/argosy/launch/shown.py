"""What a run's processes print, shown where this process prints: in a live terminal, in a notebook, or as it is.

metrics.jsonl, followed while a run goes on: each line is passed to a function of the caller's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, TextIO

from argosy.observe.line_follower import LineFollower
from argosy.observe.screen import Screen, read_lines_of
from argosy.observe.surfaces import NotebookSurface, TerminalSurface, is_in_notebook
from argosy.observe.terminal import has_live_line
from argosy.watch.terminal import FolderView

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
            self._lines = LineFollower(run_dir / "metrics.jsonl", by_line=True)
            self._lines.take()  # what is there now is not new
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


STANDARD = 1
END_S = 5.0
"""How long the last words are waited for: a process that outlives the run may still hold the pipe."""


@dataclass(frozen=True)
class Shown:
    """Where a run's processes are to print, and who shows it."""

    stdout: int | None = None
    """A descriptor; None: this process's standard output."""
    stderr: int | None = None
    screen: Screen | None = None
    """Shows the run, if somebody looks."""


@contextmanager
def shown(quiet: bool = False) -> Iterator[Shown]:
    """Show in this block what processes print to the descriptors that it yields.

    In a terminal and in a notebook a screen shows the run, unless it is to be `quiet`. In any other output without a
    descriptor (a StringIO) lines are passed on as they are; to any other, processes print themselves.
    """
    out = sys.stdout
    if out is None:
        yield Shown()
    elif not quiet and is_in_notebook():
        with _screen(Screen(NotebookSurface(), FolderView), has_stderr=False) as found:
            yield found
    elif not _is_standard(out):
        with _pipe(lambda reader: _pass_on(reader, out)) as writer:
            yield Shown(stdout=writer)
    elif not quiet and has_live_line(out):
        with _screen(Screen(TerminalSurface(out), FolderView), has_stderr=sys.stderr.isatty()) as found:
            yield found
    else:
        yield Shown()


@contextmanager
def _screen(screen: Screen, has_stderr: bool) -> Iterator[Shown]:
    with ExitStack() as held:
        held.enter_context(screen)
        writer = held.enter_context(_pipe(lambda reader: read_lines_of(reader, screen)))
        yield Shown(stdout=writer, stderr=writer if has_stderr else None, screen=screen)


@contextmanager
def _pipe(read: Callable[[int], None]) -> Iterator[int]:
    """Yield the end of a pipe to write to; `read` is called in a thread with the other one, which it closes."""
    reader, writer = os.pipe()
    passing = Thread(target=read, args=(reader,), name="argosy-output", daemon=True)
    passing.start()
    try:
        yield writer
    finally:
        os.close(writer)
        passing.join(END_S)


def _is_standard(out: TextIO) -> bool:
    try:
        return out.fileno() == STANDARD
    except (AttributeError, OSError, ValueError):  # it has no descriptor, as a StringIO or a notebook's
        return False


def _pass_on(reader: int, out: TextIO) -> None:
    with open(reader, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(OSError, ValueError):  # it was closed; the workers must not wait for it
                out.write(line)
                out.flush()
