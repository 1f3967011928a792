"""`argosy watch --terminal`: the panel of `argosy train`, for runs that train elsewhere or did so."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from argosy.errors import UserError
from argosy.observe.folder_view import FolderView
from argosy.observe.panel import RunView, duration, one_line
from argosy.observe.surfaces import TerminalSurface
from argosy.observe.terminal import has_live_line, printable
from argosy.watch.run_files import RunFiles, find_runs

REFRESH_S = 0.5
SILENT_S = 60.0
"""A run that is not finished and has written nothing for so long is said to be silent."""
ENDED = ("finished", "stopped", "failed", "dead")
NEXT, BEFORE, QUIT = ("\x1b[B", "\x1b[C", "n"), ("\x1b[A", "\x1b[D", "p"), ("q", "\x03", "\x04")
"""Keys: arrows down and right, or n; arrows up and left, or p; q."""


def main(root: Path) -> int:
    """Show the run in `root`, or the runs under it, until q is typed. Without a terminal print a line for each run.

    Raises: UserError if there is no run.
    """
    runs = list(find_runs(root).values())
    if not runs:
        raise UserError(
            f"{root} holds no run. Name a run's folder, or one that holds runs: argosy watch runs --terminal"
        )
    if not has_live_line(sys.stdout) or not sys.stdin.isatty():
        for run in runs:
            view = seen(FolderView(run), run)
            print(f"{view.name}{one_line(view).plain}")
        return 0
    with _keys():
        _show(runs)
    return 0


def seen(folder: FolderView, run_dir: Path) -> RunView:
    """Return the run as it is now, with a word on whether it still trains."""
    view = _in_printable_words(folder.look())
    if (run_dir / "report.json").exists():
        return replace(view, doing="ended", left_s=0.0 if view.step == view.steps else None)
    files = _files(run_dir)  # what its events say of its end: the folder of parameter servers has no report
    files.refresh()
    if files.state in ENDED:
        return replace(view, doing=files.state, left_s=0.0 if view.step == view.steps else None)
    try:
        silent_s = time.time() - (run_dir / "metrics.jsonl").stat().st_mtime
    except OSError:
        return replace(view, doing="no step yet")
    if silent_s <= SILENT_S:
        return view
    return replace(view, doing=f"silent for {duration(silent_s)}")


def _in_printable_words(view: RunView) -> RunView:
    """Return the view with what the run's files say in text only as text: they may be a stranger's."""
    return replace(
        view,
        name=printable(view.name),
        model=printable(view.model),
        plan=printable(view.plan),
        doing=printable(view.doing),
        events=[(time_s, printable(words), style) for time_s, words, style in view.events],
    )


@cache
def _files(run_dir: Path) -> RunFiles:
    return RunFiles(run_dir)


def _show(runs: list[Path]) -> None:
    at, folders = 0, {0: FolderView(runs[0])}
    surface = TerminalSurface(sys.stdout)
    try:
        while True:
            view = seen(folders.setdefault(at, FolderView(runs[at])), runs[at])
            if len(runs) > 1:
                view = replace(view, name=f"{view.name} ({at + 1} of {len(runs)})")
            surface.show([], view)
            key = _typed(REFRESH_S)
            if key in QUIT:
                break
            at = (at + (key in NEXT) - (key in BEFORE)) % len(runs)
    except KeyboardInterrupt:
        pass
    surface.close([], view, is_told=False)


@contextmanager
def _keys() -> Iterator[None]:
    """Read single keys in this block; the terminal is as it was afterwards."""
    was = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, was)


def _typed(timeout_s: float) -> str:
    """Return what was typed within this time, one key with its whole escape sequence; "" if nothing was."""
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return os.read(sys.stdin.fileno(), 16).decode(errors="replace") if ready else ""
