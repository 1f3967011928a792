"""A first look at a run of very many steps: some of its lines, evenly spread, while all of them are being read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from argosy.observe.events import from_the_end
from argosy.observe.records import record_of
from argosy.watch.columns import STEP, Columns, Line, rows_of
from argosy.watch.documents import leads_away
from argosy.watch.linefile import spread_lines
from argosy.watch.metrics_table import LOSS, NORMS

LONG_BYTES = 2**26
"""A shorter file is read in a tenth of a second, and needs no preview."""
LINES = 2000
LONGEST_LINE_BYTES = 2**16
"""There is no preview of a file with longer lines: it would be read many times over."""


class Preview:
    """Numbers by step of about LINES lines of a run, and of its last one: no norms, and no keys that few lines have."""

    def __init__(self, lines: list[Line]):
        self.steps, self.norms = Columns(), Columns()
        if lines:
            self.steps.append(rows_of(lines))

    def keys(self) -> list[str]:
        """Return the keys of these lines."""
        return self.steps.keys()


def preview(folder: Path) -> Preview | None:
    """Return a preview of the run in `folder`; None if it is short, has few lines, or cannot be read now."""
    path = folder / "metrics.jsonl"
    try:
        if leads_away(folder, path.name) or path.stat().st_size < LONG_BYTES:
            return None
        spread = map(record_of, spread_lines(path, path.stat().st_size, LINES, LONGEST_LINE_BYTES))
        lines = [*(line for line in spread if line is not None), *_last(path)]
    except OSError:
        return None
    steps = [line for line in lines if isinstance(line.get(STEP), int) and LOSS in line]
    if len(steps) < LINES / 2:
        return None
    return Preview([{key: line[key] for key in line if key != NORMS} for line in steps])


def _last(path: Path) -> Iterator[Line]:
    for line in from_the_end(path):
        if LOSS in line:
            yield line
            return
