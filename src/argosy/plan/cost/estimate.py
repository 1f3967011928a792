"""Estimates with their interval, and how quantities are written: seconds, counts, bytes, money."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from argosy.plan.hardware.devices import GIB
from argosy.plan.workload import Numbers

INTERVAL_Z = 1.6449
"""Standard deviations from the middle to the ends of an interval of 90 %."""


@dataclass(frozen=True)
class Estimate:
    """A positive quantity: nine times in ten it lies from `low` to `high`, and half of the time below `mid`."""

    low: Numbers
    mid: Numbers
    high: Numbers

    @classmethod
    def exactly(cls, value: Numbers) -> Estimate:
        """Return a number that is known for sure."""
        return cls(value, value, value)

    @classmethod
    def within(cls, mid: Numbers, factor: Numbers) -> Estimate:
        """Return the interval from mid / factor to mid x factor."""
        return cls(mid / factor, mid, mid * factor)

    @classmethod
    def of_draws(cls, draws: NDArray[np.float64]) -> Estimate:
        """Return the interval of a quantity that was drawn at random."""
        return cls(*map(float, np.quantile(draws, [0.05, 0.5, 0.95])))

    @classmethod
    def log_normal(cls, mid: Numbers, std: float) -> Estimate:
        """Return the 90 % interval around `mid` of a log-normal quantity; std is that of its logarithm."""
        return cls.within(mid, math.exp(INTERVAL_Z * std))


def propagate(function: Callable[..., Numbers], *inputs: Estimate) -> Estimate:
    """Return the estimate of function(*inputs), for independent inputs and a positive, monotone function.

    Each input is moved to the ends of its interval in turn while the others stay in the middle. The logarithms of the
    resulting changes add up in quadrature, upwards and downwards apart. This is exact for products and quotients of
    log-normal inputs, and the usual first-order propagation of errors (JCGM 100:2008, 5.1) otherwise.
    """
    middles = [each.mid for each in inputs]
    mid = np.asarray(function(*middles), dtype=float)
    down, up = np.zeros_like(mid), np.zeros_like(mid)
    for i, each in enumerate(inputs):
        ends = [_log_ratio(function(*middles[:i], end, *middles[i + 1 :]), mid) for end in (each.low, each.high)]
        down = down + np.minimum(0.0, np.minimum(*ends)) ** 2
        up = up + np.maximum(0.0, np.maximum(*ends)) ** 2
    return Estimate(
        *(plain(mid * factor) for factor in (np.exp(-np.sqrt(down)), np.ones_like(mid), np.exp(np.sqrt(up))))
    )


def _log_ratio(value: Numbers, mid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log(value / mid); 0 where both are 0, such as the CO2 of clean electricity."""
    return np.log(np.divide(value, mid, out=np.ones(np.broadcast(value, mid).shape), where=mid > 0))


def plain(values: NDArray[np.float64]) -> Numbers:
    """Return an array, or the one number that it is."""
    return values if np.ndim(values) else float(values)


def first_of(values: Numbers) -> float:
    return float(np.ravel(values)[0])


MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0


def seconds(value: Numbers) -> str:
    """Return a duration: 12.3 ms, 4.56 s, 7.8 min, 9.1 h, 23.4 days."""
    value = float(value)
    units = ((DAY, 2, "days"), (HOUR, 1, "h"), (MINUTE, 2, "min"), (1.0, 0.1, "s"))
    for unit, least, name in units:
        if abs(value) >= unit * least:
            return f"{_three(value / unit)} {name}"
    return f"{_three(value * 1e3)} ms"


def gib(value: Numbers) -> str:
    """Return bytes in GiB, without the unit: 79.1, 0.3, 0.02."""
    whole = float(value) / GIB
    return f"{whole:.1g}" if 0 < whole < 0.05 else f"{whole:.1f}"


def count(value: Numbers) -> str:
    """Return a count: 8.03B, 1.41T, 405."""
    value = float(value)
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{_three(value / unit)}{name}"
    return _three(value)


def percent(share: Numbers, signed: bool = False) -> str:
    return f"{100 * float(share):{'+' if signed else ''}.1f} %"


def within(estimate: Estimate, write: Callable[[Numbers], str]) -> str:
    """Return the middle, with the interval behind it."""
    return f"{write(estimate.mid)} ({write(estimate.low)} to {write(estimate.high)})"


def table_in_html(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    lines = [("th", head)] * bool(head) + [("td", row) for row in rows]
    cells = ("".join(f'<{tag} style="text-align:left">{escape(c)}</{tag}>' for c in line) for tag, line in lines)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _three(value: float) -> str:
    """Return three significant figures, never as a power of ten."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
