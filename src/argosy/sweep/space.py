"""The parameters of a sweep: what is drawn for a key of the run, and what that means to the run file."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Scalar = None | bool | int | float | str


@dataclass(frozen=True)
class SweepParameter:
    """A key of the run, or a table of it, that varies."""

    key: str
    """As a user writes it: optimizer.lr."""
    values: tuple[Any, ...] = ()
    """Values of a list; empty for a range."""
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    whole: bool = False
    """True if it takes whole numbers."""

    @property
    def is_list(self) -> bool:
        """True if it is a list of values, not a range."""
        return bool(self.values)

    @property
    def choices(self) -> tuple[Scalar, ...]:
        """What stands for each value of a list in the journal, which takes plain values only: tables as JSON."""
        return tuple(v if isinstance(v, Scalar) else json.dumps(v, sort_keys=True) for v in self.values)

    def value(self, drawn: Scalar) -> Any:
        """Return the value of the run's key for what was drawn."""
        if self.is_list:
            return self.values[self.choices.index(drawn)]
        return int(drawn) if self.whole and isinstance(drawn, int | float) else drawn

    @property
    def ends(self) -> tuple[Any, ...]:
        """All values of a list; of a range its ends."""
        if self.is_list:
            return self.values
        return (self.value(self.low), self.value(self.high))

    @property
    def grid(self) -> tuple[Any, ...] | None:
        """All values that there are, in order; None if there is no end to them."""
        if self.is_list:
            return self.values
        step = self.step or (1.0 if self.whole and not self.log else None)
        if step is None:
            return None
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        return tuple(self.value(round(self.low + i * step, 12)) for i in range(count))

    @property
    def size(self) -> float:
        """Number of values; infinite if there is no end to them."""
        if self.is_list or self.grid is None:
            return len(self.values) or (self.high - self.low + 1 if self.whole else math.inf)
        return len(self.grid)


Values = Mapping[str, Any]
"""Key of the run -> value, of one trial."""


def combinations(parameters: Sequence[SweepParameter]) -> Iterator[Values]:
    """Yield all combinations of the parameters, which all have a grid; the last key varies fastest."""
    grids = [parameter.grid or () for parameter in parameters]
    for row in itertools.product(*grids):
        yield {parameter.key: value for parameter, value in zip(parameters, row, strict=True)}


def some_combinations(parameters: Sequence[SweepParameter]) -> Iterator[Values]:
    """Yield a few combinations in which each value of a list and each end of a range occurs."""
    most = max(len(parameter.ends) for parameter in parameters)
    for place in range(most):
        yield {p.key: p.ends[place % len(p.ends)] for p in parameters}


def drawn(parameter: SweepParameter, value: Any) -> Scalar:
    """Return what stands for a value of the run's key in the journal."""
    return parameter.choices[parameter.values.index(value)] if parameter.is_list else value


def in_words(values: Values) -> str:
    """Return the values as `key=value`, with the keys' last names."""
    return " ".join(f"{key.rpartition('.')[2]}={short(value)}" for key, value in values.items())


def short(value: Any) -> str:
    """Return a value in few characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."
