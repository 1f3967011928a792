"""Quantities as text for people: three figures, a unit, and the interval if there is one."""

from __future__ import annotations

from collections.abc import Callable

from argosy.plan.cost.estimate import Estimate
from argosy.plan.workload import Numbers

GIB = 2**30
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
    """Return bytes in GiB, without the unit."""
    return f"{float(value) / GIB:.1f}"


def count(value: Numbers) -> str:
    """Return a count: 8.03B, 1.41T, 405."""
    value = float(value)
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{_three(value / unit)}{name}"
    return _three(value)


def percent(share: Numbers, signed: bool = False) -> str:
    """Return a share of 1 in percent."""
    return f"{100 * float(share):{'+' if signed else ''}.1f} %"


def within(estimate: Estimate, write: Callable[[Numbers], str]) -> str:
    """Return the middle, with the interval behind it."""
    return f"{write(estimate.mid)} ({write(estimate.low)} to {write(estimate.high)})"


def _three(value: float) -> str:
    """Return three significant figures, never as a power of ten."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
