"""What is shown of a run at one moment: plain data, and its figures in words, for the panel in a terminal, notebooks
and `argosy watch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunView:
    """A run at one moment. What is not known is left at its default."""

    name: str = ""
    model: str = ""
    """Its name and size in words."""
    plan: str = ""
    processes: int = 0
    steps: int | None = None
    """Steps of the whole run; None as long as a run in minutes does not know them."""
    left_s: float | None = None
    """Seconds to the end."""
    doing: str = ""
    """What it does now beside training; "" while it trains."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """The newest step's line of metrics.jsonl."""
    losses: Sequence[tuple[int, float]] = ()
    """(step, loss), 0-based steps in order; thinned out in long runs."""
    validation: Sequence[tuple[int, float]] = ()
    """(step, loss on held-out text)."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Part of a step (`plan.calibration.reconcile.PARTS`) -> seconds, the mean of the last steps."""
    predicted_parts: Mapping[str, float] = field(default_factory=dict)
    predicted_step_s: float | None = None
    predicted_memory_bytes: float | None = None
    ranks: Mapping[int, float] = field(default_factory=dict)
    """Rank -> seconds of its own work in a step, the mean of the last ones: a slow rank shows here."""
    standing_s: Mapping[int, float] = field(default_factory=dict)
    """Rank -> for how long it has made no progress, for those that stand still."""
    events: Sequence[tuple[float, str, str]] = ()
    """(seconds since 1970, words, style), the newest last."""

    @property
    def step(self) -> int:
        """How many steps are done."""
        return int(self.record["step"]) + 1 if self.record else 0

    @property
    def validation_loss(self) -> float | None:
        """The last loss on held-out text."""
        return self.validation[-1][1] if self.validation else None


def mfu_in_words(mfu: float | None) -> str:
    """Return e.g. "MFU 61%"; "MFU n/a" above 100 %.

    Nothing computes faster than the peak: where it seems so, the peak was measured while the machine was busy.
    """
    return "MFU n/a" if mfu is None or mfu > 1 else f"MFU {mfu:.0%}"


def short(number: float) -> str:
    """Return a number with one digit behind the point and its unit, e.g. 5.1k."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Return seconds as h:mm:ss or m:ss."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
