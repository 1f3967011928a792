"""Figures of a run in words."""

from __future__ import annotations


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
