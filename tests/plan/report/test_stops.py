"""What stops a run, in words and figures of its own length."""

from __future__ import annotations

import pytest

from argosy.plan.hardware.clusters import Cluster
from argosy.plan.report.stops import reliability, spares_in_words, stops_in_words

FLEET = Cluster.parse("h100-16384")


def test_a_longer_run_has_more_stops_and_spares_only_for_as_long_as_it_lasts():
    hour, day, month = (reliability(FLEET, 16_384, 16_384.0 * hours) for hours in (1, 24, 720))
    assert [hour.stops[1] * 720, day.stops[1] * 30] == pytest.approx([month.stops[1]] * 2)
    assert hour.spare_nodes < day.spare_nodes == month.spare_nodes
    low, mid, high = month.spare_nodes
    assert low < mid < high and f"hold {mid} ({low} to {high}) spare nodes" in spares_in_words(month)
    assert "silent corruptions" in stops_in_words(month) and month.corruptions.high >= 1
