"""Print what a run that was launched prints.

Examples:
  argosy logs runs/demo           what there is
  argosy logs runs/demo -f        and what follows, until the job ends
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from argosy.cli.options import parse


@dataclass(frozen=True)
class Options:
    """Options of `argosy logs`."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    follow: Annotated[bool, tyro.conf.arg(aliases=["-f"])] = False
    """Go on until the job ends. Ctrl-C ends only the printing."""


def main(argv: list[str]) -> None:
    """`argosy logs RUN`."""
    options = parse(argv, "argosy logs", Options)
    from argosy.launch.engines.table import engine_of
    from argosy.launch.launched import job_in

    job = job_in(options.run)
    engine, is_empty = engine_of(job), True
    for text in engine.logs(job, options.follow):
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
        is_empty = False
    if is_empty:
        print(f"{options.run}: nothing yet: the job is {' '.join(engine.state(job)).strip()}", file=sys.stderr)
