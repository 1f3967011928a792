"""Print the output of a launched run; otherwise the logs of workers other than rank 0, or the run's steps and events.

Examples:
  argosy logs runs/demo           what there is
  argosy logs runs/demo -f        and what follows, until the job ends
"""

from __future__ import annotations

import sys
from codecs import getincrementaldecoder
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from argosy.cli.options import parse

ENDED = {"ended", "finished", "failed", "stopped"}


@dataclass(frozen=True)
class Options:
    """Options of `argosy logs`."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    follow: Annotated[bool, tyro.conf.arg(aliases=["-f"])] = False
    """Go on until the job ends. Ctrl-C ends only the printing."""


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy logs", Options)
    from argosy.launch.launched import launched_in, one_line, printed
    from argosy.observe.terminal import printable
    from argosy.watch.terminal import retold

    characters = getincrementaldecoder("utf-8")("backslashreplace")
    is_empty = True
    for piece in printed(options.run, options.follow):
        sys.stdout.write(printable(characters.decode(piece)))
        sys.stdout.flush()
        is_empty = False
    for line in retold(options.run) if is_empty and not options.follow else ():  # it printed to a terminal
        print(printable(line))
        is_empty = False
    if is_empty:
        states = {run.state: run.why for run in launched_in(options.run)}
        if states.keys() <= ENDED:
            said = f"nothing was printed: {one_line(', '.join(f'{state} {why}' for state, why in states.items()))}"
        else:
            said = "nothing yet; `argosy runs` says what it waits for"
        print(printable(f"{options.run}: {said}"), file=sys.stderr)
