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

from argosy.cli.documents import DryRun, answer, show_dry_run
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
    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    dry_run: bool = False
    """Say what would be told to end, and leave it alone."""
    json: bool = False
    """Print JSON, a job a line."""


@dataclass(frozen=True)
class StoppedJob:
    """A job of the run."""

    site: str
    """The name of its site in a run with sites; else empty."""
    engine: str
    job: str
    state: str
    """Before it was told: waiting, running, ended or unknown."""
    told: bool
    """False if it had ended already."""
    words: str
    """Its future, in words that go on from its name."""


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy stop", Options)
    from argosy.engines.table import engine_of, state_of
    from argosy.launch.launched import holders, jobs_of
    from argosy.sync.layout import site_folder

    problems, would = [], []
    for name, job in jobs_of(options.run).items():
        whose = f"{options.run}: {f'site {name}: ' if name else ''}its job {job.id} on {job.engine}"
        state, words = state_of(job)
        has_ended = state == "ended"
        if options.dry_run:
            would += [] if has_ended else [f"tell {whose}, which is {state}, to save and end"]
            continue
        held_by = holders(site_folder(options.run, name)) if has_ended else []
        if held_by:
            problems.append(f"{whose} has ended, but {', '.join(held_by)} trains it: `kill` it there, and it saves")
            continue
        try:
            if not has_ended:
                engine_of(job).stop(job)
        except UserError as problem:  # the other sites are to stop nevertheless
            problems.append(f"{whose} may not have been stopped: {problem}")
            continue
        said = f"is that of {job.original}, of which this is a copy" if job.original else "has ended already"
        said = said if has_ended else WILL[state].format(words)
        answer(
            options.json, "stop", f"{whose} {said}", StoppedJob(name, job.engine, job.id, state, not has_ended, said)
        )
    if options.dry_run:
        show_dry_run(DryRun(tuple(would), options.run), options.json)
    if problems:
        raise UserError("\n".join(problems))
