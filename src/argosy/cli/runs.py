"""List runs with their states and last steps, wherever they were launched.

Examples:
  argosy runs                     those in ./runs
  argosy runs /shared/team        those in and under another folder
  argosy runs --where "loss < 3 and tokens > 1e9" --sort val     which did well, the best first
  argosy runs --where 'state == "failed" or "llama" in model'    of any key that --json shows
  argosy runs --json              for a program
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from argosy.cli.documents import write
from argosy.cli.options import must_be_folder, parse
from argosy.watch.overview import RunRow

if TYPE_CHECKING:
    from argosy.launch.launched import Launched

NARROWEST = 80
"""Columns of a line where nobody looks at it in a terminal are not counted; a narrower terminal breaks lines."""


@dataclass(frozen=True)
class Options:
    folder: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """The folder to search, or a run's own."""
    where: str = ""
    """Only runs for which this holds; a comparison with a number that a run lacks never does."""
    sort: str = ""
    """Order by a key, the least first; --sort=-KEY: the greatest first."""
    json: bool = False
    """Print JSON, a run a line, with all that is known of it."""


@dataclass(frozen=True, kw_only=True)
class ListedRun(RunRow):
    """A run in a list: `state` and `why` as its engine says, of one that was launched."""

    folder: str
    engine: str
    """Empty if it was not launched."""
    job: str
    problem: str | None = None
    """Why its files could not be read."""


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy runs", Options)
    must_be_folder(options.folder)
    from argosy.launch.launched import launched_in
    from argosy.observe.terminal import printable

    found = launched_in(options.folder)
    if options.json or options.where or options.sort:
        from argosy.watch.library import chosen

        keys = tuple(field.name for field in fields(ListedRun))
        rows = chosen(map(_row, found), options.where, options.sort, keys)
        if options.json:
            write("runs", *(ListedRun(**row) for row in rows))
            return
        by_id = {run.id: run for run in found}
        found = [by_id[row["id"]] for row in rows]
    if not found:
        print(f"no runs in {options.folder}" + (f" for which {options.where}" if options.where else ""))
        return
    width = max(len(run.id) for run in found)
    for run in found:
        where = f"{run.engine} {run.job}" if run.engine else ""
        step = "" if run.step is None else f"step {run.step}"
        print(fitting(printable(f"{run.id:{width}}  {run.state:9} {step:>12}  {where:16}  {run.why}")))


def _row(run: Launched) -> dict[str, Any]:
    """Return all that is known of a run, by key."""
    from argosy.observe.records import finite
    from argosy.sync.layout import kept_in
    from argosy.watch import overview
    from argosy.watch.reader import RunTail

    known: dict[str, Any] = {"problem": None}
    try:
        tail = RunTail(kept_in(run.folder))
        tail.refresh()
        known |= vars(overview.row_of(run.id, tail))
    except Exception as problem:  # whatever its files hold: the others are listed
        known["problem"] = f"{type(problem).__name__}: {problem}"[:200]
    return finite({**known, **vars(run), "folder": str(run.folder)})


def fitting(line: str) -> str:
    """Return a line for one row of the terminal: line breaks become blanks, and what does not fit is cut."""
    line = " ".join(line.split("\n")).rstrip()
    if not sys.stdout.isatty():
        return line
    columns = max(NARROWEST, shutil.get_terminal_size().columns)
    return line if len(line) <= columns else line[: columns - 1] + "…"
