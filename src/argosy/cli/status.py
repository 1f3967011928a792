"""Say in a few lines how a run is: state, loss, health, plan and measurement, what changed, and what to do next.

The run may train, hang, be over or lie in a copied folder; it does not notice. Exit code 0: it is well or done; 1: it
failed, died or has a critical alert.

Examples:
  argosy status runs/demo                         for a person
  argosy status runs/demo --json                  for a program, under 2 kB
  argosy status runs/demo --since 1769000000.123  what changed after that event of an earlier status
  argosy status runs/demo --since 10m             in the last ten minutes
  argosy status runs/demo --since resume          since it went on
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from argosy.cli.documents import write
from argosy.cli.options import parse
from argosy.errors import ArgosyWarning


@dataclass(frozen=True)
class Options:
    """Options of `argosy status`."""

    run: Annotated[Path, tyro.conf.Positional]
    """A run's folder."""
    since: str = ""
    """Tell what changed after an `event` of an earlier status, a duration ago (10m), or the last event of a kind."""
    json: bool = False
    """Print JSON."""


def main(argv: list[str]) -> int:
    options = parse(argv, "argosy status", Options)
    from argosy.observe.terminal import printable
    from argosy.watch.reader import RunReader
    from argosy.watch.status import in_text, status_of

    warnings.simplefilter("ignore", ArgosyWarning)  # of an old run.toml: it is the run that is asked to change it
    reader = RunReader(options.run)
    reader.refresh()
    status = status_of(reader, options.since)
    if options.json:
        write("status", status)
    else:
        print("\n".join(printable(line) for line in in_text(status)))
    return int(status.health == "critical")
