"""What a rank counts is read as it was written, and two readings make a window."""

from __future__ import annotations

import pytest

from argosy.observe import counters
from argosy.observe.counters import CATEGORIES, COUNTED_AXES, NETWORK_TIERS, Counters


def words() -> memoryview:
    page = memoryview(bytearray(8 * (3 + counters.COUNTER_WORDS))).cast("q")
    counters.clear(page, 3)
    return page


def test_every_category_axis_and_tier_has_a_place_of_its_own():
    page = words()
    seconds = {category: 0.5 + number for number, category in enumerate(CATEGORIES)}
    communication = {
        axis: {tier: [1.0 + i, 10 * j] for j, tier in enumerate(NETWORK_TIERS, 1)}
        for i, axis in enumerate(COUNTED_AXES)
    }
    counters.add_step(page, 3, 7, seconds, communication, 123)
    found = counters.read(page.tolist(), 3)
    assert (found.steps, found.first_step, found.last_step, found.memory_bytes) == (1, 7, 7, 123)
    assert found.seconds == pytest.approx(seconds)
    assert {
        a: {t: list(both) for t, both in tiers.items()} for a, tiers in found.communication.items()
    } == communication


def test_a_window_has_what_was_added_in_it():
    page = words()
    assert counters.read(page.tolist(), 3) == Counters()
    counters.add_step(page, 3, 0, {"forward": 1.0, "step": 1.0}, {}, 1)
    before = counters.read(page.tolist(), 3)
    for step in (1, 2):
        counters.add_step(page, 3, step, {"forward": 2.0, "step": 3.0}, {"tp": {"node": [0.25, 100]}}, 2)
    window = counters.read(page.tolist(), 3).since(before)
    assert (window.steps, window.first_step, window.last_step) == (2, 1, 2)
    assert window.seconds == pytest.approx({"forward": 4.0, "step": 6.0})
    assert window.communication["tp"]["node"] == pytest.approx([0.5, 200])
    assert counters.read(page.tolist(), 3).since(Counters()).first_step == 0
