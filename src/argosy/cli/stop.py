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

    for name, job in jobs_of(options.run).items():
        whose, engine = f"{options.run}: {f'site {name}: ' if name else ''}its job", engine_of(job)
        if engine.state(job)[0] == "ended":
            print(f"{whose} {job.id} on {job.engine} has ended already")
            continue
        engine.stop(job)
        print(f"{whose} {job.id} on {job.engine} saves and ends; `argosy runs` shows when it has")
