"""Stop a run that was launched: it saves its state, and its job ends. The same `argosy launch` goes on from there.

Example:
  argosy stop runs/demo
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
    from argosy.launch.launched import job_in

    job = job_in(options.run)
    engine = engine_of(job)
    if engine.state(job)[0] == "ended":
        print(f"{options.run}: its job {job.id} on {job.engine} has ended already")
        return
    engine.stop(job)
    print(f"{options.run}: its job {job.id} on {job.engine} saves and ends; `argosy runs` shows when it has")
