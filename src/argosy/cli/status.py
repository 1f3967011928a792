"""Say in a few lines how a run is: state, loss, health, plan and measurement, what changed, and what to do next.

It only reads the folder, so the run may be training, hung, finished, or a copy. Exit code 0: well or done; 1: failed,
died, or a critical alert.

Examples:
  argosy status runs/demo                         for a person
  argosy status runs/demo --json                  for a program, under 2 kB
  argosy status runs/demo --since 1769000000.123  what changed after that event of an earlier status
  argosy status runs/demo --since 10m             in the last ten minutes
  argosy status runs/demo --since resume          since it went on
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.cli.documents import answer
from argosy.cli.options import PrintJson, RunPath, parse, read_run


@dataclass(frozen=True)
class Options:
    run: RunPath
    since: str = ""
    """Tell what changed after an `event` of an earlier status, a duration ago (10m), or the last event of a kind."""
    json: PrintJson = False


def main(argv: list[str]) -> int:
    options = parse(argv, "argosy status", Options)
    from argosy.watch.status import in_text, status_of

    status = status_of(read_run(options.run), options.since)
    answer(options.json, "status", "\n".join(in_text(status)), status)
    return int(status.health == "critical")
