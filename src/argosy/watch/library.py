"""The runs under a folder, each opened when it is asked for, and closed when memory is short; which of them fulfil a
condition, in which order, and the numbers of their steps as a table."""

from __future__ import annotations

import ast
import math
import operator
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from argosy.errors import ArgosyError, UserError, encodable, near_names
from argosy.watch.columns import STEP_COLUMN, Columns, Floats
from argosy.watch.metrics_table import Preview, preview
from argosy.watch.nodes import EnergySoFar
from argosy.watch.reader import RunReader, RunTail, is_run

AnswerT = TypeVar("AnswerT")

REREAD_S = 0.5
"""A run that was read so recently is not read again."""
FIND_S = 5.0
"""New runs are looked for so often, or less often where that takes long."""
MOST_OPEN = 24
MOST_HELD_BYTES = 2**30
"""Numbers of open runs take at most about so much memory; those that were asked for longest ago are closed."""
PROCESSOR_SHARE = 0.2
"""Most of a processor that goes into looking for changes."""


@dataclass
class OpenRun:
    reader: RunReader
    meter: EnergySoFar
    lock: threading.Lock = field(default_factory=threading.Lock)
    read_at: float = -1e9
    """Time of the last refresh, on the monotonic clock."""


class Unreadable(ArgosyError):
    """A run's files hold what a run does not write, and a question about it cannot be answered."""


@dataclass
class _Tail:
    tail: RunTail | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    read_at: float = -1e9


class Library:
    """The runs under `root`. Any thread may call any method; two that ask for one run wait for each other."""

    def __init__(self, root: Path):
        self.root = root
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, OpenRun] = OrderedDict()
        self._tails: dict[str, _Tail] = {}
        self._found: dict[str, Path] = {}
        self._found_at, self._finding_s = -1e9, 0.0
        self._finding = threading.Lock()

    def ids(self) -> list[str]:
        with self._finding:
            now = time.monotonic()
            if now - self._found_at > max(FIND_S, self._finding_s / PROCESSOR_SHARE):
                self._found = find_runs(self.root)
                self._found_at = time.monotonic()
                self._finding_s = self._found_at - now
                with self._lock:
                    self._tails = {run_id: tail for run_id, tail in self._tails.items() if run_id in self._found}
            return list(self._found)

    def ask(self, run_id: str, question: Callable[[OpenRun], AnswerT]) -> AnswerT:
        """Return the answer of the run with this id, refreshed. Nobody else reads it until the question returns.

        Raises: UserError if there is none; Unreadable if it cannot be answered.
        """
        folder = run_folder(self.root, run_id)
        with self._lock:
            entry = self._open.get(folder)
            if entry is None:
                reader = RunReader(folder)
                entry = self._open[folder] = OpenRun(reader, EnergySoFar(folder))
            self._open.move_to_end(folder)
        try:
            with entry.lock:
                if entry.reader.nbytes > MOST_HELD_BYTES:
                    entry.reader.release()
                if time.monotonic() - entry.read_at > REREAD_S:
                    entry.reader.refresh()
                    entry.read_at = time.monotonic()
                return question(entry)
        except ArgosyError:
            raise
        except Exception as problem:  # whatever its files hold: other runs must not suffer
            with self._lock:
                self._open.pop(folder, None)
            raise Unreadable(f"{run_id}: {_sentence(problem)}") from problem
        finally:
            self._make_room(entry)

    def preview(self, run_id: str) -> Preview | None:
        """Return a preview of a long run that was not read yet, else None. Raises: UserError if there is no run."""
        folder = run_folder(self.root, run_id)
        with self._lock:
            entry = self._open.get(folder)
        return preview(folder) if entry is None or entry.read_at < 0 else None

    def ask_all(
        self, question: Callable[[str, RunTail], AnswerT], otherwise: Callable[[str, str], AnswerT]
    ) -> list[AnswerT]:
        """Return the answers of all runs, refreshed, given the id of each; for a run that cannot be read, `otherwise`
        is asked with its id and the reason."""
        return [self._ask_tail(run_id, question, otherwise) for run_id in self.ids()]

    def news(self, known: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
        """Return id, step and state of the runs that changed since what is `known`, which is brought up to date."""

        def now(run_id: str, tail: RunTail) -> tuple[Any, ...]:
            events = tail.events[-1]["time_s"] if tail.events else None
            return run_id, tail.last_line.get("step"), tail.state, tail.alive_s, len(tail.events), events

        changed = [
            each
            for each in self.ask_all(now, lambda run_id, _: (run_id, None, "unreadable"))
            if known.get(each[0]) != each
        ]
        known.update({each[0]: each for each in changed})
        return [{"id": each[0], "step": each[1], "state": each[2]} for each in changed]

    def _ask_tail(
        self, run_id: str, question: Callable[[str, RunTail], AnswerT], otherwise: Callable[[str, str], AnswerT]
    ) -> AnswerT:
        with self._lock:
            entry = self._tails.setdefault(run_id, _Tail())
        with entry.lock:
            try:
                if entry.tail is None or time.monotonic() - entry.read_at > REREAD_S:
                    entry.tail = entry.tail or RunTail(run_folder(self.root, run_id))
                    entry.tail.refresh()
                    entry.read_at = time.monotonic()
                return question(run_id, entry.tail)
            except UserError as problem:  # it was removed, or is being made
                entry.tail, why = None, str(problem)
            except Exception as problem:  # whatever its files hold: other runs must not suffer
                entry.tail, why = None, _sentence(problem)
        return otherwise(run_id, why)

    def _make_room(self, keep: OpenRun) -> None:
        with self._lock:
            sizes = {folder: entry.reader.nbytes for folder, entry in self._open.items()}
            for folder, entry in list(self._open.items()):
                if len(self._open) <= MOST_OPEN and sum(sizes[f] for f in self._open) <= MOST_HELD_BYTES:
                    return
                if entry is not keep:
                    del self._open[folder]


def _sentence(problem: Exception) -> str:
    return f"it cannot be read ({type(problem).__name__}: {encodable(str(problem))[:200]})"


MOST_LISTED_RUNS = 5000
DEEPEST_FOLDER = 4
"""A run is looked for in so many levels of folders."""
MOST_FOLDERS = 50_000
"""Most folders that are looked into."""


def find_runs(root: Path) -> dict[str, Path]:
    """Return the runs in and under `root`: path relative to it -> folder, in alphabetical order.

    A link is not followed, so nothing outside of `root` is found. A run within a run's folder is none of its own.
    """
    if is_run(root):
        return {own_id(root): root}
    found = dict(_runs_under(root))
    return dict(sorted(found.items()))


def own_id(run: Path) -> str:
    """Return the id of a run that was named itself, and is no run under a folder: its folder's name."""
    return run.resolve().name.lstrip(".") or "run"


def run_folder(root: Path, run_id: str) -> Path:
    """Return the folder of the run with this id. Raises: UserError if `root` has no such run, or it lies outside."""
    unknown = UserError(f"no run {run_id!r} in {root}")
    if "\0" in run_id or run_id.startswith(("/", "\\")):
        raise unknown
    parts = run_id.split("/")
    if is_run(root) and run_id == own_id(root):
        return root.resolve()
    if any(not part or part.startswith(".") for part in parts):
        raise unknown
    try:
        home = root.resolve(strict=True)
        folder = (home / run_id).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # a circle of links, a name that is too long
        raise unknown from None
    if not folder.is_relative_to(home) or not is_run(folder):
        raise unknown
    return folder


def _runs_under(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield runs, level by level, so that in a huge tree the nearest ones are found."""
    level, seen, count = [root], 0, 0
    for _ in range(DEEPEST_FOLDER):
        below: list[Path] = []
        for folder in level:
            for child in _folders_in(folder):
                seen += 1
                if seen > MOST_FOLDERS or count >= MOST_LISTED_RUNS:
                    return
                if is_run(child):
                    count += 1
                    yield child.relative_to(root).as_posix(), child
                else:
                    below.append(child)
        level = below


def _folders_in(folder: Path) -> list[Path]:
    found: list[Path] = []
    with suppress(OSError), os.scandir(folder) as entries:  # one that may not be read is passed over
        found = [Path(e.path) for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
    return sorted(found)


SHORT_KEYS = {"val": "validation_loss"}
"""Other names of keys."""
USUAL_KEYS = ("loss", "validation_loss", "bits_per_byte")
"""Keys that a run gets in time: asked for before, they have no values, so that a script may wait for them."""
LONGEST_CONDITION = 1000
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
    known = {*keys, *SHORT_KEYS}
    try:
        if len(text) > LONGEST_CONDITION:
            raise SyntaxError(f"more than {LONGEST_CONDITION} characters")
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
            both = _value(left, row), _value(right, row)
            if any(isinstance(each, str) for each in both):
                raise TypeError  # a text, repeated a billion times, would take all memory
            value = ARITHMETIC[type(sign)](*both)
        case ast.Compare(left=left, ops=signs, comparators=others):
            values = [_value(each, row) for each in (left, *others)]
            pairs = zip(signs, values, values[1:], strict=False)
            value = all(COMPARISONS[type(sign)](one, two) for sign, one, two in pairs)
        case ast.Constant(value=value):
            pass
        case ast.Name(id=name):
            value = row.get(SHORT_KEYS.get(name, name))
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
    name = SHORT_KEYS.get(name, name)
    known = set(keys)
    if name not in known:
        raise UserError(f"--sort {by}: a run has no {name!r}; {near_names(name, sorted(known))}")
    rows = list(rows)
    having = [row for row in rows if row.get(name) is not None]
    lacking = [row for row in rows if row.get(name) is None]
    number = all(isinstance(row[name], int | float) for row in having)
    having.sort(key=lambda row: row[name] if number else str(row[name]), reverse=backwards)
    return [*having, *lacking]


def keys_of_steps(reader: RunReader) -> list[str]:
    """Return the keys that `table_of_steps` takes, `step` first. Norms, which have steps of their own, are left out."""
    known = {*reader.keys(), *reader.evaluations.keys()} - {STEP_COLUMN}
    return [STEP_COLUMN, *sorted(key for key in known if not key.startswith("norms."))]


def table_of_steps(
    reader: RunReader, names: Iterable[str], first: int = 0, last: int | None = None, every: int = 1
) -> dict[str, list[Any]]:
    """Return columns by name, of every so many steps from `first` to `last`; what is not known or not finite is None.

    every: with 10, the steps 9, 19, ..., as evaluations and norms are due. `all`: every key. Keys of evaluations stand
    at the steps that they followed; if only such keys are asked for, other steps are left out.
    Raises: UserError for a key that the run does not have.
    """
    steps, evaluations = reader.steps, reader.evaluations
    keys, known = set(reader.keys()), keys_of_steps(reader)
    asked = list(dict.fromkeys(SHORT_KEYS.get(name, name) for name in names))
    if "all" in asked:
        asked = known
    if unknown := [name for name in asked if name not in known and name not in USUAL_KEYS]:
        raise UserError(f"--columns: the run has no {unknown[0]!r}; {near_names(unknown[0], sorted(known))}")
    at = steps[STEP_COLUMN]
    if not any(name in keys for name in asked if name != STEP_COLUMN):
        at = evaluations[STEP_COLUMN] if set(asked) != {STEP_COLUMN} else at
    at = at[(at >= first) & (at <= (math.inf if last is None else last)) & (at % every == every - 1)]
    return {
        name: [int(step) for step in at]
        if name == STEP_COLUMN
        else _at(at, steps if name in keys else evaluations, name)
        for name in asked
    }


def _at(at: Floats, table: Columns, name: str) -> list[float | None]:
    """Return the values of a key at these steps."""
    steps, values = table[STEP_COLUMN], table[name]
    places = np.minimum(np.searchsorted(steps, at), max(0, len(steps) - 1))
    found = np.where(steps[places] == at, values[places], np.nan) if len(steps) else np.full(len(at), np.nan)
    return [float(value) if math.isfinite(value) else None for value in found]
