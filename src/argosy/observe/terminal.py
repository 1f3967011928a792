"""A terminal that the processes of a run share. Any of them may print a message while something is shown there.

It may go away, as may the reader of a pipe (`| head`): a run goes on without it.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

TOLD_AFTER_S, TOLD_AGAIN_S = 5.0, 60.0
CLEAR_LINE = "\r\x1b[2K"
"""Back to the start of the line, and erase it (ECMA-48: CR, EL 2)."""


MAY_PASS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EAGAIN})
"""Errors of an output that may take more later: a full disk, a slow reader of a pipe that does not wait."""
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that steer a terminal or turn the order of text (Unicode's control and bidirectional ones), and what is no
character; all but ends of lines and tabs."""


def printable(text: str) -> str:
    """Return text that came from a run's files with such characters escaped: printed, it can only be read.

    So no name, message or log can write over other lines of a terminal, or set it up.
    """
    return STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


class Owner(Protocol):
    """The owner of this process's terminal: an `observe.screen.Screen`."""

    def take(self, message: dict[str, Any]) -> None:
        """Show a message of `Progress`; waits for nothing."""


owner: Owner | None = None
"""The owner of the terminal now, if it has one. There is one terminal."""


def has_live_line(stream: TextIO) -> bool:
    """Return True if `stream` is a terminal in which a line can be written over."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def print_message(text: str) -> None:
    """Print to stderr, in place of the live line if there is one; its owner writes it again below."""
    text = printable(text)
    if owner is not None and has_live_line(sys.stderr):
        owner.take({"say": text})
        return
    start = CLEAR_LINE if has_live_line(sys.stderr) else ""
    sys.stderr.write(f"{start}{text}\n")  # at once: other processes write too
    sys.stderr.flush()


@contextmanager
def told_if_long(what: str) -> Iterator[None]:
    """Print on stderr what is done in this block, once it has taken `TOLD_AFTER_S`, and then every `TOLD_AGAIN_S`."""
    begun_s, has_ended = time.monotonic(), threading.Event()

    def tell() -> None:
        wait_s = TOLD_AFTER_S
        while not has_ended.wait(wait_s):
            wait_s = TOLD_AGAIN_S
            with suppress(OSError, ValueError):  # nobody reads any more
                print_message(f"{what} ({time.monotonic() - begun_s:.0f} s so far)")

    threading.Thread(target=tell, name="argosy-told-if-long", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


@contextmanager
def lasting_output(instead: Path = Path(os.devnull)) -> Iterator[None]:
    """In this block, prints do not fail when nobody reads them any more: what follows goes to the file `instead`.

    Streams without a descriptor (a notebook's, a StringIO) stay as they are.
    """
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    for name, stream in before.items():
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError, ValueError):
                setattr(sys, name, _lasting(stream, instead))
            with suppress(OSError, ValueError):
                stream.flush()
    try:
        yield
    finally:
        for name, stream in before.items():
            if stream is not None:
                getattr(sys, name).flush()
            setattr(sys, name, stream)


def _lasting(stream: io.TextIOWrapper, instead: Path) -> TextIO:
    raw = _LastingOutput(stream.fileno(), instead)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), stream.encoding, stream.errors,
        line_buffering=stream.line_buffering, write_through=stream.write_through,
    )  # fmt: skip


class _LastingOutput(io.FileIO):
    """A descriptor to which a write never fails: once it takes nothing any more, it leads to another file."""

    def __init__(self, descriptor: int, instead: Path):
        super().__init__(descriptor, "w", closefd=False)
        self._instead = instead

    def write(self, data: Any, /) -> int:
        """Write `data`, or drop it."""
        written = None
        try:
            written = super().write(data)
        except OSError as problem:
            if problem.errno not in MAY_PASS:
                self._lead_elsewhere(problem)
                with suppress(OSError):
                    written = super().write(data)
        return memoryview(data).nbytes if written is None else written

    def _lead_elsewhere(self, problem: OSError) -> None:
        """Replace the descriptor itself: other code of this process prints to it too."""
        try:
            self._instead.parent.mkdir(exist_ok=True)
            spare = os.open(self._instead, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError:
            spare = os.open(os.devnull, os.O_WRONLY)
        os.dup2(spare, self.fileno())
        os.close(spare)
        with suppress(OSError):
            super().write(
                f"argosy: nobody reads what is printed any more ({problem.strerror}): it goes here\n".encode()
            )
