"""Print the output of a launched run; otherwise the logs of workers other than rank 0, or the run's steps and events.

Examples:
  argosy logs runs/demo           what there is
  argosy logs runs/demo -f        and what follows, until the job ends
"""

from __future__ import annotations

import sys
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from argosy.cli.documents import write
from argosy.cli.options import parse

LONGEST_LINE = 2**20
"""Characters of a line after which it is cut in two documents."""
ENDED = {"ended", "finished", "failed", "stopped"}


@dataclass(frozen=True)
class Options:
    """Options of `argosy logs`."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    follow: Annotated[bool, tyro.conf.arg(aliases=["-f"])] = False
    """Go on until the job ends. Ctrl-C ends only the printing."""
    json: bool = False
    """Print JSON, a line for each."""


@dataclass(frozen=True)
class LogLine:
    """A line that a run printed, or that tells of it."""

    text: str
    """Without characters that steer a terminal."""


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy logs", Options)
    from argosy.launch.launched import launched_in, one_line, printed
    from argosy.observe.terminal import printable
    from argosy.watch.terminal import retold

    show = _documents if options.json else _text
    is_empty = True
    for _ in show(map(printable, _decoded(printed(options.run, options.follow)))):
        is_empty = False
    if is_empty and not options.follow:  # it printed to a terminal
        for _ in show(f"{printable(line)}\n" for line in retold(options.run)):
            is_empty = False
    if is_empty:
        states = {run.state: run.why for run in launched_in(options.run)}
        if states.keys() <= ENDED:
            said = f"nothing was printed: {one_line(', '.join(f'{state} {why}' for state, why in states.items()))}"
        else:
            said = "nothing yet; `argosy runs` says what it waits for"
        print(printable(f"{options.run}: {said}"), file=sys.stderr)


def _decoded(pieces: Iterable[bytes]) -> Iterator[str]:
    characters = getincrementaldecoder("utf-8")("backslashreplace")
    return map(characters.decode, pieces)


def _text(pieces: Iterable[str]) -> Iterator[None]:
    """Print pieces of text as they come, and yield after each."""
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
        yield


def _documents(pieces: Iterable[str]) -> Iterator[None]:
    """Do as `_text` with a document for each line, once it is whole."""
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        if len(rest) > LONGEST_LINE:
            lines, rest = [*lines, rest], ""
        write("logs", *map(LogLine, lines))
        yield
    if rest:
        write("logs", LogLine(rest))
