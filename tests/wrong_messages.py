"""Messages that are nearly right."""

from __future__ import annotations

import random
from typing import Any

VALUES: list[Any] = [
    -1, 0, 1, 2**31, 2**53 - 1, 2**63, 10**30, 1.5, float("nan"), "", "A", "x" * 300, [], {}, None, True, [[1, 2]],
    [[2, 1]], {"A": 1}, {"A": 0}, {"X": 1}, ["A", "A"], "0" * 16,
]  # fmt: skip


def altered(said: Any, luck: random.Random) -> Any:
    """A message with something else in one place."""
    if isinstance(said, dict) and said and luck.random() < 0.9:
        key = luck.choice(list(said))
        if luck.random() < 0.1:
            return {name: value for name, value in said.items() if name != key}
        return {**said, key: altered(said[key], luck)}
    if isinstance(said, list) and said and luck.random() < 0.7:
        place = luck.randrange(len(said))
        return [*said[:place], altered(said[place], luck), *said[place + 1 :]]
    return luck.choice(VALUES)
