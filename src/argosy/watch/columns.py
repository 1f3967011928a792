"""Columns of numbers by step, and the parsing that fills them from JSON lines.

A key is a path in a line's nested tables, with dots: `seconds.forward`, `communication.tp.node.0`. The part before the
first dot is its group. Lines are parsed group by group: of a million lines only what is asked for becomes numbers.

Where lines are alike, the first of a chunk says which numbers the group has. A type is made for just these (msgspec's
structs), so that no table and no key's name becomes an object of Python. A line with another key, or with something
else than a number, does not fit the type: that chunk is read in the plain way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.observe.records import MOST_NUMBER

Floats = npt.NDArray[np.float64]
Line = dict[str, Any]


def finite_mean(values: Floats) -> float:
    """Return the mean of the numbers that are finite; 0 if none is."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else 0.0


def middle_half(step_s: Floats) -> npt.NDArray[np.intp]:
    """Return the indices of the middle half of these steps, by duration: compiling and pauses are not in it."""
    order = np.argsort(step_s, kind="stable")  # NaN comes last
    count = int(np.isfinite(step_s).sum())
    return order[count // 4 : max(count - count // 4, min(count, 1))]


def channels_in(keys: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield axis, tier and key of each `communication.AXIS.TIER.0`, seconds; other keys are passed over."""
    for key in keys:
        match key.split("."):
            case ["communication", axis, tier, "0"]:
                yield axis, tier, key


STEP_COLUMN = "step"
MOST_COLUMNS_READ = 20_000
"""A line of a foreign file may name anything; keys beyond so many are left out."""
DEEPEST_TABLE = 8
"""Tables that are nested deeper than this are left out."""
LISTS = ("communication.",)
"""Lists become columns in these groups only: the loads of all experts, step by step, are no columns."""
MOST_NUMBERS = 10**8
"""Most numbers that are held, 800 MB. A key that comes when there is no room for it is left out."""


class Columns:
    """Numbers by step: `columns[key]` is as long as `columns`, NaN where a line has no such number.

    Steps rise strictly. An array that was taken is good until the next `append` or `cut`, which may write into it.
    """

    def __init__(self, load: Callable[[str], None] | None = None):
        """`load` is called with the group of a key that is asked for and not there, and may `put` it."""
        self._load = load
        self._count = 0
        self._arrays: dict[str, Floats] = {STEP_COLUMN: np.empty(0)}
        self.left_out: set[str] = set()
        """Keys for which there was no room."""

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in list(self._arrays.values()))  # another thread may be adding one

    def __iter__(self) -> Iterator[str]:
        """Yield the keys that are in memory, `step` first."""
        return iter(list(self._arrays))

    def keys(self) -> list[str]:
        """Return the keys that are in memory, `step` first."""
        return list(self._arrays)

    def __contains__(self, key: object) -> bool:
        """Return True if `key` is in memory."""
        return key in self._arrays

    def __getitem__(self, key: str) -> Floats:
        """Return the numbers of `key`, all NaN if no line has it."""
        if key not in self._arrays:
            self.load(group_of(key))
        if key not in self._arrays:
            return np.full(self._count, np.nan)
        return self._arrays[key][: self._count]

    def load(self, group: str) -> None:
        """Read the keys of `group` that are not in memory."""
        if self._load is not None:
            self._load(group)

    def since(self, step: float) -> slice:
        """Return the slice of `step` and all later ones."""
        return slice(int(np.searchsorted(self[STEP_COLUMN], step)), self._count)

    def between(self, first: float | None, last: float | None) -> slice:
        """Return the slice of the steps from `first` to `last`, both included; None: no bound."""
        steps = self[STEP_COLUMN]
        begin = 0 if first is None else int(np.searchsorted(steps, first))
        end = self._count if last is None else int(np.searchsorted(steps, last, side="right"))
        return slice(begin, max(begin, end))

    def append(self, rows: Mapping[str, Floats]) -> None:
        """Append rows, which name their `step`; rows of steps that are there already replace these and all after them.

        That is what lines say that were written after a recovery: the steps behind them are run again.
        """
        steps = rows[STEP_COLUMN]
        keep = _risen(steps)
        if not keep.any():
            return
        self.cut(float(steps[keep][0]))
        first, self._count = self._count, self._count + int(keep.sum())
        for key in {**self._arrays, **rows}:
            if self._has_room(key):
                array = self._room(key, first)
                array[first : self._count] = rows[key][keep] if key in rows else np.nan

    def put(self, steps: Floats, rows: Mapping[str, Floats]) -> None:
        """Give keys values at `steps` that are there already; the last of equal steps counts."""
        if not self._count:
            return
        own = self[STEP_COLUMN]
        at = np.minimum(np.searchsorted(own, steps), self._count - 1)
        found = own[at] == steps
        for key, values in rows.items():
            if key != STEP_COLUMN and self._has_room(key):
                self._room(key, 0)[at[found]] = values[found]

    def cut(self, step: float) -> None:
        self._count = int(np.searchsorted(self[STEP_COLUMN], step))

    def drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._arrays.pop(key, None)

    def _has_room(self, key: str) -> bool:
        if key in self._arrays:
            return True
        if len(self._arrays) < MOST_COLUMNS_READ and (len(self._arrays) + 1) * self._count <= MOST_NUMBERS:
            return True
        if len(self.left_out) < MOST_COLUMNS_READ:
            self.left_out.add(key)
        return False

    def _room(self, key: str, known: int) -> Floats:
        """Return the array of `key` with room for all rows; what it does not know yet (after `known`) is NaN."""
        array = self._arrays.get(key)
        if array is None or len(array) < self._count:
            roomy = np.full(max(64, self._count + self._count // 4 if known else self._count), np.nan)
            if array is not None:
                roomy[:known] = array[:known]
            self._arrays[key] = array = roomy
        return array


def group_of(key: str) -> str:
    """Return the part of a key before its first dot."""
    return key.partition(".")[0]


def _risen(steps: Floats) -> npt.NDArray[np.bool_]:
    """Return True for each row whose step no later row has or goes back behind."""
    later = np.minimum.accumulate(steps[::-1])[::-1]
    return np.append(steps[:-1] < later[1:], True) if len(steps) else np.zeros(0, bool)


def rows_of(lines: Sequence[Line], prefix: str = "") -> dict[str, Floats]:
    """Return the columns of these lines, by flat key. null is NaN. Texts are left out, and lists but LISTS."""
    out: dict[str, Floats] = {}
    _add_columns(lines, prefix, out)
    return out


def _add_columns(lines: Sequence[Line], prefix: str, out: dict[str, Floats]) -> None:
    """Add column by column: of a million lines, that is some times as fast as line by line."""
    names: dict[str, None] = {}
    for line in lines:
        if len(names) <= MOST_COLUMNS_READ and not names.keys() >= line.keys():
            names.update(dict.fromkeys(line))
    for name in names:
        if len(out) >= MOST_COLUMNS_READ:
            return
        key, values = f"{prefix}{name}", [line.get(name) for line in lines]
        array = numbers(values)
        if array is not None:
            out[key] = array
        elif key.count(".") < DEEPEST_TABLE and any(isinstance(value, dict) for value in values):
            _add_columns([value if isinstance(value, dict) else {} for value in values], f"{key}.", out)
        elif key.startswith(LISTS):
            _add_columns([_as_table(value) for value in values], f"{key}.", out)


def numbers(values: list[Any]) -> Floats | None:
    """Return these values as numbers; None if most are neither number nor null. A single one that is none is NaN."""
    try:
        array = np.array(values, dtype=float)
    except (TypeError, ValueError, OverflowError):  # a table, a text, lists of several lengths, a giant integer
        return _mostly_numbers(values)
    return array if array.ndim == 1 else None


def _mostly_numbers(values: list[Any]) -> Floats | None:
    are = [value is None or (isinstance(value, int | float) and abs(value) < MOST_NUMBER) for value in values]
    if 2 * sum(are) <= len(values) or all(value is None for value, is_one in zip(values, are, strict=True) if is_one):
        return None
    return np.array([value if is_one else None for value, is_one in zip(values, are, strict=True)], dtype=float)


def _as_table(value: Any) -> Line:
    return {str(index): part for index, part in enumerate(value)} if isinstance(value, list) else {}


try:
    import msgspec
except ImportError:
    msgspec = None  # type: ignore[assignment]

Shape = tuple[tuple[str, Any], ...]
"""Names of a table, each with the shape of its table, with the length of its list, or with None: a number."""


def group_rows(chunk: bytes, group: str, sample: dict[str, Any]) -> dict[str, Floats] | None:
    """Return the columns of `group`, and `step`; None if the lines are not alike, or msgspec is not installed.

    sample: a line that has the group. Lines without a loss, and those without the group, have NaN.
    """
    shape = _shape(sample[group], f"{group}.", 0) if isinstance(sample.get(group), dict) else None
    if msgspec is None or shape is None:
        return None
    parse, columns = _parser(group, shape)
    try:
        lines = [line for line in parse(chunk) if line.loss is not _ABSENT]
        steps = np.array([line.step for line in lines], dtype=float)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return None
    # A line without the group shows as one whose numbers are all missing.
    tables = [_NOTHING if line.group is None else line.group for line in lines]
    out = {STEP_COLUMN: steps}
    for key, get in columns:
        out[key] = np.array([get(table) for table in tables], dtype=float)
    return out


class _Nothing:
    """Has any attribute, and it is nothing."""

    def __getattr__(self, name: str) -> _Nothing | None:
        return None if name.startswith("n") else self


_ABSENT: Any = object()
_NOTHING = _Nothing()


def _shape(table: dict[str, Any], prefix: str, depth: int) -> Shape | None:
    """Return the shape of a table; None if there is anything but numbers in it."""
    out: list[tuple[str, Any]] = []
    for name, value in table.items():
        inner: Any = None
        if isinstance(value, dict):
            inner = _shape(value, f"{prefix}{name}.", depth + 1) if depth < DEEPEST_TABLE else None
            if inner is None:
                return None
        elif isinstance(value, list):
            if not prefix.startswith(LISTS) or not all(isinstance(part, int | float) for part in value):
                return None
            inner = len(value)
        elif value is not None and not isinstance(value, int | float):
            return None
        out.append((name, inner))
    return tuple(out) if len(out) <= MOST_COLUMNS_READ else None


@lru_cache(maxsize=64)
def _parser(group: str, shape: Shape) -> tuple[Callable[[bytes], list[Any]], list[tuple[str, Callable[[Any], Any]]]]:
    """Return what parses lines to objects with `step`, `loss` and `group`, and how a column is got out of a group."""
    columns: list[tuple[str, Callable[[Any], Any]]] = []
    kind = _type(shape, f"{group}.", "", columns)
    fields: list[Any] = [("step", float), ("loss", Any, _ABSENT), ("group", kind | None, None)]
    line = msgspec.defstruct("Line", fields, rename={"group": group}, gc=False)
    return msgspec.json.Decoder(line).decode_lines, columns


def _type(shape: Shape, prefix: str, path: str, columns: list[tuple[str, Callable[[Any], Any]]]) -> Any:
    """Return a struct of this shape, and add its numbers' keys. Numbers are named n0, n1, ..., tables t0, t1, ..."""
    fields: list[tuple[str, Any, Any]] = []
    names: dict[str, str] = {}
    default: Any
    for index, (name, inner) in enumerate(shape):
        if inner is None:
            field, default = f"n{index}", None
            kind: Any = float | None
            columns.append((f"{prefix}{name}", attrgetter(f"{path}{field}")))
        else:
            field, default = f"t{index}", _NOTHING
            if isinstance(inner, int):
                parts: list[Any] = [(f"n{n}", float | None) for n in range(inner)]
                kind = msgspec.defstruct("Numbers", parts, array_like=True, forbid_unknown_fields=True, gc=False)
                columns += [(f"{prefix}{name}.{n}", attrgetter(f"{path}{field}.n{n}")) for n in range(inner)]
            else:
                kind = _type(inner, f"{prefix}{name}.", f"{path}{field}.", columns)
        names[field] = name
        fields.append((field, kind, default))
    return msgspec.defstruct("Table", fields, rename=names, forbid_unknown_fields=True, gc=False)
