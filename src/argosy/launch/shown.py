"""What workers print, shown where this process prints: in a notebook, `sys.stdout` is not the descriptor 1."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import TextIO

STANDARD = 1
END_S = 5.0
"""How long the last words are waited for: a process that outlives the run may still hold the pipe."""


@contextmanager
def shown() -> Iterator[int | None]:
    """Yield the descriptor that workers are to print to, so that it comes out of this process's `sys.stdout`.

    None if they may print to this process's standard output, which then is the same.
    """
    out = sys.stdout
    if out is None or _is_standard(out):
        yield None
        return
    reader, writer = os.pipe()
    passing = Thread(target=_pass_on, args=(reader, out), name="argosy-output", daemon=True)
    passing.start()
    try:
        yield writer
    finally:
        os.close(writer)
        passing.join(END_S)


def _is_standard(out: TextIO) -> bool:
    try:
        return out.fileno() == STANDARD
    except (AttributeError, OSError, ValueError):  # it has no descriptor, as a StringIO or a notebook's
        return False


def _pass_on(reader: int, out: TextIO) -> None:
    with open(reader, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(OSError, ValueError):  # it was closed; the workers must not wait for it
                out.write(line)
                out.flush()
