"""What a run's processes print, shown where this process prints: in a live terminal, in a notebook, or as it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from threading import Thread
from typing import TextIO

from argosy.observe.notebook import NotebookSurface, is_in_notebook
from argosy.observe.screen import Screen, read_lines_of
from argosy.observe.terminal import has_live_line
from argosy.observe.terminal_surface import TerminalSurface

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
        with _screen(Screen(NotebookSurface()), has_stderr=False) as found:
            yield found
    elif not _is_standard(out):
        with _pipe(lambda reader: _pass_on(reader, out)) as writer:
            yield Shown(stdout=writer)
    elif not quiet and has_live_line(out):
        with _screen(Screen(TerminalSurface(out)), has_stderr=sys.stderr.isatty()) as found:
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
