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

from argosy.cli.documents import answer
from argosy.cli.options import parse
from argosy.credentials import redact
from argosy.observe.terminal import printable

MOST_LINE_CHARACTERS = 2**20
"""Characters of a line after which it is cut in two."""
ENDED_KINDS = {"ended", "finished", "failed", "stopped"}


@dataclass(frozen=True)
class Options:
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
    """Without characters that steer a terminal, and with credentials hidden."""


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy logs", Options)
    from argosy.launch.launched import launched_in, one_line, printed
    from argosy.watch.terminal import retold

    is_empty = True
    for line in _lines(printed(options.run, options.follow)):
        _show(line, options.json)
        is_empty = False
    for line in retold(options.run) if is_empty and not options.follow else ():  # it printed to a terminal
        _show(line, options.json)
        is_empty = False
    if is_empty:
        states = {run.state: run.why for run in launched_in(options.run)}
        if states.keys() <= ENDED_KINDS:
            said = f"nothing was printed: {one_line(', '.join(f'{state} {why}' for state, why in states.items()))}"
        else:
            said = "nothing yet; `argosy runs` says what it waits for"
        print(printable(f"{options.run}: {said}"), file=sys.stderr)


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield each line as soon as it is whole; one that is longer than `MOST_LINE_CHARACTERS` in parts."""
    characters, rest = getincrementaldecoder("utf-8")("backslashreplace"), ""
    for piece in pieces:
        *lines, rest = (rest + characters.decode(piece)).split("\n")
        yield from lines
        if len(rest) > MOST_LINE_CHARACTERS:
            yield rest
            rest = ""
    if rest:
        yield rest


def _show(line: str, is_json: bool) -> None:
    text = redact(printable(line))
    answer(is_json, "logs", text, LogLine(text))
