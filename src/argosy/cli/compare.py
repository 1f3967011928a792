"""Compare two runs: the settings that differ, and the losses at equal tokens, time and cost.

For a page with the curves of any number of runs side by side: argosy watch FOLDER.

Examples:
  argosy compare runs/a runs/b             a table
  argosy compare runs/a runs/b --plot      and charts, in the terminal
  argosy compare runs/a runs/b --json      for a program
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from argosy.cli.documents import write
from argosy.cli.options import PrintJson, RunPath, parse, read_run


@dataclass(frozen=True)
class Options:
    a: RunPath
    b: Annotated[Path, tyro.conf.Positional]
    """The other run's folder."""
    plot: bool = False
    """Draw the loss curves too."""
    json: PrintJson = False


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy compare", Options)
    from rich.console import Console

    from argosy.compare.side_by_side import charts, compare, in_text
    from argosy.observe.terminal import printable

    a, b = read_run(options.a), read_run(options.b)
    found = compare(a, b)
    if options.json:
        write("compare", found)
        return
    for line in in_text(found):
        print(printable(line))
    for row in charts(a, b, found) if options.plot else ():
        Console(highlight=False).print(row)
