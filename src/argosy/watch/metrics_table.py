"""metrics.jsonl as columns, of steps and of evaluations; and a first look at a very long one: some of its lines, evenly
spread, while all of them are being read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from argosy.observe.events import from_the_end
from argosy.observe.line_follower import LineFollower
from argosy.observe.records import record_of, step_line
from argosy.watch.columns import STEP_COLUMN, Columns, Floats, Line, add_column, group_of, rows_of
from argosy.watch.linefile import leads_away, spread_lines

try:  # without the extra `watch` all is the same, but a long run takes some times as long to open
    import msgspec
except ImportError:
    msgspec = None  # type: ignore[assignment]

LOSS_KEY = "loss"
"""A line with this key is that of a step."""
VALIDATION_LOSS = "validation_loss"
"""A line with this key, and without the other, is that of an evaluation."""
BITS_PER_BYTE = "bits_per_byte"
VALIDATION_ACCURACY = "validation_accuracy"
"""Accuracy of a reward model on held-out pairs: a key of evaluations too."""
FIRST_KEYS = (STEP_COLUMN, LOSS_KEY, "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "step_time_s", "time_s")
"""Keys of a long file that are read of each line before anything is shown."""
NORMS_GROUP = "norms"
"""Group that only steps that are due have; in a table of its own, since it is hundreds of keys in a large model."""
TABLE_READ_WHOLE_BYTES = 4 * 2**20
"""All keys of a shorter file, and of what is added to any file, are read at once."""
SAMPLED_LINES = 4
"""First lines of each chunk of a long file that are read, beside its last one, to learn which keys there are."""
SELDOM = ("user", "experts", "sites", "sync", NORMS_GROUP)
"""Groups that perhaps none of these lines has: the first line of a chunk that has one is read too."""
OF_EVALUATIONS = (VALIDATION_LOSS, BITS_PER_BYTE, VALIDATION_ACCURACY, "tasks")
ABSENT: Any = object()

Rows = dict[str, Floats]


class MetricsTable:
    """The lines of metrics.jsonl, followed.

    Of a long file, a group of keys (`seconds`, `communication`, ...) is read when one of its keys is asked for.
    """

    def __init__(self, path: Path):
        self._file = LineFollower(path)
        self._clear()

    def _clear(self) -> None:
        self.steps = Columns(self._load)
        self.evaluations = Columns()
        self.norms = Columns()
        """Keys LAYER.weight, LAYER.gradient, LAYER.update; a row for each step that was due."""
        self.bad_lines = 0
        """Complete lines that are no records."""
        self.last_line: Line = {}
        """The newest line of a step."""
        self._groups: set[str] | None = None
        """Groups of `steps` that are in memory; None: all."""
        self._keys: dict[str, None] = {}

    @property
    def is_missing(self) -> bool:
        return self._file.is_missing

    def keys(self) -> list[str]:
        """Return all keys of steps, in memory or not. Of a long file, some that few lines have may be missing yet."""
        return list(self._keys)

    def refresh(self) -> bool:
        """Read what was added; return True if anything changed. Raises: OSError if the file cannot be read."""
        changed = self._file.forget_what_is_gone()
        if changed:
            self._forget_after(self._file.note)
        is_long = self._file.unread_bytes() > TABLE_READ_WHOLE_BYTES
        if is_long and not len(self.steps):
            self._groups = set(FIRST_KEYS)
        for chunk in self._file.blocks():
            changed = True
            if is_long and self._groups is not None:
                self._append_groups(chunk, self._groups)
            else:
                self._append(chunk)
            self._file.note = float(self.steps[STEP_COLUMN][-1]) if len(self.steps) else -np.inf
        if changed:
            found = map(step_line, from_the_end(self._file.path))
            self.last_line = next((line for line in found if line is not None), {})
        return changed

    def drop_all_but_first(self) -> None:
        """Give the memory of other groups back; they are read again when they are asked for."""
        self._groups = set(FIRST_KEYS)
        self.steps.drop([key for key in self.steps if group_of(key) not in FIRST_KEYS])

    def _forget_after(self, step: float) -> None:
        if np.isfinite(step):
            for table in (self.steps, self.evaluations, self.norms):
                table.cut(step + 1)
        else:
            self._clear()

    def _append(self, chunk: bytes) -> None:
        """Append lines with all their keys; of groups that are not in memory, only take note of the keys."""
        steps, evaluations, bad = _sorted_out(map(record_of, _lines(chunk)))
        self.bad_lines += bad
        if evaluations:
            self.evaluations.append(rows_of(evaluations))
        if steps:
            self._append_steps(steps)

    def _append_steps(self, lines: list[Line]) -> None:
        self._append_norms([line for line in lines if NORMS_GROUP in line])
        rows = rows_of([{key: value for key, value in line.items() if key != NORMS_GROUP} for line in lines])
        self._keys.update(dict.fromkeys(rows))
        groups = self._groups
        self.steps.append({k: v for k, v in rows.items() if groups is None or group_of(k) in groups})

    def _append_norms(self, lines: list[Line]) -> None:
        lines = [
            {STEP_COLUMN: line[STEP_COLUMN], **line[NORMS_GROUP]}
            for line in lines
            if isinstance(line[NORMS_GROUP], dict)
        ]
        if lines:
            self.norms.append(rows_of(lines))

    def _append_groups(self, chunk: bytes, groups: Collection[str]) -> None:
        """Append only some groups of the lines' keys, and all norms; learn which other keys there are."""
        grouped = _grouped(chunk, groups, SELDOM)
        self.bad_lines += grouped.bad_lines
        if grouped.evaluations:
            self.evaluations.append(rows_of(grouped.evaluations))
        if STEP_COLUMN in grouped.steps:
            self.steps.append(grouped.steps)
        self._append_norms([line for line in grouped.seldom if NORMS_GROUP in line])
        others = {group: line for line in reversed(grouped.seldom) for group in line if group != STEP_COLUMN}
        sampled, _, _ = _sorted_out(map(record_of, _some_lines(chunk)))
        some = [{key: line[key] for key in line if key != NORMS_GROUP} for line in (*sampled, *others.values())]
        self._keys.update(dict.fromkeys(rows_of(some)))

    def _load(self, group: str) -> None:
        """Read a group of the lines that were passed over before."""
        if self._groups is None or group in self._groups:
            return
        for chunk in self._file.again():
            self._groups.add(group)  # unless the file is gone at the moment: then it is read later
            rows = _grouped(chunk, {STEP_COLUMN, LOSS_KEY, group}).steps
            if STEP_COLUMN in rows:
                self.steps.put(rows[STEP_COLUMN], {key: rows[key] for key in rows if group_of(key) == group})
                self._keys.update(dict.fromkeys(rows))


def _lines(chunk: bytes) -> list[bytes]:
    return [line for line in chunk.split(b"\n") if line.strip()]


def _some_lines(chunk: bytes) -> list[bytes]:
    *first, _ = [*chunk[: 2**16].split(b"\n", SAMPLED_LINES), b""]
    return [*first[:SAMPLED_LINES], chunk[chunk.rfind(b"\n", 0, -1) + 1 :]]


def _sorted_out(records: Iterable[Line | None]) -> tuple[list[Line], list[Line], int]:
    """Return the lines of steps, those of evaluations, and the number of those that are neither."""
    steps, evaluations, bad = [], [], 0
    for record in records:
        if record is None or not _is_step(record.get(STEP_COLUMN)):
            bad += 1
        elif LOSS_KEY in record:
            steps.append(record)
        else:
            evaluations.append(record)
    return steps, evaluations, bad


def _is_step(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 2**53


@dataclass
class Grouped:
    """Some groups of the keys of a chunk's lines."""

    steps: Rows
    evaluations: list[Line]
    bad_lines: int
    """The number of lines that are no records."""
    seldom: list[Line]
    """The lines with a group of SELDOM: their step and these groups."""


def _grouped(chunk: bytes, groups: Collection[str], seldom: Collection[str] = ()) -> Grouped:
    """Return these groups of keys, and the lines that have one of `seldom`."""
    names, rare = sorted(groups), [*OF_EVALUATIONS, *(name for name in seldom if name not in groups)]
    if msgspec is not None:
        try:
            records = _decoder(tuple(names), tuple(rare))(chunk)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass  # a damaged line, or a number that JSON has no word for: line by line
        else:
            if (found := _from_records(records, names, rare)) is not None:
                return found
    steps, evaluations, bad = _sorted_out(map(record_of, _lines(chunk)))
    some = [{key: line[key] for key in (STEP_COLUMN, *rare) if key in line} for line in steps]
    return Grouped(_only(steps, names), evaluations, bad, [line for line in some if len(line) > 1])


@lru_cache(maxsize=64)
def _decoder(names: tuple[str, ...], rare: tuple[str, ...]) -> Callable[[bytes], list[Any]]:
    """Return a parser of lines to objects with the values of these keys as f0, f1, ..., and r0, r1, ... unparsed.

    A key that a line lacks is None, the loss and unparsed ones ABSENT.
    """
    # Without gc: what is parsed lives for a moment, and holds no circles.
    fields: list[tuple[str, Any, Any]] = [
        (f"f{n}", Any, ABSENT if name == LOSS_KEY else None) for n, name in enumerate(names)
    ]
    fields += [(f"r{n}", msgspec.Raw, ABSENT) for n in range(len(rare))]
    renamed = {f"f{n}": name for n, name in enumerate(names)} | {f"r{n}": name for n, name in enumerate(rare)}
    return msgspec.json.Decoder(msgspec.defstruct("Line", fields, rename=renamed, gc=False)).decode_lines


def _from_records(records: list[Any], names: Sequence[str], rare: Sequence[str]) -> Grouped | None:
    """Return what these objects of `_decoder` come to; None if a line has no number as its step, or is no step's."""
    step, loss = attrgetter(f"f{names.index(STEP_COLUMN)}"), attrgetter(f"f{names.index(LOSS_KEY)}")
    seldom: list[Line] = []
    evaluations: dict[float, Line] = {}
    for n, name in enumerate(rare):
        raws = list(map(attrgetter(f"r{n}"), records))
        if raws.count(ABSENT) == len(raws):
            continue
        there = [(line, msgspec.json.decode(raw)) for line, raw in zip(records, raws, strict=True) if raw is not ABSENT]
        for line, value in there:
            if loss(line) is ABSENT:
                evaluations.setdefault(step(line), {STEP_COLUMN: step(line)})[name] = value
            else:
                seldom.append({STEP_COLUMN: step(line), name: value})
    if evaluations:
        records = [line for line in records if loss(line) is not ABSENT]
    rows = _columns(records, names)
    if STEP_COLUMN not in rows or not np.isfinite(rows[STEP_COLUMN]).all() or not all(map(_is_step, evaluations)):
        return None
    if LOSS_KEY not in rows and records:
        return None
    return Grouped(rows, list(evaluations.values()), 0, seldom)


def _columns(records: list[Any], names: Sequence[str]) -> Rows:
    out: Rows = {}
    for n, name in enumerate(names):
        values = list(map(attrgetter(f"f{n}"), records))
        if values.count(None) < len(values):
            add_column(name, values, out)
    return out


def _only(lines: Sequence[Line], groups: Collection[str]) -> Rows:
    return rows_of([{key: line[key] for key in groups if key in line} for line in lines])


LONG_BYTES = 2**26
"""A shorter file is read in a tenth of a second, and needs no preview."""
PREVIEW_LINES = 2000
LONGEST_PREVIEW_BYTES = 2**16
"""There is no preview of a file with longer lines: it would be read many times over."""


class Preview:
    """Numbers by step of about PREVIEW_LINES lines of a run, and of its last one: no norms, no keys of few lines."""

    def __init__(self, lines: list[Line]):
        self.steps, self.norms = Columns(), Columns()
        if lines:
            self.steps.append(rows_of(lines))

    def keys(self) -> list[str]:
        return self.steps.keys()


def preview(folder: Path) -> Preview | None:
    """Return a preview of the run in `folder`; None if it is short, has few lines, or cannot be read now."""
    path = folder / "metrics.jsonl"
    try:
        if leads_away(folder, path.name) or path.stat().st_size < LONG_BYTES:
            return None
        spread = map(record_of, spread_lines(path, path.stat().st_size, PREVIEW_LINES, LONGEST_PREVIEW_BYTES))
        lines = [*(line for line in spread if line is not None), *_last(path)]
    except OSError:
        return None
    steps = [line for line in lines if isinstance(line.get(STEP_COLUMN), int) and LOSS_KEY in line]
    if len(steps) < PREVIEW_LINES / 2:
        return None
    return Preview([{key: line[key] for key in line if key != NORMS_GROUP} for line in steps])


def _last(path: Path) -> Iterator[Line]:
    for line in from_the_end(path):
        if LOSS_KEY in line:
            yield line
            return
