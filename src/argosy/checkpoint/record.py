"""Reading records that come from outside: each function checks a value, and raises Malformed with its key and value.

By hand, not with pydantic: each rank has a process that writes its checkpoints, and it is to start in a moment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

MOST = 2**63 - 1
"""The largest whole number that is taken."""
SHOWN = 60
"""Letters of a wrong value that are shown."""
_SHA256 = re.compile("[0-9a-f]{64}")

Reader = Callable[[str, Any], Any]


class MalformedRecord(ValueError):
    """A record does not have the values that it must have."""


def whole(key: str, value: Any) -> int:
    """Return a whole number from 0 to MOST."""
    if type(value) is not int or not 0 <= value <= MOST:
        raise _wrong(key, value, "a whole number from 0 to 2^63 - 1")
    return value


def number(key: str, value: Any, most: float) -> float:
    """Return a number from 0 to `most`."""
    if type(value) not in (int, float) or not 0 <= value <= most or not math.isfinite(value):
        raise _wrong(key, value, f"a number from 0 to {most}")
    return float(value)


def text(key: str, value: Any) -> str:
    """Return a string."""
    if not isinstance(value, str):
        raise _wrong(key, value, "a string")
    return value


def sha256(key: str, value: Any) -> str:
    """Return 64 hexadecimal digits."""
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise _wrong(key, value, "a SHA-256, 64 hexadecimal digits")
    return value


def flag(key: str, value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value


def mapping(key: str, value: Any) -> dict[str, Any]:
    """Return a mapping."""
    if not isinstance(value, dict):
        raise _wrong(key, value, "a mapping")
    return value


def entries(key: str, value: Any, *names: str) -> list[Any]:
    """Return the values of a mapping that has exactly these names."""
    found = mapping(key, value)
    if set(found) != set(names):
        raise _wrong(key, value, f"a mapping of {', '.join(names)}")
    return [found[name] for name in names]


def pairs(key: str, value: Any, first: Reader, second: Reader) -> tuple[tuple[Any, Any], ...]:
    """Return a list of pairs."""
    if not isinstance(value, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in value
    ):
        raise _wrong(key, value, "a list of pairs")
    return tuple((first(key, a), second(key, b)) for a, b in value)


def shown(value: Any) -> str:
    """Return a value as messages show it: not more than the beginning of a long one."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python does not spell out numbers of more than 4,300 digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _wrong(key: str, value: Any, wanted: str) -> MalformedRecord:
    return MalformedRecord(f"{shown(key)[1:-1]} = {shown(value)}, and must be {wanted}")
