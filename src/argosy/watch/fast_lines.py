"""Parses one group of keys of many JSON lines quickly, where the lines are alike.

The first line of a chunk says which numbers the group has. A type is made for just these (msgspec's structs), so that
no table and no key's name becomes an object of Python. A line with another key, or with something else than a number,
does not fit the type: then the caller reads that chunk in the plain way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from argosy.watch.columns import DEEPEST, LISTS, MOST_KEYS, STEP, Floats

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
    out = {STEP: steps}
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
            inner = _shape(value, f"{prefix}{name}.", depth + 1) if depth < DEEPEST else None
            if inner is None:
                return None
        elif isinstance(value, list):
            if not prefix.startswith(LISTS) or not all(isinstance(part, int | float) for part in value):
                return None
            inner = len(value)
        elif value is not None and not isinstance(value, int | float):
            return None
        out.append((name, inner))
    return tuple(out) if len(out) <= MOST_KEYS else None


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
