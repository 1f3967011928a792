"""Stop a run that was launched: it saves its state, and its job ends. The same `argosy launch` goes on from there.

Examples:
  argosy stop runs/demo
  argosy stop runs/two/sites/oslo                one site of a run; runs/two: all of them
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from argosy.cli.options import parse
from argosy.errors import UserError


@dataclass(frozen=True)
class Options:
    """Options of `argosy stop`."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""


def main(argv: list[str]) -> None:
    """`argosy stop RUN`."""
    options = parse(argv, "argosy stop", Options)
    from argosy.launch.engines.table import engine_of
    from argosy.launch.site_jobs import jobs_of

    problems = []
    for name, job in jobs_of(options.run).items():
        site = f"site {name}: " if name else ""
        whose = f"{options.run}: {site}its job {job.id} on {job.engine}"
        try:
            engine = engine_of(job)
            if engine.state(job)[0] == "ended":
                print(f"{whose} has ended already")
                continue
            engine.stop(job)
        except UserError as problem:  # the other sites are to stop nevertheless
            problems.append(f"{site}{problem}")
            continue
        print(f"{whose} saves and ends; `argosy runs` shows when it has")
    if problems:
        raise UserError("\n".join(problems))
