"""Which ranks, devices and links are said to be slow, against whom, and for how long a finding holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from argosy.watch.facts import DeviceSeen, RankTable, RunFacts
from argosy.watch.rules.planner import Advice, Planner
from argosy.watch.rules.ranks import (
    agent_of,
    listed,
    node_of,
    nodes_of,
    slow_link,
    slow_ranks,
    straggler,
    throttled_device,
)
from watched import event, small_run

WORLD = event("generation", 0.0, "coordinator", ranks={f"node{rank // 2}/{rank % 2}": rank for rank in range(4)})


def told(own_s: Any, steps: int = 12, **more: Any) -> RankTable:
    """Ranks of two a node; each takes so many seconds in every step."""
    table = np.tile(np.asarray(own_s, dtype=float), (steps, 1))
    nodes = tuple(f"node{rank // 2}" for rank in range(len(own_s)))
    return RankTable(np.arange(len(own_s)), nodes, np.arange(100 - steps, 100), table, **more)


def of_ranks(ranks: RankTable | None = None, events: Any = (WORLD,), **facts: Any) -> RunFacts:
    """A run of 100 steps of a quarter of a second, of which nobody knows plan or machine."""
    steps = {"step": np.arange(100.0), "step_time_s": np.full(100, 0.25)}
    return RunFacts(now_s=0.0, steps=steps, events=events, ranks=ranks, **facts)


def said(rule: Any, facts: RunFacts) -> Advice | None:
    found: Advice | None = rule(facts, Planner(facts))
    return found


def test_a_slow_rank_is_told_with_its_peers_its_category_and_what_others_wait():
    by_category = {"forward": np.array([0.05, 0.05, 0.14, 0.05]), "backward": np.array([0.05, 0.05, 0.06, 0.05])}
    found = said(straggler, of_ranks(told([0.1, 0.1, 0.2, 0.1], seconds=by_category)))
    assert found is not None and (found.steps, found.gain_share) == ((88, 99), pytest.approx(0.4))
    assert found.title == "Rank 2 on node1 is slow: it takes 2.0 times as long as its peers"
    assert found.evidence == (
        "Its own work takes 0.20 s a step, its peers' 0.10 s (median of steps 88 to 99), mostly because of forward. "
        "The others wait 0.10 s in each step."
    )
    assert (found.gain, found.plan) == ("up to 0.10 s of each step", "")
    assert found.do == "Look at node1: other programs, clocks, a failing device (`argosy probe` there)."


@pytest.mark.parametrize(
    ("slow", "words"), [((2,), ""), ((2, 3), " Slow too: rank 3."), ((2, 3, 5), " Slow too: ranks 3, 5.")]
)
def test_other_slow_ranks_are_named(slow, words):
    own_s = [0.1] * 8
    for number, rank in enumerate(slow):
        own_s[rank] = 0.3 - 0.05 * number
    found = said(straggler, of_ranks(told(own_s)))
    assert found is not None and found.evidence.endswith(f"in each step.{words}")


@pytest.mark.parametrize(
    ("slow_steps", "known_steps", "is_slow"), [(7, 12, True), (6, 12, False), (6, 10, True), (9, 9, False)]
)
def test_a_rank_is_slow_if_it_is_in_most_of_ten_steps_or_more(slow_steps, known_steps, is_slow):
    ranks = told([0.1, 0.1, 0.1, 0.1])
    ranks.own_s[:slow_steps, 3] = 0.2
    ranks.own_s[known_steps:, 3] = np.nan
    assert slow_ranks(of_ranks(ranks)).keys() == ({3} if is_slow else set())


def test_the_factor_is_the_runs_and_few_steps_or_one_rank_tell_nothing():
    ranks, strict = told([0.1, 0.1, 0.2, 0.1]), small_run(resilience={"straggler_factor": 2.1})
    assert slow_ranks(of_ranks(ranks)) == {2: 2.0}
    assert slow_ranks(of_ranks(ranks, run=strict)) == {}
    assert slow_ranks(of_ranks(told([0.1, 0.1, 0.2, 0.1], steps=9))) == {}
    assert slow_ranks(of_ranks(told([0.2]))) == slow_ranks(of_ranks()) == {}


FINDING = event(
    "straggler", 1.0, "coordinator", ranks=[3], why="rank 3 takes 2.0 times as long as its peers",
    evidence={"factor": 2.0, "steps": 20, "last_step": 60},
)  # fmt: skip


def test_where_nodes_tell_nothing_the_detectors_finding_is_said():
    found = said(straggler, of_ranks(events=[WORLD, FINDING]))
    assert found is not None and (found.steps, found.gain) == ((41, 60), "")
    assert found.title == "Rank 3 on node1 is slow: it takes 2.0 times as long as its peers"
    assert found.evidence == (
        "rank 3 takes 2.0 times as long as its peers, up to step 60; the others wait for it in each of them."
    )


# Of the 100 steps, 39 were made after the finding; with a run, four windows of its detector count, 50 steps at least.
@pytest.mark.parametrize(
    ("last_step", "window", "holds"), [(49, 0, True), (48, 0, False), (20, 20, True), (18, 20, False)]
)
def test_a_finding_holds_for_fifty_steps_or_four_windows_of_the_detector(last_step, window, holds):
    old = FINDING | {"evidence": {"factor": 2.0, "last_step": last_step}}
    run = small_run(resilience={"straggler_steps": window}) if window else None
    assert (said(straggler, of_ranks(events=[WORLD, old], run=run)) is not None) is holds


@pytest.mark.parametrize("kind", [straggler, slow_link])
def test_a_finding_ends_with_its_world(kind):
    found = FINDING | {"event": kind.__name__}
    assert said(kind, of_ranks(events=[WORLD, found])) is not None
    assert said(kind, of_ranks(events=[WORLD, found, {**WORLD, "time_s": found["time_s"] + 1}])) is None


def test_a_slow_link_is_told_in_the_detectors_words_without_a_plan_if_the_machine_is_unknown():
    evidence = {"factor": 2.0, "last_step": 98}
    link = event("slow_link", 1.0, "coordinator", why="ranks wait 2.0 times as long", ranks=[1], evidence=evidence)
    found = said(slow_link, of_ranks(events=[WORLD, link]))
    assert found is not None and found.evidence == "ranks wait 2.0 times as long (at step 98)."
    assert found.do == "Measure the network between the nodes with `argosy probe`, and look for other jobs on it."
    assert (found.gain, found.gain_share, found.plan, found.steps) == ("", None, "", (98, 98))
    assert found.facts == {"ranks": [1], **evidence}


def devices(*clocks: float, **newest: Any) -> list[DeviceSeen]:
    """Busy devices of one rank each; `newest` is told of the last."""
    seen = [DeviceSeen("node0", (rank,), clock_mhz=mhz, utilisation=0.9) for rank, mhz in enumerate(clocks)]
    return [*seen[:-1], replace(seen[-1], **newest)]


def test_a_device_below_85_percent_of_the_median_clock_is_throttled():
    found = said(throttled_device, of_ranks(devices=devices(1000, 1000, 1000, 849, temperature_c=88.4)))
    assert found is not None and found.title == "1 device runs at a lower clock than the others"
    assert found.evidence == (
        "That of rank 3 on node0 runs at 849 MHz, 88 degrees C; the median of 4 busy devices is 1000 MHz."
    )
    assert found.facts == {"devices": [["node0", [3], 849]]}
    two = said(throttled_device, of_ranks(devices=devices(*[1000] * 6, 700, 800, ranks=())))
    assert two is not None and two.title == "2 devices run at a lower clock than the others"
    assert two.evidence.startswith("That of rank 6 on node0 runs at 700 MHz; the median")


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (devices(1000, 1000, 1000, 851), "training"),
        (devices(1000, 800), "training"),  # of two nobody knows which is right
        (devices(1000, 1000, 1000, 800, utilisation=0.4), "training"),  # it idles
        (devices(1000, 1000, 1000, 800), "finished"),
        (devices(1000, 1000, 1000, 800, 800), "training"),  # more than a third: another kind of device
    ],
)
def test_devices_that_are_alike_few_idle_or_of_two_kinds_are_not(seen, state):
    assert said(throttled_device, of_ranks(devices=seen, state=state)) is None


def test_ranks_are_on_the_nodes_of_the_newest_world():
    newer = event("generation", 5.0, ranks={"a/b/0": 0, "c/0": 1})
    facts = of_ranks(events=[WORLD, newer])
    assert nodes_of(facts) == {0: "a/b", 1: "c"} and (node_of(facts, 1), node_of(facts, 2)) == ("c", "")
    assert nodes_of(of_ranks(events=[event("generation", 0.0)])) == {}


@pytest.mark.parametrize(("process", "node"), [("launcher-node3", "node3"), ("launcher", ""), ("rank-0", "")])
def test_an_event_of_an_agent_tells_its_node(process, node):
    assert agent_of({"event": "worker_died", "process": process}) == node
    assert agent_of({"event": "worker_died"}) == ""


def test_five_numbers_are_listed_and_the_rest_counted():
    assert listed(range(5)) == "0, 1, 2, 3, 4" and listed(range(7)) == "0, 1, 2, 3, 4 and 2 more" and listed([]) == ""
