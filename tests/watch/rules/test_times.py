"""Shares of a step by what takes them, with figures that can be computed by hand, where no better plan is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argosy.plan.cost.estimate import Estimate
from argosy.plan.plan import Plan
from argosy.watch.facts import DeviceSeen, RankTable, RunFacts
from argosy.watch.rules.planner import Advice, Planner
from argosy.watch.rules.times import (
    evaluation_share,
    exposed_communication,
    idle_devices,
    memory_near_limit,
    pipeline_bubble,
    recompiles,
    waiting_for_data,
)
from watched import BEGAN_S, small_run

STEPS = 100
PARTS = ("data", "forward", "backward", "communication", "optimizer")


def timed(plan: str = "dp_replicate=2,microbatch=4", run: Any = None, more: Any = None, **parts: Any) -> RunFacts:
    """A run of 100 steps of a second, of which `forward` takes what the other parts leave; the machine is unknown."""
    seconds = {name: np.broadcast_to(np.asarray(parts.get(name, 0.0), float), STEPS).copy() for name in PARTS}
    seconds["forward"] += 1 - sum(np.median(values) for values in seconds.values())
    whole = sum(seconds.values()) + parts.get("evaluate", 0.0)
    steps = {f"seconds.{name}": values for name, values in seconds.items()}
    if "evaluate" in parts:
        steps["seconds.evaluate"] = np.full(STEPS, parts["evaluate"])
    steps |= {
        "step": np.arange(STEPS, dtype=float), "seconds.step": whole, "step_time_s": np.ones(STEPS),
        "time_s": BEGAN_S + np.cumsum(whole), "memory_bytes": np.full(STEPS, 79e9),
    } | (more or {})  # fmt: skip
    return RunFacts(now_s=0.0, run=run or small_run(), plan=Plan.parse(plan), steps=steps)


def said(rule: Any, facts: RunFacts) -> Advice:
    found: Advice | None = rule(facts, Planner(facts))
    assert found is not None
    return found


def is_silent(rule: Any, facts: RunFacts) -> bool:
    return rule(facts, Planner(facts)) is None


def test_waits_for_data_name_the_sources_and_the_share():
    run = small_run(data={"sources": {"one": 1.0, "two": 1.0}})
    found = said(waiting_for_data, timed(run=run, data=0.2))
    assert found.title == "Steps wait 20.0 % of their time for data" and found.gain == "up to 20.0 % of each step"
    assert "Of 1.00 s a step, 0.20 s are spent waiting for the batch (steps 3 to 99)." in found.evidence
    assert "Put the prepared data (one, two) on a disk" in found.do
    assert found.facts == {"share": pytest.approx(0.2), "seconds": pytest.approx(0.2)}
    assert is_silent(waiting_for_data, timed(data=0.049))


def test_waits_for_sums_are_said_without_a_plan_from_a_quarter_on():
    found = said(exposed_communication, timed(communication=0.25))
    assert found.title == "Ranks wait 25.0 % of a step for each other, most for sums of gradients"
    assert found.evidence == "Of 1.00 s a step: 0.25 s for sums of gradients (steps 3 to 99)."
    assert found.do.startswith("No other plan on these devices is predicted to be enough faster.")
    assert (found.plan, found.gain_share) == ("", None)
    assert is_silent(exposed_communication, timed(communication=0.24))


def test_waits_are_told_by_axis_and_tier_of_rank_0_the_three_largest_first():
    of_ranks = {
        "communication.dp.network.0": 0.2, "communication.tp.node.0": 0.05, "communication.ep.node.0": 0.03,
        "communication.cp.node.0": 0.01, "communication.dp.network.1": 0.9,
    }  # fmt: skip
    more = {name: np.full(STEPS, value) for name, value in of_ranks.items()}
    found = said(exposed_communication, timed(communication=0.4, more=more))
    assert found.title == "Ranks wait 29.0 % of a step for each other, most along dp over the network"
    assert found.evidence == (
        "Of 1.00 s a step: 0.20 s along dp over the network, 50.0 ms along tp inside a machine, 30.0 ms along ep "
        "inside a machine (steps 3 to 99)."
    )
    assert len(found.facts["waits"]) == 4


@pytest.mark.parametrize(
    ("axis", "plan", "sends_less"),
    [
        ("replicate", "dp_replicate=2,microbatch=4", True),
        ("shard", "dp_shard=2,zero=1,microbatch=4", True),
        ("shard", "dp_shard=2,zero=3,microbatch=4", False),  # weights are gathered for each microbatch
        ("tp", "tp=2,microbatch=4", False),
    ],
)
def test_a_larger_batch_is_advised_only_where_it_sends_less_for_a_token(axis, plan, sends_less):
    more = {f"communication.{axis}.network.0": np.full(STEPS, 0.4)}
    found = said(exposed_communication, timed(plan, communication=0.4, more=more))
    assert ("train.global_batch" in found.do) is sends_less


@pytest.mark.parametrize(("slowest_s", "is_explained"), [(0.7, True), (0.6, False)])
def test_waits_for_a_slow_rank_are_no_matter_of_the_plan(slowest_s, is_explained):
    own_s = np.tile([0.5, slowest_s], (30, 1))
    ranks = RankTable(np.arange(2), ("a", "a"), np.arange(70, 100), own_s)
    facts = timed(communication=0.3)
    facts = RunFacts(now_s=0.0, run=facts.run, plan=facts.plan, steps=facts.steps, ranks=ranks)
    assert is_silent(exposed_communication, facts) is is_explained


def test_evaluations_are_to_take_a_twentieth():
    run = small_run(evaluate={"every_steps": 20, "tokens": 1000})
    facts = timed(run=run, evaluate=0.25)
    every = np.arange(19.0, 100, 20)
    facts = RunFacts(now_s=0.0, run=run, steps=facts.steps, evaluations={"step": every})
    found = said(evaluation_share, facts)
    assert found.title == "Evaluation takes 20.0 % of the time"
    assert found.evidence == (
        "5 evaluations of 1000 tokens took 5.00 s each, one every 20 steps of 1.00 s (steps 0 to 99)."
    )
    # Five seconds are a twentieth of a hundred, of which 95 are steps.
    assert found.do == "Set evaluate.every_steps = 95, or evaluate.tokens = 210, for 5.0 %."
    assert found.gain_share == pytest.approx(0.15)
    alone = "Set evaluate.every_steps = 95 for 5.0 %."  # no evaluation is shorter than a batch, or a task
    plan = Plan.parse("dp_replicate=2,microbatch=16")
    whole = RunFacts(0.0, run=run, plan=plan, steps=facts.steps, evaluations={"step": every})
    assert said(evaluation_share, whole).do == alone
    scored = run.with_keys(evaluate={"tasks": ("arc_easy",)})
    facts = RunFacts(now_s=0.0, run=scored, steps=facts.steps, evaluations={"step": every})
    assert said(evaluation_share, facts).do == alone
    once = RunFacts(now_s=0.0, run=run, steps=facts.steps, evaluations={"step": every[:1]})
    assert is_silent(evaluation_share, once)


def compiling(*slow: int, more_s: float = 10.0, plan: str = "compile=true") -> RunFacts:
    longer = np.zeros(STEPS)
    longer[list(slow)] = more_s
    return timed(plan, forward=longer)


def test_steps_that_compiled_again_are_counted():
    found = said(recompiles, compiling(10, 40, 70))
    assert found.title == "3 steps took so long that torch.compile must have compiled again"
    assert found.evidence == ("Steps 10, 40, 70 took 10.0 s longer than usual in forward and backward (1.00 s).")
    assert found.gain_share == pytest.approx(30 / 130) and found.facts["lost_s"] == pytest.approx(30)
    many = said(recompiles, compiling(*range(10, 100, 10)))
    assert "Steps 10, 20, 30, 40, 50, 60, 70, 80, ... took" in many.evidence and many.steps == (10, 90)


@pytest.mark.parametrize(
    "facts",
    [
        compiling(10, 40),
        compiling(0, 1, 2, 10, 40),  # the first steps compile
        compiling(10, 40, 70, more_s=3.9),  # not five times the median
        compiling(10, 40, 70, plan="compile=false"),
    ],
)
def test_two_steps_first_steps_short_ones_and_eager_runs_did_not_recompile(facts):
    assert is_silent(recompiles, facts)


def test_devices_that_idle_are_told_with_their_power():
    devices = [
        DeviceSeen("a", (0,), utilisation=0.3, power_w=700.0),
        DeviceSeen("a", (1,), utilisation=0.5, power_w=800.0),
    ]
    facts = timed()
    seen = RunFacts(
        now_s=0.0, run=facts.run, plan=facts.plan, steps=facts.steps, devices=[*devices, DeviceSeen("a", (2,))]
    )
    found = said(idle_devices, seen)
    assert found.title == "Devices are busy only 40.0 % of the time"
    assert found.evidence == (
        "Mean utilisation of 2 devices over the last minutes is 40.0 %, and they draw 1,500 W all the same."
    )
    assert found.facts == {"utilisation": 0.4, "power_w": 1500.0}
    busy = RunFacts(now_s=0.0, run=facts.run, plan=facts.plan, steps=facts.steps, devices=[devices[1]])
    assert is_silent(idle_devices, busy)


@pytest.mark.parametrize(("microbatch", "also"), [(1, ""), (2, ", or a smaller microbatch,")])
def test_so_many_microbatches_are_advised_that_the_bubble_is_a_tenth(microbatch, also):
    run, bubble = small_run(train={"global_batch": 32 * microbatch}), {"bubble": 7.0}  # 7 / (32 + 7), and 7 / (63 + 7)
    planner: Any = SimpleNamespace(
        predicted=SimpleNamespace(seconds=bubble, step_s=Estimate.exactly(39.0)), faster=None
    )
    found = pipeline_bubble(timed(f"pp=8,microbatch={microbatch}", run=run), planner)
    assert found is not None and found.do == (
        f"With 63 microbatches the bubble would be about 10.0 % of a step: a larger train.global_batch{also} makes "
        "more of them."
    )


def test_what_only_a_known_machine_tells_is_not_said_of_another():
    assert is_silent(memory_near_limit, timed()) and is_silent(pipeline_bubble, timed("pp=2,microbatch=4"))
