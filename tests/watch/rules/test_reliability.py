"""What deaths, stops and checkpoints cost a run, where its wall time went, and the remedy for the largest part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from argosy.plan.plan import Plan
from argosy.watch.facts import RunFacts
from argosy.watch.rules.planner import Advice, Planner
from argosy.watch.rules.reliability import (
    checkpoint_interval,
    checkpoint_stalls,
    lost_ranks,
    low_goodput,
    spent,
)
from watched import BEGAN_S, event, small_run, start

STEPS = 1000


def lasting(events: Any = (), run: Any = None, stood_s: float = 0.0, **beside: float) -> RunFacts:
    """A run of 1000 steps of a second, seconds beside each step, and a time in which it stood still at the end."""
    parts = {f"seconds.{name}": np.full(STEPS, value) for name, value in beside.items()}
    step_s = 1.0 + sum(beside.values())
    steps = {
        "step": np.arange(STEPS, dtype=float), "step_time_s": np.ones(STEPS), "seconds.step": np.full(STEPS, step_s),
        "time_s": BEGAN_S + step_s * np.arange(1, STEPS + 1) + stood_s * (np.arange(STEPS) == STEPS - 1),
    }  # fmt: skip
    plan = Plan.parse("dp_replicate=2,microbatch=4")
    return RunFacts(now_s=0.0, run=run or small_run(), plan=plan, steps=steps | parts, events=[start(), *events])


def died(
    at_s: float, node: str = "node0", stood_s: float = 10.0, lost: int = 0, source: str = "memory", **facts: Any
) -> list[Any]:
    """A process that dies, and the world that goes on so many seconds later."""
    said = {"rank": 1, "step": int(at_s), "why": "signal SIGKILL", "exit_code": -9} | facts
    kind = said.pop("kind", "worker_died")
    return [
        event(kind, at_s, f"launcher-{node}" if node else "coordinator", **said),
        event("break", at_s, "coordinator", why="a rank is lost"),
        event("recovered", at_s + stood_s, steps_lost=lost, source=source),
        start(int(at_s), BEGAN_S + at_s + stood_s),
    ]


def said(rule: Any, facts: RunFacts) -> Advice:
    found: Advice | None = rule(facts, Planner(facts))
    assert found is not None
    return found


def test_a_death_is_told_with_its_node_step_reason_and_cost():
    found = said(lost_ranks, lasting(died(500.0, lost=2)))
    assert (found.severity, found.title) == ("warning", "Rank 1 died")
    assert found.evidence == "rank 1 on node0 died at step 500: signal SIGKILL. 1 stop cost 12.0 s, 2 steps made again."
    assert (found.gain, found.gain_share) == ("12.0 s so far", None)
    assert found.do.startswith("Nothing, if it stays at this")
    assert found.facts == {"ranks": [1], "nodes": {"node0": 1}, "cost_s": 12.0, "steps_lost": 2, "stops": 1}


def test_a_death_that_cost_less_than_a_hundredth_is_no_warning():
    found = said(lost_ranks, lasting(died(500.0, stood_s=5.0)))
    assert (found.severity, found.gain) == ("info", "")
    assert found.evidence.endswith("1 stop cost 5.00 s, no step lost.")


def test_a_node_that_loses_two_processes_beside_others_is_in_doubt():
    events = [*died(300.0, "node1"), *died(500.0, "node0", rank=0), *died(700.0, "node1", rank=3)]
    found = said(lost_ranks, lasting(events))
    assert found.title == "Ranks 0, 1, 3 died" and found.facts["nodes"] == {"node1": 2, "node0": 1}
    assert found.do.startswith("node1 lost 2 processes: check it (`argosy probe` there); start the run without it")
    assert found.gain_share == pytest.approx(30 / 1000)
    alone = said(lost_ranks, lasting([*died(300.0, "node1"), *died(500.0, "node1")]))
    assert "lost 2 processes" not in alone.do and alone.gain_share is None  # it may be the only one


def test_what_is_not_known_of_a_death_is_left_out():
    found = said(lost_ranks, lasting(died(500.0, node="", rank=None, step=None, why="exit code 1")))
    assert (found.title, found.facts["nodes"]) == ("Rank ? died", {})
    assert found.evidence.startswith("a process died: exit code 1. ")


def test_a_process_that_the_kernel_killed_asks_for_fewer_processes():
    found = said(lost_ranks, lasting(died(500.0, kind="oom_kill", why="the kernel killed it")))
    assert "rank 1 on node0 was out of memory at step 500" in found.evidence
    assert found.do.startswith("The kernel killed a process for want of memory: use fewer processes")


def test_no_advice_without_deaths():
    facts = lasting()
    assert lost_ranks(facts, Planner(facts)) is None


def test_the_wall_time_is_split_without_a_rest():
    facts = lasting(died(400.0, stood_s=100.0, lost=20), checkpoint=0.1, evaluate=0.2, check=0.3, stood_s=50.0)
    found = spent(facts)
    assert found is not None and found.parts == pytest.approx({
        "stopped": 100, "made again": 20, "checkpoints": 100, "evaluation": 200, "checks": 300,
        "starting and the rest": 0,
    })  # fmt: skip
    assert (found.wall_s, found.useful_s, found.goodput) == (1650, 1000, pytest.approx(1000 / 1650))
    back = spent(lasting([event("rewind", 400.0, step=48, to_step=40)]))
    assert back is not None and back.parts["made again"] == pytest.approx(8)
    rest = spent(lasting(stood_s=50.0))
    assert rest is not None and rest.parts["starting and the rest"] == pytest.approx(50)


def test_before_the_first_step_and_the_first_start_nothing_is_spent():
    assert spent(RunFacts(now_s=0.0, events=[start()])) is None
    steps = {"step": np.arange(2.0), "step_time_s": np.ones(2)}
    assert spent(RunFacts(now_s=0.0, steps=steps)) is None


@pytest.mark.parametrize(
    ("facts", "share", "remedy"),
    [
        (lasting(died(400.0, stood_s=200.0), stood_s=200.0), "200.0 s stopped", "Failures cost most"),
        (lasting(died(400.0, stood_s=1.0, lost=199), stood_s=200.0), "199.0 s made again", "save more often"),
        (lasting(checkpoint=0.2), "200.0 s checkpoints", "checkpoint.background = true"),
        (lasting(evaluate=0.2), "200.0 s evaluation", "evaluate.every_steps"),
        (lasting(check=0.2), "200.0 s checks", "resilience.replay_check_every_steps"),
        (lasting(stood_s=200.0), "200.0 s starting and the rest", "longer runs spread it"),
    ],
)
def test_the_remedy_for_a_low_goodput_is_that_of_its_largest_part(facts, share, remedy):
    found = said(low_goodput, facts)
    assert found.title == "Only 83.3 % of the time went into steps that count"
    assert share.replace("200.0 s", "3.33 min").replace("199.0 s", "3.32 min") in found.evidence
    assert remedy in found.do
    assert found.gain_share == pytest.approx(1 / 6, abs=0.002)


@pytest.mark.parametrize("facts", [lasting(stood_s=100.0), RunFacts(now_s=0.0)])
def test_a_goodput_of_nine_tenths_is_good(facts):
    assert low_goodput(facts, Planner(facts)) is None


def saved(every: int, checkpoint: float, events: Any = (), **options: Any) -> RunFacts:
    """A run that saved every so many steps, which two ranks told; they stopped it for so long in each step's mean."""
    saves = [
        event("save", (1 + checkpoint) * step + after_s, step=step, seconds=1.0)
        for step in range(every, STEPS + 1, every)
        for after_s in (1.0, 1.5)
    ]
    both = sorted([*saves, *events], key=lambda each: each["time_s"])
    return lasting(both, small_run(checkpoint=options), checkpoint=checkpoint)


def test_saves_that_stop_training_are_counted_once_a_step():
    found = said(checkpoint_stalls, saved(100, 0.05, background=False))
    assert found.title == "Saving stops training for 4.8 % of the time"
    assert found.evidence == "10 saves while training waits stopped training for 5.00 s each (steps 0 to 999)."
    assert found.do.startswith("Set checkpoint.background = true")
    assert found.facts == {"share": pytest.approx(0.05 / 1.05), "stall_s": pytest.approx(5.0), "saves": 10}


def test_saves_in_the_background_are_to_be_rarer_or_on_a_faster_disk():
    rarer = said(checkpoint_stalls, saved(100, 0.05, background=True))
    assert rarer.do.startswith("Save at most every ") and "checkpoint.every_minutes = " in rarer.do
    # Failures come so often that they should be no rarer.
    deaths = [each for n in range(1, 10) for each in died(100.0 * n, source="disk")]
    slow = said(checkpoint_stalls, saved(100, 0.05, events=deaths, background=True))
    assert slow.do.startswith("Write to a faster disk: a save begins only when the one before has been written.")


def test_a_run_that_saves_by_steps_is_told_to_save_by_time_alone():
    for rule, facts in ((checkpoint_stalls, saved(100, 0.05, every_steps=100)), (checkpoint_interval, saved(20, 0.05))):
        assert ("and checkpoint.every_steps = 0" in said(rule, facts).do) == (rule is checkpoint_stalls)


@pytest.mark.parametrize("facts", [saved(100, 0.02), saved(1000, 0.05)])
def test_short_stalls_and_a_single_save_are_no_matter(facts):
    assert checkpoint_stalls(facts, Planner(facts)) is None


def test_the_best_interval_is_youngs_for_the_failures_that_went_back_to_the_disk():
    deaths = [each for n in range(1, 10) for each in died(100.0 * n, source="disk" if n % 3 else "memory")]
    found = said(checkpoint_interval, saved(200, 0.005, deaths))
    assert found.title == "Checkpoints should be oftener"
    assert found.evidence.startswith("One is made every 3.35 min and stops training for 1.00 s; with 6 failures that ")
    facts = found.facts
    assert (facts["now_s"], facts["stall_s"], facts["failures"]) == (pytest.approx(201), pytest.approx(1), 6)
    assert 1005 / 6 < facts["mtbf_s"] < 1.5 * 1005 / 6  # of so few, what fleets let expect still counts a little
    assert facts["best_s"] == pytest.approx((2 * facts["stall_s"] * facts["mtbf_s"]) ** 0.5, rel=0.1)
    assert facts["gain"] == found.gain_share > 0.01


def test_without_failures_the_catalogue_asks_for_rarer_ones_and_without_saves_nobody_knows():
    found = said(checkpoint_interval, saved(20, 0.05))
    assert (
        found.title == "Checkpoints should be rarer" and "by the catalogue's rate, the best interval" in found.evidence
    )
    assert checkpoint_interval(lasting(), Planner(lasting())) is None
    ended = replace(saved(20, 0.05), state="finished")
    assert checkpoint_interval(ended, Planner(ended)) is None
