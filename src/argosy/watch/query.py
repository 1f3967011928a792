"""Questions to runs: which of them fulfil a condition, in which order, and the numbers of their steps as a table."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from argosy.config.layers import near_names
from argosy.errors import UserError
from argosy.watch.columns import STEP, Columns
from argosy.watch.facts import Floats
from argosy.watch.reader import RunReader

SHORT = {"val": "validation_loss"}
"""Other names of keys."""
LONGEST = 1000
"""Characters of a condition."""

Row = dict[str, Any]
Predicate = Callable[[Row], Any]

COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.In: lambda part, whole: str(part) in str(whole), ast.NotIn: lambda part, whole: str(part) not in str(whole),
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


class _Unknown(Exception):
    """A value that a run does not have: no comparison with it holds."""


def condition_of(text: str, keys: Iterable[str]) -> Predicate:
    """Return the condition that a text states, such as `loss < 3 and tokens > 1e9 and state == "training"`.

    Numbers, strings, the keys of a run, + - * /, comparisons, `in` (part of a text), and, or, not. No comparison with
    a value that a run lacks holds. Nothing of it is run as code. Raises: UserError if it is no such condition.
    """
    known = {*keys, *SHORT}
    try:
        if len(text) > LONGEST:
            raise SyntaxError(f"more than {LONGEST} characters")
        tree = ast.parse(text, mode="eval").body
        _check(tree, known)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        why = problem.msg if isinstance(problem, SyntaxError) else str(problem)
        raise UserError(f'--where "{text[:80]}": {why} (say it as in "loss < 3 and tokens > 1e9")') from None

    def holds(row: Row) -> bool:
        try:
            return bool(_value(tree, row))
        except (_Unknown, TypeError, ZeroDivisionError, OverflowError):
            return False

    return holds


def _check(tree: ast.expr, known: set[str]) -> None:
    """Raises: SyntaxError at what a condition may not hold."""
    match tree:
        case ast.BoolOp(values=parts):
            pass
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=part):
            parts = [part]
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in ARITHMETIC:
            parts = [left, right]
        case ast.Compare(left=left, ops=signs, comparators=others) if all(type(sign) in COMPARISONS for sign in signs):
            parts = [left, *others]
        case ast.Constant(value=str() | int() | float()):
            parts = []
        case ast.Name(id=name):
            parts = []
            if name not in known:
                raise SyntaxError(f"a run has no {name!r}; {near_names(name, sorted(known))}")
        case _:
            raise SyntaxError(f"{ast.unparse(tree)[:60]!r} is not understood")
    for part in parts:
        _check(part, known)


def _value(tree: ast.expr, row: Row) -> Any:
    value: Any
    match tree:
        case ast.BoolOp(op=sign, values=parts):
            each = (_holds(part, row) for part in parts)
            value = all(each) if isinstance(sign, ast.And) else any(each)
        case ast.UnaryOp(op=ast.Not(), operand=part):
            value = not _holds(part, row)
        case ast.UnaryOp(operand=part):
            value = -_value(part, row)
        case ast.BinOp(left=left, op=sign, right=right):
            value = ARITHMETIC[type(sign)](_value(left, row), _value(right, row))
        case ast.Compare(left=left, ops=signs, comparators=others):
            values = [_value(each, row) for each in (left, *others)]
            pairs = zip(signs, values, values[1:], strict=False)
            value = all(COMPARISONS[type(sign)](one, two) for sign, one, two in pairs)
        case ast.Constant(value=value):
            pass
        case ast.Name(id=name):
            value = row.get(SHORT.get(name, name))
            if value is None or (isinstance(value, float) and math.isnan(value)):
                raise _Unknown
    return value


def _holds(tree: ast.expr, row: Row) -> bool:
    try:
        return bool(_value(tree, row))
    except _Unknown:
        return False


def chosen(rows: Iterable[Row], where: str, sort: str, keys: Iterable[str]) -> list[Row]:
    """Return the rows for which the condition `where` holds, as `ordered` by `sort`; both may be empty.

    Raises: UserError.
    """
    if where:
        rows = filter(condition_of(where, keys), rows)
    return ordered(rows, sort, keys) if sort else list(rows)


def ordered(rows: Iterable[Row], by: str, keys: Iterable[str]) -> list[Row]:
    """Return the rows by a key, the least first, with a `-` before it the greatest; rows without it come last.

    Raises: UserError if there is no such key.
    """
    backwards, name = by.startswith("-"), by.removeprefix("-")
    name = SHORT.get(name, name)
    known = set(keys)
    if name not in known:
        raise UserError(f"--sort {by}: a run has no {name!r}; {near_names(name, sorted(known))}")
    rows = list(rows)
    having = [row for row in rows if row.get(name) is not None]
    lacking = [row for row in rows if row.get(name) is None]
    number = all(isinstance(row[name], int | float) for row in having)
    having.sort(key=lambda row: row[name] if number else str(row[name]), reverse=backwards)
    return [*having, *lacking]


def table_of_steps(
    reader: RunReader, names: Iterable[str], first: int = 0, last: int | None = None, every: int = 1
) -> dict[str, list[Any]]:
    """Return columns by name, of every so many steps from `first` to `last`; what is not known or not finite is None.

    `all`: every key. Keys of evaluations stand at the steps that they followed; if only such keys are asked for, other
    steps are left out. Raises: UserError for a key that the run does not have.
    """
    steps, evaluations = reader.steps, reader.evaluations
    keys = [key for key in reader.keys() if not key.startswith("norms.")]  # noqa: SIM118
    known = {STEP, *keys, *evaluations.keys()}
    asked = list(dict.fromkeys(SHORT.get(name, name) for name in names))
    if "all" in asked:
        asked = [STEP, *sorted(known - {STEP})]
    if unknown := [name for name in asked if name not in known]:
        raise UserError(f"--columns: the run has no {unknown[0]!r}; {near_names(unknown[0], sorted(known))}")
    at = steps[STEP]
    if not any(name in keys for name in asked if name != STEP):
        at = evaluations[STEP] if set(asked) != {STEP} else at
    at = at[(at >= first) & (at <= (math.inf if last is None else last)) & (at % every == 0)]
    return {
        name: [int(step) for step in at] if name == STEP else _at(at, steps if name in keys else evaluations, name)
        for name in asked
    }


def _at(at: Floats, table: Columns, name: str) -> list[float | None]:
    """Return the values of a key at these steps."""
    steps, values = table[STEP], table[name]
    places = np.minimum(np.searchsorted(steps, at), max(0, len(steps) - 1))
    found = np.where(steps[places] == at, values[places], np.nan) if len(steps) else np.full(len(at), np.nan)
    return [float(value) if math.isfinite(value) else None for value in found]
