"""Records as a run's files have them, checked when they are read: a folder may be damaged, foreign, or forged.

`record_of` is the one parser of a line: numbers that no float holds become null, and text is text that can be encoded.
`step_line`, `event_of`, `node_line` and the other functions here check the keys that readers rely on. A value of
another kind than expected counts as missing; in a list by rank, it leaves a null, so that the others keep their place.
"""

from __future__ import annotations

import json
import math
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from typing import Any

from argosy.errors import encodable

Record = dict[str, Any]
Fit = Callable[[Any], Any]
"""Returns the value, made to fit, or `_UNFIT`."""

LARGEST = 2**53
"""Whole numbers beyond this are no steps, tokens or bytes of ours, and a float does not hold them exactly."""
MOST_NUMBER = 2.0**63
"""A number beyond this is not kept: other parsers, and arrays of whole numbers, end there."""
MOST_RANKS = 2**18
"""A rank is below this: tables by rank are as long as the largest one."""
LATEST_TIME_S = 1e11
DEEPEST_RECORD = 32
MANY_BRACKETS = 500
"""A line with fewer brackets is not looked through for tables that are nested too deeply for other parsers."""

NORM_KINDS = ("weight", "gradient", "update")
"""Norms of a layer, as `observe.norms_every_steps` has them written."""
MOST_LINE_BYTES = 2**22
"""A longer line is no record of ours."""
_SURROGATES = (b"\\ud", b"\\uD")


def _int(digits: str, most: int = len(str(int(MOST_NUMBER)))) -> int | None:
    return int(digits) if len(digits) < most else None


_DECODER = json.JSONDecoder(parse_int=_int, parse_constant=lambda _: None)


class _Unfit:
    """The type of `_UNFIT`."""


_UNFIT = _Unfit()


def record_of(line: bytes, most_bytes: int = MOST_LINE_BYTES) -> Record | None:
    """Return the record of a line of JSON; None for a line that is none: cut off, damaged, too long, of another kind.

    A whole number that is huge, and what JSON has no word for (NaN, Infinity), is null.
    """
    if len(line) > most_bytes:
        return None
    if line.startswith(BOM_UTF8):  # of a file that an editor has saved
        line = line[len(BOM_UTF8) :]
    try:
        record = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError
        return None
    if not isinstance(record, dict):
        return None
    if any(each in line for each in _SURROGATES) or line.count(b"[") + line.count(b"{") > MANY_BRACKETS:
        return {encodable(key): _plain(value) for key, value in record.items()}
    return record


def finite(value: Any) -> Any:
    """Return a value with null for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict | list) and depth == DEEPEST_RECORD:
        return None
    if isinstance(value, dict):
        return {encodable(key): _plain(each, depth + 1) for key, each in value.items()}
    return [_plain(each, depth + 1) for each in value] if isinstance(value, list) else value


def _number(value: Any) -> Any:
    """Fit a finite number."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST_NUMBER
    return value if is_one else _UNFIT


def _text(value: Any) -> Any:
    """Fit a text."""
    return encodable(value) if isinstance(value, str) else _UNFIT


def _whole(value: Any) -> Any:
    """Fit a whole number."""
    is_one = _number(value) is not _UNFIT and value == int(value) and abs(value) < LARGEST
    return int(value) if is_one else _UNFIT


def _count(value: Any) -> Any:
    """Fit a whole number that is not negative."""
    found = _whole(value)
    return found if found is not _UNFIT and found >= 0 else _UNFIT


def _rank(value: Any) -> Any:
    found = _count(value)
    return found if found is not _UNFIT and found < MOST_RANKS else _UNFIT


def _time(value: Any) -> Any:
    """Fit seconds since 1970."""
    return value if _number(value) is not _UNFIT and 0 <= value < LATEST_TIME_S else _UNFIT


def _table(known: Mapping[str, Fit], others: Fit = lambda value: value) -> Fit:
    """Return what fits a table: its `known` keys, and `others`; what does not fit is left out."""

    def fit(value: Any) -> Any:
        if not isinstance(value, dict):
            return _UNFIT
        fitted = ((key, known.get(key, others)(each)) for key, each in value.items())
        return {key: each for key, each in fitted if each is not _UNFIT}

    return fit


def _tables_of(fit: Fit) -> Fit:
    """Return what fits a table with such values under any key."""
    return _table({}, fit)


def _list_of(fit: Fit, blank: Any = _UNFIT) -> Fit:
    """Return what fits a list of such values; `blank` stands for one that does not fit. Without it, all must."""

    def fit_all(value: Any) -> Any:
        if not isinstance(value, list):
            return _UNFIT
        fitted = [blank if (each := fit(part)) is _UNFIT else each for part in value]
        return _UNFIT if any(each is _UNFIT for each in fitted) else fitted

    return fit_all


def _any_of(*fits: Fit) -> Fit:
    """Return what fits the first of these that it can."""

    def fit_first(value: Any) -> Any:
        return next((found for fit in fits if (found := fit(value)) is not _UNFIT), _UNFIT)

    return fit_first


def _pair(first: Fit, second: Fit) -> Fit:
    def fit(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != 2:
            return _UNFIT
        both = [first(value[0]), second(value[1])]
        return _UNFIT if _UNFIT in both else both

    return fit


_NUMBER_LISTS = _list_of(_number, blank=None)
_NUMBER_TABLE = _tables_of(_number)
_RANKS = _list_of(_rank)
_BY_STEP = _list_of(_pair(_count, _NUMBER_LISTS))

_STEP_RECORD = _table(
    {
        "step": _count,
        "time_s": _time,
        "tokens": _count,
        "seconds": _NUMBER_TABLE,
        "memory": _NUMBER_TABLE,
        "user": _NUMBER_TABLE,
        "sync": _NUMBER_TABLE,
        "communication": _tables_of(_tables_of(_NUMBER_LISTS)),
        "experts": _tables_of(_table({"tokens": _NUMBER_LISTS}, _number)),
        **dict.fromkeys(("lr", "step_time_s", "tokens_per_s", "mfu", "memory_bytes"), _number),
    }
)
_EVALUATION = _table({"step": _count, "tasks": _tables_of(_NUMBER_TABLE)}, _number)
_NODE = _table(
    {
        "time_s": _time,
        "generation": _count,
        "ranks": _RANKS,
        "steps": _pair(_count, _count),
        "step_s": _NUMBER_LISTS,
        "memory_bytes": _NUMBER_LISTS,
        "seconds": _tables_of(_NUMBER_LISTS),
        "own": _BY_STEP,
        "microbatches": _BY_STEP,
        "communication": _tables_of(_tables_of(_tables_of(_NUMBER_LISTS))),
        "devices": _list_of(_table({"name": _text, "ranks": _RANKS}, _any_of(_number, _text)), blank={}),
        "host": _tables_of(_any_of(_number, _text)),
        "energy": _table({"source": _text}, _number),
    }
)
_EVENT = _table(
    {
        "event": _text,
        "time_s": _time,
        "since_s": _time,
        "ranks": _any_of(_RANKS, _tables_of(_rank)),
        "rank": _rank,
        "evidence": _table(dict.fromkeys(("factor", "last_step", "steps", "own_s", "peers_s"), _number)),
        "steps": _any_of(_count, _pair(_count, _count)),
        "hardware": _table(
            {"device": _text, "processes": _count, "per_node": _count}, _any_of(_number, _text, _NUMBER_TABLE)
        ),
        **dict.fromkeys(("step", "size", "world_size", "steps_lost", "generation"), _count),
        **dict.fromkeys(("exit_code", "pid", "number"), _whole),
        **dict.fromkeys(("seconds", "price_per_device_h"), _number),
        **dict.fromkeys(("loss", "grad_norm"), _any_of(_number, _text)),
        **dict.fromkeys(("why", "plan", "node", "site", "reason", "outcome", "source", "process", "currency"), _text),
    }
)
_OF_EVENTS: dict[str, dict[str, type]] = {
    **{kind: {"step": int} for kind in ("start", "save", "bad_step", "transient", "resume", "recovered")},
    "length": {"steps": int},
}
"""Event -> keys that it cannot be understood without."""
_REPORT = _table(
    {
        **dict.fromkeys(("goodput", "wall_s", "step_time_s", "tokens_per_s", "mfu"), _number),
        "status": _text,
        "sample": _text,
        "validation": _tables_of(_any_of(_number, _text)),
        "tasks": _tables_of(_NUMBER_TABLE),
        "energy": _tables_of(_any_of(_number, _text, _NUMBER_TABLE)),
    }
)


def step_line(record: Record) -> Record | None:
    """Return a line of a step in metrics.jsonl, checked; None if it is none. A loss that is no number is null."""
    if "loss" not in record:
        return None
    found = _STEP_RECORD(record)
    for key in ("loss", "grad_norm"):
        if key in found and _number(found[key]) is _UNFIT:
            found[key] = None
    return found if "step" in found else None


def evaluation_line(record: Record) -> Record | None:
    """Return a line of an evaluation in metrics.jsonl or scores.jsonl, checked; None if it is none."""
    if "loss" in record or not ("validation_loss" in record or "tasks" in record):
        return None
    found = _EVALUATION(record)
    return found if "step" in found else None


def node_line(record: Record) -> Record:
    """Return a line of nodes/NODE.jsonl, checked."""
    found: Record = _NODE(record)
    return found


def event_of(record: Record) -> Record | None:
    """Return an event, checked; None if it does not say what happened when, or lacks what it is understood by."""
    found = _EVENT(record)
    needed: dict[str, Any] = {"event": str, "time_s": (int, float), **_OF_EVENTS.get(found.get("event", ""), {})}
    return found if all(isinstance(found.get(key), kind) for key, kind in needed.items()) else None


def report_of(record: Record) -> Record:
    """Return the table of report.json, checked."""
    found: Record = _REPORT(record)
    return found
