"""The end of a run, as its user reads it: the status, and the report below it."""

from __future__ import annotations

import warnings
from pathlib import Path

from argosy.errors import ArgosyWarning
from argosy.observe.report import Report
from argosy.observe.terminal import printable
from argosy.watch.reader import RunReader
from argosy.watch.status import in_text, status_of


def ending_in_words(run_dir: Path, report: Report) -> str:
    """Return the status of a run that has finished, without what to do next, and its report."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ArgosyWarning)  # this command has shown them
            reader = RunReader(run_dir)
            reader.refresh()
            status = status_of(reader)
        what_next = ("next:", f"  {status.next.command}")
        head = [line for line in in_text(status) if not line.startswith(what_next)]
    except Exception as problem:  # whatever the folder holds: the run is done, and its report is what counts
        head = [f"no status: {type(problem).__name__}: {problem}"[:200]]
    return "\n".join([*map(printable, head), report.in_words()])
