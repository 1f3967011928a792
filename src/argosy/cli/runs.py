"""List runs, wherever they were launched, with what has become of each and its last step.

Examples:
  argosy runs                     those in ./runs
  argosy runs /shared/team        those in and under another folder
  argosy runs --json              for a program
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from argosy.cli.options import must_be_folder, parse

NARROWEST = 80
"""Columns of a line where nobody looks at it in a terminal are not counted; a narrower terminal breaks lines."""


@dataclass(frozen=True)
class Options:
    """Options of `argosy runs`."""

    folder: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """The folder to search, or a run's own."""
    json: bool = False
    """Print JSON."""


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy runs", Options)
    must_be_folder(options.folder)
    from argosy.launch.launched import launched_in
    from argosy.observe.terminal import printable

    found = launched_in(options.folder)
    if options.json:
        print(json.dumps([{**vars(run), "folder": str(run.folder)} for run in found], indent=1))
        return
    if not found:
        print(f"no runs in {options.folder}")
        return
    width = max(len(run.id) for run in found)
    for run in found:
        where = f"{run.engine} {run.job}" if run.engine else ""
        step = "" if run.step is None else f"step {run.step}"
        print(fitting(printable(f"{run.id:{width}}  {run.state:9} {step:>12}  {where:16}  {run.why}")))


def fitting(line: str) -> str:
    """Return a line for one row of the terminal: line breaks become blanks, and what does not fit is cut."""
    line = " ".join(line.split("\n")).rstrip()
    if not sys.stdout.isatty():
        return line
    columns = max(NARROWEST, shutil.get_terminal_size().columns)
    return line if len(line) <= columns else line[: columns - 1] + "…"
