"""metrics.jsonl as columns: of steps and of evaluations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from argosy.observe.events import from_the_end
from argosy.watch.columns import STEP, Columns, Floats, Line, group_of, numbers, parse_line, rows_of
from argosy.watch.linefile import LineFile

try:  # without the extra `watch` all is the same, but a long run takes some times as long to open
    import msgspec
except ImportError:
    msgspec = None  # type: ignore[assignment]

LOSS = "loss"
"""A line with this key is that of a step."""
VALIDATION_LOSS = "validation_loss"
"""A line with this key, and without the other, is that of an evaluation."""
FIRST = (
    STEP, LOSS, "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "step_time_s", "time_s", VALIDATION_LOSS,
    "bits_per_byte",
)  # fmt: skip
"""What is read of each line of a long file before anything is shown."""
NORMS = "norms"
"""Group that only steps that are due have; in a table of its own, since it is hundreds of keys in a large model."""
READ_WHOLE_BYTES = 4 * 2**20
"""Of a shorter file, and of what is added to any, all keys are read at once."""
SAMPLED_LINES = 4
"""So many first lines of each chunk of a long file, and its last one, are read to learn which keys there are."""
SELDOM = ("user", "experts", NORMS)
"""Groups that perhaps none of these lines has: the first line of a chunk that has one is read too."""
ABSENT: Any = object()

Rows = dict[str, Floats]


class MetricsTable:
    """The lines of metrics.jsonl, followed.

    Of a long file, a group of keys (`seconds`, `communication`, ...) is read when one of its keys is asked for.
    """

    def __init__(self, path: Path):
        self._file = LineFile(path)
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
        """True if there is no file at the moment."""
        return self._file.is_missing

    def keys(self) -> list[str]:
        """Return all keys of steps, in memory or not. Of a long file, some that few lines have may be missing yet."""
        return list(self._keys)

    def refresh(self) -> bool:
        """Read what was added; return True if anything changed. Raises: OSError if the file cannot be read."""
        changed = self._file.forget_what_is_gone()
        if changed:
            self._forget_after(self._file.mark)
            steps = (line for line in from_the_end(self._file.path) if LOSS in line)
            self.last_line = next(steps, {})
        is_long = self._file.unread_bytes() > READ_WHOLE_BYTES
        if is_long and not len(self.steps):
            self._groups = set(FIRST)
        for chunk in self._file.read_on():
            changed = True
            if is_long and self._groups is not None:
                self._append_groups(chunk, self._groups)
            else:
                self._append(chunk)
            self._file.mark = float(self.steps[STEP][-1]) if len(self.steps) else -np.inf
        return changed

    def drop_all_but_first(self) -> None:
        """Give the memory of other groups back; they are read again when they are asked for."""
        self._groups = set(FIRST)
        self.steps.drop([key for key in self.steps if group_of(key) not in FIRST])

    def _forget_after(self, step: float) -> None:
        if np.isfinite(step):
            for table in (self.steps, self.evaluations, self.norms):
                table.cut(step + 1)
        else:
            self._clear()

    def _append(self, chunk: bytes) -> None:
        """Append lines with all their keys; of groups that are not in memory, only take note of the keys."""
        steps, evaluations, bad = _sorted_out(map(parse_line, _lines(chunk)))
        self.bad_lines += bad
        if evaluations:
            self.evaluations.append(rows_of(evaluations))
        if steps:
            self._append_steps(steps)

    def _append_steps(self, lines: list[Line]) -> None:
        self.last_line = lines[-1]
        self._append_norms([line for line in lines if NORMS in line])
        rows = rows_of([{key: value for key, value in line.items() if key != NORMS} for line in lines])
        self._keys.update(dict.fromkeys(rows))
        groups = self._groups
        self.steps.append({k: v for k, v in rows.items() if groups is None or group_of(k) in groups})

    def _append_norms(self, lines: list[Line]) -> None:
        lines = [{STEP: line[STEP], **line[NORMS]} for line in lines if isinstance(line[NORMS], dict)]
        if lines:
            self.norms.append(rows_of(lines))

    def _append_groups(self, chunk: bytes, groups: Collection[str]) -> None:
        """Append only some groups of the lines' keys, and all norms; learn which other keys there are."""
        grouped = _grouped(chunk, groups, (*SELDOM,))
        self.bad_lines += grouped.bad_lines
        if STEP in grouped.evaluations:
            self.evaluations.append(grouped.evaluations)
        if STEP in grouped.steps:
            self.steps.append(grouped.steps)
        self._append_norms([line for line in grouped.seldom if NORMS in line])
        others = {group: line for line in reversed(grouped.seldom) for group in line if group != STEP}
        sampled, _, _ = _sorted_out(map(parse_line, _some_lines(chunk)))
        some = [{key: line[key] for key in line if key != NORMS} for line in (*sampled, *others.values())]
        self._keys.update(dict.fromkeys(rows_of(some)))
        if sampled:
            self.last_line = sampled[-1]

    def _load(self, group: str) -> None:
        """Read a group of the lines that were passed over before."""
        if self._groups is None or group in self._groups:
            return
        for chunk in self._file.again():
            self._groups.add(group)  # unless the file is gone at the moment: then it is read later
            rows = _grouped(chunk, {STEP, LOSS, group}).steps
            if STEP in rows:
                self.steps.put(rows[STEP], {key: rows[key] for key in rows if group_of(key) == group})
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
        if record is None or not _is_step(record.get(STEP)):
            bad += 1
        elif LOSS in record:
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
    evaluations: Rows
    bad_lines: int
    """The number of lines that are no records."""
    seldom: list[Line]
    """Of the lines with a group of SELDOM: step and these groups."""


def _grouped(chunk: bytes, groups: Collection[str], seldom: Collection[str] = ()) -> Grouped:
    """Return these groups of keys, and the lines that have one of `seldom`."""
    names, rare = sorted(groups), [name for name in seldom if name not in groups]
    found = None
    if msgspec is not None:
        try:
            records = _decoder(tuple(names), tuple(rare))(chunk)
        except (msgspec.MsgspecError, ValueError):
            pass  # a damaged line, or a number that JSON has no word for: line by line
        else:
            found = _from_records(records, names, rare)
    if found is None:
        steps, evaluations, bad = _sorted_out(map(parse_line, _lines(chunk)))
        some = [{key: line[key] for key in (STEP, *rare) if key in line} for line in steps]
        return Grouped(_only(steps, names), _only(evaluations, names), bad, [line for line in some if len(line) > 1])
    return found


@lru_cache(maxsize=64)
def _decoder(names: tuple[str, ...], rare: tuple[str, ...]) -> Callable[[bytes], list[Any]]:
    """Return a parser of lines to objects with the values of these keys as f0, f1, ..., and r0, r1, ... unparsed.

    A key that a line lacks is None, the loss and unparsed ones ABSENT.
    """
    # Without gc: what is parsed lives for a moment, and holds no circles.
    fields: list[tuple[str, Any, Any]] = [
        (f"f{n}", Any, ABSENT if name == LOSS else None) for n, name in enumerate(names)
    ]
    fields += [(f"r{n}", msgspec.Raw, ABSENT) for n in range(len(rare))]
    renamed = {f"f{n}": name for n, name in enumerate(names)} | {f"r{n}": name for n, name in enumerate(rare)}
    return msgspec.json.Decoder(msgspec.defstruct("Line", fields, rename=renamed, gc=False)).decode_lines


def _from_records(records: list[Any], names: Sequence[str], rare: Sequence[str]) -> Grouped | None:
    """Return what these objects of `_decoder` come to; None if a line has no number as its step."""
    values = {name: list(map(attrgetter(f"f{n}"), records)) for n, name in enumerate(names)}
    if numbers(values[STEP]) is None or None in values[STEP]:
        return None
    seldom = []
    for n, name in enumerate(rare):
        for step, raw in zip(values[STEP], map(attrgetter(f"r{n}"), records), strict=True):
            if raw is not ABSENT:
                seldom.append({STEP: step, name: msgspec.json.decode(raw)})
    if ABSENT not in values[LOSS]:
        return Grouped(_arrays(values), {}, 0, seldom)
    is_step = [value is not ABSENT for value in values[LOSS]]
    steps, evaluations = (
        {key: list(compress(column, keep)) for key, column in values.items()}
        for keep in (is_step, [not this for this in is_step])
    )
    del evaluations[LOSS]
    return Grouped(_arrays(steps), _arrays(evaluations), 0, seldom)


def _arrays(values: dict[str, list[Any]]) -> Rows:
    out: Rows = {}
    for key, column in values.items():
        if column.count(None) == len(column):
            continue  # no line has it
        array = numbers(column)
        out |= {key: array} if array is not None else rows_of([{key: value} for value in column])
    return out


def _only(lines: Sequence[Line], groups: Collection[str]) -> Rows:
    return rows_of([{key: line[key] for key in groups if key in line} for line in lines])
