"""Print what a run that was launched prints.

Examples:
  argosy logs runs/demo           what there is
  argosy logs runs/demo -f        and what follows, until the job ends
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from argosy.cli.options import parse

LOOK_S = 0.5


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
    log, engine = Path(job.log), engine_of(job)
    at = _print_from(log, 0)
    if not at and not options.follow:
        print(f"{log}: nothing yet: the job is {' '.join(engine.state(job)).strip()}", file=sys.stderr)
    while options.follow:
        has_ended = engine.state(job)[0] == "ended"
        at = _print_from(log, at)
        if has_ended:
            break
        time.sleep(LOOK_S)


def _print_from(log: Path, at: int) -> int:
    """Print what `log` has from byte `at` on. Return where it ends."""
    try:
        with log.open("rb") as file:
            file.seek(at)
            while text := file.read(1 << 16):
                sys.stdout.buffer.write(text)
            sys.stdout.flush()
            return file.tell()
    except FileNotFoundError:
        return at
