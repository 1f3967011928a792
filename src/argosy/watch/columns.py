"""Columns of numbers by step, and the parsing that fills them from JSON lines.

A key is a path in a line's nested tables, with dots: `seconds.forward`, `communication.tp.node.0`. The part before the
first dot is its group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
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


def rows_of(lines: Sequence[Line]) -> dict[str, Floats]:
    """Return the columns of these lines, by flat key. null is NaN. Texts are left out, and lists but LISTS."""
    out: dict[str, Floats] = {}
    _add_tables("", lines, out)
    return out


def _add_tables(prefix: str, tables: Sequence[Line], out: dict[str, Floats]) -> None:
    """Add column by column: of a million lines, that is some times as fast as line by line."""
    alike = dict.fromkeys(map(tuple, tables))  # most have the same keys
    for name in dict.fromkeys(chain.from_iterable(alike)):
        if len(out) >= MOST_COLUMNS_READ:
            return
        add_column(f"{prefix}{name}", [table.get(name) for table in tables], out)


def add_column(key: str, values: list[Any], out: dict[str, Floats]) -> None:
    """Add what `rows_of` returns of one key, whose value in each line is given."""
    kinds = set(map(type, values))
    array = None if kinds == {dict} else _numbers(values)
    if array is not None and array.ndim == 1:
        out[key] = array
    elif key.count(".") < DEEPEST_TABLE and dict in kinds:
        _add_tables(f"{key}.", [value if isinstance(value, dict) else {} for value in values], out)
    elif key.startswith(LISTS) and array is not None and array.ndim == 2:
        out |= {f"{key}.{n}": column for n, column in enumerate(array.T[: MOST_COLUMNS_READ - len(out)])}
    elif key.startswith(LISTS):
        _add_tables(f"{key}.", [_as_table(value) for value in values], out)


def _numbers(values: list[Any]) -> Floats | None:
    """Return these values as numbers, lists of one length as rows; None if most are neither number nor null.

    A single one that is none is NaN.
    """
    with suppress(TypeError, ValueError, OverflowError):  # a table, a text, lists of several lengths, a giant integer
        return np.array(values, dtype=float)
    are = [value is None or (isinstance(value, int | float) and abs(value) < MOST_NUMBER) for value in values]
    if 2 * sum(are) <= len(values) or all(value is None for value, is_one in zip(values, are, strict=True) if is_one):
        return None
    return np.array([value if is_one else None for value, is_one in zip(values, are, strict=True)], dtype=float)


def _as_table(value: Any) -> Line:
    return {str(index): part for index, part in enumerate(value)} if isinstance(value, list) else {}
