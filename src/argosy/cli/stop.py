"""Stop a run that was launched: it saves its state, and its job ends. The same `argosy launch` goes on from there.

Examples:
  argosy stop runs/demo
  argosy stop runs/demo --dry-run                say which job that is, and leave it alone
  argosy stop runs/two/sites/oslo                one site of a run; runs/two: all of them
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from argosy.cli.options import parse
from argosy.errors import UserError

WILL = {
    "waiting": "is taken out of the queue; it trained nothing there that would have to be saved",
    "running": "saves and ends; `argosy runs` shows when it has",
    "unknown": "was told to end; whether it still runs is not known: {}",
}
"""State of a job that was told to stop -> what is said of it."""


@dataclass(frozen=True)
class Options:
    """Options of `argosy stop`."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    dry_run: bool = False
    """Say what would be told to end, and leave it alone."""


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy stop", Options)
    from argosy.engines.table import engine_of, state_of
    from argosy.launch.sites import jobs_of
    from argosy.observe.terminal import printable

    problems = []
    for name, job in jobs_of(options.run).items():
        whose = f"{options.run}: {f'site {name}: ' if name else ''}its job {job.id} on {job.engine}"
        state, words = state_of(job)
        if state == "ended":
            print(printable(f"{whose} has ended already"))
            continue
        if options.dry_run:
            print(printable(f"{whose} is {state}: it would be told to save and end"))
            continue
        try:
            engine_of(job).stop(job)
        except UserError as problem:  # the other sites are to stop nevertheless
            problems.append(f"{whose} may not have been stopped: {problem}")
            continue
        print(printable(f"{whose} {WILL[state].format(words)}"))
    if problems:
        raise UserError("\n".join(problems))
