"""Quantities in words: three figures, the unit that fits."""

import pytest

from argosy.plan.cost.estimate import Estimate, count, gib, percent, seconds, within


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0.00 ms"),
        (0.0123, "12.3 ms"),
        (4.563, "4.56 s"),
        (119, "119 s"),
        (600, "10.0 min"),
        (9 * 3600, "9.00 h"),
        (60 * 86_400, "60.0 days"),
    ],
)
def test_seconds(value: float, said: str) -> None:
    assert seconds(value) == said


@pytest.mark.parametrize(("value", "said"), [(405.4, "405"), (8.03e9, "8.03B"), (1.41e12, "1.41T"), (12_345, "12.3k")])
def test_count(value: float, said: str) -> None:
    assert count(value) == said


def test_the_interval_stands_behind_the_middle() -> None:
    assert within(Estimate(0.9, 1, 1.2), seconds) == "1.00 s (0.90 s to 1.20 s)"
    assert [gib(size * 2**30) for size in (1.5, 0.06, 0.019, 0.0)] == ["1.5", "0.1", "0.02", "0.0"]
    assert (percent(0.532), percent(-0.018, signed=True)) == ("53.2 %", "-1.8 %")
