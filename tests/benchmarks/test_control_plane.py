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


def test_a_swarm_that_stands_still_says_what_it_has_seen_and_keeps_the_folder(control_plane, tmp_path, monkeypatch):
    """Here a worker of one node never starts, and without it and with no spare there is no world."""
    obey = control_plane.Agent.obey
    is_the_one = lambda agent, message: agent.name == "node00000" and getattr(message, "slot", -1) == 7  # noqa: E731
    monkeypatch.setattr(control_plane, "LIMIT_S", 1.5)
    monkeypatch.setattr(control_plane.Agent, "obey", lambda a, m: None if is_the_one(a, m) else obey(a, m))
    monkeypatch.setattr(control_plane.Swarm, "connect", lambda swarm: swarm.agents.extend(
        control_plane.Agent(number, swarm) for number in range(2)))  # fmt: skip
    with pytest.raises(SystemExit) as stood_still:
        control_plane.measure(tmp_path, nodes=2)
    said = str(stood_still.value)
    assert "no world of 2 nodes within 2 s. Agents: 2 with 0 ranks in generation 0" in said
    assert str(tmp_path) in said and "The coordinator lives" in said
