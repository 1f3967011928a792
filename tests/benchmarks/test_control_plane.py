"""`benchmarks/control_plane.py`: a real coordinator forms worlds of agents that are made up, and ends with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from argosy.observe.events import read_lines

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def control_plane(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import control_plane

    yield control_plane
    sys.modules.pop("control_plane", None)


def test_a_small_swarm_goes_through_all_that_is_measured(control_plane, tmp_path):
    figures = control_plane.measure(tmp_path, nodes=5, steady_s=2.0, step_s=0.2, hangs_up=True)
    assert {"formed_s", "steady_cpu", "rss_mb", "lost_seen_s", "end_s"} <= figures.keys()
    assert figures["nodes"] == 5 and min(figures.values()) >= 0
    events = read_lines(tmp_path / "events" / "coordinator.jsonl")
    kinds = [event["event"] for event in events if event["event"] != "agent_came"]
    told = kinds[: kinds.index("finish")]
    assert told == ["generation", "agent_left", "break", "generation"], "and no detector found anything"
    first, second = (event["ranks"] for event in events if event["event"] == "generation")
    assert len(first) == len(second) == 40 and len(first.items() & second.items()) == 32, "the others keep their ranks"
