"""Each rule of advice: a run in which it speaks, with its figures, and the healthy run, in which it is silent."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from argosy.watch.conclusions import ADVICE_RULES, advise
from argosy.watch.facts import DeviceSeen, RunFacts
from argosy.watch.forecast import forecast
from argosy.watch.rules.planner import Advice, Planner
from watched import BEGAN_S, H100, STEPS, big_run, columns, continued, event, healthy, ranks, small_run, start

FSDP = "dp_shard=64,zero=3,recompute=full,microbatch=1,precision=bf16"
GENERATION = {"ranks": {f"node{rank // 4}/{rank % 4}": rank for rank in range(8)}}


def said(rule: str, facts: RunFacts) -> Advice | None:
    """What the rule alone says of the run."""
    return {each.__name__: each for each in ADVICE_RULES}[rule](facts, Planner(facts))


def big(step_s: float = 6.0, plan: str = FSDP, steps: dict[str, Any] | None = None, **facts: Any) -> RunFacts:
    """A run of an 8B model on 64 H100, as it was predicted or slower."""
    return healthy(facts.pop("run", big_run()), plan, hardware=H100, steps=steps or columns(step_s=step_s), **facts)


def as_planned(facts: RunFacts) -> RunFacts:
    """The same with steps that take what was predicted."""
    assert facts.prediction is not None
    return replace(facts, steps=columns(step_s=float(facts.prediction.step_s.mid)))


def with_imbalance(value: float) -> RunFacts:
    run = small_run(model={"moe": {"experts": 8, "experts_per_token": 2, "expert_ffn_width": 32}})
    steps = columns()
    layers = {f"experts.{layer}.imbalance": np.full(STEPS, value if layer else 1.2) for layer in (0, 1)}
    return healthy(run, steps=steps | layers)


def spiking(at: int, loss: float) -> dict[str, Any]:
    steps = columns()
    steps["loss"][at] = loss
    return steps


def overfitting(rises: bool) -> RunFacts:
    held_out = np.array([3.0, 2.5, 2.4, 2.5, 2.6, 2.7] if rises else [3.0, 2.5, 2.4, 2.3, 2.2, 2.1])
    evaluations = {"step": np.arange(6) * 70.0, "validation_loss": held_out}
    return healthy(evaluations=evaluations)


def growing(times: float, loss_falls: bool) -> RunFacts:
    steps = columns(600)
    steps["grad_norm"] = steps["grad_norm"] * times ** np.linspace(0, 1, 600)
    steps["loss"] = np.linspace(3, 2 if loss_falls else 3, 600) + np.random.default_rng(0).normal(0, 0.02, 600)
    return healthy(steps=steps)


def ended_rate(final: float) -> RunFacts:
    steps = columns()
    steps["lr"] = np.where(steps["step"] < 300, 1e-3, final)
    return healthy(steps=steps)


def recompiling(times: int) -> RunFacts:
    forward = np.full(STEPS, 0.1275)
    forward[20 : 20 + 40 * times : 40] += 15
    run = small_run()
    plan = "dp_replicate=2,microbatch=4,compile=true"
    return healthy(run, plan, steps=columns(forward=forward))


def evaluating(seconds: float) -> RunFacts:
    evaluate = np.where(np.arange(STEPS) % 20 == 19, seconds, 0.0)
    run = small_run(evaluate={"every_steps": 20, "tokens": 100_000})
    evaluations = {"step": np.arange(19, STEPS, 20.0), "validation_loss": np.linspace(4, 3, STEPS // 20)}
    return healthy(run, steps=columns(evaluate=evaluate), evaluations=evaluations)


def saving(stall_s: float, every: int = 20, **options: Any) -> RunFacts:
    """A run that saves every so many steps; it goes on for a day after its newest line if `long`."""
    checkpoint = np.where(np.arange(STEPS) % every == every - 1, stall_s, 0.0)
    steps = columns(checkpoint=checkpoint)
    saves = [
        event("save", float(steps["time_s"][at]) - BEGAN_S, step=at + 1, seconds=1.0)
        for at in range(every - 1, STEPS, every)
    ]
    events = [*saves, *options.pop("events", [])]
    return healthy(small_run(checkpoint=options), steps=steps, events=events)


def killed(*deaths: tuple[float, int, str], stood_s: float = 1.0) -> list[Any]:
    """Deaths (seconds after the beginning, rank, launcher), each with what follows."""
    found = [event("generation", 0.0, "coordinator", generation=1, **GENERATION)]
    for at_s, rank, by in deaths:
        why = "signal SIGKILL"
        found += [
            event("worker_died", at_s, by, rank=rank, exit_code=-9, why=why, step=int(at_s), generation=1, pid=1),
            event("break", at_s + 0.01, "coordinator", why=f"rank {rank} is lost: {why}"),
            event("recovered", at_s + stood_s - 0.1, step=int(at_s), source="disk", steps_lost=5, seconds=0.1),
            start(int(at_s), BEGAN_S + at_s + stood_s),
        ]
    return found


def devices(low_mhz: float) -> tuple[DeviceSeen, ...]:
    clocks = [1980.0] * 7 + [low_mhz]
    return tuple(
        DeviceSeen(f"node{n // 4}", (n,), "H100", 0.98, 88.0 if mhz < 1900 else 65.0, mhz)
        for n, mhz in enumerate(clocks)
    )


def later(steps: dict[str, Any], at: int, by_s: float) -> dict[str, Any]:
    """The run stood still before this step."""
    steps["time_s"][at:] += by_s
    return steps


def shared(own_s: tuple[float, float]) -> RunFacts:
    """Rank 0 runs three microbatches, rank 1 one; each takes so long for its own."""
    told = ranks(2)
    told = replace(told, own_s=np.tile(own_s, (30, 1)), microbatches=np.tile((3.0, 1.0), (30, 1)))
    return healthy(plan="dp_replicate=2,shares=3:1,microbatch=4,compile=false", ranks=told)


SLOW_LINK = event(
    "slow_link", 170.0, "coordinator", why="ranks wait 2.0 times as long", ranks=[],
    evidence={"factor": 2.0, "last_step": STEPS - 2},
)  # fmt: skip
FOUND_STRAGGLER = event(
    "straggler", 160.0, "coordinator", ranks=[5], action="alarm", why="rank 5 takes 2.0 times as long as its peers",
    evidence={"factor": 2.0, "slow_steps": 20, "steps": 20, "last_step": STEPS - 5},
)  # fmt: skip
BAD_STEP = event(
    "bad_step", 150.0, step=370, reason="loss_spike", loss=9.5, grad_norm=3.2, largest_loss=4.1, outcome="skip",
)  # fmt: skip
FLIPPED = event("transient", 150.0, step=371, reason="loss_spike", first_loss=40.0, loss=2.2)

SPEAKS: dict[str, tuple[Callable[..., RunFacts], str]] = {
    "straggler": (lambda: healthy(ranks=ranks(slow={5: 2.0}), events=[event("generation", 0, **GENERATION)]),
        r"Rank 5 on node1 .* 2\.0 times.*0\.60 s a step.*0\.30 s.*steps 370 to 399.*forward"),
    "straggler with a small share": (lambda: shared((0.3, 0.3)),
        r"Rank 1 .* 3\.0 times.*0\.30 s a step, its peers' 100\.0 ms .* Its share of the work is as small"),
    "straggler from an event": (lambda: healthy(events=[event("generation", 0, **GENERATION), FOUND_STRAGGLER]),
        r"Rank 5 on node1 .* 2\.0 times"),
    "slow_link": (lambda: big(events=[SLOW_LINK]), r"2\.0 times as long.*--plan"),
    "throttled_device": (lambda: healthy(devices=devices(1200.0)), r"rank 7 on node1.*1200 MHz.*88 degrees.*1980"),
    "lost_ranks": (lambda: healthy(events=killed((60.0, 1, "launcher-node0"))),
        r"Rank 1 .*rank 1 on node0 died at step 60: signal SIGKILL.*1 stop cost 3\.\d+ s, 5 steps made again"),
    "lost_ranks of one node": (
        lambda: healthy(events=killed((30.0, 5, "launcher-node1"), (60.0, 1, "launcher"), (90.0, 5, "launcher-node1"))),
        r"node1 lost 2 processes"),
    "bad_steps": (lambda: healthy(events=[BAD_STEP]),
        r"Step 370 was bad.*a spike: loss 9\.5.*4\.1 would have been good"),
    "bad_steps, applied": (lambda: healthy(steps=spiking(350, 8.0)), r"Step 350 was bad.*step 350: loss 8"),
    "bad_steps, once": (lambda: healthy(events=[FLIPPED]), r"bad once.*flipped bit"),
    "growing_gradients": (lambda: growing(20, loss_falls=False), r"grown \d\.\d-fold.*steps 200 to 599"),
    "learning_rate_ended": (lambda: ended_rate(0.0), r"Since step 300.*600 steps are left"),
    "overfits": (lambda: overfitting(rises=True), r"since step 140.*2\.400.*2\.700"),
    "skewed_experts": (lambda: with_imbalance(6.0), r"layer 1: the busiest expert gets 6\.0 times"),
    "memory_near_limit": (lambda: big(steps=columns(step_s=6.0) | {"memory_bytes": np.full(STEPS, 82e9)}),
        r"Rank 0 uses 9\d\.\d % .*76\.4 GiB"),
    "waiting_for_data": (lambda: healthy(steps=columns(data=0.1)),
        r"wait 20\.\d % .*(99\.\d ms|0\.10 s) are spent.*corpus"),
    "exposed_communication": (lambda: big(steps=columns(step_s=6.0, communication=1.5)),
        r"wait 2\d\.\d % .*sums of gradients.*--plan \"\S+\""),
    "pipeline_bubble": (lambda: big(plan="pp=8,dp_replicate=8,microbatch=4,precision=bf16"),
        r"8 stages run 8 microbatches in the schedule 1f1b"),
    "memory_left_over": (big, r"never used.*recompute=\w+ in place of full"),
    "recompiles": (lambda: recompiling(8), r"Steps 20, 60, 100.*15\.\d s longer"),
    "slower_than_planned": (lambda: big(step_s=12.0), r"times as long as planned.*forward and backward"),
    "idle_devices": (lambda: healthy(devices=[DeviceSeen("n", (0,), "H100", 0.2, power_w=300.0)]),
        r"20\.0 % .*draw 300 W"),
    "evaluation_share": (lambda: evaluating(4.0), r"takes 33\.\d %.*evaluate\.every_steps = 1\d\d"),
    "checkpoint_stalls": (lambda: saving(2.0, background=False), r"20 saves while training waits.*background = true"),
    "checkpoint_interval, rarer": (lambda: saving(0.2),
        r"should be rarer.*needs one, by the catalogue.*every_minutes = \d+\."),
    "checkpoint_interval, oftener": (
        lambda: saving(0.2, every=200, events=killed(*((20.0 * n, 1, "launcher") for n in range(1, 8)))),
        r"should be oftener.*7 failures that needed one"),
    "low_goodput": (
        lambda: healthy(
            steps=later(columns(2000), 1250, 900.0), events=killed((500.0, 1, "launcher"), stood_s=900.0)),
        r"Only \d\d\.\d % .*15\.\d min stopped"),
    "faster_plan": (big, r"predicted to take \d\d\.\d % less.*--plan"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPEAKS)
def test_a_rule_speaks_with_its_figures(case: str):
    make, expected = SPEAKS[case]
    advice = said(re.split("[, ]", case)[0], make())
    assert advice is not None
    text = f"{advice.title} {advice.evidence} {advice.do} {advice.gain}"
    assert re.search(expected, text), text


NEAR_MISSES: dict[str, Callable[[], RunFacts]] = {
    "straggler": lambda: healthy(ranks=ranks(slow={5: 1.3}), events=[event("generation", 0, **GENERATION)]),
    "straggler with a large share": lambda: shared((0.3, 0.1)),
    "straggler that was replaced": lambda: healthy(events=[FOUND_STRAGGLER, event("generation", 170.0, **GENERATION)]),
    "straggler while nodes see none": lambda: healthy(ranks=ranks(), events=[FOUND_STRAGGLER]),
    "slow_link before a new world": lambda: big(events=[SLOW_LINK, event("generation", 171.0, **GENERATION)]),
    "throttled_device": lambda: healthy(devices=devices(1850.0)),
    "lost_ranks that were stopped": lambda: healthy(events=[event("signal", 60.0, "launcher", number=15)]),
    "bad_steps, long ago": lambda: healthy(steps=columns(3000), events=[BAD_STEP]),
    "growing_gradients that learn": lambda: growing(20, loss_falls=True),
    "growing_gradients, slowly": lambda: growing(2, loss_falls=False),
    "learning_rate_ended": lambda: ended_rate(1e-4),
    "overfits": lambda: overfitting(rises=False),
    "skewed_experts": lambda: with_imbalance(2.0),
    "memory_near_limit": lambda: big(steps=columns(step_s=6.0) | {"memory_bytes": np.full(STEPS, 70e9)}),
    "waiting_for_data": lambda: healthy(steps=columns(data=0.01)),
    "waiting_for_data of tiny steps": lambda: healthy(steps=columns(step_s=0.01, data=0.001)),
    "exposed_communication": lambda: big(steps=columns(step_s=6.0, communication=0.3)),
    "exposed_communication but for the bubble": lambda: big(
        plan="pp=8,dp_replicate=8,microbatch=4,precision=bf16",
        steps=columns(step_s=6.0) | {"communication.pp.node.0": np.full(STEPS, 2.0)},
    ),
    "exposed_communication but for one long step": lambda: big(
        steps=columns(step_s=6.0, communication=np.where(np.arange(STEPS) == STEPS - 9, 600.0, 0.0))
        | {"communication.dp.node.0": np.where(np.arange(STEPS) == STEPS - 9, 600.0, 0.1)}
    ),
    "exposed_communication for a slow rank": lambda: healthy(
        steps=columns(communication=0.3), ranks=ranks(2, slow={1: 2.0})
    ),
    "pipeline_bubble": lambda: big(plan="pp=2,dp_replicate=4,tp=8,microbatch=1,precision=bf16"),
    "pipeline_bubble before the batch is whole": lambda: big(
        plan="pp=8,dp_replicate=8,microbatch=4,precision=bf16",
        run=big_run(train={"batch_ramp": [{"until_step": 9000, "global_batch": 128}]}),
    ),
    "recompiles, rarely": lambda: recompiling(2),
    "slower_than_planned": lambda: as_planned(big()),
    "idle_devices": lambda: healthy(devices=[DeviceSeen("n", (0,), "H100", 0.95)]),
    "evaluation_share": lambda: evaluating(0.2),
    "checkpoint_stalls": lambda: saving(0.1),
    "checkpoint_interval": lambda: saving(0.02),
    "low_goodput of a short run": lambda: healthy(events=killed((60.0, 1, "launcher"), stood_s=60.0)),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_a_rule_is_silent_below_its_threshold(case: str):
    assert said(re.split("[, ]", case)[0], NEAR_MISSES[case]()) is None


def test_all_rules_are_tested_both_ways():
    names = {rule.__name__ for rule in ADVICE_RULES}
    assert {re.split("[, ]", case)[0] for case in SPEAKS} == names
    assert names - {re.split("[, ]", case)[0] for case in NEAR_MISSES} == {"memory_left_over", "faster_plan"}


def test_a_healthy_run_under_the_planners_own_plan_gets_no_advice():
    best = Planner(big()).faster
    assert best is not None
    facts = as_planned(big(plan=str(best.plan)))
    assert advise(facts) == ()


def test_a_run_that_knows_nothing_gets_no_advice_and_no_error():
    assert advise(RunFacts(now_s=0.0)) == ()
    assert advise(replace(healthy(), run=None, plan=None, prediction=None)) == ()


def test_on_an_unknown_device_the_planner_is_silent():
    unknown = replace(H100, device="Some GPU of 2031")
    facts = big(prediction=big().prediction)
    events = [start(hardware=unknown, plan=FSDP)]
    assert Planner(replace(facts, events=events)).faster is None


def test_a_day_in_which_the_run_was_stopped_is_no_time_of_its_own():
    running = healthy(steps=columns(2000), power_w=1000.0, devices=(DeviceSeen("node0", (0,), utilisation=0.2),))
    paused = continued(running, 86_400.0, 1000)
    assert paused.wall_s == pytest.approx(running.wall_s, abs=2)
    assert not {"low_goodput", "lost_ranks"} & {each.rule for each in advise(paused, Planner(paused))}
    (idle,) = (each for each in advise(paused, Planner(paused)) if each.rule == "idle_devices")
    assert "0.22 kWh so far" in idle.evidence


def test_the_money_and_energy_of_a_forecast_are_without_the_time_in_which_the_run_was_stopped():
    plan = "dp_shard=64,zero=1,recompute=selective,microbatch=1,precision=bf16,bucket_mb=64"
    running = healthy(big_run(train={"steps": 500}), plan, hardware=H100)
    before, after = (forecast(facts) for facts in (running, continued(running, 86_400.0)))
    assert before is not None and after is not None and before.cost is not None and after.cost is not None
    assert after.cost_so_far == pytest.approx(before.cost_so_far, rel=0.05)
    assert after.cost.mid == pytest.approx(before.cost.mid, rel=0.05)
    assert after.energy_kwh is not None and before.energy_kwh is not None
    assert after.energy_kwh.mid == pytest.approx(before.energy_kwh.mid, rel=0.05)


def test_the_better_plan_is_said_once_by_the_rule_that_knows_why():
    found = advise(big(steps=columns(step_s=6.0, communication=1.5)))
    plans = [advice.rule for advice in found if advice.plan]
    assert plans == ["exposed_communication"]


def test_the_alternative_is_that_of_the_measured_state_not_of_the_prediction():
    slow, usual = (Planner(big(step_s=step_s)).faster for step_s in (12.0, 6.0))
    assert slow is not None and usual is not None
    assert slow.now_s == pytest.approx(2 * usual.now_s, rel=0.01)
    assert float(slow.step_s.low) < float(slow.step_s.mid) < slow.now_s
